"""Scenarios of bare queues: a loop that a user wrote on `JobQueue.claim`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from howdah import JobQueue
from howdah.chaos import fault_hits, ledger
from howdah.chaos.history import History
from howdah.chaos.processes.environment import BARE
from howdah.chaos.run import read_database
from howdah.chaos.scenario import Fault, RunContext, Scenario
from howdah.model import EXPLICIT, NewJob

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

MAX_ATTEMPTS = 3
MAX_DEATHS = MAX_ATTEMPTS + 1
"""The first claim may be one of a batch that did not report starts; afterwards every claim counts."""
NEIGHBOURS = 4


class BareKillers(Scenario):
    """Jobs that kill the process of a bare loop, in the middle of batches."""

    name = "bare killers"
    about = "jobs that kill the process of a bare JobQueue.claim loop in the middle of batches"
    min_seconds = 18.0
    first_seconds = 1.0
    every_seconds = 6.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "killer in a batch", {"position": random.randrange(NEIGHBOURS + 1)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        """One batch: a killer between neighbours, all of one priority."""
        batch = [_job(f"neighbour-{fault.at}-{n}", {}) for n in range(NEIGHBOURS)]
        batch.insert(fault.detail["position"], _job(f"killer-{fault.at}", {"kill": True}))
        described = [
            {
                "tag": job.data["tag"], "type": BARE, "queue": "default", "priority": EXPLICIT, "key": None,
                "n": None, "delay": None, "max_attempts": MAX_ATTEMPTS, "unique": None,
            }
            for job in batch
        ]  # fmt: skip
        call = f"killer-{fault.at}"
        with contextlib.closing(JobQueue(run.place.checker, schema=run.place.schema)) as queue:
            run.ledger.write("enqueue-invoked", call=call, jobs=described)
            ids = [str(handle.id) for handle in queue.enqueue_many(batch)]
            run.ledger.write("enqueue-acknowledged", call=call, ids=ids)

    def missed(self, history: History, planned: Iterable[str], lease: float) -> list[str]:
        return super().missed(history, [fault_hits.KILLED_BY_OWN_JOB], lease)

    def findings(self, run: RunContext) -> list[str]:
        """A killer ends as failed after few deaths; its neighbours complete, and pay for no death."""
        history = History(ledger.read(run.ledger.path))
        wrong = []
        for row in read_database(run.place).rows:
            tag = row.tag or ""
            starts = sum(bool(lease.starts) for lease in history.jobs.get(row.id, ()))
            if tag.startswith("killer") and (row.status != "failed" or starts > MAX_DEATHS):
                wrong.append(f"{tag} is {row.status} after it killed {starts} processes")
            if tag.startswith("neighbour") and row.status != "completed":
                wrong.append(f"{tag} is {row.status} after {row.attempts} attempts")
            if tag.startswith("neighbour") and row.attempts > max(1, starts):
                wrong.append(f"{tag} was charged {row.attempts} attempts for {starts} starts")
        return wrong


def _job(tag: str, data: dict[str, Any]) -> NewJob:
    return NewJob(
        job_type=BARE, data={"tag": tag, "seconds": 0.0, "failures": 0, **data},
        max_attempts=MAX_ATTEMPTS, priority=EXPLICIT,
    )  # fmt: skip
