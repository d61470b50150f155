"""Naps: jobs that run for longer than a fault which no worker causes. Their workers live, so each of them runs once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from recorded_enqueue import enqueue_recorded

from howdah import JobQueue
from howdah.chaos import ledger
from howdah.chaos.history import History
from howdah.chaos.scenario import Fault, RunContext, Scenario
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

CLAIM_TIMEOUT_SECONDS = 20.0


class HealthyWorkers(Scenario):
    """A scenario in which naps must not run twice."""

    def start_naps(self, run: RunContext, fault: Fault, seconds: Sequence[float]) -> list[Any]:
        """Enqueue naps of these seconds, and wait until all are claimed. Returns their ids."""
        with contextlib.closing(JobQueue(run.place.checker, schema=run.place.schema)) as queue:
            ids = [
                enqueue_recorded(
                    run, queue, "chaos.nap", f"nap-{fault.at}-{number}", 5, seconds=each
                )
                for number, each in enumerate(seconds)
            ]
        query = f"SELECT count(lease_id) FROM {quote_schema(run.place.schema)}.live_jobs WHERE id = ANY (%s)"
        with run.place.connect() as conn:
            run.wait_until(
                lambda: conn.execute(query.encode(), (ids,)).fetchone() == (len(ids),),
                CLAIM_TIMEOUT_SECONDS,
            )
        return ids

    def findings(self, run: RunContext) -> list[str]:
        history = History(ledger.read(run.ledger.path))
        tags = {job: each["tag"] for call in history.enqueues.values() for job, each in call.jobs()}
        return [
            f"{tags[job]} ran more than once, and its worker was alive"
            for job, leases in history.jobs.items()
            if tags.get(job, "").startswith("nap-")
            and sum(bool(lease.starts) for lease in leases) > 1
        ]
