"""Claims jobs for the slots. While there is nothing to claim, it waits for a notification, the next due time, a free
slot, or the next poll.

The slots decide how many jobs to claim, and of which types."""

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

IDLE_HYSTERESIS_SECONDS = 1.0
IDLE_RETRY_SECONDS = 0.01
POLL_SECONDS = 1.0
POLL_SECONDS_LISTENING = 5.0
HEAD_MARGIN_SECONDS = 1.0
CLAIM_RETRY_SECONDS = 0.5


class Fetcher:
    """Keeps the buffer of the slots filled."""

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
        self._notified = asyncio.Event()
        self._ignore_heads = False
        self._flagged_idle = True  # as the worker was registered
        self._flagged_at = time.monotonic()
        self._has_work = False
        self._has_work_since = time.monotonic()  # or has had none since
        self._clock_offset = 0.0  # seconds that the database's clock is ahead of ours
        listener.subscribe("wake", self._on_notification)

    def _on_notification(self, text: str) -> None:
        """The payload is [[queue, job type, least due time], …], or [] if the list would not fit."""
        oldest = now = time.time() + self._clock_offset
        if text:
            lanes = msgspec.json.decode(text)
            if lanes and not any(
                lane[0] in self._queues and lane[1] in self._job_types for lane in lanes
            ):
                return
            oldest = min((float(lane[2]) for lane in lanes), default=0.0)
        # The lane's head may have passed a job whose enqueue took long to commit.
        if oldest < now - HEAD_MARGIN_SECONDS:
            self._ignore_heads = True
        self._notified.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Claim until the worker stops."""
        while not stopping.is_set():
            self._slots.release_overdue()
            self._notified.clear()
            try:
                await self._claim_or_wait()
            except DATABASE_ERRORS as error:
                logger.warning("claim failed; retrying", extra={"error": str(error)})
                await self._wait(CLAIM_RETRY_SECONDS)

    async def _claim_or_wait(self) -> None:
        demand = self._slots.demand()
        if not demand.any_type and not demand.short:
            await self._slots.wait_for_demand()
            return
        found = 0
        if demand.any_type:
            found = await self._claim(demand.any_type, self._job_types)
        if demand.short and found == demand.any_type:
            found += await self._claim(demand.short, demand.short_types)
        if found:
            await asyncio.sleep(0)  # let the slots start these jobs before the next claim is sent
            await self._note_work()
        elif demand.any_type:
            await self._wait_for_work()
        else:
            await self._slots.wait_for_demand()  # every slot has a long job

    async def _claim(self, batch_size: int, job_types: list[str]) -> int:
        ignore_heads, self._ignore_heads = self._ignore_heads, False
        fault_points.reach("before-claim")
        try:
            jobs: list[Claimed] = await self._store.run(
                self._statements.claim(
                    self._worker_id, job_types, batch_size, self._lease, self._queues, ignore_heads
                )
            )
        except BaseException:
            self._ignore_heads = ignore_heads or self._ignore_heads
            raise
        if jobs:
            fault_points.reach("after-claim")
            self._slots.put(jobs)
        return len(jobs)

    async def _note_work(self) -> None:
        now = time.monotonic()
        if not self._has_work:
            self._has_work, self._has_work_since = True, now
        elif self._flagged_idle and now - self._has_work_since > IDLE_HYSTERESIS_SECONDS:
            await self._flag(idle=False)

    async def _wait_for_work(self) -> None:
        now = time.monotonic()
        if self._has_work:
            self._has_work, self._has_work_since = False, now
        if not self._flagged_idle:
            if now - self._has_work_since < IDLE_HYSTERESIS_SECONDS:
                await self._wait(IDLE_RETRY_SECONDS)
            else:
                # Enqueues notify from now on. The caller claims again before it waits, to find the jobs
                # that were enqueued before.
                await self._flag(idle=True)
            return
        due, database_now = await self._store.run(
            self._statements.next_due_at(self._job_types, self._queues)
        )
        self._clock_offset = database_now.timestamp() - time.time()
        until_due = None if due is None else (due - database_now).total_seconds()
        await self._wait(self._poll_seconds(until_due))

    def _poll_seconds(self, until_due: float | None) -> float:
        """How long to wait for a notification before the next poll."""
        # An enqueue that checked for idle workers before this one was flagged, and committed after its last
        # claim, sends no notification. So the first polls after the flag are quick.
        is_flag_old = time.monotonic() - self._flagged_at > POLL_SECONDS_LISTENING
        is_listening = self._listener.healthy and is_flag_old
        seconds = POLL_SECONDS_LISTENING if is_listening else POLL_SECONDS
        seconds *= 0.8 + 0.4 * random.random()  # noqa: S311 - spreads the polls of many workers
        if until_due is not None:
            seconds = min(seconds, max(0.0, until_due))
        return min(seconds, POLL_SECONDS) if self._slots.prefetched else seconds

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._notified.wait()

    async def _flag(self, *, idle: bool) -> None:
        await self._store.run(self._statements.touch_worker(self._worker_id, idle, None))
        self._flagged_idle, self._flagged_at = idle, time.monotonic()

    def wake(self) -> None:
        """End the current wait."""
        self._notified.set()
