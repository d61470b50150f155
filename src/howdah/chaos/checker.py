"""Decides, job by job, whether each promise was kept: pure functions over the ledger and the database.

A finding is only made where the lines prove it, whatever the scheduling of processes: what one process wrote
after it was answered is later than what the database did, and what it wrote before it asked is earlier. A
second lease is wrong, for instance, if its claim was answered before the first one can have run out."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from howdah.chaos.checks.check import PROMISES, Case, Finding
from howdah.chaos.checks.jobs import Work
from howdah.chaos.checks.leases import Leases
from howdah.chaos.checks.ordering import Order
from howdah.chaos.checks.recovery_time import Resuming

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.chaos.history import Database, Enqueue, History, Row

JUDGES = (Leases, Work, Order, Resuming)


class Checker:
    """The checks over one run that waited, for long enough, until every job had ended."""

    def __init__(self, history: History, database: Database, *, lease: float) -> None:
        self.history = history
        self.database = database
        self.lease = lease

    def check(self) -> list[Finding]:
        """Everything that is wrong, by promise."""
        cases = list(self.cases())
        judges = [judge(self.history, self.database, self.lease) for judge in JUDGES]
        found = [finding for judge in judges for finding in judge.check(cases)]
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


__all__ = ["PROMISES", "Checker", "Finding"]
