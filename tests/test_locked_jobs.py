"""A job that another transaction has locked is not lost: its acknowledgement waits for the end of that transaction,
which may roll back. SQL callers, the two queues, `task.run` and the worker."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from blocking import BlockingAsyncJobQueue
from howdah import JobLocked, JobQueue, LeaseLost
from howdah.worker.rejected_outcomes import LOGGED_REJECTIONS
from waiting import ended, eventually, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from conftest import RunWorker
    from howdah import App, Job
    from proxy import Proxy

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


@pytest.fixture(params=[JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"])
def make_queue(request: pytest.FixtureRequest, database: str) -> Iterator[Callable[..., Any]]:
    queues = []

    def make(url: str = database, **options: Any) -> Any:
        queues.append(request.param(url, **options))
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
    make_queue: Callable[..., Any], connect: Connect, sent: list[str], how: str, name: str
) -> None:
    queue = make_queue()
    queue.enqueue("work", max_attempts=1)
    (job,) = queue.claim("work")
    operator = lock(connect, job.id, how)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ACKNOWLEDGEMENTS[name], queue, job)
        until(lambda: sent.count("held_jobs") >= 2, "it was rejected twice")
        operator.rollback()
        answer.result(60)
    assert queue.get(job.id).status == STATES[name]


@pytest.mark.parametrize("name", ACKNOWLEDGEMENTS)
def test_an_acknowledgement_is_lost_when_the_other_transaction_took_the_job(
    make_queue: Callable[..., Any], connect: Connect, sent: list[str], name: str
) -> None:
    queue = make_queue()
    queue.enqueue("work")
    (job,) = queue.claim("work")
    operator = lock(connect, job.id, "takeover_jobs")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ACKNOWLEDGEMENTS[name], queue, job)
        until(lambda: "held_jobs" in sent, "it was rejected")
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
    sent: list[str],
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
        await eventually(lambda: sent.count("held_jobs") > LOGGED_REJECTIONS, "it was rejected")
        assert (await ended(await work.aenqueue(1))).status == "completed"
        assert (await handle.ajob()).status != "completed"
        operator.rollback()
        assert (await ended(handle)).status == "completed"
    assert runs == [0, 1]
    assert "lease lost" not in caplog.text
    assert "another transaction has locked jobs that have ended" in caplog.text


async def test_a_lease_that_expired_while_the_job_was_locked_does_not_cost_the_outcome(
    app: App, running_worker: RunWorker, connect: Connect, sent: list[str]
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
        operator = lock(connect, handle.id)
        conn.execute("UPDATE howdah.leases SET expires_at = clock_timestamp()")
        may_end.set()
        await eventually(lambda: "held_jobs" in sent, "it was rejected")
        assert conn.execute("SELECT howdah.recover_stale_jobs()").fetchone() == (0,)
        count = sent.count("held_jobs")
        await eventually(lambda: sent.count("held_jobs") > count, "it was rejected again")
        operator.rollback()
        job = await ended(handle)
    assert (job.status, job.result) == ("completed", "result")


def test_a_task_that_runs_here_waits_for_the_transaction_that_locked_its_job(
    sync_app: App, connect: Connect, sent: list[str]
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
        until(lambda: "held_jobs" in sent, "it was rejected")
        operators[0].rollback()
        assert answer.result(60) == "result"


def test_a_completion_whose_first_send_is_still_running_counts_as_its_own(
    make_queue: Callable[..., Any],
    connect: Connect,
    proxy: Proxy,
    database: str,
    sent: list[str],
) -> None:
    """The connection broke, and the server goes on with the statement: it holds the lock, and commits."""
    conn = connect()
    conn.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END';"
        "CREATE TRIGGER wait BEFORE INSERT ON howdah.finished_jobs FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    holder = connect(autocommit=False)
    holder.execute("SELECT pg_advisory_xact_lock(1)")
    queue = make_queue(url=proxy.url(conn.info.dbname))
    queue.enqueue("work")
    (job,) = queue.claim("work")
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock'"
    )
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(queue.complete, job, "result")
        until(lambda: conn.execute(waits).fetchone() == (1,), "the first send waits")
        proxy.refuse()
        proxy.accept()
        until(lambda: "held_jobs" in sent, "the second send was rejected")
        holder.rollback()
        answer.result(60)
    assert queue.get(job.id).result == "result"
