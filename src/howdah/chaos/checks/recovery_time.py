"""P9: work resumes by itself, in time."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from howdah.chaos.checks.check import Check, Finding, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import JobRecord
    from howdah.chaos.ledger import Line

RECOVERY_SECONDS = 5.0
"""Work must resume within this time after a fault (P9); for killed workers, after their leases expire."""


class RecoveryTimeCheck(Check):
    """How soon stale jobs are recovered, workers reconnect, and due jobs are claimed."""

    def check(self, records: Iterable[JobRecord]) -> Iterator[Finding]:
        yield from self.stale_jobs()
        yield from self.reconnects()
        yield from self.idle_workers()

    def stale_jobs(self) -> Iterator[Finding]:
        """Stale jobs that were not recovered in time, although the database and a worker were available."""
        reported = set()
        for line in self.history.overdue:
            holder = self._acknowledging_worker(line)
            faults = self.common if holder is None else self.worker_faults(holder)
            calm = [end for begin, end in faults if begin < line.t]
            waited = min([line["seconds"], *(line.t - end for end in calm)])
            if line["fence"] in reported or waited <= RECOVERY_SECONDS:
                continue
            if self._worker_was_available(line.t - RECOVERY_SECONDS, line.t):
                reported.add(line["fence"])
                what = f"was not recovered {waited:.1f} s after its lease expired"
                yield Finding("P9", line["job"], what, numbers(line))

    def reconnects(self) -> Iterator[Finding]:
        """Workers that did not reach the database in time after its fault ended."""
        for worker, lines in self.history.troubles.items():
            first: Line | None = None
            for line in lines:
                if _blocked_nothing(line):
                    continue
                first = first or line
                if line.kind == "trouble":
                    continue
                # Measured from the end of the last fault before this line: during a fault no reply is due.
                faults = [(b, e) for b, e in self.worker_faults(worker) if b < line.t]
                since = max([first["asked"], *(end for _, end in faults)])
                if line.t - since > RECOVERY_SECONDS:
                    what = f"worker {worker} got its next reply only after {line.t - since:.1f} s"
                    yield Finding("P9", "(all)", what, numbers(first, line))
                first = None

    def idle_workers(self) -> Iterator[Finding]:
        """Jobs were due, a worker was able to claim, and no worker claimed any."""
        claims = sorted(
            x.claim.t
            for leases in self.history.jobs.values()
            for x in leases
            if x.claim is not None
        )
        since: Line | None = None  # the first sample since the last claim in which jobs were due
        for sample in self.history.samples:
            last = claims[bisect.bisect_left(claims, sample.t) - 1] if claims else 0.0
            if not sample["due"] or (since is not None and since.t < last < sample.t):
                since = None
            if not sample["due"]:
                continue
            since = since or sample
            calm = max([since.t, *(end for begin, end in self.common if begin < sample.t)])
            if sample.t - calm > RECOVERY_SECONDS and self._worker_was_available(calm, sample.t):
                what = f"{sample['due']} jobs were due, and no worker claimed any for {sample.t - calm:.1f} s"
                yield Finding("P9", "(all)", what, numbers(since, sample))
                since = None

    def _acknowledging_worker(self, overdue: Line) -> int | None:
        """The worker that is acknowledging the job, perhaps in the handler's own transaction. While that worker is
        paused, the row is locked and cannot be recovered."""
        for lease in self.history.jobs.get(overdue["job"], ()):
            if lease.fence == overdue["fence"] and any(x.t < overdue.t for x in lease.invoked):
                return lease.worker
        return None

    def _worker_was_available(self, since: float, until: float) -> bool:
        """Whether at least one worker ran during all this time and no fault kept it from working."""
        for worker, ready in self.history.ready.items():
            exited = self.history.exits.get(worker)
            if ready.t < since and (exited is None or exited.t > until):
                faults = self.worker_faults(worker) + self._stalls(worker)
                if not any(begin < until and end > since for begin, end in faults):
                    return True
        return False

    def _stalls(self, worker: int) -> list[tuple[float, float]]:
        """When a handler blocked the worker's event loop."""
        return [
            (lease.began, lease.ended() or float("inf"))
            for lease in self.history.by_worker().get(worker, ())
            if lease.claim is not None and lease.claim["type"] == "chaos.staller"
        ]


def _blocked_nothing(line: Line) -> bool:
    """Maintenance that got no reply while claims did: a worker runs maintenance beside its claims, and one call
    without a reply blocks nothing. Claims have their own lines."""
    return (
        line.kind == "trouble"
        and line["function"] == "run_due_duty"
        and line["claimed"] > line["asked"]
    )
