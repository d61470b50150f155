"""Which workers a job wakes: as many as there are jobs, and never none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from children import Children
from howdah import NewJob
from howdah.protocol.worker_statements import WorkerStatements
from howdah.worker import fetcher
from howdah.worker.wakes import Wakes
from waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from conftest import RunWorker
    from howdah import App, JobQueue, Worker

FLEET = 20


class Statements:
    """Counts the statements of one kind of all workers of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "claim") -> None:
        self.count = 0
        self.job_types: list[list[str]] = []  # of each claim
        statement = getattr(WorkerStatements, name)

        def counted(*given: Any) -> Any:
            self.count += 1
            if name == "claim":
                self.job_types.append(given[2])
            return statement(*given)

        monkeypatch.setattr(WorkerStatements, name, counted)


class Waiting:
    """The fetchers that wait for work now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: set[Wakes] = set()
        wait = Wakes.wait

        async def noted(waiting: Wakes, seconds: float) -> bool:
            if seconds > 0.05:
                self.now.add(waiting)
            try:
                return await wait(waiting, seconds)
            finally:
                self.now.discard(waiting)

        monkeypatch.setattr(Wakes, "wait", noted)

    async def all(self, count: int) -> None:
        await eventually(lambda: len(self.now) == count, f"{count} workers wait")


def add_tasks(app: App) -> asyncio.Event:
    """A task that does nothing, and one that runs until the event is set."""
    gate = asyncio.Event()

    @app.task
    async def quick() -> None:
        pass

    @app.task
    async def gated() -> None:
        await gate.wait()

    return gate


@contextlib.asynccontextmanager
async def running(
    run: RunWorker, app: App, count: int, **options: Any
) -> AsyncIterator[list[Worker]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run(app, **options)) for _ in range(count)]


async def idle(conn: psycopg.Connection[Any], count: int) -> None:
    def are() -> bool:
        return conn.execute("SELECT count(*) FROM howdah.workers WHERE idle").fetchone() == (count,)

    await eventually(are, f"{count} workers are idle")


def ended(conn: psycopg.Connection[Any], job_type: str = "quick") -> int:
    query = "SELECT count(*) FROM howdah.finished_jobs WHERE job_type = %s"
    return int(conn.execute(query, [job_type]).fetchone()[0])  # type: ignore[index]


# ── as many as there are jobs ─────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("hourly")
async def test_one_job_at_a_time_takes_few_claims_on_a_fleet_of_idle_workers(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims, waiting = Statements(monkeypatch), Waiting(monkeypatch)
    add_tasks(app)
    async with running(running_worker, app, FLEET):
        await idle(conn, FLEET)
        await waiting.all(FLEET)
        before = claims.count
        for n in range(10):
            await app.aqueue.enqueue("quick")
            await eventually(lambda n=n: ended(conn) == n + 1)
            await waiting.all(FLEET)
        # One claim finds the job, and one finds that there is no other. If all workers answered: 210.
        assert claims.count - before <= 30


@pytest.mark.usefixtures("hourly")
@pytest.mark.parametrize("count", [fetcher.MANY_TYPES - 1, fetcher.MANY_TYPES])
async def test_an_idle_worker_with_many_types_first_claims_those_that_it_was_woken_for(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    """And then all, before it waits again."""
    claims, waiting = Statements(monkeypatch), Waiting(monkeypatch)

    async def nothing() -> None:
        pass

    for n in range(count):
        app.task(name=f"type {n}")(nothing)
    async with running(running_worker, app, 1):
        await idle(conn, 1)
        await waiting.all(1)
        claims.job_types.clear()
        await app.aqueue.enqueue("type 7")
        await eventually(lambda: ended(conn, "type 7") == 1)
        await waiting.all(1)
        first, *others = map(len, claims.job_types)
        assert first == (1 if count == fetcher.MANY_TYPES else count)
        assert others[-1] == count


@pytest.mark.usefixtures("hourly")
async def test_many_jobs_wake_every_idle_worker(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(monkeypatch)
    gate = add_tasks(app)
    async with running(running_worker, app, 6, concurrency=1) as workers:
        await idle(conn, 6)
        await waiting.all(6)
        await app.aqueue.enqueue_many([NewJob(job_type="gated")] * 6)
        for worker in workers:
            await eventually(lambda worker=worker: worker.health()["running"] == 1)
        gate.set()


async def test_the_due_time_of_one_job_does_not_wake_a_fleet_at_once(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(monkeypatch)
    add_tasks(app)
    async with running(running_worker, app, FLEET):
        await idle(conn, FLEET)
        await waiting.all(FLEET)
        claims = Statements(monkeypatch)
        # Every worker polls before the job is due, and knows its due time then.
        await app.aqueue.enqueue("quick", delay=3)
        await eventually(lambda: ended(conn) == 1)
        # The chosen one, the first in order, and on a slow machine some of those that follow.
        assert claims.count <= FLEET / 2


# ── without delay ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("hourly")
async def test_a_notified_due_time_shortens_the_wait_of_a_worker(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(monkeypatch)
    add_tasks(app)
    async with running(running_worker, app, 2):
        await idle(conn, 2)
        for n in range(4):
            await waiting.all(2)
            await app.aqueue.enqueue_many(
                [NewJob(job_type="quick", delay=0.3), NewJob(job_type="quick", delay=0.6)]
            )
            await eventually(lambda n=n: ended(conn) == 2 * n + 2)
    late = conn.execute("SELECT min(started_at - run_at) >= interval '0' FROM howdah.jobs")
    assert late.fetchone() == (True,)


def enqueue_for(
    conn: psycopg.Connection[Any],
    queue: JobQueue,
    worker: Worker,
    other: Worker,
    job_type: str = "quick",
) -> None:
    """Enqueue a job for which only one of two workers can be chosen. Both are flagged idle afterwards."""
    flag = "UPDATE howdah.workers SET idle = %s WHERE worker_id = %s"
    conn.execute(flag, [True, worker.worker_id])
    conn.execute(flag, [False, other.worker_id])
    queue.enqueue(job_type, conn=conn)
    conn.execute(flag, [True, other.worker_id])


@pytest.mark.usefixtures("hourly")
@pytest.mark.parametrize("late", [False, True], ids=["at once", "below its lane's head"])
async def test_a_worker_without_a_free_slot_passes_its_notification_on(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    connect: Callable[..., psycopg.Connection[Any]],
    queue: JobQueue,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
) -> None:
    waiting = Waiting(monkeypatch)
    gate = add_tasks(app)
    conn.execute("UPDATE howdah.maintenance SET due_at = 'infinity' WHERE duty = 'sweep'")
    caller = connect(autocommit=False)
    async with running(running_worker, app, 2, concurrency=1) as workers:
        await idle(conn, 2)
        await waiting.all(2)
        await app.aqueue.enqueue("gated")
        await eventually(lambda: [w for w in workers if w.health()["running"]])
        full, free = sorted(workers, key=lambda worker: not worker.health()["running"])
        await waiting.all(1)
        enqueue_for(caller, queue, full, free)
        if late:
            (due,) = caller.execute(  # the margin of a head is 1 s
                "SELECT run_at + interval '1.3 s' FROM howdah.live_jobs WHERE job_type = 'quick'"
            ).fetchone()  # type: ignore[misc]
            query = "SELECT clock_timestamp() > %s"
            await eventually(lambda: conn.execute(query, [due]).fetchone() == (True,))
            conn.execute(
                "UPDATE howdah.sweeps SET raised = array_fill(clock_timestamp(), ARRAY[256])"
            )
        caller.commit()
        await eventually(lambda: ended(conn) == 1)  # no poll finds it within the hour
        flags = dict(conn.execute("SELECT worker_id, idle FROM howdah.workers").fetchall())
        assert flags[full.worker_id] is False
        gate.set()


@contextlib.asynccontextmanager
async def one_full_executor(
    run: RunWorker, app: App, conn: psycopg.Connection[Any], waiting: Waiting
) -> AsyncIterator[tuple[Worker, Worker, threading.Event]]:
    """Two idle workers. The first has no free slot for tasks in threads until the event is set."""
    gate = threading.Event()

    @app.task
    def long_in_thread() -> None:
        gate.wait(600)

    @app.task
    def quick_in_thread() -> None:
        pass

    add_tasks(app)
    async with (
        run(app, concurrency=1, queues=["default", "own"]) as full,
        run(app, concurrency=1, queues=["default"]) as free,
    ):
        await idle(conn, 2)
        await waiting.all(2)
        await app.aqueue.enqueue("long_in_thread", queue="own")
        await eventually(lambda: full.health()["running"])
        await waiting.all(2)
        try:
            yield full, free, gate
        finally:
            gate.set()


@pytest.mark.usefixtures("hourly")
async def test_a_worker_with_a_full_executor_passes_every_notification_for_it_on(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    queue: JobQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(monkeypatch)
    async with one_full_executor(running_worker, app, conn, waiting) as (full, free, _):
        for n in range(3):
            conn.execute("UPDATE howdah.workers SET full_types = '{}'")  # as if not written yet
            with conn.transaction():
                enqueue_for(conn, queue, full, free, "quick_in_thread")
            await eventually(lambda n=n: ended(conn, "quick_in_thread") == n + 1)
            await waiting.all(2)


@pytest.mark.usefixtures("hourly")
async def test_a_worker_is_not_chosen_for_the_types_of_a_full_executor(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(monkeypatch)
    chosen = "SELECT w FROM howdah.idle_workers('default', %s, 5) AS w"

    def choose(job_type: str) -> set[str]:
        return {worker for (worker,) in conn.execute(chosen, [job_type])}

    async with one_full_executor(running_worker, app, conn, waiting) as (full, free, gate):
        both = {full.worker_id, free.worker_id}
        await app.aqueue.enqueue("quick_in_thread")
        await eventually(lambda: ended(conn, "quick_in_thread") == 1)
        assert choose("quick_in_thread") == {free.worker_id}
        assert choose("quick") == both
        await app.aqueue.enqueue("long_in_thread")
        await eventually(lambda: free.health()["running"])
        await waiting.all(2)
        # Two workers that cannot run a job do not wake each other again and again.
        passes = Statements(monkeypatch, "pass_wake")
        conn.execute("UPDATE howdah.workers SET full_types = '{}'")
        await app.aqueue.enqueue("long_in_thread")
        await eventually(lambda: choose("long_in_thread") == set())
        await waiting.all(2)
        assert passes.count == 2
        gate.set()
        await eventually(lambda: ended(conn, "long_in_thread") == 3)
        await eventually(lambda: choose("long_in_thread") == both)


async def test_a_worker_without_notifications_is_not_chosen(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("howdah.database.listener.Listener.start", lambda listener: None)
    add_tasks(app)
    async with running(running_worker, app, 1):
        await idle(conn, 0)
        await app.aqueue.enqueue("quick")
        await eventually(lambda: ended(conn) == 1)


# ── if the chosen worker is gone ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_job_whose_worker_is_gone_is_claimed_by_another_within_two_seconds(
    tmp_path: Path, database: str, queue: JobQueue, conn: psycopg.Connection[Any], number: int
) -> None:
    children = Children(tmp_path, database)
    try:
        gone, left = (children.start("--concurrency", "2").ready() for _ in range(2))
        flags = "SELECT count(*) FROM howdah.workers WHERE idle"
        until(lambda: conn.execute(flags).fetchone() == (2,), "both workers are idle")
        os.kill(gone.pid, number)
        name = "SELECT worker_id FROM howdah.workers WHERE pid = %s"
        (survivor,) = conn.execute(name, [left.pid]).fetchone()  # type: ignore[misc]
        waited = []
        query = "SELECT extract(epoch FROM claimed_at - run_at) FROM howdah.jobs WHERE id = %s"
        for _ in range(4):
            with psycopg.connect(database) as caller:  # only the worker that is gone can be chosen
                caller.execute("UPDATE howdah.workers SET idle = worker_id <> %s", [survivor])
                job = queue.enqueue("noop", conn=caller)
                caller.execute("UPDATE howdah.workers SET idle = true")
            found = until(
                lambda job=job: (conn.execute(query, [job.id]).fetchone() or [None])[0],
                "another worker claimed the job",
            )
            waited.append(float(found))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(gone.pid, signal.SIGCONT)
        children.close()
    # Two seconds, and what a busy machine adds. Polls every five seconds would take longer than this
    # in one of four.
    assert sorted(waited)[2] < 3, waited
