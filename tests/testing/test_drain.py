"""drain: runs pending jobs in the process of the test, on the database or in its open transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from howdah import App, Cancel, Context, Fail, JobNotFound, Retry, Snooze, Status, current
from howdah.testing import DrainResult, adrain, assert_enqueued, assert_not_enqueued, drain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

app = App()
ran: list[Any] = []


@app.task
def note(what: str, ctx: Context) -> str:
    ran.append(what)
    ctx.progress(50, stage="half")
    ctx.event("noted", {"what": what})
    return what.upper()


@app.task
async def anote(what: str) -> str:
    ran.append(what)
    return what.upper()


@app.task(max_attempts=3, retry=Retry.fixed(0))
def at_once(works_at: int, ctx: Context) -> None:
    if ctx.attempt < works_at:
        raise ValueError(f"attempt {ctx.attempt} broke")


@app.task(max_attempts=3, retry=Retry.fixed(3600))
def later(works_at: int, ctx: Context) -> None:
    if ctx.attempt < works_at:
        raise ValueError(f"attempt {ctx.attempt} broke")


@app.task
def end(how: str) -> None:
    match how:
        case "snooze":
            raise Snooze(3600)
        case "cancel":
            raise Cancel("not needed")
        case "fail":
            raise Fail("no use")


@app.task
def fan_out(n: int) -> None:
    for i in range(n):
        note.enqueue(f"child {i}")


@app.task
async def afan_out(n: int) -> None:
    for i in range(n):
        await note.aenqueue(f"child {i}")


@pytest.fixture(autouse=True)
def here(howdah_database: str) -> Iterator[str]:
    ran.clear()
    yield howdah_database
    app.close()


@pytest.fixture
async def ahere(here: str) -> AsyncIterator[str]:
    yield here
    await app.aclose()


# ── on the database ───────────────────────────────────────────────────────────────────────────────


def test_all_due_jobs_run_and_are_completed() -> None:
    handles = [note.enqueue("one"), anote.enqueue("two")]
    assert drain(app) == DrainResult(completed=2)
    assert [handle.result() for handle in handles] == ["ONE", "TWO"]
    job = handles[0].job()
    assert (job.attempts, job.progress, job.current_stage) == (1, 100, "half")
    assert [(e.kind, e.data) for e in app.queue.events(job)] == [("noted", {"what": "one"})]
    assert drain(app) == DrainResult()


async def test_adrain_runs_sync_and_async_tasks(ahere: str) -> None:
    handles = [await note.aenqueue("one"), await anote.aenqueue("two")]
    assert await adrain(app) == DrainResult(completed=2)
    assert [await handle.aresult() for handle in handles] == ["ONE", "TWO"]


async def test_drain_runs_an_async_task_inside_a_running_event_loop() -> None:
    anote.enqueue("one")
    assert drain(app).completed == 1


def test_jobs_run_by_priority() -> None:
    note.enqueue("usual")
    note.using(priority=150).enqueue("urgent")
    note.using(priority=30).enqueue("sometime")
    drain(app)
    assert ran == ["urgent", "usual", "sometime"]


def test_jobs_that_handlers_enqueue_run() -> None:
    fan_out.enqueue(3)
    assert drain(app) == DrainResult(completed=4)
    assert ran == ["child 0", "child 1", "child 2"]


def test_retries_that_are_due_immediately_run() -> None:
    at_once.enqueue(3)
    assert drain(app) == DrainResult(completed=1, retried=2)


def test_a_job_that_fails_permanently_is_counted_with_its_error() -> None:
    handle = at_once.enqueue(9)
    assert drain(app) == DrainResult(failed=1, retried=2, errors=("ValueError: attempt 3 broke",))
    kinds = [event.kind for event in app.queue.events(handle)]
    assert kinds == ["error"] * 3


def test_delayed_jobs_and_delayed_retries_stay_pending() -> None:
    later.enqueue(2)
    note.using(delay=60).enqueue("in a minute")
    assert drain(app) == DrainResult(retried=1)
    assert app.queue.pending() == 2


def test_with_scheduled_jobs_and_retries_run_in_due_order() -> None:
    note.using(delay=7200).enqueue("in two hours")
    note.using(delay=60).enqueue("in a minute")
    note.using(delay=3600).enqueue("in an hour")
    later.enqueue(3)
    assert drain(app, with_scheduled=True) == DrainResult(completed=4, retried=2)
    assert ran == ["in a minute", "in an hour", "in two hours"]


def test_snoozed_cancelled_and_failed_jobs_are_counted() -> None:
    for how in ("snooze", "cancel", "fail"):
        end.enqueue(how)
    assert drain(app) == DrainResult(snoozed=1, cancelled=1, failed=1, errors=("Fail: no use",))


def test_a_job_that_fails_after_a_cancel_request_is_cancelled() -> None:
    other = App()

    @other.task
    def stop_me(ctx: Context) -> None:
        other.queue.cancel(ctx.id)
        raise ValueError("broke")

    stop_me.enqueue()
    assert drain(other).cancelled == 1
    other.close()


def test_limit_is_the_maximum_number_of_runs() -> None:
    for n in range(3):
        note.enqueue(str(n))
    assert drain(app, limit=2).completed == 2
    assert ran == ["0", "1"]


def test_a_job_that_always_snoozes_stops_at_the_limit() -> None:
    end.enqueue("snooze")
    assert drain(app, with_scheduled=True, limit=5) == DrainResult(snoozed=5)


def test_only_jobs_of_the_given_queues_run() -> None:
    note.using(queue="fast").enqueue("fast")
    note.enqueue("default")
    assert drain(app, queues=["fast"]).completed == 1
    assert ran == ["fast"]
    assert drain(app).completed == 1


def test_jobs_without_a_task_of_the_app_stay_pending() -> None:
    app.queue.enqueue("of another app")
    assert drain(app) == DrainResult()
    assert app.queue.pending() == 1


def test_jobs_of_one_ordering_key_run_in_enqueue_order() -> None:
    for n in range(3):
        note.using(ordering_key="k", priority=100 + n).enqueue(str(n))
    assert drain(app).completed == 3
    assert ran == ["0", "1", "2"]


def test_handlers_read_the_resources() -> None:
    other = App()

    @other.task
    def use() -> str:
        return str(current().resources["db"])

    handle = use.enqueue()
    drain(other, resources={"db": "the test's own"})
    assert handle.job().result == "the test's own"
    other.close()


def test_pytest_fail_in_a_handler_is_raised_after_its_job_has_failed() -> None:
    other = App()

    @other.task(max_attempts=1)
    def interrupted() -> None:
        pytest.fail("from inside")

    handle = interrupted.enqueue()
    with pytest.raises(pytest.fail.Exception, match="from inside"):
        drain(other)
    assert handle.job().status == "failed"
    other.close()


# ── in an open transaction ────────────────────────────────────────────────────────────────────────


def test_a_rollback_removes_the_jobs(here: str) -> None:
    with psycopg.connect(here) as conn:
        handle = note.using(conn=conn).enqueue("one")
        assert drain(app, conn=conn) == DrainResult(completed=1)
        assert app.queue.get(handle, conn=conn).result == "ONE"
        conn.rollback()
    with pytest.raises(JobNotFound):
        handle.job()
    assert ran == ["one"]


def test_jobs_that_handlers_enqueue_are_part_of_the_transaction(here: str) -> None:
    with psycopg.connect(here) as conn:
        fan_out.using(conn=conn).enqueue(2)
        afan_out.using(conn=conn).enqueue(1)
        assert drain(app, conn=conn) == DrainResult(completed=5)
        assert_enqueued(note.using(conn=conn), "child 1")
        assert_not_enqueued(note)
        conn.rollback()
    assert sum(app.counts().values()) == 0
    note.enqueue("afterwards")
    assert app.queue.pending() == 1, "the app uses its own connections again"


def test_ordering_keys_are_assigned_before_the_commit(here: str) -> None:
    with psycopg.connect(here) as conn:
        for n in range(3):
            note.using(ordering_key="k", conn=conn).enqueue(str(n))
        assert drain(app, conn=conn).completed == 3
        conn.commit()
    assert ran == ["0", "1", "2"]
    assert app.counts()[Status.COMPLETED] == 3


def test_the_remaining_jobs_of_an_ordering_key_run_after_the_commit(here: str) -> None:
    with psycopg.connect(here) as conn:
        for n in range(3):
            note.using(ordering_key="k", conn=conn).enqueue(str(n))
        assert drain(app, conn=conn, limit=1).completed == 1
        conn.commit()
    assert drain(app).completed == 2
    assert ran == ["0", "1", "2"]


def test_the_callers_deferred_constraints_stay_deferred(here: str) -> None:
    with psycopg.connect(here) as conn:
        conn.execute("CREATE TEMP TABLE parent (id int PRIMARY KEY)")
        conn.execute(
            "CREATE TEMP TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
        )
        conn.execute("INSERT INTO child VALUES (1)")
        note.using(ordering_key="k", conn=conn).enqueue("one")
        assert drain(app, conn=conn).completed == 1
        conn.execute("INSERT INTO parent VALUES (1)")
        conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        conn.rollback()


def test_scheduled_jobs_and_retries_run_in_the_transaction(here: str) -> None:
    with psycopg.connect(here) as conn:
        later.using(conn=conn).enqueue(3)
        note.using(delay=60, conn=conn).enqueue("in a minute")
        assert drain(app, conn=conn, with_scheduled=True) == DrainResult(completed=2, retried=2)
        conn.rollback()


def test_the_error_of_a_handler_that_aborts_the_transaction_is_the_cause(here: str) -> None:
    other = App()
    with psycopg.connect(here) as conn:

        @other.task
        def divide() -> None:
            conn.execute("SELECT 1 / 0")

        divide.using(conn=conn).enqueue()
        with pytest.raises(psycopg.errors.InFailedSqlTransaction) as caught:
            drain(other, conn=conn)
        assert isinstance(caught.value.__cause__, psycopg.errors.DivisionByZero)
        conn.rollback()
    other.close()


def test_a_handler_can_complete_its_job_in_the_same_transaction(here: str) -> None:
    other = App()
    with psycopg.connect(here) as conn:

        @other.task
        def pay(complete: bool, ctx: Context) -> None:
            claim = ctx.completion()
            if complete:
                other.queue.complete(claim, {"rows": 1}, conn=conn)

        handle = pay.using(conn=conn).enqueue(True)
        pay.using(conn=conn, max_attempts=1).enqueue(False)
        result = drain(other, conn=conn)
        assert (result.completed, result.failed) == (1, 1)
        assert "did not commit" in result.errors[0]
        assert other.queue.get(handle, conn=conn).result == {"rows": 1}
        conn.rollback()
    other.close()


def test_drain_on_a_sqlalchemy_session(here: str) -> None:
    engine = create_engine(here.replace("postgresql:", "postgresql+psycopg:"))
    with Session(engine) as session:
        session.execute(text("CREATE TEMP TABLE users (id int)"))
        fan_out.using(conn=session, ordering_key="k").enqueue(1)
        assert drain(app, conn=session).completed == 2
        session.rollback()
    engine.dispose()
    assert sum(app.counts().values()) == 0


def test_drain_on_a_django_connection(here: str) -> None:
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure()
        django.setup()
    from django.db.utils import ConnectionHandler

    with psycopg.connect(here) as probe:
        address = {
            "NAME": probe.info.dbname,
            "USER": probe.info.user,
            "HOST": probe.info.host,
            "PORT": probe.info.port,
        }
    handler = ConnectionHandler({"default": {"ENGINE": "django.db.backends.postgresql", **address}})
    conn = handler["default"]
    conn.set_autocommit(False)
    try:
        fan_out.using(conn=conn, ordering_key="k").enqueue(1)
        assert drain(app, conn=conn).completed == 2
        conn.rollback()
    finally:
        conn.close()
    assert sum(app.counts().values()) == 0


async def test_adrain_on_an_asyncpg_connection(ahere: str) -> None:
    conn = await asyncpg.connect(ahere)
    transaction = conn.transaction()
    await transaction.start()
    await afan_out.using(conn=conn, ordering_key="k").aenqueue(1)
    await fan_out.using(conn=conn).aenqueue(1)
    assert await adrain(app, conn=conn) == DrainResult(completed=4)
    await transaction.rollback()
    await conn.close()
    assert sum((await app.aqueue.counts()).values()) == 0


async def test_adrain_on_an_async_psycopg_connection(ahere: str) -> None:
    async with await psycopg.AsyncConnection.connect(ahere) as conn:
        await afan_out.using(conn=conn, ordering_key="k").aenqueue(2)
        assert await adrain(app, conn=conn) == DrainResult(completed=3)
        await conn.rollback()
    assert sum((await app.aqueue.counts()).values()) == 0


async def test_adrain_on_a_sqlalchemy_async_session(ahere: str) -> None:
    engine = create_async_engine(ahere.replace("postgresql:", "postgresql+psycopg:"))
    async with AsyncSession(engine) as session:
        await afan_out.using(conn=session, ordering_key="k").aenqueue(2)
        assert await adrain(app, conn=session, with_scheduled=True) == DrainResult(completed=3)
        await session.rollback()
    await engine.dispose()
    assert sum((await app.aqueue.counts()).values()) == 0


async def test_a_sync_enqueue_in_the_event_loop_of_the_connection_is_rejected(ahere: str) -> None:
    other = App()

    @other.task(retry=Retry.never())
    async def wrong() -> None:
        wrong.enqueue()

    async with await psycopg.AsyncConnection.connect(ahere) as conn:
        await wrong.using(conn=conn).aenqueue()
        result = await adrain(other, conn=conn)
        assert "call aenqueue there" in result.errors[0]
        await conn.rollback()
    await other.aclose()
