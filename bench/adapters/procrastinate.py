"""procrastinate 3.10.0 on psycopg 3 (its C implementation) and uvloop.

Settings: `concurrency=20` for asynchronous tasks (howto/production/concurrency in its documentation). Tried on
no-op jobs: 10 and 50 (within the spread). `fetch_job_polling_interval=0.1` (`App.run_worker` in its reference)
instead of 5 s: sometimes a notification arrives while its worker is busy, the job then waits for the next poll, and
the p99 would be seconds. LISTEN/NOTIFY is on, its default. Jobs are kept (`delete_jobs="never"`, its default), as in
Howdah. Bulk enqueues use `batch_defer_async` (howto/basics/batch_defer); enqueues in a transaction use
`configure(connection=…)` (howto/production/external_connection). Blocking tasks run in threads.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from procrastinate import App, PsycopgConnector

from bench.adapters import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.adapters.driver import Call, Control
    from bench.ledger import Ledger

CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "20"))
POLLING = float(os.environ.get("BENCH_POLLING", "0.1"))


class Procrastinate(driver.Peer):
    """An app and one task."""

    def __init__(self, database: str, handler: str) -> None:
        super().__init__(database, handler)
        self.connector = PsycopgConnector(conninfo=database, min_size=1, max_size=20)
        self.app = App(connector=self.connector)
        self.ledger: Ledger | None = None

        async def handle(number: int, pad: str) -> None:
            if self.ledger is not None:
                self.ledger.mark(number)
            if handler == "io":
                await asyncio.sleep(0.001)

        def handle_in_a_thread(number: int, pad: str) -> None:
            if self.ledger is not None:
                self.ledger.mark(number)

        self.task = self.app.task(name="job")(handle_in_a_thread if handler == "thread" else handle)

    async def setup(self) -> None:
        async with self.app.open_async():
            await self.app.schema_manager.apply_schema_async()

    async def connect(self) -> None:
        await self.app.open_async()

    async def close(self) -> None:
        await self.app.close_async()

    async def enqueue(self, call: Call) -> None:
        await self.task.defer_async(number=call.number, pad=call.pad)

    async def enqueue_many(self, calls: Sequence[Call]) -> None:
        await self.task.batch_defer_async(
            *({"number": call.number, "pad": call.pad} for call in calls)
        )

    async def enqueue_in_transaction(self, call: Call, before_commit: Callable[[], None]) -> None:
        async with self.connector.pool.connection() as connection, connection.transaction():
            deferrer = self.task.configure(connection=connection)
            await deferrer.defer_async(number=call.number, pad=call.pad)
            before_commit()

    async def work(self, ledger: Ledger, control: Control) -> None:
        self.ledger = ledger
        async with self.app.open_async():
            running = asyncio.create_task(
                self.app.run_worker_async(
                    concurrency=CONCURRENCY,
                    fetch_job_polling_interval=POLLING,
                    install_signal_handlers=False,
                )
            )
            await control.wait_for_stop(running)
            running.cancel()
            await asyncio.wait([running])


if __name__ == "__main__":
    driver.main(Procrastinate)
