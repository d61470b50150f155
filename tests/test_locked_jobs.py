"""A job that another transaction has locked is not lost: its acknowledgement waits for the end of that transaction,
which may roll back. SQL callers, the two queues, `task.run` and the worker."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from blocking import BlockingAsyncJobQueue
from howdah import Context, JobLocked, JobQueue, LeaseLost
from howdah.database.async_store import AsyncStore
from howdah.database.store import Store
from howdah.worker.rejected_outcomes import LOGGED_REJECTIONS
from waiting import ended, eventually, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from conftest import RunWorker
    from howdah import App, Job
    from howdah.protocol.statements import Statement

    Connect = Callable[..., psycopg.Connection[Any]]

OPERATIONS = {
    "cancel_jobs": "SELECT * FROM howdah.cancel_jobs(ARRAY[%s::uuid])",
    "takeover_jobs": "SELECT howdah.takeover_jobs(ARRAY[%s::uuid])",
    "recover_stale_jobs": "SELECT howdah.recover_stale_jobs('0') WHERE %s::uuid IS NOT NULL",
    "a lock of a caller": "SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE",
}
ACKNOWLEDGEMENTS: dict[str, Callable[[Any, Job], None]] = {
    "complete": lambda queue, job: queue.complete(job, "result"),
    "fail": lambda queue, job: queue.fail(job, "no", retry=False),
    "release": lambda queue, job: queue.release(job),
    "event": lambda queue, job: queue.event(job, "note"),
}
STATES = {"complete": "completed", "fail": "failed", "release": "pending", "event": "claimed"}
LOCK_WAITS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND wait_event_type = 'Lock'"
)


@pytest.fixture
def rejections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that a client asked why an acknowledgement was rejected."""
    asked: list[str] = []
    run, run_async = Store.run, AsyncStore.run

    def note(statement: Statement[Any]) -> None:
        if statement.operation == "held_jobs":
            asked.append(statement.operation)

    def noted(self: Store, statement: Statement[Any], conn: Any = None) -> Any:
        note(statement)
        return run(self, statement, conn)

    async def noted_async(self: AsyncStore, statement: Statement[Any], conn: Any = None) -> Any:
        note(statement)
        return await run_async(self, statement, conn)

    monkeypatch.setattr(Store, "run", noted)
    monkeypatch.setattr(AsyncStore, "run", noted_async)
    return asked


@pytest.fixture(params=[JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"])
def make_queue(request: pytest.FixtureRequest, database: str) -> Iterator[Callable[..., Any]]:
    queues = []

    def make(**options: Any) -> Any:
        queues.append(request.param(database, **options))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


def lock(connect: Connect, job_id: Any, how: str = "cancel_jobs") -> psycopg.Connection[Any]:
    """An operator's open transaction that has locked the job."""
    operator = connect(autocommit=False)
    operator.execute(OPERATIONS[how].encode(), (job_id,))
    return operator


@pytest.mark.parametrize("how", OPERATIONS)
def test_held_jobs_tells_a_locked_job_from_a_lost_one(connect: Connect, how: str) -> None:
    conn = connect()
    conn.execute("SELECT howdah.enqueue_job('work', p_max_attempts => 1)")
    job = conn.execute(
        "SELECT id, lease_id FROM howdah.claim_job_batch('w', p_started => true)"
    ).fetchone()
    assert job is not None
    complete = "SELECT * FROM howdah.complete_jobs(ARRAY[%s::uuid], ARRAY[%s::uuid])"
    held = "SELECT * FROM howdah.held_jobs(ARRAY[%s::uuid], ARRAY[%s::uuid])"
    operator = lock(connect, job[0], how)
    assert conn.execute(complete.encode(), job).fetchall() == []
    assert conn.execute(held.encode(), job).fetchall() == [job]
    operator.rollback()
    assert conn.execute(complete.encode(), job).fetchall() == [(job[0],)]
    assert conn.execute(held.encode(), job).fetchall() == []


@pytest.mark.parametrize("name", ACKNOWLEDGEMENTS)
@pytest.mark.parametrize("how", OPERATIONS)
def test_an_acknowledgement_waits_for_a_transaction_that_rolls_back(
    make_queue: Callable[..., Any], connect: Connect, rejections: list[str], how: str, name: str
) -> None:
    queue = make_queue()
    queue.enqueue("work", max_attempts=1)
    (job,) = queue.claim("work")
    operator = lock(connect, job.id, how)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ACKNOWLEDGEMENTS[name], queue, job)
        until(lambda: len(rejections) >= 2, "it was rejected twice")
        operator.rollback()
        answer.result(60)
    assert queue.get(job.id).status == STATES[name]


@pytest.mark.parametrize("name", ACKNOWLEDGEMENTS)
def test_an_acknowledgement_is_lost_when_the_other_transaction_took_the_job(
    make_queue: Callable[..., Any], connect: Connect, rejections: list[str], name: str
) -> None:
    queue = make_queue()
    queue.enqueue("work")
    (job,) = queue.claim("work")
    operator = lock(connect, job.id, "takeover_jobs")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ACKNOWLEDGEMENTS[name], queue, job)
        until(lambda: bool(rejections), "it was rejected")
        operator.commit()
        with pytest.raises(LeaseLost):
            answer.result(60)
    assert queue.get(job.id).status == "pending"


def test_a_job_that_stays_locked_is_an_error_that_says_so_and_the_others_are_completed(
    make_queue: Callable[..., Any], connect: Connect
) -> None:
    queue = make_queue(command_timeout=2.5)
    queue.enqueue_many([("work", None)] * 3)
    jobs = queue.claim("work")
    connect().execute("SELECT howdah.takeover_jobs(%s)", ([jobs[2].id],))
    operator = connect(autocommit=False)
    operator.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (jobs[0].id,))
    with pytest.raises(JobLocked, match="another transaction has locked 1 job") as caught:
        queue.complete(jobs, [1, 2, 3])
    assert caught.value.ids == (jobs[0].id,)
    assert caught.value.lost == (jobs[2].id,)
    assert queue.get(jobs[1].id).result == 2
    operator.rollback()
    queue.complete(jobs[0].id, 1)  # by its id: the fence is still known
    assert queue.get(jobs[0].id).result == 1


@pytest.mark.parametrize("how", OPERATIONS)
async def test_a_worker_writes_an_outcome_when_the_transaction_that_locked_the_job_rolls_back(
    app: App,
    running_worker: RunWorker,
    connect: Connect,
    rejections: list[str],
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The neighbours, which end meanwhile, are written at once."""
    runs: list[int] = []
    may_end = asyncio.Event()

    @app.task(max_attempts=1)
    async def work(n: int) -> int:
        runs.append(n)
        if n == 0:
            await may_end.wait()
        return n

    async with running_worker(app):
        handle = await work.aenqueue(0)
        await eventually(lambda: runs == [0], "it runs")
        operator = lock(connect, handle.id, how)
        may_end.set()
        await eventually(lambda: len(rejections) > LOGGED_REJECTIONS, "it was rejected")
        assert (await ended(await work.aenqueue(1))).status == "completed"
        assert (await handle.ajob()).status != "completed"
        operator.rollback()
        assert (await ended(handle)).status == "completed"
    assert runs == [0, 1]
    assert "lease lost" not in caplog.text
    assert "another transaction has locked jobs that have ended" in caplog.text


async def test_a_worker_waits_for_no_lock_while_an_operator_holds_jobs_that_report_and_end(
    app: App, running_worker: RunWorker, connect: Connect, rejections: list[str]
) -> None:
    """Their events are kept, and neither these nor their outcomes delay the reports and outcomes of the others."""
    may_end = asyncio.Event()
    started: list[int] = []

    @app.task(max_attempts=1)
    async def work(ctx: Context, n: int, held: bool) -> int:
        started.append(n)
        if held:
            await may_end.wait()
        ctx.event("ended", {"n": n})
        return n

    conn, waits = connect(), 0
    async with running_worker(app, concurrency=10):
        held = [await work.aenqueue(n, True) for n in range(5)]
        await eventually(lambda: len(started) == 5, "they run")
        operator = connect(autocommit=False)
        operator.execute(
            "SELECT FROM howdah.live_jobs WHERE id = ANY (%s) FOR UPDATE", ([h.id for h in held],)
        )
        may_end.set()
        await eventually(lambda: len(rejections) >= 2, "they were rejected")
        for n in range(10):
            handle = await work.aenqueue(5 + n, False)
            while (await handle.ajob()).status != "completed":
                waits += (conn.execute(LOCK_WAITS).fetchone() or (0,))[0]
        operator.rollback()
        jobs = [await ended(each) for each in held]
    assert waits == 0
    assert [job.result for job in jobs] == list(range(5))
    assert [job.events_count for job in jobs] == [1] * 5


async def test_a_suspect_that_an_operator_has_locked_starts_later_and_delays_no_other(
    app: App, running_worker: RunWorker, connect: Connect, rejections: list[str]
) -> None:
    ran: list[int] = []

    @app.task(max_attempts=1)
    async def work(n: int) -> int:
        ran.append(n)
        return n

    conn = connect()
    handles = [await work.aenqueue(n) for n in range(2)]
    conn.execute("UPDATE howdah.live_jobs SET claims = 3")
    operator = connect(autocommit=False)
    locked = threading.Event()

    def lock_first(statement: Statement[Any]) -> None:
        """Between the claim of the first suspect and the write of its start."""
        if statement.operation == "start_jobs" and not locked.is_set():
            operator.execute(
                "SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (handles[0].id,)
            )
            locked.set()

    run_async = AsyncStore.run

    async def run(self: AsyncStore, statement: Statement[Any], conn: Any = None) -> Any:
        lock_first(statement)
        return await run_async(self, statement, conn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncStore, "run", run)
        async with running_worker(app):
            assert (await ended(handles[1])).status == "completed"
            await eventually(lambda: len(rejections) >= 2, "the first was rejected")
            assert ran == [1]
            operator.rollback()
            assert (await ended(handles[0])).status == "completed"
    assert ran == [1, 0]


async def test_a_lease_that_expired_while_the_job_was_locked_does_not_cost_the_outcome(
    app: App, running_worker: RunWorker, connect: Connect, rejections: list[str]
) -> None:
    """Recovery runs all the time, and would end the job as failed."""
    may_end = threading.Event()
    started = threading.Event()

    @app.task(max_attempts=1)
    def work() -> str:
        started.set()
        assert may_end.wait(60)
        return "result"

    conn = connect()
    async with running_worker(app):
        handle = await work.aenqueue()
        await eventually(started.is_set, "it runs")
        conn.execute("UPDATE howdah.live_jobs SET lease_expires_at = clock_timestamp()")
        operator = lock(connect, handle.id)
        may_end.set()
        await eventually(lambda: bool(rejections), "it was rejected")
        assert conn.execute("SELECT howdah.recover_stale_jobs()").fetchone() == (0,)
        count = len(rejections)
        await eventually(lambda: len(rejections) > count, "it was rejected again")
        operator.rollback()
        job = await ended(handle)
    assert (job.status, job.result) == ("completed", "result")


def test_a_task_that_runs_here_waits_for_the_transaction_that_locked_its_job(
    sync_app: App, connect: Connect, rejections: list[str]
) -> None:
    operators: list[psycopg.Connection[Any]] = []

    @sync_app.task
    def work() -> str:
        conn = connect()
        (job_id,) = conn.execute("SELECT id FROM howdah.live_jobs").fetchone() or ()
        operators.append(lock(connect, job_id))
        return "result"

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(work.run)
        until(lambda: bool(rejections), "it was rejected")
        operators[0].rollback()
        assert answer.result(60) == "result"
