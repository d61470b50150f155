"""Howdah, from this checkout, on asyncpg and uvloop.

Settings: `concurrency=100` for I/O-bound jobs, otherwise the defaults, which are adaptive. History is kept (`keep`
is 7 days), leases and fences are on, and everything commits durably.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import asyncpg

from bench.adapters import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.adapters.driver import Call, Control
    from bench.ledger import Ledger


class Howdah(driver.Peer):
    """Tasks of an app, a worker, and a pool of the caller's for transactions."""

    def __init__(self, database: str, handler: str) -> None:
        super().__init__(database, handler)
        os.environ["HOWDAH_DATABASE_URL"] = database
        from bench.adapters import howdah_tasks

        self.app = howdah_tasks.app
        self._pool: asyncpg.Pool | None = None

    @property
    def task(self) -> Any:
        return self.app.tasks[self.handler]

    async def setup(self) -> None:
        await self.app.aqueue.pending()
        await self.app.aqueue.close()

    async def connect(self) -> None:
        await self.app.aqueue.pending()
        self._pool = await asyncpg.create_pool(self.database, min_size=1, max_size=64)

    async def close(self) -> None:
        await self.app.aqueue.close()
        if self._pool is not None:
            await self._pool.close()

    async def enqueue(self, call: Call) -> None:
        await self.task.aenqueue(call.number, call.pad)

    async def enqueue_many(self, calls: Sequence[Call]) -> None:
        await self.task.aenqueue_many([(call.number, call.pad) for call in calls])

    async def enqueue_in_transaction(self, call: Call, before_commit: Callable[[], None]) -> None:
        if self._pool is None:
            raise RuntimeError("not connected")
        async with self._pool.acquire() as connection, connection.transaction():
            await self.task.using(conn=connection).aenqueue(call.number, call.pad)
            before_commit()

    async def work(self, ledger: Ledger, control: Control) -> None:
        from howdah.worker import Worker

        worker = Worker(self.app, concurrency=100) if self.handler == "io" else Worker(self.app)
        running = asyncio.create_task(worker.run())
        await worker.ready.wait()
        await control.wait_for_stop(running)
        worker.stop()
        await running


if __name__ == "__main__":
    driver.main(Howdah)
