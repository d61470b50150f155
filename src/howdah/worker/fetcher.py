"""Claims jobs ahead of need, and sleeps well: until a notification, the next due time, a free slot, or the
poll behind them all.

How many to claim, and of which types, is for the slots to say; this sees to it that they are had."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from typing import TYPE_CHECKING

import msgspec

from howdah.database.driver_errors import DATABASE_ERRORS
from howdah.execution import fault_points

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from howdah.database.async_store import AsyncStore
    from howdah.database.listener import Listener
    from howdah.protocol.worker_statements import Claimed, WorkerStatements
    from howdah.worker.slots import Slots

logger = logging.getLogger(__name__)

HYSTERESIS = 1.0
POLL = 1.0
POLL_WHEN_LISTENING = 5.0
HEAD_MARGIN = 1.0
RETRY_PAUSE = 0.5


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
        self._flagged = time.monotonic()
        self._clock = 0.0  # what the database's clock is ahead of ours
        listener.subscribe("wake", self._hear)

    def _hear(self, text: str) -> None:
        """A NOTIFY: [[queue, job type, least due time], …], or [] for more than would fit."""
        oldest = now = time.time() + self._clock
        if text:
            lanes = msgspec.json.decode(text)
            if lanes and not any(
                lane[0] in self._queues and lane[1] in self._job_types for lane in lanes
            ):
                return
            oldest = min((float(lane[2]) for lane in lanes), default=0.0)
        # An enqueue that took long to commit may lie below its lane's head.
        if oldest < now - HEAD_MARGIN:
            self._ignore_heads = True
        self._woken.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Claim until the worker stops."""
        while not stopping.is_set():
            self._slots.give_back_hoarded()
            self._woken.clear()
            try:
                await self._supply()
            except DATABASE_ERRORS as error:
                logger.warning(
                    "claiming failed and will be tried again", extra={"error": str(error)}
                )
                await self._sleep(RETRY_PAUSE)

    async def _supply(self) -> None:
        """Claim what the slots want, or wait."""
        wanted = self._slots.wanted()
        if not wanted.any_type and not wanted.short:
            await self._slots.wait_for_room()
            return
        found = 0
        if wanted.any_type:
            found = await self._claim(wanted.any_type, self._job_types)
        if wanted.short and found == wanted.any_type:
            found += await self._claim(wanted.short, wanted.short_types)
        if found:
            await asyncio.sleep(0)  # the slots first: no job waits for the next claim to be sent
            await self._note_work()
        elif wanted.any_type:
            await self._rest()
        else:
            await self._slots.wait_for_room()  # every slot has a long job

    async def _claim(self, want: int, job_types: list[str]) -> int:
        ignore_heads, self._ignore_heads = self._ignore_heads, False
        fault_points.reach("before-claim")
        try:
            jobs: list[Claimed] = await self._store.run(
                self._statements.claim(
                    self._worker_id, job_types, want, self._lease, self._queues, ignore_heads
                )
            )
        except BaseException:
            self._ignore_heads = ignore_heads or self._ignore_heads
            raise
        if jobs:
            fault_points.reach("after-claim")
            self._slots.take(jobs)
        return len(jobs)

    async def _note_work(self) -> None:
        now = time.monotonic()
        if not self._working:
            self._working, self._since = True, now
        elif self._idle and now - self._since > HYSTERESIS:
            await self._flag(idle=False)

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
        self._clock = there.timestamp() - time.time()
        await self._sleep(self._nap(None if due is None else (due - there).total_seconds()))

    def _nap(self, until_due: float | None) -> float:
        """How long to sleep unless woken."""
        # An enqueue that looked before we were idle, and committed after our last claim, wakes nobody.
        settled = time.monotonic() - self._flagged > POLL_WHEN_LISTENING
        seconds = POLL_WHEN_LISTENING if self._listener.healthy and settled else POLL
        seconds *= 0.8 + 0.4 * random.random()  # noqa: S311 - spreads the polls of many workers
        if until_due is not None:
            seconds = min(seconds, max(0.0, until_due))
        return min(seconds, POLL) if self._slots.waiting else seconds

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    async def _flag(self, *, idle: bool) -> None:
        await self._store.run(self._statements.touch_worker(self._worker_id, idle, None))
        self._idle, self._flagged = idle, time.monotonic()

    def wake(self) -> None:
        """Look again now."""
        self._woken.set()
