"""Acknowledging in batches."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from howdah.database.async_store import AsyncStore
from howdah.database.store import Store
from howdah.execution.heartbeat import Heartbeat
from howdah.execution.run import Run
from howdah.hooks import Hooks
from howdah.outcome import Completed, CompletedByHandler
from howdah.protocol.worker_statements import WorkerStatements
from howdah.worker.completer import Completer
from howdah.worker.throughput import Throughput
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from uuid import UUID

    import psycopg

    from howdah import JobQueue
    from proxy import Proxy

LEASE = timedelta(seconds=30)


@pytest.mark.parametrize("claims", [2, 1])
async def test_a_stale_run_is_rejected_in_the_same_batch_as_the_newer_run_of_its_job(
    database: str, queue: JobQueue, connect: Callable[..., psycopg.Connection[Any]], claims: int
) -> None:
    """A worker may claim a job that it already has in flight: the first lease expired, or the job failed elsewhere and
    an operator retried it, or the server crashed and lost the first claim. The count of claims does not show the last
    two."""
    conn, statements = connect(), WorkerStatements("howdah")
    store, heartbeat_store = AsyncStore(database, "howdah"), Store(database, "howdah")
    states: list[str] = []
    hooks = Hooks([lambda change: states.append(change.state)])
    heartbeat = Heartbeat(heartbeat_store, statements, LEASE, lambda run: None)
    completer = Completer(store, statements, heartbeat, hooks, Throughput())
    queue.enqueue("work")
    for is_stale in (True, False):
        (job,) = await store.run(
            statements.claim("worker", ["work"], 1, LEASE, ["default"], due_from=None)
        )
        run = Run(id=job.id, lease_id=job.lease_id, job=job, task=None)
        heartbeat.add([run])
        completer.put(run, Completed(None))
        if is_stale and claims == 2:
            conn.execute("UPDATE howdah.leases SET expires_at = clock_timestamp()")
            assert queue.recover_stale_jobs() == 1
        elif is_stale:
            fence = [[job.id], [job.lease_id]]
            conn.execute("SELECT howdah.fail_jobs(%s, %s, '{elsewhere}', '{NULL}')", fence)
            assert queue.retry(job.id) == [job.id]
    assert job.claims == claims
    writing = asyncio.gather(completer.run(), completer.run_rejected())
    async with asyncio.timeout(240):
        await completer.drain()
    writing.cancel()
    await asyncio.to_thread(hooks.stop)
    await store.close()
    await asyncio.to_thread(heartbeat_store.close)
    assert sorted(states) == ["completed", "lost"]
    assert queue.get(job.id).status == "completed"


async def test_the_second_try_to_complete_a_job_counts_as_its_own(
    proxy: Proxy, database: str, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The first was executed, its answer was lost, and the database could not be reached for longer than a statement
    is retried."""
    statements = WorkerStatements("howdah")
    name = database.partition("?")[0].rpartition("/")[2]
    store = AsyncStore(proxy.url(name), "howdah", timeout=0.3)
    heartbeat_store = Store(database, "howdah")
    states: list[str] = []
    hooks = Hooks([lambda change: states.append(change.state)])
    heartbeat = Heartbeat(heartbeat_store, statements, LEASE, lambda run: None)
    completer = Completer(store, statements, heartbeat, hooks, Throughput())
    queue.enqueue("work")
    (job,) = await store.run(
        statements.claim("worker", ["work"], 1, LEASE, ["default"], due_from=None)
    )
    run = Run(id=job.id, lease_id=job.lease_id, job=job, task=None)
    heartbeat.add([run])
    proxy.cut(b"cut-here", executed=True, then=proxy.refuse)
    completer.put(run, Completed('"cut-here"'))
    writing = asyncio.gather(completer.run(), completer.run_rejected())
    await eventually(
        lambda: "outcomes could not be written; retrying" in caplog.text, "the first try failed"
    )
    assert queue.get(job.id).status == "completed"
    proxy.accept()
    async with asyncio.timeout(120):
        await completer.drain()
    writing.cancel()
    await asyncio.to_thread(hooks.stop)
    assert states == ["completed"]
    assert "lease" not in caplog.text
    await store.close()
    await asyncio.to_thread(heartbeat_store.close)


async def test_outcomes_that_a_server_timeout_always_cancels_end_by_rule_and_keep_no_other(
    database: str, queue: JobQueue, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    """One job of a batch can never be completed within `statement_timeout`: its attempt fails and is retried."""
    conn, statements = connect(), WorkerStatements("howdah")
    conn.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.result = '\"slow\"' THEN PERFORM pg_sleep(60); END IF; RETURN NEW; END $$"
    )
    conn.execute(
        "CREATE TRIGGER slow BEFORE INSERT ON howdah.finished_jobs FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    name = conn.info.dbname
    conn.execute(f"ALTER DATABASE {name} SET statement_timeout = '400ms'".encode())
    store, heartbeat_store = AsyncStore(database, "howdah"), Store(database, "howdah")
    states: dict[object, str] = {}
    hooks = Hooks([lambda change: states.update({change.id: change.state})])
    heartbeat = Heartbeat(heartbeat_store, statements, LEASE, lambda run: None)
    completer = Completer(store, statements, heartbeat, hooks, Throughput())
    queue.enqueue_many([{"job_type": "work"}] * 8)
    jobs = await store.run(
        statements.claim("worker", ["work"], 8, LEASE, ["default"], due_from=None)
    )
    for number, job in enumerate(jobs):
        run = Run(id=job.id, lease_id=job.lease_id, job=job, task=None)
        heartbeat.add([run])
        completer.put(run, Completed('"slow"' if number == 3 else "1"))
    writing = asyncio.create_task(completer.run())
    async with asyncio.timeout(120):
        await completer.drain()
    writing.cancel()
    await asyncio.to_thread(hooks.stop)
    assert [states[job.id] for job in jobs].count("completed") == 7
    assert states[jobs[3].id] == "retrying"
    slow = queue.get(jobs[3].id)
    assert (slow.status, slow.attempts) == ("pending", 1)
    assert "statement timeout" in (slow.last_error or "")
    await store.close()
    await asyncio.to_thread(heartbeat_store.close)


@asynccontextmanager
async def claimed(
    url: str, database: str, count: int
) -> AsyncIterator[tuple[Completer, list[Run], dict[UUID, str]]]:
    """A completer, runs of claimed jobs, and the states that hooks receive."""
    statements = WorkerStatements("howdah")
    store, heartbeat_store = AsyncStore(url, "howdah"), Store(database, "howdah")
    states: dict[UUID, str] = {}
    hooks = Hooks([lambda change: states.update({change.id: change.state})])
    heartbeat = Heartbeat(heartbeat_store, statements, LEASE, lambda run: None)
    completer = Completer(store, statements, heartbeat, hooks, Throughput())
    jobs = await store.run(
        statements.claim("worker", ["work"], count, LEASE, ["default"], due_from=None)
    )
    runs = [Run(id=job.id, lease_id=job.lease_id, job=job, task=None) for job in jobs]
    heartbeat.add(runs)
    writing = asyncio.gather(completer.run(), completer.run_rejected())
    yield completer, runs, states
    async with asyncio.timeout(120):
        await completer.drain()
    writing.cancel()
    await asyncio.to_thread(hooks.stop)
    await store.close()
    await asyncio.to_thread(heartbeat_store.close)


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        ("SELECT howdah.complete_jobs(%(ids)s, %(leases)s)", "completed"),
        ("UPDATE howdah.live_jobs SET keep = '0'", "completed"),  # and then completed
        ("SELECT howdah.recover_stale_jobs('0 s')", "lost"),
        ("SELECT howdah.fail_jobs(%(ids)s, %(leases)s, '{no}', '{NULL}')", "lost"),
    ],
)
async def test_a_handler_has_completed_its_job_only_if_its_transaction_did(
    database: str,
    queue: JobQueue,
    connect: Callable[..., psycopg.Connection[Any]],
    ending: str,
    state: str,
) -> None:
    """Nothing is left to write, so the database rejects the outcome in each case."""
    conn = connect()
    queue.enqueue("work")
    async with claimed(database, database, 1) as (completer, (run,), states):
        fence = {"ids": [run.id], "leases": [run.lease_id]}
        conn.execute(ending.encode(), fence)
        if state == "completed":
            conn.execute("SELECT howdah.complete_jobs(%(ids)s, %(leases)s)", fence)
        completer.put(run, CompletedByHandler())
    assert states == {run.id: state}


async def test_a_completion_whose_answer_was_lost_counts_although_the_next_send_is_cancelled(
    proxy: Proxy,
    database: str,
    queue: JobQueue,
    connect: Callable[..., psycopg.Connection[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The statement of a batch is divided then, and its parts must know that they may have been executed."""
    conn, locker = connect(), connect(autocommit=False)
    name = database.partition("?")[0].rpartition("/")[2]
    queue.enqueue_many([{"job_type": "work"}] * 3)
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%complete_jobs%'"

    def lock() -> None:
        locker.execute("LOCK TABLE howdah.finished_jobs IN ACCESS EXCLUSIVE MODE")

    async with claimed(proxy.url(name), database, 3) as (completer, runs, states):
        proxy.cut(b"cut-here", executed=True, then=lock)
        for run in runs:
            completer.put(run, Completed('"cut-here"'))
        await eventually(lambda: conn.execute(waiting).fetchone(), "the completion is sent again")
        conn.execute(f"SELECT pg_cancel_backend(pid) FROM ({waiting}) AS w".encode())
        locker.rollback()
    assert states == {run.id: "completed" for run in runs}
    assert "lease" not in caplog.text
