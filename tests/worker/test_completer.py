"""Acknowledging in batches."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from howdah.database.async_store import AsyncStore
from howdah.database.store import Store
from howdah.execution.heartbeat import Heartbeat
from howdah.execution.run import Run
from howdah.hooks import Hooks
from howdah.outcome import Completed
from howdah.protocol.worker_statements import WorkerStatements
from howdah.worker.completer import Completer
from howdah.worker.throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from howdah import JobQueue

LEASE = timedelta(seconds=30)


async def test_a_stale_run_is_rejected_in_the_same_batch_as_the_newer_run_of_its_job(
    database: str, queue: JobQueue, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    """A worker may claim a job that it already has in flight: the first lease expired, or the server crashed and
    lost the first claim."""
    conn, statements = connect(), WorkerStatements("howdah")
    store, heartbeat_store = AsyncStore(database, "howdah"), Store(database, "howdah")
    states: list[str] = []
    hooks = Hooks([lambda change: states.append(change.state)])
    heartbeat = Heartbeat(heartbeat_store, statements, LEASE, lambda run: None)
    completer = Completer(store, statements, heartbeat, hooks, Throughput())
    queue.enqueue("work")
    for _ in range(2):
        (job,) = await store.run(
            statements.claim("worker", ["work"], 1, LEASE, ["default"], ignore_heads=True)
        )
        conn.execute("UPDATE howdah.live_jobs SET lease_expires_at = clock_timestamp()")
        run = Run(id=job.id, lease_id=job.lease_id, job=job, task=None)
        heartbeat.add(run)
        completer.put(run, Completed(None))
        if job.claims == 1:
            assert conn.execute("SELECT howdah.recover_stale_jobs()").fetchone() == (1,)
    writing = asyncio.create_task(completer.run())
    async with asyncio.timeout(240):
        await completer.drain()
    writing.cancel()
    await asyncio.to_thread(hooks.stop)
    assert states == ["lost", "completed"]
    assert queue.get(job.id).status == "completed"
    await store.close()
    await asyncio.to_thread(heartbeat_store.close)
