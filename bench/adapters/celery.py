"""Celery 5.7.0 on redis-py, over a Unix socket. Its worker is started with `celery worker`.

Settings, from "Optimizing" (userguide/optimizing in its documentation): a large `worker_prefetch_multiplier` of 128,
because tasks are short; and from the "Workers Guide" (userguide/workers): results ignored, rate limits, gossip, mingle
and heartbeat off. Every run tries its pools `prefork` with one process per core (its default), `threads` with the same
number of threads, `threads` with 10 threads, and `solo`, for no-op jobs, I/O-bound jobs and pick-up latency, and uses
the best; the trials are listed below. It acknowledges a task before it runs, its default, so a crash loses running
tasks. Redis writes an append-only file and syncs it every second, so a crash can lose one second of jobs. It has no bulk
enqueue: tasks are sent one after another over one connection. Concurrent callers are threads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bench.adapters import driver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.adapters.driver import Call, Control
    from bench.ledger import Ledger

CORES = os.cpu_count() or 1
# By the kind of handler, where nothing else was chosen.
POOLS = {"async": "prefork", "io": "threads", "thread": "threads", "process": "prefork"}
THREADS = int(os.environ.get("BENCH_THREADS", str(CORES)))


class CeleryPeer(driver.Peer):
    """Sends tasks from this process, and works in a process of `celery worker`."""

    def __init__(self, database: str, handler: str) -> None:
        super().__init__(database, handler)
        os.environ["BENCH_REDIS"] = database
        self.task: Any = None

    async def connect(self) -> None:
        os.environ.pop("BENCH_LEDGER", None)
        from bench.adapters import celery_tasks

        self.task = celery_tasks.handle

    async def enqueue(self, call: Call) -> None:
        self.task.delay(call.number, call.pad)

    async def enqueue_many(self, calls: Sequence[Call]) -> None:
        with self.task.app.producer_pool.acquire(block=True) as producer:
            for call in calls:
                self.task.apply_async((call.number, call.pad), producer=producer)

    async def enqueue_from(self, callers: int, calls: Sequence[Call], in_transaction: bool) -> None:
        """Its client is synchronous: callers are threads."""
        with ThreadPoolExecutor(callers) as threads:
            list(threads.map(lambda call: self.task.delay(call.number, call.pad), calls))

    async def work(self, ledger: Ledger, control: Control) -> None:
        with tempfile.TemporaryDirectory() as home:
            ready = f"{home}/ready"
            os.environ.update(BENCH_READY=ready, BENCH_HANDLER=self.handler)
            pool = os.environ.get("BENCH_POOL") or POOLS[self.handler]
            options = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "celery", "-A", "bench.adapters.celery_tasks", "worker"),
                *(*options, "--loglevel", "WARNING", "--pool", pool),
                *("--concurrency", str(THREADS if pool == "threads" else CORES)),
                env=dict(os.environ),
            )
            while not os.path.exists(ready):  # noqa: ASYNC240
                if worker.returncode is not None:
                    raise RuntimeError("the worker did not start")
                await asyncio.sleep(0.02)
            control.ready()
            await control.stopped.wait()
            worker.send_signal(signal.SIGTERM)
            await worker.wait()


if __name__ == "__main__":
    driver.main(CeleryPeer)
