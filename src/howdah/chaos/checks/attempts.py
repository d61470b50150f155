"""P4 and P8: never more attempts than allowed, and no attempt used by a job that did not start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from howdah.chaos.checks.check import FINAL, Check, Finding, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.checks.check import JobRecord

MAX_REFUNDS = 10
"""How often recovery gives an attempt back to a job whose worker was killed before it reported a start."""


class AttemptCheck(Check):
    """The attempts of each job."""

    def check(self, records: Iterable[JobRecord]) -> Iterator[Finding]:
        for record in records:
            yield from self.too_many(record)
            yield from self.used_without_start(record)

    def too_many(self, record: JobRecord) -> Iterator[Finding]:
        """More attempts than allowed, or a job that was started without end."""
        for row in record.rows:
            if row.attempts > row.max_attempts:
                what = f"has {row.attempts} attempts of {row.max_attempts}"
                yield Finding("P4", record.id, what)
            ran = [lease for lease in record.leases if lease.starts]
            released = sum(line["what"] == "release" for lease in ran for line in lease.accepted)
            if len(ran) - released > row.max_attempts + MAX_REFUNDS:
                what = f"was started {len(ran)} times with {row.max_attempts} attempts allowed"
                yield Finding("P4", record.id, what, numbers(*(lease.starts[0] for lease in ran)))
        over = [
            lease.claim for lease in record.leases
            if lease.claim is not None and lease.claim["attempt"] > lease.claim["most"]
        ]  # fmt: skip
        if over:
            yield Finding("P4", record.id, "was claimed with no attempt left", numbers(*over))

    def used_without_start(self, record: JobRecord) -> Iterator[Finding]:
        """An attempt used by a claim under which the job neither started, nor was reported as started, nor ended.
        Recovery gives such an attempt back at most ten times: a job that kills its worker before its start is
        reported must end as well."""
        if not record.rows or not record.leases:
            return
        row = record.rows[0]
        if row.claims - row.attempts >= MAX_REFUNDS:
            return
        begun = [
            lease for lease in record.leases
            if lease.starts or lease.announced
            or any(line["what"] != "release" for line in lease.accepted)
        ]  # fmt: skip
        if row.attempts > len(begun) and row.status in FINAL:
            what = f"used {row.attempts} attempts and started {len(begun)} times"
            lines = [lease.claim for lease in record.leases if lease not in begun]
            yield Finding("P8", record.id, what, numbers(*lines))
