"""The context of a run, and its reports as others read them. It is the same in each executor."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import psycopg
import pytest

import howdah
from howdah import Aborted, Context, HowdahError, InvalidOption, Retry, Status
from howdah.execution import heartbeat as heartbeat_module
from waiting import ended, eventually, lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import RunWorker
    from howdah import App, Job

in_each_executor = pytest.mark.parametrize("executor", ["async", "thread", "process"])


@in_each_executor
async def test_a_context_has_the_fields_of_its_run(
    module_app: App, running_worker: RunWorker, executor: str
) -> None:
    task = module_app.tasks[f"{executor}:describes"]
    handle = await task.using(request_id="r-1", idempotency_key=f"k-{executor}").aenqueue()
    async with running_worker(module_app):
        fields = await handle.aresult(120)
    deadline = datetime.fromisoformat(fields.pop("deadline"))
    assert timedelta(0) < deadline - datetime.now(UTC) < timedelta(seconds=51)
    assert UUID(fields.pop("id")) == handle.id
    assert fields == {
        "job_type": f"{executor}:describes",
        "queue": "default",
        "attempt": 1,
        "max_attempts": 7,
        "request_id": "r-1",
        "idempotency_key": f"k-{executor}",
        "cancelled": False,
    }


@in_each_executor
async def test_no_event_is_lost_when_the_job_ends_right_after(
    module_app: App, running_worker: RunWorker, executor: str
) -> None:
    handle = await module_app.tasks[f"{executor}:reports"].aenqueue(300)
    async with running_worker(module_app):
        job = await ended(handle)
    events = await module_app.aqueue.events(handle)
    assert [e.data["n"] for e in events if e.kind == "step"] == list(range(300))
    assert (events[-1].kind, events[-1].data) == ("log", {"text": "done � ?"})
    assert job.events_count == len(events) == 301
    assert (job.status, job.progress, job.current_stage) == (Status.COMPLETED, 100, "last")


@in_each_executor
async def test_the_error_of_a_failed_attempt_comes_after_its_reports(
    module_app: App, running_worker: RunWorker, executor: str
) -> None:
    handle = await module_app.tasks[f"{executor}:fails_at_a_stage"].aenqueue()
    async with running_worker(module_app) as worker:
        job = await ended(handle)
    assert (job.progress, job.current_stage, job.events_count) == (40, "packing", 2)
    first, second = await module_app.aqueue.events(handle)
    assert (first.kind, second.kind) == ("about to fail", "error")
    assert second.data["error"] == "RuntimeError: torn"
    assert second.data["worker"] == worker.worker_id
    assert 'raise RuntimeError("torn")' in second.data["traceback"]


@in_each_executor
async def test_a_first_report_and_a_new_stage_need_no_ordinary_flush_and_percent_never_decreases(
    module_app: App,
    running_worker: RunWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
) -> None:
    # Neither the ordinary flush nor the heartbeat writes them.
    monkeypatch.setattr(heartbeat_module, "FLUSH_SECONDS", 3600.0)
    monkeypatch.setattr(heartbeat_module, "MAX_PERIOD_SECONDS", 3600.0)
    release = tmp_path / "release"
    name = "goes_back" if executor != "async" else None
    if name is None:

        @module_app.task(name="async:goes_back_slowly")
        async def goes_back(ctx: Context) -> None:
            ctx.progress(60, stage="one")
            ctx.progress(20)
            ctx.progress(float("nan"))
            ctx.progress(stage="two")
            await eventually(release.exists)

        handle: Any = await goes_back.aenqueue()
    else:
        handle = await module_app.tasks[f"{executor}:{name}"].aenqueue(release=str(release))

    async def shown() -> Job | None:
        job = await handle.ajob()
        return job if job.current_stage == "two" else None

    async with running_worker(module_app, lease=3600):
        job = await eventually(shown)
        assert (job.progress, job.status) == (60, Status.RUNNING)
        release.touch()
        await ended(handle)


async def test_reports_of_many_threads_at_once_are_all_written(
    app: App, running_worker: RunWorker
) -> None:
    @app.task
    def chatty(ctx: Context) -> None:
        def talk(number: int) -> None:
            for n in range(200):
                ctx.event("said", {"by": number, "n": n})
                ctx.progress(n / 2, stage=f"{number}")

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    handle = await chatty.aenqueue()
    async with running_worker(app):
        job = await ended(handle)
    assert job.status is Status.COMPLETED
    events = await app.aqueue.events(handle)
    assert job.events_count == len(events) == 800
    for number in range(4):
        assert [e.data["n"] for e in events if e.data["by"] == number] == list(range(200))


async def test_progress_that_is_not_a_number_is_rejected(
    app: App, running_worker: RunWorker
) -> None:
    @app.task(max_attempts=1)
    def wrong(ctx: Context) -> str:
        with pytest.raises(InvalidOption, match="percent must be a number, not str"):
            ctx.progress("half")  # type: ignore[arg-type]
        ctx.event("")
        return "went on"

    handle = await wrong.aenqueue()
    async with running_worker(app):
        assert await handle.aresult(120) == "went on"
    assert [event.kind for event in await app.aqueue.events(handle)] == ["event"]


async def test_a_context_is_passed_to_any_parameter_annotated_with_it(
    app: App, running_worker: RunWorker
) -> None:
    @app.task
    def first(ctx: Context, x: int) -> list[Any]:
        return [x, ctx.attempt]

    @app.task
    def positional(ctx: Context, /, x: int) -> list[Any]:
        return [x, ctx.attempt]

    @app.task
    def before_many(ctx: Context, *xs: int) -> list[Any]:
        return [*xs, ctx.attempt]

    @app.task
    async def keyword(x: int, *, ctx: Context) -> list[Any]:
        return [x, ctx.attempt]

    @app.task
    async def optional(x: int, ctx: Context | None = None) -> list[Any]:
        return [x, ctx and ctx.attempt]

    @app.task
    def none_at_all(x: int) -> list[Any]:
        return [x, howdah.current().attempt]

    tasks = (first, positional, before_many, keyword, optional, none_at_all)
    async with running_worker(app):
        for task in tasks:
            handle = await task.aenqueue(5)  # type: ignore[call-arg]
            assert await handle.aresult(120) == [5, 1], task.name
    # A direct call gets a context whose reports are discarded.
    assert first(5) == positional(5) == before_many(5) == [5, 1]  # type: ignore[call-arg]
    assert await keyword(5) == [5, 1]  # type: ignore[call-arg]
    mine = Context(id=UUID(int=1), job_type="first", attempt=9)
    assert first(mine, 5) == [5, 9]  # type: ignore[call-arg, arg-type]
    assert await keyword(5, ctx=mine) == [5, 9]


async def test_current_outside_of_a_run_raises() -> None:
    with pytest.raises(HowdahError, match="outside of a running task"):
        howdah.current()


async def test_every_call_of_the_context_raises_in_a_handler_that_must_stop(
    app: App, running_worker: RunWorker, tmp_path: Path
) -> None:
    @app.task
    def listens(ctx: Context) -> None:
        (tmp_path / "ran").write_text("ran\n")
        while not ctx.cancelled:
            pass
        calls: list[Callable[[], Any]] = [
            ctx.check,
            lambda: ctx.progress(1),
            lambda: ctx.event("x"),
            lambda: ctx.log("x"),
            ctx.completion,
        ]
        for call in calls:
            with pytest.raises(Aborted, match="cancelled"):
                call()
        try:
            ctx.check()
        except Exception:
            pytest.fail("except Exception must not catch an abort")

    handle = await listens.aenqueue()
    async with running_worker(app):
        await eventually(lambda: lines(tmp_path / "ran"))
        await handle.acancel()
        job = await ended(handle)
    assert job.status is Status.CANCELLED
    assert job.last_error == "cancelled while running"


@in_each_executor
async def test_the_jobs_that_a_handler_enqueues_get_its_request_id(
    module_app: App, running_worker: RunWorker, executor: str
) -> None:
    task = module_app.tasks[f"{executor}:enqueues_another"]
    async with running_worker(module_app):
        child = await (await task.using(request_id="r-7").aenqueue()).aresult(120)
        assert (await module_app.aqueue.get(child)).request_id == "r-7"
        child = await (await task.aenqueue()).aresult(120)
        assert (await module_app.aqueue.get(child)).request_id is None


# ── completing the job in the handler's transaction ───────────────────────────────────────────────


@pytest.fixture
def table(connect: Callable[..., psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    conn = connect()
    conn.execute("CREATE TABLE IF NOT EXISTS charges (job uuid, attempt int)")
    conn.execute("TRUNCATE charges")
    return conn


@in_each_executor
async def test_rows_and_completion_commit_together_exactly_once(
    module_app: App,
    running_worker: RunWorker,
    database: str,
    table: psycopg.Connection[Any],
    executor: str,
) -> None:
    """The first attempt raises before its commit, and the second commits."""
    app = module_app

    @app.task(name="thread:charge", retry=Retry.fixed(0))
    def charge(ctx: Context) -> str:
        ctx.event("before", {"attempt": ctx.attempt})
        with psycopg.connect(database) as conn:
            conn.execute("INSERT INTO charges VALUES (%s, %s)", [ctx.id, ctx.attempt])
            app.queue.complete(ctx.completion(), {"charged": ctx.attempt}, conn=conn)
            if ctx.attempt == 1:
                raise OSError("torn before the commit")
        return "not stored: the transaction has written the result"

    @app.task(name="async:charge", retry=Retry.fixed(0))
    async def acharge(ctx: Context) -> str:
        ctx.event("before", {"attempt": ctx.attempt})
        conn = await asyncpg.connect(database)
        try:
            async with conn.transaction():
                await conn.execute("INSERT INTO charges VALUES ($1, $2)", ctx.id, ctx.attempt)
                await app.aqueue.complete(ctx.completion(), {"charged": ctx.attempt}, conn=conn)
                if ctx.attempt == 1:
                    raise OSError("torn before the commit")
        finally:
            await conn.close()
        return "not stored: the transaction has written the result"

    handle = await app.tasks[f"{executor}:charge"].aenqueue()
    async with running_worker(app):
        job = await ended(handle)
        # The event from before the commit may be written after the job ended.
        await eventually(lambda: _counted(app, handle, 3))
    assert (job.status, job.attempts, job.result) == (Status.COMPLETED, 2, {"charged": 2})
    assert table.execute("SELECT job, attempt FROM charges").fetchall() == [(handle.id, 2)]
    events = await app.aqueue.events(handle)
    assert [(e.kind, e.attempt) for e in events] == [("before", 1), ("error", 1), ("before", 2)]


async def _counted(app: App, handle: Any, count: int) -> bool:
    return (await app.aqueue.get(handle)).events_count == count


async def test_a_completion_that_was_rolled_back_is_a_failed_attempt(
    app: App, running_worker: RunWorker, database: str, table: psycopg.Connection[Any]
) -> None:
    @app.task
    def forgets_to_commit(ctx: Context) -> None:
        conn = psycopg.connect(database)
        conn.execute("INSERT INTO charges VALUES (%s, %s)", [ctx.id, ctx.attempt])
        app.queue.complete(ctx.completion(), conn=conn)
        if ctx.attempt == 1:
            conn.rollback()
        else:
            conn.commit()
        conn.close()

    handle = await forgets_to_commit.aenqueue()
    async with running_worker(app):
        job = await ended(handle)
    assert (job.status, job.attempts) == (Status.COMPLETED, 2)
    assert table.execute("SELECT attempt FROM charges").fetchall() == [(2,)]
    (error,) = await app.aqueue.events(handle)
    assert "did not commit" in error.data["error"]


async def test_a_stale_completion_rolls_back_the_handlers_rows(
    app: App, running_worker: RunWorker, database: str, table: psycopg.Connection[Any]
) -> None:
    @app.task
    def too_late(ctx: Context) -> None:
        with psycopg.connect(database) as conn:
            conn.execute("INSERT INTO charges VALUES (%s, %s)", [ctx.id, ctx.attempt])
            table.execute(
                "UPDATE howdah.live_jobs SET lease_id = gen_random_uuid() WHERE id = %s", [ctx.id]
            )
            app.queue.complete(ctx.completion(), conn=conn)

    handle = await too_late.aenqueue()
    async with running_worker(app) as worker:
        await eventually(lambda: _is_claimed(app, handle))
        await eventually(lambda: worker.health()["running"] == 0)
    assert table.execute("SELECT * FROM charges").fetchall() == []
    assert not (await handle.ajob()).status.is_final


async def _is_claimed(app: App, handle: Any) -> bool:
    return (await app.aqueue.get(handle)).claims > 0


async def test_a_direct_call_has_no_lease_to_complete_under() -> None:
    with pytest.raises(HowdahError, match="the task was called directly"):
        Context(id=UUID(int=1), job_type="x").completion()


async def test_events_are_retried_and_the_outcome_is_written_after_them(
    app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from howdah.database.store import Store
    from howdah.errors import DatabaseUnreachable

    away = threading.Event()
    attempts: list[int] = []
    run_all = Store.run_all

    def unreliable(self: Store, statements: Any) -> Any:
        if away.is_set() and "add_events" in statements[0].text:
            attempts.append(1)
            raise DatabaseUnreachable("here", "there", "away")
        return run_all(self, statements)

    monkeypatch.setattr(Store, "run_all", unreliable)
    going_on = threading.Event()

    @app.task
    def reports(ctx: Context) -> None:
        for n in range(3):
            ctx.event("step", {"n": n})
        going_on.wait(120)

    away.set()
    handle = await reports.aenqueue()
    async with running_worker(app) as worker:
        await eventually(lambda: attempts)
        going_on.set()
        await eventually(lambda: worker.health()["running"] == 0)  # the handler has returned
        failures = len(attempts)
        await eventually(lambda: len(attempts) > failures + 1)
        assert not (await handle.ajob()).status.is_final  # the outcome is written after the events
        away.clear()
        await ended(handle)
    assert [e.data["n"] for e in await app.aqueue.events(handle)] == [0, 1, 2]
