"""SAQ 0.26.4 on redis-py with hiredis and uvloop, over a Unix socket.

Settings, from its README (README.md in its repository): a `concurrency` of 20. Tried on no-op jobs: 10, 50 and 100,
and 50 with `max_concurrent_ops` of 50; all were slower and used more CPU. Results are kept for 10 minutes, its
default. It has no bulk enqueue, so many single enqueues are awaited concurrently. Redis writes an append-only file and
syncs it every second, so a crash can lose one second of acknowledged jobs.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from saq import Worker
from saq.queue.redis import RedisQueue

from bench.adapters import driver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.adapters.driver import Call, Control
    from bench.ledger import Ledger

CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "20"))
OPERATIONS = int(os.environ.get("BENCH_OPERATIONS", "20"))


class Saq(driver.Peer):
    """A queue and a worker."""

    _queue: Any

    async def connect(self) -> None:
        self._queue = RedisQueue.from_url(f"unix://{self.database}", max_concurrent_ops=OPERATIONS)
        await self._queue.connect()

    async def close(self) -> None:
        await self._queue.disconnect()

    async def enqueue(self, call: Call) -> None:
        await self._queue.enqueue("handle", number=call.number, pad=call.pad)

    async def enqueue_many(self, calls: Sequence[Call]) -> None:
        await asyncio.gather(*(self.enqueue(call) for call in calls))

    async def work(self, ledger: Ledger, control: Control) -> None:
        async def handle(context: Any, *, number: int, pad: str) -> None:
            ledger.mark(number)
            if self.handler == "io":
                await asyncio.sleep(0.001)

        def handle_in_a_thread(context: Any, *, number: int, pad: str) -> None:
            ledger.mark(number)

        await self.connect()
        function: Any = handle_in_a_thread if self.handler == "thread" else handle
        worker = Worker(self._queue, [("handle", function)], concurrency=CONCURRENCY)
        running = asyncio.create_task(worker.start())
        await control.wait_for_stop(running)
        # A stop sends jobs back that are done and not yet acknowledged, and they run again.
        while await self._queue.count("incomplete"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await worker.stop()
        await running
        await self.close()


if __name__ == "__main__":
    driver.main(Saq)
