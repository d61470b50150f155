"""P2 and P3: a job ends once, under the only lease that lives, and no stale write is accepted."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from typing import TYPE_CHECKING

from howdah.chaos.checks.check import Finding, Judge, numbers, successions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import Case
    from howdah.chaos.history import Database, History
    from howdah.chaos.ledger import Line


TICK = 0.02
"""Seconds by which two clocks of one host may differ over a lease."""


class Leases(Judge):
    """Ends, leases and fences."""

    def __init__(self, history: History, database: Database, lease: float) -> None:
        super().__init__(history, database, lease)
        durable = sorted(history.durable())
        self._answered = [answered for answered, _ in durable]
        # Of all that was answered until then, when the last one of it was asked for.
        self._asked_by = list(itertools.accumulate((asked for _, asked in durable), max))

    def check(self, cases: Iterable[Case]) -> Iterator[Finding]:
        for case in cases:
            yield from self.ended_twice(case)
            yield from self.live_leases(case)
            yield from self.stale_writes(case)
        yield from self.failed_twice()

    def ended_twice(self, case: Case) -> Iterator[Finding]:
        """More than one accepted end."""
        if len(case.rows) > 1:
            yield Finding("P2", case.id, f"has {len(case.rows)} rows: it ended more than once")
        ends = [line for lease in case.leases for line in lease.accepted if line["final"]]
        # A repeated completion under one fence is the same one, told again.
        if len({(line["fence"], line["what"]) for line in ends}) > 1:
            yield Finding("P2", case.id, "two ends were accepted", numbers(*ends))
        for end in ends:
            for lease in case.leases:
                if lease.claim is not None and lease.claim["asked"] > end.t:
                    what = "was claimed again after its end was accepted"
                    yield Finding("P2", case.id, what, numbers(end, lease.claim))

    def live_leases(self, case: Case) -> Iterator[Finding]:
        """A claim that was answered while an earlier lease cannot have run out, nor been given up."""
        for first, second in successions(case.leases):
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
                yield Finding("P3", case.id, what, numbers(first.claim, last, second.claim))
        yield from self._claimed_at_once(case)

    def stale_writes(self, case: Case) -> Iterator[Finding]:
        """Something accepted under a fence, asked for after a later claim had been answered."""
        for first, second in successions(case.leases):
            if second.claim is None:
                continue
            for line in (*first.accepted, *first.beats):
                # Asked for more than once where the first answer was lost: the first may have counted.
                asked = min(
                    [line["asked"], *(i.t for i in first.invoked if line in first.accepted)]
                )
                if asked > second.claim.t:
                    what = f"a stale fence was accepted ({line.get('what', 'extend')})"
                    yield Finding("P3", case.id, what, numbers(second.claim, line))
        done = case.rows[0] if case.rows else None
        if done is not None and done.status == "completed" and done.lease_id is not None:
            known = {lease.fence for lease in case.leases}
            if case.leases and done.lease_id not in known:
                yield Finding("P3", case.id, "was completed under a fence that nobody was given")

    def failed_twice(self) -> Iterator[Finding]:
        """One attempt that failed twice, by the events in the database."""
        for (job, attempt), times in Counter(self.database.errors).items():
            if times > 1:
                yield Finding("P2", job, f"attempt {attempt} failed {times} times")

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
                yield Finding("P3", case.id, "was given to two claims at once", numbers(a, b))

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
