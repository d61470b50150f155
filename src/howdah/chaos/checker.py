"""Decides for each job whether every promise was kept: pure functions over the ledger and the database.

A finding needs proof in the ledger that holds for every possible scheduling of the processes. A line written after
a reply is later than the database's action; a line written before a request is earlier. For example, a second lease
is wrong only if its claim was answered before the first lease can have expired."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from howdah.chaos.checks.attempts import AttemptCheck
from howdah.chaos.checks.check import PROMISES, Finding, JobRecord
from howdah.chaos.checks.effects import EffectCheck
from howdah.chaos.checks.leases import LeaseCheck
from howdah.chaos.checks.lost_jobs import LostJobCheck
from howdah.chaos.checks.ordering import OrderingCheck
from howdah.chaos.checks.recovery_time import RecoveryTimeCheck

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.chaos.history import Database, Enqueue, History, Row

CHECKS = (LeaseCheck, LostJobCheck, AttemptCheck, EffectCheck, OrderingCheck, RecoveryTimeCheck)


class Checker:
    """Runs every check over a run that waited until every job ended, or until it timed out."""

    def __init__(self, history: History, database: Database, *, lease: float) -> None:
        self.history = history
        self.database = database
        self.lease = lease

    def check(self) -> list[Finding]:
        """All findings, sorted by promise."""
        records = list(self.job_records())
        checks = [check(self.history, self.database, self.lease) for check in CHECKS]
        found = [finding for check in checks for finding in check.check(records)]
        return sorted(found, key=lambda finding: finding.promise)

    def job_records(self) -> Iterator[JobRecord]:
        """Every job in the ledger or in the database."""
        rows: dict[str, list[Row]] = defaultdict(list)
        for row in self.database.rows:
            rows[row.id].append(row)
        enqueues: dict[str, Enqueue] = {}
        for job, _, enqueue in self.history.acknowledged():
            enqueues.setdefault(job, enqueue)
        for job in {**rows, **self.history.jobs, **enqueues}:
            leases = self.history.jobs.get(job, [])
            yield JobRecord(job, leases, rows.get(job, []), enqueues.get(job))


__all__ = ["PROMISES", "Checker", "Finding"]
