"""Claims jobs for the slots. While there is nothing to claim, it waits for a notification, the next due time, a free
slot, or the next poll.

A notification wakes as many workers as there are jobs (decision 0039). A worker that was woken and has no free slot
for what it finds wakes others. The slots decide how many jobs to claim, and of which types."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from typing import TYPE_CHECKING

import msgspec

from howdah.database.backoff import Backoff
from howdah.database.driver_errors import DATABASE_ERRORS, is_too_much
from howdah.encoding.safe_logger import get_logger
from howdah.execution import fault_points
from howdah.worker.prefetch import PREFETCH_JOBS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
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
DUE_STEP_SECONDS = 0.005  # due times of notifications are rounded up to this


def wake_channel(worker_id: str) -> str:
    """The channel of a worker without its schema, as the SQL function `wake_channel` names it."""
    return "wake:" + hashlib.sha256(worker_id[:100].encode()).hexdigest()[:8]


def least(due_from: dict[str, float]) -> float | None:
    """The least of these due times; None if there is none."""
    return min(due_from.values(), default=None)


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
        self._wait_ended = asyncio.Event()
        self._woken = False  # the wait was ended by something other than its timer
        # The types that it was woken for and that no claim since has found less of than it asked for.
        self._unanswered: set[str] = set()
        self._notified: set[str] = (
            set()
        )  # the types that notifications have named since the last claim
        # The least due times that notifications have named since the last claim of each type. If its enqueue took long
        # to commit, the head of its lane may have passed such a job.
        self._due_from: dict[str, float] = {}
        self._due_timers: dict[int, asyncio.TimerHandle] = {}
        self._due_types: dict[int, set[str]] = {}
        # What enqueues choose workers by: whether it is idle, and the types that it has no free slot for. At first as
        # the worker was registered; None: unknown.
        self._flagged: tuple[bool, frozenset[str]] | None = (True, frozenset())
        self._flagged_at = time.monotonic()
        self._is_busy = False
        self._has_work = False
        self._has_work_since = time.monotonic()  # or has had none since
        self._full_since: float | None = None
        self._most = PREFETCH_JOBS  # jobs to claim at once
        # Seconds from our monotonic clock to the database's clock, at least: the answer that told the time may have
        # been slow. Our wall clock may jump.
        self._clock_offset: float | None = None
        listener.subscribe(wake_channel(worker_id), self._on_notification)
        slots.on_demand(self.wake)

    # ── what wakes it ─────────────────────────────────────────────────────────────────────────────

    def _on_notification(self, text: str) -> None:
        """The payload is [[queue, job type, least due time], …], or [] if the list would not fit. It is empty
        if notifications may have been lost."""
        lanes = msgspec.json.decode(text) if text else []
        mine = [lane for lane in lanes if lane[0] in self._queues and lane[1] in self._job_types]
        if lanes and not mine:
            return
        types = {lane[1] for lane in mine} or set(self._job_types)
        for _, job_type, due, *_ in mine:
            self._due_from[job_type] = min(due, self._due_from.get(job_type, due))
        if mine and self._clock_offset is not None:
            now = time.monotonic() + self._clock_offset
            for _, job_type, due, *_ in mine:
                if now < due < now + QUICK_POLLS_SECONDS:
                    self._wake_at(due, now, job_type)
            types = {lane[1] for lane in mine if lane[2] <= now}
        if types:
            self._wake_to_claim(types)

    def _wake_at(self, due: float, now: float, job_type: str) -> None:
        """Wake when a job is due. Its worker was chosen when it was enqueued, so it claims on time; the others
        learn of later due times when they poll."""
        step = math.ceil(due / DUE_STEP_SECONDS)
        self._due_types.setdefault(step, set()).add(job_type)
        if step not in self._due_timers:
            # A timer that sets an event, not a timeout: a timeout would cancel the task of this part.
            self._due_timers[step] = asyncio.get_running_loop().call_later(
                step * DUE_STEP_SECONDS - now, self._on_due, step
            )

    def _on_due(self, step: int) -> None:
        self._due_timers.pop(step, None)
        self._wake_to_claim(self._due_types.pop(step))

    def _wake_to_claim(self, job_types: set[str]) -> None:
        self._unanswered |= job_types
        self._notified |= job_types
        self.wake()

    def wake(self) -> None:
        """End the current wait."""
        self._woken = True
        self._wait_ended.set()

    # ── claiming ──────────────────────────────────────────────────────────────────────────────────

    async def run(self, stopping: asyncio.Event) -> None:
        """Claim until the worker stops."""
        backoff = Backoff(CLAIM_RETRY_SECONDS, MAX_CLAIM_RETRY_SECONDS)
        try:
            while not stopping.is_set():
                await self._run_once(backoff)
        finally:
            for timer in self._due_timers.values():
                timer.cancel()

    async def _run_once(self, backoff: Backoff) -> None:
        self._slots.release_overdue()
        self._forget_wake()
        try:
            if not self._heartbeat.can_extend:
                # A worker does not claim what it could not keep.
                await self._wait(EXTEND_POLL_SECONDS)
                return
            await self._claim_or_wait()
        except DATABASE_ERRORS as error:
            self._heartbeat.outages.report(logger, "claim failed; retrying", error)
            await self._wait(backoff.next())
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
        types, self._notified = self._notified, set()
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
        asked, due_from = self._take_wakes(job_types)
        fault_points.reach("before-claim")
        try:
            jobs: list[Claimed] = await self._store.run(
                self._statements.claim(
                    self._worker_id,
                    job_types,
                    batch_size,
                    self._lease,
                    self._queues,
                    least(due_from),
                )
            )
        except BaseException as error:
            if is_too_much(error):
                # What the lost answer has claimed is recovered when its leases expire. Not as many again.
                self._most = max(1, batch_size // 2)
            self._give_back_wakes(asked, due_from)
            raise
        size = sum([len(job.data) for job in jobs])
        self._most = (
            min(2 * self._most, PREFETCH_JOBS)
            if size <= MAX_CLAIM_BYTES
            else max(1, len(jobs) * MAX_CLAIM_BYTES // size)
        )
        if len(jobs) == batch_size:
            self._unanswered |= asked  # jobs may be left
        if jobs:
            fault_points.reach("after-claim")
            self._slots.put(jobs)
        return len(jobs)

    def _take_wakes(self, job_types: Iterable[str]) -> tuple[set[str], dict[str, float]]:
        """Those of these types that it was woken for, and the due times that it was notified of. A statement answers
        them; if they are noted again meanwhile, that is for the next one."""
        if not self._unanswered and not self._due_from:
            return set(), {}
        asked = self._unanswered.intersection(job_types)
        self._unanswered -= asked
        named = self._due_from.keys() & set(job_types)
        return asked, {name: self._due_from.pop(name) for name in named}

    def _give_back_wakes(self, asked: set[str], due_from: dict[str, float]) -> None:
        """After a statement that failed."""
        self._unanswered |= asked
        for job_type, due in due_from.items():
            self._due_from[job_type] = min(due, self._due_from.get(job_type, due))

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
            asyncio.ensure_future(self._wait_ended.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _pass_on(self) -> None:
        """Wake other workers for the jobs that this one was woken for and has no free slot for."""
        if not self._unanswered:
            return
        full = self._slots.full_types()
        if full.isdisjoint(self._unanswered):
            return
        # The flag first, so that two workers without a free slot do not wake each other again and again.
        # It is written in any case: an enqueue has chosen this worker.
        is_idle = self.is_flagged_idle and len(full) < len(self._job_types)
        self._flagged = None
        await self._flag(idle=is_idle, full=full if is_idle else frozenset())
        asked, due_from = self._take_wakes(full)
        try:
            await self._store.run(
                self._statements.pass_wake(
                    self._worker_id, sorted(asked), self._queues, least(due_from)
                )
            )
        except BaseException:
            self._give_back_wakes(asked, due_from)
            raise

    async def _wait_for_work(self) -> None:
        now = time.monotonic()
        if self._has_work:
            self._has_work, self._has_work_since = False, now
        if self._is_busy:
            if now - self._has_work_since < IDLE_HYSTERESIS_SECONDS:
                await self._wait(IDLE_RETRY_SECONDS)
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
        self._unanswered.update(types)

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
        self._clock_offset = database_now.timestamp() - time.monotonic()
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
        woken = await self._wait(min(seconds, max(0.0, until_due)))
        return woken or until_due <= seconds or self._slots.prefetched > 0

    def _poll_seconds(self) -> float:
        """How long to wait for a notification before the next poll."""
        # An enqueue that checked for idle workers before this one was flagged, and committed after its last
        # claim, sends no notification. So the first polls after the flag are quick.
        is_flag_old = time.monotonic() - self._flagged_at > QUICK_POLLS_SECONDS
        is_quick = not (self._listener.healthy and is_flag_old) or self._slots.prefetched
        seconds = POLL_SECONDS if is_quick else POLL_SECONDS_LISTENING
        return seconds * (1 - 0.4 * random.random())  # noqa: S311 - spreads the polls of many workers

    async def _wait(self, seconds: float) -> bool:
        """Wait for this time. Returns at once, and True, if the worker is or was woken."""
        timer = asyncio.get_running_loop().call_later(seconds, self._wait_ended.set)
        try:
            await self._wait_ended.wait()
        finally:
            timer.cancel()
        woken = self._woken
        self._forget_wake()
        return woken

    def _forget_wake(self) -> None:
        self._woken = False
        self._wait_ended.clear()

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
