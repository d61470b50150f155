"""P9: work resumes by itself."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from howdah.chaos.checks.check import Finding, Judge, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import Case
    from howdah.chaos.ledger import Line


RECOVERY = 5.0
"""Seconds within which work resumes (P9), for crashed workers after their leases."""


class Resuming(Judge):
    """How soon leases are taken back, connections made anew, and jobs claimed."""

    def check(self, cases: Iterable[Case]) -> Iterator[Finding]:
        yield from self.recovery()
        yield from self.resumption()
        yield from self.standstill()

    def recovery(self) -> Iterator[Finding]:
        """Leases that ran out and that nobody took back in time, though the database was there and a
        worker as well."""
        told = set()
        for line in self.history.overdue:
            holder = self._at_its_end(line)
            faults = self.common if holder is None else self.worker_faults(holder)
            calm = [end for begin, end in faults if begin < line.t]
            waited = min([line["seconds"], *(line.t - end for end in calm)])
            if line["fence"] in told or waited <= RECOVERY:
                continue
            if self._somebody_worked(line.t - RECOVERY, line.t):
                told.add(line["fence"])
                what = f"was not taken back {waited:.1f} s after its lease ran out"
                yield Finding("P9", line["job"], what, numbers(line))

    def resumption(self) -> Iterator[Finding]:
        """Workers that did not find back to the database after a fault of it had ended."""
        for worker, lines in self.history.troubles.items():
            first: Line | None = None
            for line in lines:
                if _stood_in_nobodys_way(line):
                    continue
                first = first or line
                if line.kind == "trouble":
                    continue
                # From the end of the last fault that it met on its way; within one it owes nothing.
                faults = [(b, e) for b, e in self.worker_faults(worker) if b < line.t]
                since = max([first["asked"], *(end for _, end in faults)])
                if line.t - since > RECOVERY:
                    what = f"worker {worker} was answered again after {line.t - since:.1f} s"
                    yield Finding("P9", "(all)", what, numbers(first, line))
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
            calm = max([since.t, *(end for begin, end in self.common if begin < sample.t)])
            if sample.t - calm > RECOVERY and self._somebody_worked(calm, sample.t):
                what = f"{sample['due']} jobs were due, and nobody claimed any for {sample.t - calm:.1f} s"
                yield Finding("P9", "(all)", what, numbers(since, sample))
                since = None

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
                faults = self.worker_faults(worker) + self._stalls(worker)
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


def _stood_in_nobodys_way(line: Line) -> bool:
    """Duties that were never answered, while claims were: a worker has several of them under way, and one
    that is waited for in vain keeps it from nothing. How claims fared, they tell themselves."""
    return (
        line.kind == "trouble"
        and line["function"] == "run_maintenance"
        and line["claimed"] > line["asked"]
    )
