"""A row of `workers` belongs to one life of a worker: processes may share a worker_id, and a row may disappear."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest

from howdah import App, JobQueue, Worker
from howdah.protocol.worker_statements import WorkerStatements
from waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import RunWorker


def rows(conn: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return conn.execute("SELECT worker_id, idle FROM howdah.workers").fetchall()


def prune(conn: psycopg.Connection[Any]) -> None:
    """Run the duty, as if the clock had been confirmed an hour ago."""
    conn.execute(
        "UPDATE howdah.maintenance SET observed = clock_timestamp() - interval '1 hour' "
        "WHERE duty = 'prune'"
    )
    conn.execute("SELECT howdah.prune()")


def add_work(app: App) -> Any:
    @app.task
    async def work() -> None:
        pass

    return work


async def test_a_worker_that_stops_leaves_the_row_of_its_successor_with_the_same_id(
    app: App, running_worker: RunWorker, conn: psycopg.Connection[Any]
) -> None:
    add_work(app)
    async with running_worker(app, worker_id="fixed") as new:
        async with running_worker(app, worker_id="fixed"):
            assert rows(conn) == [("fixed", True)] * 2
        (row,) = conn.execute("SELECT life FROM howdah.workers").fetchall()
        assert row == (new.life,)
    assert rows(conn) == []


async def test_two_lives_of_a_worker_count_their_throughput_in_their_own_rows(
    queue: JobQueue, conn: psycopg.Connection[Any], connect: Callable[..., Any]
) -> None:
    """One of them beats in a transaction that stays open, and the other does not wait for it."""
    beat = (
        "SELECT howdah.beat_worker('fixed', '{}', "
        """'[{"queue": "q", "job_type": "t", "completed": 1, "failed": 0, "retried": 0, "cancelled": 0, """
        """"wait_seconds": 0, "run_seconds": 0}]', %s)"""
    )
    lives = [uuid4(), uuid4()]
    slow = connect(autocommit=False)
    slow.execute(beat, [lives[0]])
    conn.execute("SET lock_timeout = '1s'")
    conn.execute(beat, [lives[1]])
    slow.commit()
    counted = conn.execute("SELECT worker_id, life, completed FROM howdah.throughput").fetchall()
    assert sorted(counted) == sorted(("fixed", life, 1) for life in lives)


async def test_a_worker_whose_row_was_pruned_registers_again_and_is_notified(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    queue: JobQueue,
    hourly: None,
) -> None:
    work = add_work(app)
    async with running_worker(app, lease=1) as worker:
        await eventually(lambda: rows(conn) == [(worker.worker_id, True)], "it is registered")
        # As if nothing had been seen of it for a day, by a duty that runs before its next heartbeat.
        with conn.transaction():
            conn.execute(
                "UPDATE howdah.workers SET seen_at = clock_timestamp() - interval '2 days'"
            )
            prune(conn)
            assert rows(conn) == []
        await eventually(lambda: rows(conn) == [(worker.worker_id, True)], "it registered again")
        handle = await work.aenqueue()
        assert await handle.aresult(60) is None


async def test_a_worker_registers_again_after_its_schema_was_created_again(
    fresh_database: str, running_worker: RunWorker, hourly: None
) -> None:
    app = App(fresh_database)
    work = add_work(app)
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        async with running_worker(app, lease=1) as worker:
            await eventually(lambda: worker.health()["ready"], "it is ready")
            conn.execute("DROP SCHEMA howdah CASCADE")
            queue = JobQueue(fresh_database)
            await asyncio.to_thread(queue.pending)  # creates the schema
            await asyncio.to_thread(queue.close)
            await eventually(lambda: rows(conn) == [(worker.worker_id, True)], "it registered")
            handle = await work.aenqueue()
            assert await handle.aresult(60) is None
    await app.aclose()


async def test_a_busy_worker_that_registers_again_is_not_flagged_idle(
    app: App, running_worker: RunWorker, conn: psycopg.Connection[Any]
) -> None:
    @app.task
    async def nap() -> None:
        await asyncio.sleep(0.05)

    async with running_worker(app, lease=1) as worker:
        await app.aqueue.enqueue_many([("nap", {})] * 10_000)
        await eventually(lambda: rows(conn) == [(worker.worker_id, False)], "it is busy")
        conn.execute("DELETE FROM howdah.workers")
        await eventually(lambda: rows(conn) == [(worker.worker_id, False)], "it registered again")


def test_pruning_removes_the_lives_that_are_over_and_no_others(
    queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    statements = WorkerStatements("howdah")
    old, new = uuid4(), uuid4()
    for life in (old, new):
        queue._backend.run(
            statements.register_worker("fixed", "host", 1, ["q"], ["t"], [100], "{}", life)
        )
    conn.execute(
        "UPDATE howdah.workers SET seen_at = clock_timestamp() - interval '2 days' WHERE life = %s",
        [old],
    )
    prune(conn)
    assert conn.execute("SELECT life FROM howdah.workers").fetchall() == [(new,)]


def test_a_lease_of_a_worker_has_the_bounds_of_every_lease(sync_app: App) -> None:
    from howdah import InvalidOption

    add_work(sync_app)
    with pytest.raises(InvalidOption, match="lease is 4000000; it must be at most 30 days"):
        Worker(sync_app, lease=4_000_000)
    with pytest.raises(InvalidOption, match="lease is 0; it must be at least"):
        Worker(sync_app, lease=0)
    with pytest.raises(InvalidOption, match="at most 30 days"):
        App(lease=4_000_000)


def test_sql_callers_without_a_life_share_one_row(conn: psycopg.Connection[Any]) -> None:
    assert conn.execute("SELECT howdah.touch_worker('w')").fetchone() == (False,)
    for _ in range(2):
        conn.execute("SELECT howdah.register_worker('w', 'h', 1, '{default}', '{mail}')")
    assert conn.execute("SELECT howdah.touch_worker('w', false)").fetchone() == (True,)
    assert rows(conn) == [("w", False)]
    conn.execute("SELECT howdah.remove_worker('w')")
    until(lambda: rows(conn) == [], "it is gone")


async def test_a_transaction_that_locks_the_rows_of_workers_stops_no_worker(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    connect: Callable[..., Any],
) -> None:
    work = add_work(app)
    async with running_worker(app, lease=1) as worker:
        await eventually(lambda: rows(conn) == [(worker.worker_id, True)], "it is registered")
        operator = connect(autocommit=False)
        operator.execute("SELECT FROM howdah.workers FOR UPDATE")
        beaten = worker._heartbeat._last_beat
        await eventually(lambda: worker._heartbeat._last_beat > beaten + 2, "it beats")
        assert worker.health()["ready"]
        assert await (await work.aenqueue()).aresult(30) is None
        operator.execute("DELETE FROM howdah.workers")
        beaten = worker._heartbeat._last_beat
        await eventually(lambda: worker._heartbeat._last_beat > beaten + 2, "it beats")
        operator.rollback()
        assert worker.health()["ready"]
    assert rows(conn) == []
