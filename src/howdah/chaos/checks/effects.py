"""P6: every completed job did its work, no job runs twice without a fault, and effects in the database happen
exactly once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from howdah.chaos.checks.check import FINAL, Check, Finding, numbers, successions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import JobRecord
    from howdah.chaos.history import Lease


class EffectCheck(Check):
    """Runs of jobs and their effects."""

    def check(self, records: Iterable[JobRecord]) -> Iterator[Finding]:
        for record in records:
            yield from self.work_done(record)
            yield from self.extra_runs(record)
        yield from self.enqueued_twice()
        yield from self.exactly_once()

    def work_done(self, record: JobRecord) -> Iterator[Finding]:
        """A completed job whose work was not done under that fence before it was acknowledged."""
        for row in record.rows:
            if row.status != "completed" or not record.leases:
                continue
            lease = next((each for each in record.leases if each.fence == row.lease_id), None)
            if lease is None or lease.claim is None:
                continue
            if not lease.effects:
                lines = numbers(lease.claim, *lease.invoked)
                yield Finding("P6", record.id, "was completed and its work was not done", lines)
            elif lease.invoked and min(line.t for line in lease.effects) > lease.invoked[0].t:
                lines = numbers(lease.invoked[0], lease.effects[0])
                yield Finding("P6", record.id, "was acknowledged before its work was done", lines)

    def extra_runs(self, record: JobRecord) -> Iterator[Finding]:
        """A job that ran again although no fault hit its first run."""
        for first, second in successions(record.leases):
            if not first.starts or second.claim is None or self._explained(first, second.claim.t):
                continue
            what = "ran again, and no fault hit its first run"
            yield Finding("P6", record.id, what, numbers(first.claim, *first.starts, second.claim))

    def enqueued_twice(self) -> Iterator[Finding]:
        """One enqueue that created two jobs."""
        tags = Counter(row.tag for row in self.database.rows if row.tag is not None)
        for tag, count in tags.items():
            if count > 1:
                jobs = sorted(row.id for row in self.database.rows if row.tag == tag)
                if len(set(jobs)) > 1:
                    yield Finding("P6", jobs[0], f"was enqueued once and exists {count} times")

    def exactly_once(self) -> Iterator[Finding]:
        """Rows written together with the completion: one for each completed job, none for other jobs."""
        for row in self.database.rows:
            if row.job_type == "chaos.once" and row.status in FINAL:
                found, expected = self.database.effects.get(row.id, 0), row.status == "completed"
                if found != expected:
                    what = f"is {row.status} and has {found} rows in its handler's table"
                    yield Finding("P6", row.id, what)

    def _explained(self, lease: Lease, until: float) -> bool:
        """Whether a lease was acknowledged, or hit by a fault, before the next claim."""
        if any(line.t < until for line in (*lease.invoked, *lease.accepted)):
            return True
        exited = self.history.exits.get(lease.worker)
        if exited is not None and exited.t < until + 1.0:
            return True
        # A worker that was paused or could not reach the database lost its leases some time later. A delay explains
        # a lost lease only if it was long enough to miss the heartbeats.
        since = lease.began - self.lease
        faults = self.failing + self.jumps + self.by_worker[lease.worker]
        faults += [(begin, end) for begin, end in self.delays if end - begin > self.lease / 3]
        if any(begin < until and end > since for begin, end in faults):
            return True
        troubles = self.history.troubles.get(lease.worker, ())
        return any(line["asked"] < until and line.t > since for line in troubles)
