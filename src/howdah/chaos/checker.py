"""Decides, job by job, whether each promise was kept: pure functions over the ledger and the database.

A finding is only made where the lines prove it, whatever the scheduling of processes: what one process wrote
after it was answered is later than what the database did, and what it wrote before it asked is earlier. A
second lease is wrong, for instance, if its claim was answered before the first one can have run out."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from howdah.chaos.history import Database, Enqueue, History, Lease, Row, Window
    from howdah.chaos.ledger import Line

RECOVERY = 5.0
"""Seconds within which work resumes (P9), for crashed workers after their leases."""
RETURNED = 10
"""How often an attempt is given back to a job whose worker died before it could say that it had begun."""
TICK = 0.02
"""Seconds by which two clocks of one host may differ over a lease."""
SLOW_ENQUEUE = 0.5
"""Seconds above which an enqueue was possibly written long before it was committed."""

PROMISES = {
    "P1": "no acknowledged job is lost",
    "P2": "a job ends once",
    "P3": "one live lease, and no stale write is accepted",
    "P4": "never more attempts than allowed",
    "P5": "a rolled-back enqueue never runs",
    "P6": "nothing is completed without its work; effects in the database happen exactly once",
    "P7": "jobs under one ordering key run in order",
    "P8": "a bad job harms no neighbour",
    "P9": "work resumes by itself",
}
FINAL = ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: which, of which job, in words, and the lines of the ledger that prove it."""

    promise: str
    job: str
    what: str
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = f" (ledger lines {', '.join(map(str, self.lines))})" if self.lines else ""
        return f"{self.promise} {self.job}: {self.what}{lines}"


@dataclass(slots=True)
class Case:
    """One job: what the ledger has of it, and what the database."""

    id: str
    leases: list[Lease]
    rows: list[Row]
    enqueue: Enqueue | None


class Checker:
    """The checks over one run that waited, for long enough, until every job had ended."""

    def __init__(self, history: History, database: Database, *, lease: float) -> None:
        self.history = history
        self.database = database
        self.lease = lease
        self._failing = _times(history.windows_of("connection", "server"))
        self._delays = _times(history.windows_of("delay"))
        self._common = sorted(self._failing + self._delays)
        self._of_worker: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for window in history.windows_of("worker"):
            if window.target is not None:
                self._of_worker[window.target] += _times([window])
        durable = sorted(history.durable())
        self._answered = [answered for answered, _ in durable]
        # Of all that was answered until then, when the last one of it was asked for.
        self._asked_by = list(itertools.accumulate((asked for _, asked in durable), max))

    def check(self) -> list[Finding]:
        """Everything that is wrong, by promise."""
        per_job: tuple[Callable[[Case], Iterable[Finding]], ...] = (
            self.lost, self.ended_twice, self.live_leases, self.stale_writes, self.attempts,
            self.burned, self.work_done, self.extra_executions,
        )  # fmt: skip
        whole: tuple[Callable[[], Iterable[Finding]], ...] = (
            self.rolled_back, self.enqueued_twice, self.failed_twice, self.exactly_once,
            self.ordering_keys, self.first_come, self.recovery, self.resumption, self.standstill,
        )  # fmt: skip
        found = [f for case in self.cases() for each in per_job for f in each(case)]
        found += [finding for each in whole for finding in each()]
        return sorted(found, key=lambda finding: finding.promise)

    def cases(self) -> Iterator[Case]:
        """Every job that the ledger or the database knows."""
        rows: dict[str, list[Row]] = defaultdict(list)
        for row in self.database.rows:
            rows[row.id].append(row)
        asked: dict[str, Enqueue] = {}
        for job, _, enqueue in self.history.acknowledged():
            asked.setdefault(job, enqueue)
        for job in {**rows, **self.history.jobs, **asked}:
            yield Case(job, self.history.jobs.get(job, []), rows.get(job, []), asked.get(job))

    # ── P1, P2 ────────────────────────────────────────────────────────────────────────────────────

    def lost(self, case: Case) -> Iterator[Finding]:
        """An acknowledged job that is not there, or that nobody will ever end."""
        if case.enqueue is None:
            return
        lines = _numbers(case.enqueue.invoked, case.enqueue.answer)
        if not case.rows:
            yield Finding("P1", case.id, "was acknowledged and is gone", lines)
        elif case.rows[0].status not in FINAL:
            what = f"is still {case.rows[0].status} long after the load has ended"
            yield Finding("P1", case.id, what, lines)

    def ended_twice(self, case: Case) -> Iterator[Finding]:
        """More than one accepted end."""
        if len(case.rows) > 1:
            yield Finding("P2", case.id, f"has {len(case.rows)} rows: it ended more than once")
        ends = [line for lease in case.leases for line in lease.accepted if line["final"]]
        # A repeated completion under one fence is the same one, told again.
        if len({(line["fence"], line["what"]) for line in ends}) > 1:
            yield Finding("P2", case.id, "two ends were accepted", _numbers(*ends))
        for end in ends:
            for lease in case.leases:
                if lease.claim is not None and lease.claim["asked"] > end.t:
                    what = "was claimed again after its end was accepted"
                    yield Finding("P2", case.id, what, _numbers(end, lease.claim))

    def failed_twice(self) -> Iterator[Finding]:
        """One attempt that failed twice, by the events in the database."""
        for (job, attempt), times in Counter(self.database.errors).items():
            if times > 1:
                yield Finding("P2", job, f"attempt {attempt} failed {times} times")

    # ── P3 ────────────────────────────────────────────────────────────────────────────────────────

    def live_leases(self, case: Case) -> Iterator[Finding]:
        """A claim that was answered while an earlier lease cannot have run out, nor been given up."""
        for first, second in _successions(case.leases):
            if first.claim is None or second.claim is None:
                continue
            answered = second.claim.t
            known = [b for b in (first.claim, *first.beats) if b["asked"] < answered]
            last = max(known, key=lambda line: line["asked"], default=None)
            if last is None or any(line.t < answered for line in first.invoked):
                continue
            if self._is_undone(first.claim, second.claim):
                continue
            if answered < last["asked"] + self.lease - TICK:
                what = (
                    f"was claimed again {answered - last['asked']:.2f} s after its lease of "
                    f"{self.lease:g} s was set"
                )
                yield Finding("P3", case.id, what, _numbers(first.claim, last, second.claim))
        yield from self._claimed_at_once(case)

    def _claimed_at_once(self, case: Case) -> Iterator[Finding]:
        """Two claims under way at the same time, both of which got the job: whichever was first, its
        lease had not run out when the other one was answered."""
        for one, other in itertools.combinations(case.leases, 2):
            a, b = one.claim, other.claim
            if a is None or b is None or a["asked"] > b.t or b["asked"] > a.t:
                continue
            answered = max(a.t, b.t)
            if any(line.t < answered for line in (*one.invoked, *other.invoked)):
                continue
            if self._is_undone(a, b) or self._is_undone(b, a):
                continue
            if answered < min(a["asked"], b["asked"]) + self.lease - TICK:
                yield Finding("P3", case.id, "was given to two claims at once", _numbers(a, b))

    def _is_undone(self, first: Line, second: Line) -> bool:
        """Whether a crash of the server between the two took the first claim back: the only statement that
        commits without waiting for the disk. Then the next one counts claims from the same number again,
        and nothing that was asked for later, and does wait for the disk, can have been answered before the
        crash, as that would have flushed the claim as well. Such a lease never was, and its fence is void."""
        if first["durable"] or second["claims"] > first["claims"]:
            return False
        return any(
            first["asked"] < crash.until()
            and crash.begin.t < second.t
            and not self._is_flushed(first.t, crash.begin.t)
            for crash in self.history.windows_of("server")
        )

    def _is_flushed(self, since: float, until: float) -> bool:
        """Whether something durable was asked for and answered in this time."""
        count = bisect.bisect_left(self._answered, until)
        return count > 0 and self._asked_by[count - 1] > since

    def stale_writes(self, case: Case) -> Iterator[Finding]:
        """Something accepted under a fence, asked for after a later claim had been answered."""
        for first, second in _successions(case.leases):
            if second.claim is None:
                continue
            for line in (*first.accepted, *first.beats):
                # Asked for more than once where the first answer was lost: the first may have counted.
                asked = min(
                    [line["asked"], *(i.t for i in first.invoked if line in first.accepted)]
                )
                if asked > second.claim.t:
                    what = f"a stale fence was accepted ({line.get('what', 'extend')})"
                    yield Finding("P3", case.id, what, _numbers(second.claim, line))
        done = case.rows[0] if case.rows else None
        if done is not None and done.status == "completed" and done.lease_id is not None:
            known = {lease.fence for lease in case.leases}
            if case.leases and done.lease_id not in known:
                yield Finding("P3", case.id, "was completed under a fence that nobody was given")

    # ── P4, P8 ────────────────────────────────────────────────────────────────────────────────────

    def attempts(self, case: Case) -> Iterator[Finding]:
        """More attempts than allowed, or a job that was started over and over."""
        for row in case.rows:
            if row.attempts > row.max_attempts:
                what = f"has {row.attempts} attempts of {row.max_attempts}"
                yield Finding("P4", case.id, what)
            ran = [lease for lease in case.leases if lease.starts]
            released = sum(line["what"] == "release" for lease in ran for line in lease.accepted)
            if len(ran) - released > row.max_attempts + RETURNED:
                what = f"was started {len(ran)} times with {row.max_attempts} attempts allowed"
                yield Finding("P4", case.id, what, _numbers(*(lease.starts[0] for lease in ran)))
        over = [
            lease.claim for lease in case.leases
            if lease.claim is not None and lease.claim["attempt"] > lease.claim["most"]
        ]  # fmt: skip
        if over:
            yield Finding("P4", case.id, "was claimed with no attempt left", _numbers(*over))

    def burned(self, case: Case) -> Iterator[Finding]:
        """An attempt used up by a claim under which the job neither began, nor was said to, nor ended."""
        if not case.rows or not case.leases:
            return
        row = case.rows[0]
        begun = [
            lease for lease in case.leases
            if lease.starts or lease.announced
            or any(line["what"] != "release" for line in lease.accepted)
        ]  # fmt: skip
        if row.attempts > len(begun) and row.status in FINAL:
            what = f"used {row.attempts} attempts and began {len(begun)} times"
            lines = [lease.claim for lease in case.leases if lease not in begun]
            yield Finding("P8", case.id, what, _numbers(*lines))

    # ── P5, P6 ────────────────────────────────────────────────────────────────────────────────────

    def rolled_back(self) -> Iterator[Finding]:
        """A job whose enqueue was undone and that is there, or that ran."""
        there = {row.tag: row.id for row in self.database.rows if row.tag is not None}
        for enqueue in self.history.enqueues.values():
            if enqueue.outcome not in ("rolled-back", "refused"):
                continue
            proof = _numbers(enqueue.invoked, enqueue.answer)
            for job in enqueue.ids:
                for lease in self.history.jobs.get(job, []):
                    yield Finding(
                        "P5", job, "was rolled back and ran", (*proof, lease.first.number)
                    )
            for described in enqueue.invoked["jobs"]:
                if described["tag"] in there:
                    yield Finding("P5", there[described["tag"]], "was undone and is there", proof)

    def enqueued_twice(self) -> Iterator[Finding]:
        """One enqueue that made two jobs."""
        tags = Counter(row.tag for row in self.database.rows if row.tag is not None)
        for tag, times in tags.items():
            if times > 1:
                jobs = sorted(row.id for row in self.database.rows if row.tag == tag)
                if len(set(jobs)) > 1:
                    yield Finding("P6", jobs[0], f"was enqueued once and is there {times} times")

    def work_done(self, case: Case) -> Iterator[Finding]:
        """A completed job whose work was not done under that fence before it was acknowledged."""
        for row in case.rows:
            if row.status != "completed" or not case.leases:
                continue
            mine = next((x for x in case.leases if x.fence == row.lease_id), None)
            if mine is None or mine.claim is None:
                continue
            done = mine.effects
            if not done:
                lines = _numbers(mine.claim, *mine.invoked)
                yield Finding("P6", case.id, "was completed and its work was not done", lines)
            elif mine.invoked and min(line.t for line in done) > mine.invoked[0].t:
                lines = _numbers(mine.invoked[0], done[0])
                yield Finding("P6", case.id, "was acknowledged before its work was done", lines)

    def exactly_once(self) -> Iterator[Finding]:
        """Rows written together with the completion: one for each completed job, none for others."""
        for row in self.database.rows:
            if row.job_type == "chaos.once" and row.status in FINAL:
                there, wanted = self.database.effects.get(row.id, 0), row.status == "completed"
                if there != wanted:
                    what = f"is {row.status} and has {there} rows in its handler's table"
                    yield Finding("P6", row.id, what)

    def extra_executions(self, case: Case) -> Iterator[Finding]:
        """A job that ran again though nothing had happened to its first run."""
        for first, second in _successions(case.leases):
            if not first.starts or second.claim is None or self._explained(first, second.claim.t):
                continue
            what = "ran again, and no fault had hit its first run"
            yield Finding("P6", case.id, what, _numbers(first.claim, *first.starts, second.claim))

    def _explained(self, lease: Lease, until: float) -> bool:
        """Whether a lease was given up, or hit by a fault, before the next claim."""
        if any(line.t < until for line in (*lease.invoked, *lease.accepted)):
            return True
        died = self.history.exits.get(lease.worker)
        if died is not None and died.t < until + 1.0:
            return True
        # Whoever was paused, or could not reach the database, lost its leases a while later; whoever had
        # to wait, if that took long enough to miss the heartbeats.
        since = lease.began - self.lease
        faults = self._failing + self._of_worker[lease.worker]
        faults += [(begin, end) for begin, end in self._delays if end - begin > self.lease / 3]
        if any(begin < until and end > since for begin, end in faults):
            return True
        troubles = self.history.troubles.get(lease.worker, ())
        return any(line["asked"] < until and line.t > since for line in troubles)

    # ── P7 ────────────────────────────────────────────────────────────────────────────────────────

    def ordering_keys(self) -> Iterator[Finding]:
        """Jobs of one ordering key: one at a time, in the order in which they were enqueued."""
        keys: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for job, described, _ in self.history.acknowledged():
            if described["key"] is not None:
                keys[described["key"]].append((described["n"], job))
        for key, members in keys.items():
            ended: Line | None = None  # the latest end that was asked for, of those before
            for _, job in sorted(members):
                leases = self.history.jobs.get(job, [])
                claims = [lease.claim for lease in leases if lease.claim is not None]
                if claims and ended is not None and claims[0].t < _asked(ended):
                    what = f'was claimed before the one before it, of key "{key}", had ended'
                    yield Finding("P7", job, what, _numbers(claims[0], ended))
                for lease in leases:
                    for line in lease.accepted:
                        if line["final"]:
                            first = min([line, *lease.invoked], key=_asked)
                            ended = max([x for x in (ended, first) if x], key=_asked)

    def first_come(self) -> Iterator[Finding]:
        """Of one type, higher priority first and then first come, first served."""
        lanes: dict[tuple[str, str], list[tuple[Enqueue, str, int, Line]]] = defaultdict(list)
        for job, described, enqueue in self.history.acknowledged():
            claims = [x.claim for x in self.history.jobs.get(job, []) if x.claim is not None]
            plain = described["delay"] is None and described["key"] is None
            if not plain or described["unique"] or not claims or claims[0]["claims"] != 1:
                continue  # not due at once, or claimed before by somebody who never heard of it
            lane = described["type"], described["queue"]
            lanes[lane].append((enqueue, job, described["priority"], claims[0]))
        for members in lanes.values():
            yield from self._first_come(members)

    def _first_come(self, members: list[tuple[Enqueue, str, int, Line]]) -> Iterator[Finding]:
        by_answer = sorted(
            (e.answer.t, asked["asked"], job, priority, asked, e)
            for e, job, priority, asked in members
            if e.answer is not None and e.answer.t - e.invoked.t < SLOW_ENQUEUE
        )
        latest: dict[int, tuple[float, str, Line, Enqueue]] = {}
        position = 0
        for enqueue, job, priority, claim in sorted(members, key=lambda m: m[0].invoked.t):
            while position < len(by_answer) and by_answer[position][0] < enqueue.invoked.t:
                _, asked, other, level, line, before = by_answer[position]
                if level not in latest or asked > latest[level][0]:
                    latest[level] = asked, other, line, before
                position += 1
            for level, (asked, other, line, before) in latest.items():
                # A claim that a fault rolled back may have kept others from seeing the job.
                if level >= priority and asked > claim.t and not self._disturbed(before, claim.t):
                    what = f"was claimed before {other}, which was there before and goes first"
                    lines = _numbers(before.answer, enqueue.invoked, claim, line)
                    yield Finding("P7", job, what, lines)

    def _disturbed(self, enqueue: Enqueue, until: float) -> bool:
        since = enqueue.invoked.t - self.lease
        return any(begin < until and end + 1.0 > since for begin, end in self._failing)

    # ── P9 ────────────────────────────────────────────────────────────────────────────────────────

    def recovery(self) -> Iterator[Finding]:
        """Leases that ran out and that nobody took back in time, though the database was there and a
        worker as well."""
        told = set()
        for line in self.history.overdue:
            holder = self._at_its_end(line)
            faults = self._common if holder is None else self._worker_faults(holder)
            calm = [end for begin, end in faults if begin < line.t]
            waited = min([line["seconds"], *(line.t - end for end in calm)])
            if line["fence"] in told or waited <= RECOVERY:
                continue
            if self._somebody_worked(line.t - RECOVERY, line.t):
                told.add(line["fence"])
                what = f"was not taken back {waited:.1f} s after its lease ran out"
                yield Finding("P9", line["job"], what, _numbers(line))

    def _at_its_end(self, overdue: Line) -> int | None:
        """The worker that is just ending the job, in a transaction of the handler's own, perhaps: while
        that one is stopped in the middle, the row is locked and nobody can take it back."""
        for lease in self.history.jobs.get(overdue["job"], ()):
            if lease.fence == overdue["fence"] and any(x.t < overdue.t for x in lease.invoked):
                return lease.worker
        return None

    def _somebody_worked(self, since: float, until: float) -> bool:
        """Whether one worker at least was there all the time, and no fault kept it from working."""
        for worker, ready in self.history.ready.items():
            left = self.history.exits.get(worker)
            if ready.t < since and (left is None or left.t > until):
                faults = self._worker_faults(worker) + self._stalls(worker)
                if not any(begin < until and end > since for begin, end in faults):
                    return True
        return False

    def _stalls(self, worker: int) -> list[tuple[float, float]]:
        """When a handler of its own kept a worker's event loop from turning."""
        return [
            (lease.began, lease.ended() or float("inf"))
            for lease in self.history.by_worker().get(worker, ())
            if lease.claim is not None and lease.claim["type"] == "chaos.staller"
        ]

    def resumption(self) -> Iterator[Finding]:
        """Workers that did not find back to the database after a fault of it had ended."""
        for worker, lines in self.history.troubles.items():
            first: Line | None = None
            for line in lines:
                first = first or line
                if line.kind == "trouble":
                    continue
                # From the end of the last fault that it met on its way; within one it owes nothing.
                faults = [(b, e) for b, e in self._worker_faults(worker) if b < line.t]
                since = max([first["asked"], *(end for _, end in faults)])
                if line.t - since > RECOVERY:
                    what = f"worker {worker} was answered again after {line.t - since:.1f} s"
                    yield Finding("P9", "(all)", what, _numbers(first, line))
                first = None

    def standstill(self) -> Iterator[Finding]:
        """Jobs were due, a worker was there that nothing kept from claiming, and nobody claimed any."""
        claims = sorted(
            x.claim.t
            for leases in self.history.jobs.values()
            for x in leases
            if x.claim is not None
        )
        since: Line | None = (
            None  # the first of the samples in a row that show nothing but due jobs
        )
        for sample in self.history.samples:
            last = claims[bisect.bisect_left(claims, sample.t) - 1] if claims else 0.0
            if not sample["due"] or (since is not None and since.t < last < sample.t):
                since = None
            if not sample["due"]:
                continue
            since = since or sample
            calm = max([since.t, *(end for begin, end in self._common if begin < sample.t)])
            if sample.t - calm > RECOVERY and self._somebody_worked(calm, sample.t):
                what = f"{sample['due']} jobs were due, and nobody claimed any for {sample.t - calm:.1f} s"
                yield Finding("P9", "(all)", what, _numbers(since, sample))
                since = None

    def _worker_faults(self, worker: int) -> list[tuple[float, float]]:
        return self._common + self._of_worker[worker]


def _successions(leases: list[Lease]) -> Iterator[tuple[Lease, Lease]]:
    """Every lease with each of the same job that is certainly later: asked for after the first one was
    known. A worker may hear of its claim, and write it down, long after others have the job."""
    for first in leases:
        for second in leases:
            if second.claim is not None and second.claim["asked"] > first.began:
                yield first, second


def _times(windows: Iterable[Window]) -> list[tuple[float, float]]:
    return [(window.begin.t, window.until()) for window in windows]


def _asked(line: Line) -> float:
    asked: float = line.get("asked", line.t)
    return asked


def _numbers(*lines: Line | None) -> tuple[int, ...]:
    return tuple(line.number for line in lines if line is not None)
