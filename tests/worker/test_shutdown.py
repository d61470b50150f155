"""Stopping a worker: what runs may finish, what does not goes back, and nobody pays for it with an attempt."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from children import Child, Children, all_ended, is_alive, offspring, until
from howdah.database.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import psycopg

    from howdah import JobQueue


@pytest.fixture
def children(tmp_path: Path, database: str) -> Iterator[Children]:
    children = Children(tmp_path, database)
    yield children
    children.close()


@pytest.fixture
def conn(connect: Callable[..., psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    return connect()


def stop(worker: Child) -> None:
    """Stop a worker with SIGTERM; it ends well. The jobs and grace periods here outlast this wait."""
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.log.read_text()


def started(children: Children, count: int) -> None:
    until(lambda: len(children.ledger("start")) == count, f"{count} jobs started")


def unfinished(conn: psycopg.Connection[Any]) -> Counter[tuple[Any, ...]]:
    """(job type, status, attempts, claims, started_at) of what has not ended."""
    return Counter(
        conn.execute(
            "SELECT job_type, status, attempts, claims, started_at FROM howdah.live_jobs"
        ).fetchall()
    )


def test_a_stop_under_load_loses_nothing_runs_nothing_twice_and_burns_no_attempt(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    queue.enqueue_many([{"job_type": "nap", "data": {"seconds": 0.05}}] * 300)
    first = children.start("--concurrency", "10", "--grace", "3600")
    until(lambda: len(children.ledger("effect")) > 30, "it is well under way")
    stop(first)
    # What ran has finished; what was only prefetched went back at once.
    assert len(children.ledger("start")) == len(children.ledger("effect")) < 300
    left = 300 - len(children.ledger("effect"))
    assert unfinished(conn) == {("nap", "pending", 0, 0, None): left}
    assert conn.execute("SELECT count(*) FROM howdah.workers").fetchone() == (0,)
    second = children.start("--concurrency", "50").ready()
    until(lambda: all_ended(conn), "the next worker did the rest")
    stop(second)
    attempts = conn.execute("SELECT status, attempts, count(*) FROM howdah.jobs GROUP BY 1, 2")
    assert attempts.fetchall() == [("completed", 1, 300)]
    assert set(children.counted("start").values()) == {1}


def test_what_outlasts_the_grace_period_is_interrupted_and_given_back(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    kinds = ("nap", "thread_nap", "process_nap", "deaf_nap", "stubborn_nap")
    worker = children.start("--grace", "0.5").ready()
    for kind in kinds:
        queue.enqueue(kind, {"seconds": 3600})
    started(children, len(kinds))
    processes = offspring(worker.pid)
    began = time.monotonic()
    stop(worker)
    assert time.monotonic() - began >= 0.5
    assert unfinished(conn) == {(kind, "pending", 0, 0, None): 1 for kind in kinds}
    assert children.ledger("effect") == []
    (warning,) = worker.said("handlers did not stop")
    assert warning["handlers"] == 2
    until(lambda: not any(map(is_alive, processes)), "no process is left")


def test_a_second_signal_stops_at_once(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    kinds = ("nap", "thread_nap", "deaf_nap", "stubborn_nap")
    worker = children.start("--grace", "3600").ready()
    for kind in kinds:
        queue.enqueue(kind, {"seconds": 3600})
    started(children, len(kinds))
    worker.send(signal.SIGTERM)
    until(lambda: worker.said("worker stopping"), "it has heard the first")
    time.sleep(0.3)
    assert worker.process.poll() is None  # the grace period is honoured
    stop(worker)
    assert unfinished(conn) == {(kind, "pending", 0, 0, None): 1 for kind in kinds}


def test_leases_and_cancellations_stay_alive_during_the_grace_period(
    children: Children, queue: JobQueue, tmp_path: Path
) -> None:
    worker = children.start("--grace", "3600", FAULT_APP_LEASE="2").ready()
    gate = tmp_path / "gate"
    slow = queue.enqueue("gated", {"gate": str(gate)})
    endless = queue.enqueue("nap", {"seconds": 3600})
    started(children, 2)
    worker.send(signal.SIGTERM)
    until(lambda: worker.said("worker stopping"), "it has heard")
    end = queue.get(slow).lease_expires_at
    assert end is not None
    other = children.start(FAULT_APP_LEASE="2").ready()  # who would take what is left lying about
    queue.cancel(endless)
    until(lambda: queue.get(endless).status == "cancelled", "it was cancelled")
    until(lambda: datetime.now(UTC) > end + timedelta(seconds=2), "its lease would have ended")
    gate.touch()
    until(lambda: queue.get(slow).status.is_final, "the slow one ended")
    assert worker.wait() == 0
    job = queue.get(slow)
    assert (job.status, job.attempts, job.claims) == ("completed", 1, 1)
    assert children.counted("start") == {str(slow.id): 1, str(endless.id): 1}
    stop(other)


def test_a_worker_that_is_told_to_stop_while_it_waits_for_its_database_stops(
    children: Children,
) -> None:
    children.database = "postgresql://nobody@127.0.0.1:9/nowhere"
    worker = children.start()
    message = "database unreachable; retrying"
    until(lambda: worker.said(message), "it says what it waits for")
    assert 'cannot reach database "nowhere" at 127.0.0.1' in worker.said(message)[0]["error"]
    stop(worker)


def test_a_second_signal_also_stops_a_worker_whose_event_loop_is_blocked(
    children: Children, queue: JobQueue
) -> None:
    worker = children.start("--grace", "3600", FAULT_APP_LAST_PATIENCE="1").ready()
    queue.enqueue("block", {"seconds": 3600})
    started(children, 1)
    worker.send(signal.SIGTERM)
    time.sleep(0.3)
    assert worker.process.poll() is None
    # Two that are equal would be one to a process that has not found the time for the first.
    worker.send(signal.SIGINT)
    assert worker.wait() == 1


async def test_listening_ends_whatever_it_was_about_to_do(database: str) -> None:
    """asyncpg swallows a cancellation that meets the end of what it waits for: one in sixty, here."""
    for n in range(200):
        listener = Listener(database, "howdah")
        listener.start()
        await asyncio.sleep(n % 20 / 1000)
        stopping = asyncio.create_task(listener.stop())
        assert (await asyncio.wait([stopping], timeout=60))[0]
