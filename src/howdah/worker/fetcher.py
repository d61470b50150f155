"""Claims jobs for the slots. While there is nothing to claim, it waits for a notification, the next due time, a free
slot, or the next poll.

A notification wakes as many workers as there are jobs (decision 0039). A worker that was woken and has no free slot
for what it finds wakes others. The slots decide how many jobs to claim, and of which types."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import TYPE_CHECKING

from howdah.database.backoff import Backoff
from howdah.database.driver_errors import DATABASE_ERRORS, is_too_much
from howdah.encoding.safe_logger import get_logger
from howdah.execution import fault_points
from howdah.worker.prefetch import PREFETCH_JOBS
from howdah.worker.wakes import Wakes, wake_channel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from uuid import UUID

    from howdah.database.async_store import AsyncStore
    from howdah.database.listener import Listener
    from howdah.execution.heartbeat import Heartbeat
    from howdah.protocol.worker_statements import Claimed, WorkerStatements
    from howdah.worker.prefetch import Demand
    from howdah.worker.slots import Slots

logger = get_logger(__name__)

IDLE_HYSTERESIS_SECONDS = 1.0
IDLE_RETRY_SECONDS = 0.01
POLL_SECONDS = 1.0
# The longest that a due job waits if the worker chosen for it is gone and another one is idle.
POLL_SECONDS_LISTENING = 2.0
QUICK_POLLS_SECONDS = 5.0
MAX_CLAIM_BYTES = (
    4 << 20
)  # of the data of jobs; more of them may not arrive before the statement timeout
CLAIM_RETRY_SECONDS, MAX_CLAIM_RETRY_SECONDS = 0.1, 1.0
EXTEND_POLL_SECONDS = 0.05
# A second worker answers a due time after this time, a third after twice as long, and so on.
SECOND_WORKER_SECONDS = 0.1
MANY_TYPES = 50  # a claim of all of them takes longer than one of the types that were notified


class Fetcher:
    """Keeps the buffer of the slots filled."""

    def __init__(
        self,
        store: AsyncStore,
        statements: WorkerStatements,
        slots: Slots,
        listener: Listener,
        *,
        heartbeat: Heartbeat,
        worker_id: str,
        life: UUID,
        job_types: Sequence[str],
        queues: Sequence[str],
        lease: timedelta,
    ) -> None:
        self._store = store
        self._statements = statements
        self._slots = slots
        self._listener = listener
        self._heartbeat = heartbeat
        self._worker_id = worker_id
        self._life = life
        self._job_types = list(job_types)
        self._queues = list(queues)
        self._lease = lease
        self._wakes = Wakes(job_types, queues)
        # What enqueues choose workers by: whether it is idle, and the types that it has no free slot for. At first as
        # the worker was registered; None: unknown.
        self._flagged: tuple[bool, frozenset[str]] | None = (True, frozenset())
        self._flagged_at = time.monotonic()
        self._is_busy = False
        self._has_work = False
        self._has_work_since = time.monotonic()  # or has had none since
        self._full_since: float | None = None
        self._most = PREFETCH_JOBS  # jobs to claim at once
        listener.subscribe(wake_channel(worker_id), self._wakes.on_notification)
        slots.on_demand(self._wakes.wake)

    def wake(self) -> None:
        """End the current wait."""
        self._wakes.wake()

    # ── claiming ──────────────────────────────────────────────────────────────────────────────────

    async def run(self, stopping: asyncio.Event) -> None:
        """Claim until the worker stops."""
        backoff = Backoff(CLAIM_RETRY_SECONDS, MAX_CLAIM_RETRY_SECONDS)
        try:
            while not stopping.is_set():
                await self._run_once(backoff)
        finally:
            self._wakes.close()

    async def _run_once(self, backoff: Backoff) -> None:
        self._slots.release_overdue()
        self._wakes.forget()
        try:
            if not self._heartbeat.can_extend:
                # A worker does not claim what it could not keep.
                await self._wakes.wait(EXTEND_POLL_SECONDS)
                return
            await self._claim_or_wait()
        except DATABASE_ERRORS as error:
            self._heartbeat.outages.report(logger, "claim failed; retrying", error)
            await self._wakes.wait(backoff.next())
        else:
            backoff.reset()

    async def _claim_or_wait(self) -> None:
        demands = self._slots.demand()
        found = await self._claim_notified(demands)
        if not found and demands:
            found = await self._claim_all(demands)
        await self._pass_on()
        if found:
            self._full_since = None
            await asyncio.sleep(0)  # let the slots start these jobs before the next claim is sent
            await self._note_work()
        elif any(first.is_whole for first, *_ in demands):
            self._full_since = None
            await self._wait_for_work()
        else:
            await self._wait_for_demand()  # every slot has a job, perhaps a long one

    async def _claim_notified(self, demands: list[list[Demand]]) -> int:
        """Claim what an idle worker with many types was woken for: a claim checks each lane of its types. A claim of
        all types follows before the next wait."""
        types = self._wakes.take_notified()
        if len(self._job_types) < MANY_TYPES or not 0 < len(types) < len(self._job_types) / 4:
            return 0
        found = 0
        for first, *_ in demands:
            if named := [name for name in first.job_types if name in types]:
                found += await self._claim(first.batch_size, named)
        return found

    async def _claim_all(self, demands: list[list[Demand]]) -> int:
        """Claim for every executor that has room. With several, the first claim is for all of them together: an
        idle worker sends one claim, and the jobs of the highest priorities come first."""
        if len(demands) == 1:
            return await self._claim_in_turn(demands[0])
        size = min(first.batch_size for first, *_ in demands)
        found = await self._claim(size, [name for first, *_ in demands for name in first.job_types])
        if found == size:
            for executor in self._slots.demand():
                found += await self._claim_in_turn(executor)
        return found

    async def _claim_in_turn(self, demands: list[Demand]) -> int:
        found = 0
        for demand in demands:
            claimed = await self._claim(demand.batch_size, demand.job_types)
            found += claimed
            if claimed < demand.batch_size:
                break  # the next demand is for some of the same types
        return found

    async def _claim(self, batch_size: int, job_types: list[str]) -> int:
        batch_size = min(batch_size, self._most)
        taken = self._wakes.take(job_types)
        fault_points.reach("before-claim")
        try:
            jobs: list[Claimed] = await self._store.run(
                self._statements.claim(
                    self._worker_id,
                    job_types,
                    batch_size,
                    self._lease,
                    self._queues,
                    taken.due_from,
                )
            )
        except BaseException as error:
            if is_too_much(error):
                # What the lost answer has claimed is recovered when its leases expire. Not as many again.
                self._most = max(1, batch_size // 2)
            self._wakes.put_back(taken)
            raise
        size = sum([len(job.data) for job in jobs])
        self._most = (
            min(2 * self._most, PREFETCH_JOBS)
            if size <= MAX_CLAIM_BYTES
            else max(1, len(jobs) * MAX_CLAIM_BYTES // size)
        )
        if len(jobs) == batch_size:
            self._wakes.unanswered |= taken.job_types  # jobs may be left
        if jobs:
            fault_points.reach("after-claim")
            self._slots.put(jobs)
        return len(jobs)

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────

    async def _note_work(self) -> None:
        now = time.monotonic()
        if not self._has_work:
            self._has_work, self._has_work_since = True, now
        elif not self._is_busy and now - self._has_work_since > IDLE_HYSTERESIS_SECONDS:
            self._is_busy = True
            await self._flag(idle=False)

    async def _wait_for_demand(self) -> None:
        """Wait for a free slot. A worker without one is not chosen again until it has looked for work."""
        now = time.monotonic()
        self._full_since = self._full_since or now
        if now - self._full_since > IDLE_HYSTERESIS_SECONDS:
            await self._flag(idle=False)
        waits = [
            asyncio.ensure_future(self._slots.wait_for_demand()),
            asyncio.ensure_future(self._wakes.wait_until_woken()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _pass_on(self) -> None:
        """Wake other workers for the jobs that this one was woken for and has no free slot for."""
        if not self._wakes.unanswered:
            return
        full = self._slots.full_types()
        if full.isdisjoint(self._wakes.unanswered):
            return
        # The flag first, so that two workers without a free slot do not wake each other again and again.
        # It is written in any case: an enqueue has chosen this worker.
        is_idle = self.is_flagged_idle and len(full) < len(self._job_types)
        self._flagged = None
        await self._flag(idle=is_idle, full=full if is_idle else frozenset())
        taken = self._wakes.take(full)
        try:
            await self._store.run(
                self._statements.pass_wake(
                    self._worker_id, sorted(taken.job_types), self._queues, taken.due_from
                )
            )
        except BaseException:
            self._wakes.put_back(taken)
            raise

    async def _wait_for_work(self) -> None:
        now = time.monotonic()
        if self._has_work:
            self._has_work, self._has_work_since = False, now
        if self._is_busy:
            if now - self._has_work_since < IDLE_HYSTERESIS_SECONDS:
                await self._wakes.wait(IDLE_RETRY_SECONDS)
                return
            self._is_busy = False
        polls = claims = False
        while not claims:
            full = self._slots.full_types()
            has_room = not self.is_flagged_idle or not self._flagged_full <= full
            if has_room and self._listener.healthy and await self._flag(idle=True, full=full):
                # Enqueues notify from now on. The caller claims again before it waits, to find the jobs
                # that were enqueued before.
                return
            types = [name for name in self._job_types if name not in full]
            claims = await self._wait_or_poll(polls, types)
            polls = True
        self._wakes.unanswered.update(types)

    async def _wait_or_poll(self, polls: bool, job_types: list[str]) -> bool:
        """Wait until the next poll. Returns whether to claim: something woke it, a job is due, or the poll finds
        one that is. A poll that finds none does not claim: most polls of a fleet find none."""
        if (
            not self._listener.healthy
            and time.monotonic() - self._flagged_at > IDLE_HYSTERESIS_SECONDS
        ):
            await self._flag(idle=False)  # a notification would be lost
        due, rank, database_now = await self._store.run(
            self._statements.next_wake(self._worker_id, job_types, self._queues, polls)
        )
        self._wakes.set_clock(database_now.timestamp())
        until_due = math.inf
        if due is not None:
            until_due = (due - database_now).total_seconds()
            if polls and until_due <= 0:
                return True
            until_due += SECOND_WORKER_SECONDS * 2.0 ** (min(rank, 10) - 1) if rank else 0.0
        seconds = self._poll_seconds()
        if not (self._listener.healthy and self.is_flagged_idle):
            # To set the flag soon. The listener may have become healthy while the flag was cleared.
            seconds = min(seconds, IDLE_HYSTERESIS_SECONDS)
        woken = await self._wakes.wait(min(seconds, max(0.0, until_due)))
        return woken or until_due <= seconds or self._slots.prefetched > 0

    def _poll_seconds(self) -> float:
        """How long to wait for a notification before the next poll."""
        # An enqueue that checked for idle workers before this one was flagged, and committed after its last
        # claim, sends no notification. So the first polls after the flag are quick.
        is_flag_old = time.monotonic() - self._flagged_at > QUICK_POLLS_SECONDS
        is_quick = not (self._listener.healthy and is_flag_old) or self._slots.prefetched
        seconds = POLL_SECONDS if is_quick else POLL_SECONDS_LISTENING
        return seconds * (1 - 0.4 * random.random())  # noqa: S311 - spreads the polls of many workers

    async def _flag(self, *, idle: bool, full: frozenset[str] = frozenset()) -> bool:
        """Set what enqueues choose workers by: idle, and reached by notifications, except for the types without
        a free slot. False if another transaction has locked the worker's row."""
        if self._flagged != (idle, full):
            self._flagged = None  # a statement whose answer is lost may have been executed
            touched = await self._store.run(
                self._statements.touch_worker(self._worker_id, idle, None, self._life, sorted(full))
            )
            if touched is None:
                return False
            self._flagged, self._flagged_at = (idle, full), time.monotonic()
        return True

    @property
    def is_flagged_idle(self) -> bool:
        """Whether enqueues should notify this worker."""
        return self._flagged is not None and self._flagged[0]

    @property
    def _flagged_full(self) -> frozenset[str]:
        return frozenset() if self._flagged is None else self._flagged[1]
