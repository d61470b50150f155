"""Claims jobs ahead of need, and sleeps well: until a notification, the next due time, a free slot, or the
poll behind them all.

Prefetching is adaptive: about 200 ms of work at the measured duration of jobs, and no more than the free
slots when jobs are long or of a type that was never measured."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from howdah import faults
from howdah.errors import HowdahError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from howdah.listener import Listener
    from howdah.store import AsyncStore
    from howdah.worker.slots import Slots
    from howdah.worker_statements import Claimed, WorkerStatements

logger = logging.getLogger(__name__)

AHEAD = 0.2  # seconds of work to have at hand
PREFETCH_LIMIT = 1000
HYSTERESIS = 1.0
POLL = 1.0
POLL_WHEN_LISTENING = 5.0
HEAD_MARGIN = 1.0


class Fetcher:
    """Keeps the slots supplied."""

    def __init__(
        self,
        store: AsyncStore,
        statements: WorkerStatements,
        slots: Slots,
        listener: Listener,
        *,
        worker_id: str,
        job_types: Sequence[str],
        queues: Sequence[str],
        lease: timedelta,
    ) -> None:
        self._store = store
        self._statements = statements
        self._slots = slots
        self._listener = listener
        self._worker_id = worker_id
        self._job_types = list(job_types)
        self._queues = list(queues)
        self._lease = lease
        self._woken = asyncio.Event()
        self._ignore_heads = False
        self._idle = True  # as the worker was registered
        self._since = time.monotonic()  # of the present stretch of work, or of none
        self._working = False
        listener.subscribe("wake", self._hear)

    def _hear(self, text: str) -> None:
        """A NOTIFY: [[queue, job type, least due time], …], or [] for more than would fit."""
        oldest = time.time()
        if text:
            lanes = msgspec.json.decode(text)
            if lanes and not any(
                lane[0] in self._queues and lane[1] in self._job_types for lane in lanes
            ):
                return
            oldest = min((float(lane[2]) for lane in lanes), default=0.0)
        # An enqueue that took long to commit may lie below its lane's head. Comparing with our own
        # clock can only cost a claim that looks further than it needs to.
        if oldest < time.time() - HEAD_MARGIN:
            self._ignore_heads = True
        self._woken.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Claim until the worker stops."""
        while not stopping.is_set():
            want = self._slots.wanted()
            if want <= 0:
                await self._slots.wait_for_room()
                continue
            self._woken.clear()
            try:
                jobs = await self._claim(want)
                if jobs:
                    await self._found(jobs)
                else:
                    await self._rest()
            except HowdahError as error:
                logger.warning(
                    "claiming failed and will be tried again", extra={"error": str(error)}
                )
                await asyncio.sleep(0.5)

    async def _claim(self, want: int) -> list[Claimed]:
        ignore_heads, self._ignore_heads = self._ignore_heads, False
        faults.reach("before-claim")
        jobs = await self._store.run(
            self._statements.claim(
                self._worker_id, self._job_types, want, self._lease, self._queues, ignore_heads
            )
        )
        if jobs:
            faults.reach("after-claim")
        return jobs

    async def _found(self, jobs: list[Claimed]) -> None:
        now = time.monotonic()
        if not self._working:
            self._working, self._since = True, now
        elif self._idle and now - self._since > HYSTERESIS:
            await self._flag(idle=False)
        too_many = self._slots.take(jobs)
        if too_many:
            # Long jobs that would only wait here: another worker may have room for them.
            await self._store.run(
                self._statements.release_jobs(
                    [job.id for job in too_many], [job.lease_id for job in too_many], timedelta(0)
                )
            )

    async def _rest(self) -> None:
        now = time.monotonic()
        if self._working:
            self._working, self._since = False, now
        if not self._idle:
            if now - self._since < HYSTERESIS:
                await self._sleep(0.01)
            else:
                await self._flag(idle=True)  # and claim once more before sleeping
            return
        due, there = await self._store.run(
            self._statements.next_due_at(self._job_types, self._queues)
        )
        seconds = POLL_WHEN_LISTENING if self._listener.healthy else POLL
        seconds *= 0.8 + 0.4 * random.random()  # noqa: S311 - spreads the polls of many workers
        if due is not None:
            seconds = min(seconds, max(0.0, (due - there).total_seconds()))
        await self._sleep(seconds)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    async def _flag(self, *, idle: bool) -> None:
        self._idle = idle
        await self._store.run(self._statements.touch_worker(self._worker_id, idle, None))

    def wake(self) -> None:
        """Look again now."""
        self._woken.set()
