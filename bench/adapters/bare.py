"""An upper bound, not a peer: one asyncpg connection that claims and completes with Howdah's SQL in a loop, as fast
as possible, without a worker: no slots, no heartbeat, no prefetch, no typed arguments.

Handlers are counted as for all peers. Batches are 4,000 jobs, about what Howdah's worker claims at such rates.
`pipelined.py` does the same with a second connection, so that a claim is in flight while a batch is completed.
"""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg

from bench.adapters import driver
from bench.adapters.howdah import Howdah

if TYPE_CHECKING:
    from bench.adapters.driver import Control
    from bench.ledger import Ledger

BATCH = 4000
LEASE = timedelta(seconds=30)


class Bare(Howdah):
    """Enqueues like Howdah, and works without it."""

    pipelined = False

    async def work(self, ledger: Ledger, control: Control) -> None:
        statements = self.app.statements
        claiming = await asyncpg.connect(self.database)
        completing = await asyncpg.connect(self.database) if self.pipelined else claiming
        claim = statements.claim("bare", [self.handler], BATCH, LEASE, ["default"], None)
        complete = statements.complete_runs([], [], [], None)
        claimed = await claiming.prepare(claim.text)
        completed = await completing.prepare(complete.text)
        control.ready()
        last: asyncio.Task[object] | None = None
        while not control.stopped.is_set():
            rows = await claimed.fetch(*claim.parameters)
            if not rows:
                await asyncio.sleep(0.01)
                continue
            for row in rows:
                ledger.mark(json.loads(row["data"])["number"])
            ids = [row["id"] for row in rows]
            fences = [row["lease_id"] for row in rows]
            if last is not None:
                await last
            last = asyncio.create_task(completed.fetch(ids, fences, None, None))
            if not self.pipelined:
                await last
        if last is not None:
            await last
        for connection in {claiming, completing}:
            await connection.close()


if __name__ == "__main__":
    driver.main(Bare)
