"""PgQueuer 1.6.0 on asyncpg and uvloop.

Settings, from its "Performance Tuning" guide (docs/guides/performance-tuning.md in its repository):
`durable` tables, its default, which match Howdah's, although `balanced` and `volatile` would be faster; `pgq autovac`
applied; a single asyncpg connection for the worker and a pool for producers; a large `batch_size` of 500, because
jobs are short. Tried on no-op jobs: batches of 10 (a quarter of the rate), 100 and 1,000, and `max_concurrent_tasks`
of 1,000 and 4,000 (all within the spread). Bulk enqueues pass lists of arguments. Blocking handlers use
`asyncio.to_thread`, as its error message recommends.
"""

from __future__ import annotations

import asyncio
import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

from bench.adapters import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.adapters.driver import Call, Control
    from bench.ledger import Ledger

BATCH_SIZE = int(os.environ.get("BENCH_BATCH", "500"))
MAX_TASKS = int(os.environ.get("BENCH_TASKS", "0")) or None


def _encode(call: Call) -> bytes:
    return json.dumps({"number": call.number, "pad": call.pad}).encode()


class PgQueuer(driver.Peer):
    """A queue manager, and queries over a pool."""

    _pool: Any
    _queries: Any

    async def setup(self) -> None:
        connection = await asyncpg.connect(self.database)
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()
        await connection.close()

    async def connect(self) -> None:
        self._pool = await asyncpg.create_pool(self.database, min_size=1, max_size=20)
        self._queries = Queries(AsyncpgPoolDriver(self._pool))

    async def close(self) -> None:
        await self._pool.close()

    async def enqueue(self, call: Call) -> None:
        await self._queries.enqueue("job", _encode(call), 0)

    async def enqueue_many(self, calls: Sequence[Call]) -> None:
        await self._queries.enqueue(
            ["job"] * len(calls), [_encode(call) for call in calls], [0] * len(calls)
        )

    async def enqueue_in_transaction(self, call: Call, before_commit: Callable[[], None]) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            await Queries(AsyncpgDriver(connection)).enqueue("job", _encode(call), 0)
            before_commit()

    async def work(self, ledger: Ledger, control: Control) -> None:
        connection = await asyncpg.connect(self.database)
        manager = QueueManager(Queries(AsyncpgDriver(connection)))

        def mark(job: Any) -> None:
            ledger.mark(json.loads(job.payload or b"")["number"])

        async def handle(job: Any) -> None:
            if self.handler == "thread":
                await asyncio.to_thread(mark, job)
                return
            mark(job)
            if self.handler == "io":
                await asyncio.sleep(0.001)

        manager.entrypoint("job")(handle)
        running = asyncio.create_task(
            manager.run(
                dequeue_timeout=timedelta(seconds=30),
                batch_size=BATCH_SIZE,
                max_concurrent_tasks=MAX_TASKS,
            )
        )
        await control.wait_for_stop(running)
        manager.shutdown.set()
        await running
        await connection.close()


if __name__ == "__main__":
    driver.main(PgQueuer)
