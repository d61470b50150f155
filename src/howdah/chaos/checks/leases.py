"""P2 and P3: a job ends once, under its only live lease, and no stale write is accepted."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from typing import TYPE_CHECKING

from howdah.chaos.checks.check import Check, Finding, numbers, successions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import JobRecord
    from howdah.chaos.history import Database, History
    from howdah.chaos.ledger import Line

CLOCK_TOLERANCE_SECONDS = 0.02
"""Seconds by which two clocks of one host may differ over a lease."""


class LeaseCheck(Check):
    """The ends, leases and fences of each job."""

    def __init__(self, history: History, database: Database, lease: float) -> None:
        super().__init__(history, database, lease)
        durable = sorted(history.durable())
        self._answered = [answered for answered, _ in durable]
        # For each reply, the latest request among the replies up to it.
        self._asked_by = list(itertools.accumulate((asked for _, asked in durable), max))

    def check(self, records: Iterable[JobRecord]) -> Iterator[Finding]:
        for record in records:
            yield from self.ended_twice(record)
            yield from self.live_leases(record)
            yield from self.stale_writes(record)
            yield from self.stale_reports(record)
        yield from self.failed_twice()

    def ended_twice(self, record: JobRecord) -> Iterator[Finding]:
        """More than one accepted end."""
        if len(record.rows) > 1:
            yield Finding("P2", record.id, f"has {len(record.rows)} rows: it ended more than once")
        ends = [line for lease in record.leases for line in lease.accepted if line["final"]]
        # A repeated completion under one fence is the same completion, sent again.
        if len({(line["fence"], line["what"]) for line in ends}) > 1:
            yield Finding("P2", record.id, "two ends were accepted", numbers(*ends))
        for end in ends:
            for lease in record.leases:
                if lease.claim is not None and lease.claim["asked"] > end.t:
                    what = "was claimed again after its end was accepted"
                    yield Finding("P2", record.id, what, numbers(end, lease.claim))

    def live_leases(self, record: JobRecord) -> Iterator[Finding]:
        """A claim that was answered while an earlier lease can neither have expired nor been acknowledged."""
        # Whichever later claim shows that a crash undid it: its lease never existed.
        void = {
            first.fence
            for first, later in successions(record.leases)
            if first.claim is not None
            and later.claim is not None
            and self._is_undone(first.claim, later.claim)
        }
        for first, second in successions(record.leases):
            if first.claim is None or second.claim is None:
                continue
            if first.fence in void:
                continue
            answered = second.claim.t
            known = [b for b in (first.claim, *first.beats) if b["asked"] < answered]
            last = max(known, key=lambda line: line["asked"], default=None)
            if last is None or any(line.t < answered for line in first.invoked):
                continue
            if self._clock_jumped(first.claim["asked"], answered):
                continue
            if answered < last["asked"] + self.lease - CLOCK_TOLERANCE_SECONDS:
                what = (
                    f"was claimed again {answered - last['asked']:.2f} s after its lease of "
                    f"{self.lease:g} s was set"
                )
                yield Finding("P3", record.id, what, numbers(first.claim, last, second.claim))
        yield from self._claimed_at_once(record)

    def stale_writes(self, record: JobRecord) -> Iterator[Finding]:
        """A write accepted under a fence although it was sent after a later claim was answered."""
        for first, second in successions(record.leases):
            if second.claim is None:
                continue
            for line in (*first.accepted, *first.beats):
                # A write whose first reply was lost is sent again: the first send may have taken effect.
                asked = min(
                    [line["asked"], *(i.t for i in first.invoked if line in first.accepted)]
                )
                if asked > second.claim.t:
                    what = f"a stale fence was accepted ({line.get('what', 'extend')})"
                    yield Finding("P3", record.id, what, numbers(second.claim, line))
        done = record.rows[0] if record.rows else None
        if done is not None and done.status == "completed" and done.lease_id is not None:
            known = {lease.fence for lease in record.leases}
            if record.leases and done.lease_id not in known:
                yield Finding("P3", record.id, "was completed under a fence that no claim returned")

    def stale_reports(self, record: JobRecord) -> Iterator[Finding]:
        """An event in the database that a run sent after a later claim was answered."""
        for first, second in successions(record.leases):
            for line in first.reports:
                stale = second.claim is not None and line.t > second.claim.t
                if stale and (record.id, first.fence) in self.database.reports:
                    what = "a report of a stale run was accepted"
                    yield Finding("P3", record.id, what, numbers(second.claim, line))

    def failed_twice(self) -> Iterator[Finding]:
        """One attempt with two error events in the database."""
        for (job, attempt), count in Counter(self.database.errors).items():
            if count > 1:
                yield Finding("P2", job, f"attempt {attempt} failed {count} times")

    def _claimed_at_once(self, record: JobRecord) -> Iterator[Finding]:
        """Two concurrent claims that both returned the job: whichever was first, its lease had not expired
        when the other claim was answered."""
        for one, other in itertools.combinations(record.leases, 2):
            a, b = one.claim, other.claim
            if a is None or b is None or a["asked"] > b.t or b["asked"] > a.t:
                continue
            answered = max(a.t, b.t)
            if any(line.t < answered for line in (*one.invoked, *other.invoked)):
                continue
            if self._is_undone(a, b) or self._is_undone(b, a):
                continue
            if self._clock_jumped(min(a["asked"], b["asked"]), answered):
                continue
            if answered < min(a["asked"], b["asked"]) + self.lease - CLOCK_TOLERANCE_SECONDS:
                yield Finding(
                    "P3", record.id, "was returned by two concurrent claims", numbers(a, b)
                )

    def _is_undone(self, first: Line, second: Line) -> bool:
        """Whether a crash of the server between the two undid the first claim. A claim is the only statement that
        commits without waiting for the disk. Then the second claim returns the same claim count, and no durable
        statement sent after the first claim was answered before the crash, since that would have flushed the
        claim too. Such a lease never existed, and its fence is void."""
        if first["durable"] or second["claims"] > first["claims"]:
            return False
        return any(
            first["asked"] < crash.until()
            and crash.begin.t < second.t
            and not self._is_flushed(first.t, crash.begin.t)
            for crash in self.history.windows_of("server")
        )

    def _clock_jumped(self, since: float, until: float) -> bool:
        """Whether the server's clock jumped ahead in this time, which ends every lease."""
        return any(begin < until and end > since for begin, end in self.jumps)

    def _is_flushed(self, since: float, until: float) -> bool:
        """Whether a durable statement was sent and answered in this time."""
        count = bisect.bisect_left(self._answered, until)
        return count > 0 and self._asked_by[count - 1] > since
