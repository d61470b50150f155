"""Scenarios of operators: what somebody does in psql, and then leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from healthy_workers import HealthyWorkers

from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from random import Random

    from howdah.chaos.scenario import Fault, RunContext

JOBS = 6


class OpenCancels(HealthyWorkers):
    """An operator cancels running jobs, keeps the transaction open past their leases, and rolls back. Their workers live,
    so none of the jobs runs twice (decision 0004)."""

    name = "open cancels"
    about = "an open cancel_jobs on running jobs, rolled back after their leases have expired"
    min_seconds = 14.0
    every_seconds = 6.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return self.name, {"leases": round(random.uniform(1.3, 2.0), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        held = fault.detail["leases"] * run.lease
        # Half of them end while they are locked, the others later.
        ids = self.start_naps(run, fault, [held / 2, held + 2 * run.lease] * (JOBS // 2))
        with (
            psycopg.connect(run.place.checker) as conn,
            run.fault(fault.name, scope="neighbour"),
        ):
            conn.execute(
                f"SELECT {quote_schema(run.place.schema)}.cancel_jobs(%s)".encode(), (ids,)
            )
            run.sleep(held)
            conn.rollback()
