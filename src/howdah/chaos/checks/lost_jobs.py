"""P1 and P5: no acknowledged job is lost, and no rolled-back enqueue leaves a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from howdah.chaos.checks.check import FINAL, Check, Finding, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import JobRecord


class LostJobCheck(Check):
    """Every acknowledged enqueue has a job that ended; every rolled-back one has no job."""

    def check(self, records: Iterable[JobRecord]) -> Iterator[Finding]:
        for record in records:
            yield from self.lost(record)
        yield from self.rolled_back()

    def lost(self, record: JobRecord) -> Iterator[Finding]:
        """An acknowledged job that is missing, or that never ends."""
        if record.enqueue is None:
            return
        lines = numbers(record.enqueue.invoked, record.enqueue.answer)
        if not record.rows:
            yield Finding("P1", record.id, "was acknowledged and is gone", lines)
        elif record.rows[0].status not in FINAL:
            what = f"is still {record.rows[0].status} long after the load ended"
            yield Finding("P1", record.id, what, lines)

    def rolled_back(self) -> Iterator[Finding]:
        """A job whose enqueue was rolled back or refused, and that exists or ran."""
        existing = {row.tag: row.id for row in self.database.rows if row.tag is not None}
        for enqueue in self.history.enqueues.values():
            if enqueue.outcome not in ("rolled-back", "refused"):
                continue
            proof = numbers(enqueue.invoked, enqueue.answer)
            for job in enqueue.ids:
                for lease in self.history.jobs.get(job, []):
                    yield Finding(
                        "P5", job, "was rolled back and ran", (*proof, lease.first.number)
                    )
            for described in enqueue.invoked["jobs"]:
                if described["tag"] in existing:
                    yield Finding(
                        "P5", existing[described["tag"]], "was rolled back and exists", proof
                    )
