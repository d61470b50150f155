"""The protocol in plain Python: the exact effect of every operation on every job.

A transaction sees what is committed, overlaid by what it wrote itself. What it wrote is locked, so transactions never
conflict. `system` runs each operation on the database and on this reference, and compares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

REFUNDS = 10
HOUR = timedelta(hours=1)

Lane = tuple[str, int]  # job type and priority; the queue is always the same
Heads = dict[Lane, datetime | None]
Lock = Literal["update", "no key update"]
Once = tuple[str, str]  # job type and idempotency key
Owner = tuple["UUID", timedelta]  # the job that took it, and how long the key still lives
RETAKEN = timedelta(days=7)
POSTPONED = HOUR / 2  # a lease with a locked job: a second in the database, see `System`


class Violation(AssertionError):
    """The database did what the protocol forbids."""


def must(holds: object, sentence: str) -> None:
    if not holds:
        raise Violation(sentence)


@dataclass(frozen=True, slots=True)
class Soon:
    """A due time of now plus a delay, until the clock of the database supplies the time."""

    delay: timedelta = timedelta()


@dataclass(frozen=True, slots=True)
class Requeued:
    """A due time that was raised to the lane's head, until it is compared. Not if the same operation first added a row
    to a lane that is closing: the new row has no head."""

    own: datetime
    head: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A job to enqueue."""

    job_type: str = "a"
    priority: int = 100
    delay: int = 0  # hours
    key: str | None = None
    once: str | None = None
    max_attempts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelJob:
    """One job, live or finished."""

    id: UUID
    spec: Spec
    run_at: datetime | Soon | Requeued
    turn: int  # corresponds to seq; only the order matters
    status: str = "pending"
    attempts: int = 0
    claims: int = 0
    lease: UUID | None = None
    started: bool = False
    holds_key: bool = False
    blockers: int = 0
    cancel_requested: bool = False
    progress: int = 0
    events: int = 0
    result: int | None = None

    @property
    def lane(self) -> Lane:
        return self.spec.job_type, self.spec.priority

    @property
    def live(self) -> bool:
        return self.status in ("pending", "claimed")

    @property
    def refundable(self) -> bool:
        return not self.started and self.claims - self.attempts < REFUNDS

    @property
    def suspect(self) -> bool:
        return self.claims > self.attempts

    def at(self) -> datetime:
        assert isinstance(self.run_at, datetime), "not yet compared with the database"
        return self.run_at


@dataclass(slots=True)
class Transaction:
    """What one transaction wrote and locked. For every lock, `wrote` has a copy of the row."""

    wrote: dict[UUID, ModelJob] = field(default_factory=dict)
    locks: dict[UUID, Lock] = field(default_factory=dict)
    once: dict[Once, Owner] = field(default_factory=dict)  # taken, so that the rows are locked
    freed: set[tuple[Once, UUID]] = field(default_factory=set)  # locks nothing
    leases: dict[UUID, timedelta | None] = field(default_factory=dict)  # locked; None: removed
    unassigned_keys: list[str] = field(default_factory=list)
    to_assign: list[tuple[str, int]] = field(default_factory=list)
    drained: int = 0
    passed: timedelta = timedelta()  # since it began


class Reference:
    """All committed jobs, and the open transactions."""

    def __init__(self) -> None:
        self.jobs: dict[UUID, ModelJob] = {}
        self.once: dict[Once, Owner] = {}
        self.leases: dict[UUID, timedelta] = {}  # until they expire; some have no job any more
        self.unassigned_keys: list[str] = []
        self.open: dict[int, Transaction] = {}
        self.heads: Heads = {}  # as the current transaction sees them
        self.extended_lanes: set[Lane] = set()  # to which the last operation added a row
        self.endings: Counter[UUID] = Counter()  # accepted since the last retry, committed or not
        self._turn = 0

    # ── transactions ──────────────────────────────────────────────────────────────────────────────

    def view(self, client: int) -> dict[UUID, ModelJob]:
        if client not in self.open:
            return self.jobs
        return self.jobs | self.open[client].wrote

    def lock_of_another(self, client: int, job_id: UUID) -> Lock | None:
        for other, transaction in self.open.items():
            if other != client and job_id in transaction.locks:
                return transaction.locks[job_id]
        return None

    def leases_seen(self, client: int) -> dict[UUID, timedelta]:
        own = self.open[client].leases if client in self.open else {}
        return {lease: left for lease, left in (self.leases | own).items() if left is not None}

    def is_lease_locked(self, client: int, lease: UUID) -> bool:
        """Whether another transaction extends or recovers it."""
        return any(lease in each.leases for other, each in self.open.items() if other != client)

    def commit(self, client: int) -> None:
        for key, turn in self.open[client].to_assign:
            if not self._is_assigned(client, key, turn):
                self._assign_key(client, key, turn)
        done = self.open.pop(client)
        for job_id, job in done.wrote.items():
            before = self.jobs.get(job_id)
            if not job.live and (before is None or before.live):
                self.endings[job_id] += 1
                must(self.endings[job_id] == 1, f"P2: {job_id} ended twice without a retry")
            elif job.live:
                self.endings[job_id] = 0
        self.jobs.update(done.wrote)
        self.once.update(done.once)
        for lease, time_left in done.leases.items():
            if time_left is None:
                self.leases.pop(lease, None)
            else:
                self.leases[lease] = time_left
        for once, freed_by in done.freed:
            # Another job may have taken the key meanwhile, after its lifetime.
            if self.once.get(once, (None, None))[0] == freed_by:
                del self.once[once]
        self.unassigned_keys = self.unassigned_keys[done.drained :] + done.unassigned_keys

    def rollback(self, client: int) -> Transaction:
        """Discard the transaction; apply the time that passed to the rows that it had locked."""
        undone = self.open.pop(client)
        for job_id in undone.locks:
            if job_id in self.jobs:
                self.jobs[job_id] = _later(self.jobs[job_id], undone.passed)
        for key in undone.once:
            if key in self.once:
                owner, left = self.once[key]
                self.once[key] = owner, left - undone.passed
        for lease in undone.leases.keys() & self.leases.keys():
            self.leases[lease] -= undone.passed
        return undone

    def pass_time(self, by: timedelta) -> None:
        held: set[UUID] = set()
        keys: set[Once] = set()
        leases: set[UUID] = set()
        for transaction in self.open.values():
            transaction.passed += by
            held.update(transaction.locks)
            keys.update(transaction.once)
            leases.update(transaction.leases)
            for job_id, job in transaction.wrote.items():
                transaction.wrote[job_id] = _later(job, by)
            for key, taken in transaction.once.items():
                transaction.once[key] = taken[0], taken[1] - by
            for lease, time_left in transaction.leases.items():
                if time_left is not None:
                    transaction.leases[lease] = time_left - by
        for job_id, job in self.jobs.items():
            if job_id not in held:
                self.jobs[job_id] = _later(job, by)
        for key, (owner, left) in self.once.items():
            if key not in keys:
                self.once[key] = owner, left - by
        for lease in self.leases.keys() - leases:
            self.leases[lease] -= by

    def _write(self, client: int, job: ModelJob, lock: Lock = "update") -> None:
        transaction = self.open[client]
        transaction.wrote[job.id] = job
        if transaction.locks.get(job.id) != "update":
            transaction.locks[job.id] = lock

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    # ── enqueueing ────────────────────────────────────────────────────────────────────────────────

    def enqueue(
        self, client: int, jobs: Sequence[tuple[UUID, Spec]], *, again: bool = False
    ) -> list[tuple[UUID, bool]]:
        answer = []
        for job_id, spec in jobs:
            owner, exists = job_id, job_id in self.view(client)
            if not exists:
                owner = self._take_once(client, job_id, spec, HOUR)
            fresh = owner == job_id and not exists
            answer.append((owner, fresh or (again and owner == job_id)))
            if fresh:
                self._insert(client, job_id, spec, spec.delay * HOUR, events=0)
        return answer

    def owner_of_once(self, client: int, once: Once) -> Owner | None:
        transaction = self.open[client]
        owner = transaction.once.get(once, self.once.get(once))
        return None if owner is None or (once, owner[0]) in transaction.freed else owner

    def _take_once(self, client: int, job_id: UUID, spec: Spec, ttl: timedelta) -> UUID:
        """Take the job's idempotency key. Returns the job that owns it."""
        if spec.once is None:
            return job_id
        once = spec.job_type, spec.once
        known = self.owner_of_once(client, once)
        if known is None or known[1] <= timedelta():
            known = job_id, ttl
            self.open[client].once[once] = known
            self.open[client].freed.discard((once, job_id))
        return known[0]

    def _free_once(self, client: int, job: ModelJob) -> None:
        """Free the key, if it is still the job's."""
        if job.spec.once is None:
            return
        once = job.spec.job_type, job.spec.once
        known = self.owner_of_once(client, once)
        if known is not None and known[0] == job.id:
            self.open[client].freed.add((once, job.id))

    def _insert(
        self, client: int, job_id: UUID, spec: Spec, delay: timedelta, *, events: int
    ) -> None:
        job = ModelJob(
            id=job_id,
            spec=spec,
            run_at=Soon(delay),
            turn=self._next_turn(),
            blockers=int(spec.key is not None),
            events=events,
        )
        self._write(client, job)
        if spec.key is not None:
            self.open[client].to_assign.append((spec.key, job.turn))

    # ── claiming ──────────────────────────────────────────────────────────────────────────────────

    def visible_to_claims(self, job: ModelJob) -> bool:
        """Whether a claim that starts at the lane heads finds this pending job."""
        if job.lane not in self.heads:
            return False
        head = self.heads[job.lane]
        return head is None or job.at() >= head

    def claimable(
        self,
        client: int,
        now: datetime,
        types: Sequence[str] | None = None,
        *,
        ignore_heads: bool = False,
    ) -> list[tuple[Lane, ModelJob, list[ModelJob]]]:
        """Lanes in claim order: (lane, the first job seen, the jobs that are not locked)."""
        lanes: dict[Lane, list[ModelJob]] = {}
        for job in self.view(client).values():
            if job.status == "pending" and job.blockers == 0 and job.at() <= now:
                if types is not None and job.spec.job_type not in types:
                    continue
                if self.visible_to_claims(job) or (ignore_heads and job.lane in self.heads):
                    lanes.setdefault(job.lane, []).append(job)
        found = []
        for lane, jobs in lanes.items():
            jobs.sort(key=lambda job: (job.at(), job.id))
            free = [job for job in jobs if self.lock_of_another(client, job.id) is None]
            found.append((lane, jobs[0], free))
        return sorted(found, key=lambda lane: (-lane[0][1], lane[1].at()))

    def taken(
        self,
        lanes: Sequence[tuple[Lane, ModelJob, list[ModelJob]]],
        batch: int,
        *,
        alone: bool,
        suspects_first: bool,
    ) -> list[UUID]:
        """What a claim takes of these lanes. A suspect is taken alone (P8)."""
        taken: list[UUID] = []
        for _, first, free in lanes:
            check = alone and not taken and (first.suspect or suspects_first)
            if check and free and free[0].suspect:
                return [free[0].id]
            unsuspected = [job.id for job in free if not (alone and job.suspect)]
            taken += unsuspected[: batch - len(taken)]
        return taken

    def claim(self, client: int, taken: Mapping[UUID, UUID], *, started: bool, alone: bool) -> None:
        """Claim each job under the given lease."""
        for job_id, lease in taken.items():
            self.extend(client, lease)
            job = self.view(client)[job_id]
            must(job.attempts < job.spec.max_attempts, f"P4: {job_id} had no attempt left")
            claimed = replace(
                job,
                status="claimed",
                attempts=job.attempts + 1,
                claims=job.claims + 1,
                lease=lease,
                started=started or (alone and job.suspect),
                progress=0,
            )
            self._write(client, claimed)

    # ── acknowledging ─────────────────────────────────────────────────────────────────────────────

    def holds(self, client: int, job_id: UUID, lease: UUID) -> bool:
        """Whether this is the fence of the job's live lease."""
        job = self.view(client).get(job_id)
        return job is not None and job.status == "claimed" and job.lease == lease

    def start(self, client: int, job_id: UUID) -> None:
        self._write(client, replace(self.view(client)[job_id], started=True))

    def start_unless_started(self, client: int, job_id: UUID) -> None:
        """A heartbeat locks only a job whose start it records."""
        job = self.view(client)[job_id]
        if not job.started:
            self._write(client, replace(job, started=True), "no key update")

    def complete(self, client: int, results: Mapping[UUID, int]) -> None:
        jobs = self.view(client)
        self._finish(
            client,
            [
                replace(jobs[job_id], status="completed", result=result, progress=100)
                for job_id, result in results.items()
            ],
        )

    def completed_by(self, client: int, job_id: UUID, lease: UUID) -> bool:
        job = self.view(client).get(job_id)
        return job is not None and job.status == "completed" and job.lease == lease

    def fail(self, client: int, retry_in: Mapping[UUID, timedelta | None]) -> None:
        ended = []
        for job_id, delay in retry_in.items():
            job = self.view(client)[job_id]
            job = replace(job, events=job.events + 1)
            if job.cancel_requested:
                ended.append(replace(job, status="cancelled"))
            elif delay is None or job.attempts >= job.spec.max_attempts:
                ended.append(replace(job, status="failed"))
            else:
                self._write(client, _unclaimed(job, run_at=Soon(delay)))
        self._finish(client, ended)

    def release(self, client: int, ids: Iterable[UUID], delay: timedelta = timedelta()) -> None:
        ended = []
        for job_id in ids:
            job = self.view(client)[job_id]
            if job.cancel_requested:
                ended.append(replace(job, status="cancelled"))
            else:
                due = Soon(delay) if delay else self._requeue_at(job)
                back = _unclaimed(job, run_at=due)
                back = replace(back, attempts=job.attempts - 1, claims=job.claims - 1)
                self._write(client, back)
        self._finish(client, ended)

    def stop(self, client: int, ids: Iterable[UUID]) -> None:
        jobs = self.view(client)
        self._finish(client, [replace(jobs[job_id], status="cancelled") for job_id in ids])

    def extend(self, client: int, lease: UUID) -> None:
        self.open[client].leases[lease] = HOUR

    def remove_ended(self, client: int, leases: Iterable[UUID]) -> None:
        """Remove those of the leases that have no jobs and are not locked."""
        seen = self.leases_seen(client)
        for lease in leases:
            if (
                lease in seen
                and not self.held(client, lease)
                and not self.is_lease_locked(client, lease)
            ):
                self.open[client].leases[lease] = None

    def report(self, client: int, job_id: UUID, percent: int) -> None:
        job = self.view(client)[job_id]
        job = replace(job, progress=max(job.progress, min(percent, 100)), started=True)
        self._write(client, job, "no key update")

    # ── operating ─────────────────────────────────────────────────────────────────────────────────

    def held(self, client: int, lease: UUID) -> list[UUID]:
        """The jobs that are claimed under this lease."""
        return [i for i in self.view(client) if self.holds(client, i, lease)]

    def expired(self, client: int) -> list[UUID]:
        """The leases that recovery may take."""
        return [
            lease
            for lease, left in self.leases_seen(client).items()
            if left <= timedelta() and not self.is_lease_locked(client, lease)
        ]

    def stale(self, client: int, leases: Iterable[UUID]) -> list[UUID]:
        """The jobs of these leases that recovery may take."""
        held = [job_id for lease in leases for job_id in self.held(client, lease)]
        return [job_id for job_id in held if self.lock_of_another(client, job_id) is None]

    def recover(self, client: int, leases: Sequence[UUID]) -> list[UUID]:
        """Recover what is stale and remove the leases. Returns those that stay, because they have a locked job."""
        ended = []
        for job_id in self.stale(client, leases):
            job = self.view(client)[job_id]
            if job.cancel_requested:
                ended.append(replace(job, status="cancelled"))
            elif job.attempts < job.spec.max_attempts or job.refundable:
                back = _unclaimed(job, run_at=self._requeue_at(job))
                self._write(client, replace(back, attempts=job.attempts - int(job.refundable)))
            else:
                ended.append(replace(job, status="failed"))
        self._finish(client, ended)
        postponed = [lease for lease in leases if self.held(client, lease)]
        self.open[client].leases.update(
            {lease: POSTPONED if lease in postponed else None for lease in leases}
        )
        return postponed

    def cancel(self, client: int, ids: Iterable[UUID]) -> dict[UUID, str]:
        jobs = self.view(client)
        known = [jobs[job_id] for job_id in dict.fromkeys(ids) if job_id in jobs]
        pending = [job for job in known if job.status == "pending"]
        claimed = [job for job in known if job.status == "claimed"]
        self._finish(client, [replace(job, status="cancelled") for job in pending])
        waited = {job.spec.key for job in pending if job.spec.key and not job.holds_key}
        self.open[client].unassigned_keys.extend(sorted(waited))
        for job in claimed:
            self._write(client, replace(job, cancel_requested=True))
        return {job.id: "cancelled" for job in pending} | {job.id: "cancelling" for job in claimed}

    def retry(self, client: int, ids: Iterable[UUID]) -> set[UUID]:
        jobs = self.view(client)
        finished = [jobs[job_id] for job_id in set(ids) if job_id in jobs and not jobs[job_id].live]
        last = {(job.spec.job_type, job.spec.once): job.id for job in sorted(finished, key=_turn)}
        reopened = set()
        for job in sorted(finished, key=_turn):
            once = job.spec.job_type, job.spec.once or ""
            known = None if job.spec.once is None else self.owner_of_once(client, once)
            is_taken = known is not None and known[0] != job.id and known[1] > timedelta()
            if is_taken or (job.spec.once is not None and last[once] != job.id):
                continue
            self._take_once(client, job.id, job.spec, RETAKEN)
            self._insert(client, job.id, job.spec, timedelta(), events=job.events)
            reopened.add(job.id)
        return reopened

    # ── ordering keys ─────────────────────────────────────────────────────────────────────────────

    def assign_keys(self, client: int) -> int:
        keys = sorted(set(self.unassigned_keys))
        self.open[client].drained = len(self.unassigned_keys)
        for key in keys:
            self._assign_key(client, key)
        return len(keys)

    def _jobs_of_key(self, client: int, key: str) -> tuple[list[ModelJob], list[ModelJob]]:
        jobs = [job for job in self.view(client).values() if job.live and job.spec.key == key]
        jobs.sort(key=lambda job: job.turn)
        return [job for job in jobs if job.holds_key], [job for job in jobs if not job.holds_key]

    def _is_assigned(self, client: int, key: str, turn: int) -> bool:
        """Whether this transaction wrote the key holder, or the preceding job that waits for the key."""
        lines = [
            [job for job in line if job.turn < turn] for line in self._jobs_of_key(client, key)
        ]
        return any(line and line[-1].id in self.open[client].wrote for line in lines)

    def _assign_key(self, client: int, key: str, since: int = 0) -> None:
        """At a commit, `since` limits it to jobs from its own turn on: earlier jobs recorded the key as unassigned
        themselves if necessary."""
        holders, waiting = self._jobs_of_key(client, key)
        for holder in reversed(holders):
            if self.lock_of_another(client, holder.id) == "update":
                continue
            # A job that committed after a younger job got the key goes behind that job, with the later ones of its
            # transaction.
            own = self.open[client].wrote if 0 < since < holder.turn else {}
            late = [
                job
                for job in waiting
                if since <= job.turn and (job.turn < holder.turn or job.id in own)
            ]
            free = [job for job in late if self.lock_of_another(client, job.id) is None]
            for job in free:
                self._write(client, replace(job, turn=self._next_turn()))
            if len(free) < len(late) and not since:
                self.open[client].unassigned_keys.append(key)
            return
        if holders or (waiting and not self._give_key(client, waiting[0])):
            self.open[client].unassigned_keys.append(key)

    def _give_key(self, client: int, job: ModelJob) -> bool:
        if self.lock_of_another(client, job.id) is not None:
            return False
        due = self._requeue_at(job)
        self._write(client, replace(job, holds_key=True, blockers=job.blockers - 1, run_at=due))
        return True

    def _finish(self, client: int, ended: Sequence[ModelJob]) -> None:
        freed = []
        for job in ended:
            if job.holds_key:
                freed.append((job.spec.key, job.turn))
            if job.status != "completed":
                self._free_once(client, job)
            lease = job.lease if job.status == "completed" else None
            self._write(client, replace(job, holds_key=False, blockers=0, lease=lease))
        for key, turn in freed:
            assert key is not None
            _, waiting = self._jobs_of_key(client, key)
            # A job of an unassigned key may not be behind the holder yet.
            is_unassigned = key in self._unassigned(client)
            following = [job for job in waiting if is_unassigned or job.turn > turn]
            if following and not self._give_key(client, following[0]):
                self.open[client].unassigned_keys.append(key)

    def _unassigned(self, client: int) -> list[str]:
        own = self.open[client]
        return self.unassigned_keys[own.drained :] + own.unassigned_keys

    def _requeue_at(self, job: ModelJob) -> datetime | Soon | Requeued:
        """Never below the head: a claim would not find the job there."""
        head = self.heads.get(job.lane)
        if head is None or not isinstance(job.run_at, datetime) or job.run_at >= head:
            return job.run_at
        return Requeued(job.run_at, head)


def _turn(job: ModelJob) -> int:
    return job.turn


def _unclaimed(job: ModelJob, run_at: datetime | Soon | Requeued) -> ModelJob:
    return replace(job, status="pending", run_at=run_at, lease=None, started=False)


def _later(job: ModelJob, by: timedelta) -> ModelJob:
    if not job.live:
        return job
    run_at = job.run_at - by if isinstance(job.run_at, datetime) else job.run_at
    return replace(job, run_at=run_at)
