"""Scenarios in which the server is away for longer than a lease."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from embedded_servers import running_server, workspace
from healthy_workers import HealthyWorkers

from howdah.chaos.scenario import Place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

    from howdah.chaos.scenario import Fault, RunContext
    from howdah.embedded import EmbeddedServer

JOBS = 6
OVERDUE_SECONDS = 7.0
"""The recovery, which runs every two to four seconds, is then overdue by three."""


class LongOutages(HealthyWorkers):
    """The server is shut down until all leases have expired. Its workers live, so none of the jobs runs twice
    (decision 0042)."""

    name = "long outages"
    about = "the server shut down until all leases have expired"
    min_seconds = 16.0
    first_seconds = 2.0
    every_seconds = 14.0
    server: EmbeddedServer

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with workspace("outage") as home, running_server(home / "pg") as self.server:
            yield Place(self.server.url, self.server.url)

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return self.name, {"leases": round(random.uniform(1.2, 2.0), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        away = max(fault.detail["leases"] * run.lease, OVERDUE_SECONDS)
        # Half of them end while the server is away, the others later.
        self.start_naps(run, fault, [away / 2, away + 2 * run.lease] * (JOBS // 2))
        with run.fault(fault.name, scope="connection"):
            self.server.stop()
            run.sleep(away)
            self.server.start()
