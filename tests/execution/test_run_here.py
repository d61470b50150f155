"""`task.run` and `task.arun`: a job that runs in the caller's process, and in a worker if the process is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextvars import copy_context
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import howdah
from howdah import (
    App,
    Cancel,
    Context,
    HowdahError,
    IdempotencyConflict,
    InvalidOption,
    JobCancelled,
    LeaseLost,
    Retry,
    Snooze,
    Status,
    TaskInFlight,
)
from waiting import ended, eventually, lines

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunWorker
    from howdah import Job


def last(app: App, job_type: str) -> Job:
    return app.find(job_type=job_type, limit=1)[0]


def test_a_run_gives_the_result_and_leaves_a_completed_job(sync_app: App) -> None:
    @sync_app.task
    def double(ctx: Context, x: int) -> dict[str, Any]:
        ctx.event("seen", {"x": x})
        assert sync_app.queue.get(ctx.id).status is Status.RUNNING
        return {"x": 2 * x, "attempt": ctx.attempt}

    assert double.run(4) == {"x": 8, "attempt": 1}
    job = last(sync_app, "double")
    assert (job.status, job.result, job.attempts) == (Status.COMPLETED, {"x": 8, "attempt": 1}, 1)
    assert [event.kind for event in sync_app.queue.events(job)] == ["seen"]


async def test_an_async_task_runs_in_the_callers_loop(app: App) -> None:
    loop = asyncio.get_running_loop()

    @app.task
    async def now(ctx: Context) -> datetime:
        assert asyncio.get_running_loop() is loop
        return datetime(2026, 1, 1, tzinfo=UTC)

    @app.task
    def sync(x: int) -> int:
        return x

    assert await now.arun() == datetime(2026, 1, 1, tzinfo=UTC)
    assert await sync.arun(3) == 3
    with pytest.raises(InvalidOption, match=r"await its arun\(\)"):
        now.run()


def test_an_async_task_runs_without_an_event_loop(sync_app: App) -> None:
    @sync_app.task
    async def anywhere(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    assert anywhere.run(1) == 2


def test_a_second_run_under_one_key_gives_the_stored_result(sync_app: App) -> None:
    ran: list[int] = []

    @sync_app.task
    def once(x: int) -> int:
        ran.append(x)
        return x

    keyed = once.using(idempotency_key="once-1")
    assert [keyed.run(1), keyed.run(1), once.run(3)] == [1, 1, 3]
    assert ran == [1, 3]


def test_a_run_under_a_key_whose_job_is_in_flight_raises_task_in_flight(sync_app: App) -> None:
    began, release = threading.Event(), threading.Event()

    @sync_app.task
    def slow(x: int) -> int:
        began.set()
        release.wait(120)
        return x

    keyed = slow.using(idempotency_key="slow-1")
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(keyed.run(1)))
    thread.start()
    assert began.wait(120)
    with pytest.raises(TaskInFlight, match="has not ended; wait for its result"):
        keyed.run(1)
    release.set()
    thread.join(120)
    assert results == [1]
    assert keyed.run(1) == 1
    with pytest.raises(IdempotencyConflict, match="which has other data"):
        keyed.run(2)


async def test_an_exception_is_raised_to_the_caller_and_a_worker_retries_the_job(
    app: App, running_worker: RunWorker
) -> None:
    @app.task(retry=Retry.fixed(0))
    async def second_time(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise KeyError("not yet")
        return ctx.attempt

    with pytest.raises(KeyError, match="not yet"):
        await second_time.using(idempotency_key="second").arun()
    with pytest.raises(TaskInFlight):
        await second_time.using(idempotency_key="second").arun()
    async with running_worker(app):
        (job,) = await app.aqueue.find(job_type="second_time")
        handle: Any = await asyncio.to_thread(app.handle, job)
        assert await handle.aresult(120) == 2
    assert await second_time.using(idempotency_key="second").arun() == 2


def test_a_second_run_under_the_key_of_a_failed_job_runs_again(sync_app: App) -> None:
    @sync_app.task(max_attempts=1)
    def strict(x: int) -> int:
        if x < 0:
            raise ValueError("no")
        return x

    keyed = strict.using(idempotency_key="strict")
    with pytest.raises(ValueError, match="no"):
        keyed.run(-1)
    assert keyed.run(1) == 1


def test_a_run_can_cancel_or_snooze_its_job(sync_app: App) -> None:
    @sync_app.task
    def cancels() -> None:
        raise Cancel("no need")

    @sync_app.task
    def snoozes() -> None:
        raise Snooze(60)

    with pytest.raises(JobCancelled):
        cancels.run()
    with pytest.raises(TaskInFlight):
        snoozes.run()
    job = last(sync_app, "snoozes")
    assert (job.status, job.attempts) == (Status.PENDING, 0)


def test_a_result_that_cannot_be_stored_raises_to_the_caller_and_fails_the_job(
    sync_app: App,
) -> None:
    @sync_app.task
    def unstorable() -> object:
        return object()

    with pytest.raises(howdah.InvalidJob, match="cannot be stored as JSON"):
        unstorable.run()
    assert last(sync_app, "unstorable").status is Status.FAILED


@pytest.mark.parametrize("option", ["delay", "ordering_key", "run_at", "conn"])
def test_an_option_that_does_not_apply_to_run_is_rejected(sync_app: App, option: str) -> None:
    @sync_app.task
    def f() -> None: ...

    with pytest.raises(InvalidOption, match=f"{option} does not apply to run\\(\\)"):
        f.using(**{option: 1}).run()


def test_a_request_id_reaches_the_run_and_what_it_enqueues(sync_app: App) -> None:
    @sync_app.task
    def child() -> None: ...

    @sync_app.task
    def parent(ctx: Context) -> str | None:
        child.enqueue()
        return ctx.request_id

    def request() -> None:
        howdah.request_id.set("r-9")
        assert parent.run() == "r-9"

    copy_context().run(request)
    assert last(sync_app, "parent").request_id == "r-9"
    assert last(sync_app, "child").request_id == "r-9"


def test_a_long_run_keeps_its_lease(database: str) -> None:
    app = App(database, lease=3)

    @app.task
    def long(ctx: Context) -> int:
        end = app.queue.get(ctx.id).lease_expires_at
        assert end is not None
        while datetime.now(UTC) <= end:  # until its first lease would have expired
            time.sleep(0.05)
        app.queue.recover_stale_jobs()
        return ctx.attempt

    assert long.run() == 1
    assert last(app, "long").attempts == 1
    app.close()


def test_a_run_that_lost_its_lease_raises_lease_lost_and_writes_nothing(sync_app: App) -> None:
    @sync_app.task
    def stolen(ctx: Context) -> str:
        assert sync_app.takeover(ctx.id)
        return "late"

    with pytest.raises(LeaseLost):
        stolen.run()
    assert last(sync_app, "stolen").status is Status.PENDING


@pytest.mark.parametrize("how", ["cancel", "takeover"])
async def test_an_async_run_is_stopped_when_it_is_cancelled_or_taken_over(
    database: str, how: str
) -> None:
    app = App(database, lease=0.6)
    stopped = False

    @app.task(name=f"stopped-by-{how}")
    async def endless(ctx: Context) -> None:
        nonlocal stopped
        await (app.aqueue.cancel(ctx.id) if how == "cancel" else app.atakeover(ctx.id))
        try:
            await asyncio.sleep(60)
        finally:
            stopped = True

    with pytest.raises(JobCancelled if how == "cancel" else LeaseLost):
        await endless.arun()
    assert stopped
    await app.aclose()
    await asyncio.to_thread(app.close)


async def test_an_async_run_whose_caller_is_cancelled_is_released(
    app: App, running_worker: RunWorker
) -> None:
    begun = asyncio.Event()

    @app.task
    async def abandoned(ctx: Context) -> str:
        if ctx.resources.get("by") != "worker":
            begun.set()
            await asyncio.Event().wait()
        return "by the worker"

    @app.lifespan
    def resources() -> Any:
        yield {"by": "worker"}

    running = asyncio.create_task(abandoned.using(idempotency_key="abandoned").arun())
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (job,) = await app.aqueue.find(job_type="abandoned")
    assert (job.status, job.attempts) == (Status.PENDING, 0)
    async with running_worker(app):
        handle: Any = await asyncio.to_thread(app.handle, job)
        assert await handle.aresult(120) == "by the worker"


def test_a_run_can_complete_its_job_in_its_own_transaction(sync_app: App, database: str) -> None:
    @sync_app.task
    def completes(ctx: Context, commit: bool) -> None:
        ctx.event("before")
        with psycopg.connect(database) as conn:
            sync_app.queue.complete(ctx.completion(), {"completed": True}, conn=conn)
            if not commit:
                conn.rollback()

    assert completes.run(True) == {"completed": True}
    job = last(sync_app, "completes")
    assert (job.status, job.events_count) == (Status.COMPLETED, 1)
    with pytest.raises(HowdahError, match="did not commit"):
        completes.run(False)
    job = last(sync_app, "completes")
    assert (job.status, job.attempts, job.events_count) == (Status.PENDING, 1, 2)


CODE = """
import os, signal, sys, time
from howdah import App, Context
app = App(sys.argv[1], lease=1)
@app.task
def killed(path: str, ctx: Context) -> int:
    with open(path, "a") as file:
        file.write(f"{ctx.attempt}\\n")
    if ctx.attempt == 1:
        time.sleep(60)
    return ctx.attempt
"""


async def test_a_worker_runs_the_job_of_a_process_that_was_killed(
    app: App, running_worker: RunWorker, database: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "ran")
    run = CODE + "killed.using(idempotency_key='killed').run(sys.argv[2])\n"
    command = [sys.executable, "-c", run, database, path]
    with subprocess.Popen(command) as process:  # noqa: ASYNC220
        await eventually(lambda: lines(path))

        @app.task
        def killed(path: str, ctx: Context) -> int:
            with open(path, "a") as file:
                file.write(f"{ctx.attempt}\n")
            return ctx.attempt

        with pytest.raises(TaskInFlight):  # the other process still runs it
            await killed.using(idempotency_key="killed").arun(path)  # type: ignore[call-arg]
        process.send_signal(signal.SIGKILL)
    async with running_worker(app):
        (job,) = await app.aqueue.find(job_type="killed")
        handle: Any = await asyncio.to_thread(app.handle, job)
        job = await ended(handle)
    assert (job.status, job.result, job.attempts) == (Status.COMPLETED, 2, 2)
    assert lines(path) == ["1", "2"]


def test_a_run_whose_claim_was_not_answered_is_resent_and_makes_one_job(
    sync_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sync_app.task
    def repeated(ctx: Context) -> int:
        return ctx.attempt

    fetch = howdah.database.store._fetch  # type: ignore[attr-defined]
    broken: list[bool] = []

    def lose_answer(conn: Any, statement: Any, again: bool) -> Any:
        rows = fetch(conn, statement, again)
        if "enqueue_and_claim" in statement.text and not broken:
            broken.append(True)
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return rows

    monkeypatch.setattr("howdah.database.store._fetch", lose_answer)
    assert repeated.run() == 1
    assert broken
    assert len(sync_app.find(job_type="repeated")) == 1
