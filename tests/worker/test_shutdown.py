"""Stopping a worker: running jobs may finish, the others are released, and no job loses an attempt."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from children import Child, Children, all_ended, is_alive, offspring
from howdah.database.listener import Listener
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from howdah import JobQueue
    from proxy import Proxy


def stop(worker: Child) -> None:
    """Stop a worker with SIGTERM; it exits with status 0. The jobs and grace periods here are longer than this wait."""
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.log.read_text()


def started(children: Children, count: int) -> None:
    until(lambda: len(children.ledger("start")) == count, f"{count} jobs started")


def unfinished(conn: psycopg.Connection[Any]) -> Counter[tuple[Any, ...]]:
    """(job type, status, attempts, claims, started_at) of the jobs that have not ended."""
    return Counter(
        conn.execute(
            "SELECT job_type, status, attempts, claims, started_at FROM howdah.live_jobs"
        ).fetchall()
    )


def test_a_stop_under_load_loses_no_job_runs_none_twice_and_uses_no_attempt(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    queue.enqueue_many([{"job_type": "nap", "data": {"seconds": 0.05}}] * 300)
    first = children.start("--concurrency", "10", "--grace", "3600")
    until(lambda: len(children.ledger("effect")) > 30, "more than 30 jobs ran")
    stop(first)
    # Running jobs have finished; prefetched jobs were released.
    assert len(children.ledger("start")) == len(children.ledger("effect")) < 300
    left = 300 - len(children.ledger("effect"))
    assert unfinished(conn) == {("nap", "pending", 0, 0, None): left}
    assert conn.execute("SELECT count(*) FROM howdah.workers").fetchone() == (0,)
    second = children.start("--concurrency", "50").ready()
    until(lambda: all_ended(conn), "the next worker ran the rest")
    stop(second)
    attempts = conn.execute("SELECT status, attempts, count(*) FROM howdah.jobs GROUP BY 1, 2")
    assert attempts.fetchall() == [("completed", 1, 300)]
    assert set(children.counted("start").values()) == {1}


def test_jobs_that_outlast_the_grace_period_are_interrupted_and_released(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    kinds = ("nap", "thread_nap", "process_nap", "unabortable_nap", "uncancellable_nap")
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
    (warning,) = worker.logged("handlers did not stop")
    assert warning["handlers"] == 2
    until(lambda: not any(map(is_alive, processes)), "no process is left")


def test_a_second_signal_ends_the_grace_period(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    kinds = ("nap", "thread_nap", "unabortable_nap", "uncancellable_nap")
    worker = children.start("--grace", "3600").ready()
    for kind in kinds:
        queue.enqueue(kind, {"seconds": 3600})
    started(children, len(kinds))
    worker.send(signal.SIGTERM)
    until(lambda: worker.logged("worker stopping"), "it received the first signal")
    stop(worker)  # well before the end of the grace period
    assert unfinished(conn) == {(kind, "pending", 0, 0, None): 1 for kind in kinds}


def test_leases_are_extended_and_jobs_can_be_cancelled_during_the_grace_period(
    children: Children, queue: JobQueue, tmp_path: Path
) -> None:
    worker = children.start("--grace", "3600", FAULT_APP_LEASE="2").ready()
    gate = tmp_path / "gate"
    slow = queue.enqueue("gated", {"gate": str(gate)})
    endless = queue.enqueue("nap", {"seconds": 3600})
    started(children, 2)
    worker.send(signal.SIGTERM)
    until(lambda: worker.logged("worker stopping"), "it received the signal")
    end = queue.get(slow).lease_expires_at
    assert end is not None
    other = children.start(
        FAULT_APP_LEASE="2"
    ).ready()  # it would claim the job after the lease expired
    queue.cancel(endless)
    until(lambda: queue.get(endless).status == "cancelled", "it was cancelled")
    until(
        lambda: datetime.now(UTC) > end + timedelta(seconds=2), "its first lease would have expired"
    )
    gate.touch()
    until(lambda: queue.get(slow).status.is_final, "the slow job ended")
    assert worker.wait() == 0
    job = queue.get(slow)
    assert (job.status, job.attempts, job.claims) == ("completed", 1, 1)
    assert children.counted("start") == {str(slow.id): 1, str(endless.id): 1}
    stop(other)


def test_a_worker_can_be_stopped_while_it_waits_for_its_database(
    children: Children,
) -> None:
    children.database = "postgresql://nobody@127.0.0.1:9/nowhere"
    worker = children.start()
    message = "database unreachable; retrying"
    until(lambda: worker.logged(message), "it logged that the database is unreachable")
    assert 'cannot reach database "nowhere" at 127.0.0.1' in worker.logged(message)[0]["error"]
    stop(worker)


def test_a_stop_keeps_its_time_while_the_server_is_silent(
    tmp_path: Path, database: str, proxy: Proxy, queue: JobQueue
) -> None:
    children = Children(tmp_path, proxy.url(database.partition("?")[0].rpartition("/")[2]))
    try:
        worker = children.start("--grace", "1").ready()
        for kind in ("nap", "thread_nap", "process_nap"):
            queue.enqueue(kind, {"seconds": 3600})
        started(children, 3)
        proxy.swallow()
        worker.send(signal.SIGTERM)
        began = time.monotonic()

        def is_gone() -> bool:
            proxy.swallow()  # new connections become silent, too
            return worker.process.poll() is not None

        until(is_gone, "the worker stopped")
        assert time.monotonic() - began < 1 + 15, worker.log.read_text()
    finally:
        children.close()


def test_a_second_signal_also_stops_a_worker_whose_event_loop_is_blocked(
    children: Children, queue: JobQueue
) -> None:
    worker = children.start("--grace", "3600", FAULT_APP_STOP_TIMEOUT="1").ready()
    queue.enqueue("block", {"seconds": 3600})
    started(children, 1)
    worker.send(signal.SIGTERM)
    # While the first signal is pending for the main thread, the kernel gives the second to another thread, which
    # does not interrupt the handler's sleep. And it would merge a second SIGTERM with the first.
    time.sleep(0.3)
    worker.send(signal.SIGINT)
    assert worker.wait() == 1


def test_one_signal_stops_a_worker_whose_event_loop_stays_blocked(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    worker = children.start("--grace", "1", FAULT_APP_LEASE="3", FAULT_APP_BLOCKED_EXIT="2").ready()
    job = queue.enqueue("block", {"seconds": 3600})
    started(children, 1)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 1, worker.log.read_text()
    [line] = worker.logged("a handler blocks the event loop; ending the worker without its jobs")
    assert (line["job_id"], line["job_type"]) == (str(job.id), "block")
    assert line["running"] == [f"block {job.id}"]
    children.start().ready()
    until(lambda: len(children.ledger("start")) == 2, "another worker runs the job")


async def test_a_listener_stops_at_any_point_of_its_work(database: str) -> None:
    """asyncpg swallows a cancellation that arrives together with the end of its wait: one in sixty, here."""
    for n in range(200):
        listener = Listener(database, "howdah")
        listener.start()
        await asyncio.sleep(n % 20 / 1000)
        stopping = asyncio.create_task(listener.stop())
        assert (await asyncio.wait([stopping], timeout=60))[0]
