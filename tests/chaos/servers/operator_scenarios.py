"""Scenarios of operators: what somebody does in psql, and then leaves open."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psycopg
from recorded_enqueue import enqueue_recorded

from howdah import JobQueue
from howdah.chaos import ledger
from howdah.chaos.history import History
from howdah.chaos.scenario import Fault, RunContext, Scenario
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from random import Random

JOBS = 6
CLAIM_TIMEOUT_SECONDS = 20.0


class OpenCancels(Scenario):
    """An operator cancels running jobs, keeps the transaction open past their leases, and rolls back. Their workers live,
    so none of the jobs runs twice (decision 0004)."""

    name = "open cancels"
    about = "an open cancel_jobs on running jobs, rolled back after their leases have expired"
    min_seconds = 14.0
    every_seconds = 6.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return self.name, {"leases": round(random.uniform(1.3, 2.0), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        schema = quote_schema(run.place.schema)
        held = fault.detail["leases"] * run.lease
        with contextlib.closing(JobQueue(run.place.checker, schema=run.place.schema)) as queue:
            # Half of them end while they are locked, the others later.
            ids = [
                enqueue_recorded(
                    run, queue, "chaos.nap", f"operator-{fault.at}-{n}", 5,
                    seconds=held / 2 if n % 2 else held + 2 * run.lease,
                )
                for n in range(JOBS)
            ]  # fmt: skip
        with psycopg.connect(run.place.checker) as conn:

            def claimed() -> bool:
                row = conn.execute(
                    f"SELECT count(lease_id) FROM {schema}.live_jobs WHERE id = ANY (%s)".encode(),
                    (ids,),
                ).fetchone()
                conn.rollback()
                return row == (JOBS,)

            run.wait_until(claimed, CLAIM_TIMEOUT_SECONDS)
            with run.fault(fault.name, scope="neighbour"):
                conn.execute(f"SELECT {schema}.cancel_jobs(%s)".encode(), (ids,))
                run.sleep(held)
                conn.rollback()

    def findings(self, run: RunContext) -> list[str]:
        history = History(ledger.read(run.ledger.path))
        tags = {job: each["tag"] for call in history.enqueues.values() for job, each in call.jobs()}
        return [
            f"{tags[job]} ran more than once, and its worker was alive"
            for job, leases in history.jobs.items()
            if tags.get(job, "").startswith("operator-")
            and sum(bool(lease.starts) for lease in leases) > 1
        ]
