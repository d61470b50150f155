"""oban-py 0.7.0 on psycopg 3 (its C implementation) and uvloop, on the newest Python here, because it needs 3.12.

Settings, from "Defining Queues" (docs/defining_queues.md in its repository): a queue `limit` of 500, which is also the
number of jobs that it fetches and acknowledges together. Tried on no-op jobs: 10 and 100 (slower), and a
`debounce_interval` of 1 ms instead of 5 ms (not faster, also not for pick-up latency). A pool of up to 10 connections
for the worker, its default, and of 20 for producers ("Sizing the Connection Pool" in docs/production.md). Completed
jobs are kept for one day, its default. Bulk enqueues use `enqueue_many`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from oban import Oban, worker
from oban.schema import install

from bench.adapters import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.adapters.driver import Call, Control
    from bench.ledger import Ledger

LIMIT = int(os.environ.get("BENCH_LIMIT", "500"))
DEBOUNCE = float(os.environ.get("BENCH_DEBOUNCE", "0.005"))
_ledger: list[Ledger] = []
_pause: list[float] = []


@worker(queue="default")
class Handler:
    """The one kind of job."""

    async def process(self, job: Any) -> None:
        _ledger[0].mark(job.args["number"])
        if _pause:
            await asyncio.sleep(_pause[0])


def _job(call: Call) -> Any:
    return Handler.new({"number": call.number, "pad": call.pad})  # type: ignore[attr-defined]


class ObanPy(driver.Peer):
    """An instance that enqueues, or one that works."""

    _pool: Any
    _oban: Any

    async def setup(self) -> None:
        pool = await Oban.create_pool(self.database)
        await install(pool)
        await pool.close()

    async def connect(self) -> None:
        self._pool = await Oban.create_pool(self.database, min_size=1, max_size=20)
        self._oban = Oban(pool=self._pool)
        await self._oban.start()

    async def close(self) -> None:
        await self._oban.stop()
        await self._pool.close()

    async def enqueue(self, call: Call) -> None:
        await self._oban.enqueue(_job(call))

    async def enqueue_many(self, calls: Sequence[Call]) -> None:
        await self._oban.enqueue_many([_job(call) for call in calls])

    async def enqueue_in_transaction(self, call: Call, before_commit: Callable[[], None]) -> None:
        async with self._pool.connection() as connection, connection.transaction():
            await self._oban.enqueue(_job(call), conn=connection)
            before_commit()

    async def work(self, ledger: Ledger, control: Control) -> None:
        _ledger.append(ledger)
        if self.handler == "io":
            _pause.append(0.001)
        pool = await Oban.create_pool(self.database, min_size=1, max_size=10)
        queue: Any = {"limit": LIMIT, "debounce_interval": DEBOUNCE}
        async with Oban(pool=pool, queues={"default": queue}):
            control.ready()
            await control.stopped.wait()
        await pool.close()


if __name__ == "__main__":
    driver.main(ObanPy)
