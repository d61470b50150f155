"""The slots: no job inherits anything from the job before it, none dies unseen, and executors do not take each
other's slots."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest

from howdah import Status, current
from howdah.execution.handler import CANCELLED_BY_ITSELF
from howdah.outcome import Aborted
from howdah.worker import executor_slots, executors
from howdah.worker.prefetch import Prefetch
from waiting import ended, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

    from conftest import RunWorker
    from howdah import App, TaskHandle, Worker


class Incomparable:
    """Like a numpy array: `==` has no truth value."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


VARIABLE: ContextVar[Any] = ContextVar("variable", default=None)


async def cancels_itself_and_returns() -> None:
    asyncio.current_task().cancel()  # type: ignore[union-attr]


async def swallows_its_cancellation() -> None:
    asyncio.current_task().cancel()  # type: ignore[union-attr]
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)


async def ends_in_a_cancelled_error_while_cancelling() -> None:
    asyncio.current_task().cancel()  # type: ignore[union-attr]
    await asyncio.sleep(60)


async def swallows_and_raises_later() -> None:
    await swallows_its_cancellation()
    raise asyncio.CancelledError


async def leaves_a_timer_that_cancels() -> None:
    slot = asyncio.current_task()
    asyncio.get_running_loop().call_later(0.2, slot.cancel)  # type: ignore[union-attr]


async def swallows_the_cancellation_of_a_task_group() -> None:
    async def fails() -> None:
        raise OSError("torn")

    with contextlib.suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)


async def sets_a_variable_that_cannot_be_compared() -> None:
    VARIABLE.set(Incomparable())


HARMFUL = [
    cancels_itself_and_returns, swallows_its_cancellation, ends_in_a_cancelled_error_while_cancelling,
    swallows_and_raises_later, leaves_a_timer_that_cancels, swallows_the_cancellation_of_a_task_group,
    sets_a_variable_that_cannot_be_compared,
]  # fmt: skip


def add_heir(app: App) -> Any:
    @app.task(max_attempts=1)
    async def heir() -> list[Any]:
        """What it has inherited, after a while in which a cancellation could arrive."""
        async with asyncio.timeout(60):
            await asyncio.sleep(0.4)
        return [asyncio.current_task().cancelling(), VARIABLE.get() is not None]  # type: ignore[union-attr]

    return heir


@pytest.mark.parametrize("harmful", HARMFUL, ids=lambda function: function.__name__)
async def test_a_job_inherits_nothing_from_the_job_before_it(
    app: App, running_worker: RunWorker, harmful: Callable[[], Any]
) -> None:
    first = app.task(max_attempts=1)(harmful)
    heir = add_heir(app)
    async with running_worker(app, concurrency=1) as worker:
        job = await ended(await first.aenqueue())
        assert await (await heir.aenqueue()).aresult(60) == [0, False]
        assert worker.health()["ready"]
    if job.status == Status.FAILED:
        assert job.last_error == f"CancelledError: {CANCELLED_BY_ITSELF}"


async def test_a_handler_that_cancels_all_tasks_harms_neither_its_neighbours_nor_the_worker(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    started, gate = asyncio.Event(), asyncio.Event()

    @app.task(max_attempts=1)
    async def neighbour(with_subtask: bool) -> str:
        started.set()
        if with_subtask:
            await asyncio.gather(asyncio.create_task(gate.wait()))
        else:
            await gate.wait()
        return "unharmed"

    @app.task(max_attempts=1)
    async def cancels_all(in_task: bool) -> None:
        def cancel() -> None:
            for task in asyncio.all_tasks():
                if not task.get_name().startswith("test-"):
                    task.cancel()

        if in_task:
            await asyncio.create_task(asyncio.sleep(0))
            asyncio.get_running_loop().call_soon(cancel)
        else:
            cancel()
        await asyncio.sleep(0.1)

    # The tasks of the test itself are not cancelled.
    asyncio.current_task().set_name("test-main")  # type: ignore[union-attr]
    async with running_worker(app, concurrency=4) as worker:
        for in_task in (False, True):
            started.clear()
            gate.clear()
            neighbours = [await neighbour.aenqueue(each) for each in (False, True)]
            await eventually(lambda: worker.health()["running"] == 2)
            bad = await ended(await asyncio.to_thread(cancels_all.enqueue, in_task))
            gate.set()
            for handle in neighbours:
                assert await handle.aresult(60) == "unharmed"
                assert (await handle.ajob()).attempts == 1
            assert bad.status == Status.FAILED
            assert worker.health()["ready"]
        # Notifications still arrive: the listener was not cancelled either.
        assert await (await neighbour.aenqueue(False)).aresult(60) == "unharmed"
    assert "a handler cancelled asyncio tasks that are not its own" in caplog.text


async def test_a_slot_that_ends_is_replaced_and_reported(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def fine() -> str:
        return "fine"

    async with running_worker(app, concurrency=1) as worker:
        assert await (await fine.aenqueue()).aresult(60) == "fine"
        (slot,) = worker._slots._all[0]._slots
        slot.end()
        await eventually(slot.done)
        assert await (await fine.aenqueue()).aresult(60) == "fine"
        assert worker.health()["ready"]
    assert "slot ended unexpectedly" in caplog.text


async def test_a_worker_whose_handlers_do_not_stop_is_not_ready(
    app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_slots, "STUCK_SECONDS", 0.1)
    gate = asyncio.Event()

    @app.task
    async def deaf() -> None:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()

    async with running_worker(app, concurrency=1) as worker:
        handle = await deaf.aenqueue()
        await eventually(lambda: worker.health()["running"] == 1)
        assert worker.health()["ready"]
        await app.aqueue.cancel(handle.id)
        await eventually(lambda: not worker.health()["ready"])
        gate.set()
        await eventually(lambda: worker.health()["ready"])


@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_an_async_handler_that_does_not_stop_is_abandoned_after_a_lease(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    gate = asyncio.Event()

    @app.task(timeout=0.2 if how == "timeout" else None, max_attempts=1)
    async def deaf() -> str:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()
        return "late"

    @app.task
    async def fine() -> str:
        return "fine"

    async with running_worker(app, concurrency=1, lease=1) as worker:
        handle = await deaf.aenqueue()
        await eventually(lambda: worker.health()["running"] == 1)
        if how == "cancel":
            await app.aqueue.cancel(handle.id)
        job = await ended(handle)
        assert job.status == (Status.CANCELLED if how == "cancel" else Status.FAILED)
        assert await (await fine.aenqueue()).aresult(60) == "fine"
        assert worker.health()["ready"]
        gate.set()  # its result is late
        await asyncio.sleep(0.1)
        assert await (await fine.aenqueue()).aresult(60) == "fine"
    assert (await handle.ajob()).status == job.status
    assert "handler does not stop; abandoning it" in caplog.text


# ── executors ─────────────────────────────────────────────────────────────────────────────────────


async def test_long_jobs_of_one_executor_delay_no_job_of_another(
    app: App, running_worker: RunWorker
) -> None:
    gate = threading.Event()

    @app.task
    def long_in_thread() -> None:
        gate.wait(60)

    @app.task
    async def noop() -> str:
        return "ran"

    async with running_worker(app, concurrency=4) as worker:
        for _ in range(20):
            await long_in_thread.aenqueue()
        await eventually(lambda: worker.health()["running"] == 4)
        assert await (await noop.aenqueue()).aresult(60) == "ran"
        gate.set()


async def end_one_by_one(
    worker: Worker, semaphore: threading.Semaphore, handles: list[TaskHandle[Any]]
) -> None:
    """Let each job end while the fetcher waits: the next one is claimed because a slot is free."""
    for handle in handles:
        await eventually(lambda: worker.health()["running"] == 1)
        await asyncio.sleep(1.5)  # the fetcher finds nothing, and waits
        semaphore.release()
        await ended(handle)


@pytest.mark.usefixtures("hourly")
async def test_a_free_slot_is_filled_while_the_fetcher_waits_for_jobs_of_another_executor(
    app: App, running_worker: RunWorker
) -> None:
    """Neither a poll nor a notification helps: the jobs were enqueued long before."""
    semaphore = threading.Semaphore(0)

    @app.task
    def in_thread() -> None:
        semaphore.acquire(timeout=60)

    @app.task
    async def never_enqueued() -> None:
        pass

    handles = [await in_thread.aenqueue() for _ in range(3)]
    async with running_worker(app, concurrency=1) as worker:
        await end_one_by_one(worker, semaphore, handles)


@pytest.mark.usefixtures("hourly")
async def test_a_free_slot_is_filled_although_the_last_claim_was_for_short_jobs_alone(
    app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after a burst of short jobs: the buffer may have one, while every slot has a long job.
    monkeypatch.setattr(Prefetch, "_buffer_target", lambda prefetch: 1)
    semaphore = threading.Semaphore(0)

    @app.task
    def short() -> None:
        pass

    @app.task
    def long() -> None:
        semaphore.acquire(timeout=60)

    @app.task
    async def never_enqueued() -> None:
        pass

    async with running_worker(app, concurrency=1) as worker:
        await ended(await short.aenqueue())
        handles = [await long.aenqueue() for _ in range(2)]
        await end_one_by_one(worker, semaphore, handles)


async def test_idle_threads_end(
    app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "IDLE_THREAD_SECONDS", 0.2)
    barrier = threading.Barrier(8)

    @app.task
    def together() -> None:
        barrier.wait(60)

    before = set(threading.enumerate())  # those of earlier tests

    def threads() -> int:
        new = set(threading.enumerate()) - before
        return sum(thread.name == "howdah-task" for thread in new)

    async with running_worker(app, concurrency=8):
        for _ in range(2):
            for handle in [await together.aenqueue() for _ in range(8)]:
                await ended(handle)
            await eventually(lambda: threads() == 0)


# ── stale runs ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["takeover", "recover"])
@pytest.mark.parametrize("executor", ["async", "thread", "process"])
async def test_a_stale_run_of_the_same_worker_is_stopped_and_its_reports_are_rejected(
    module_app: App,
    running_worker: RunWorker,
    connect: Callable[..., psycopg.Connection[Any]],
    executor: str,
    how: str,
    tmp_path: Path,
) -> None:
    conn, path = connect(), tmp_path / "lines"
    async with running_worker(module_app, concurrency=4, processes=2):
        handle = await module_app.tasks[f"{executor}:reporting"].aenqueue(str(path))
        await eventually(lambda: path.exists() and "1 entered" in path.read_text())
        if how == "takeover":
            assert await module_app.atakeover(handle)
        else:
            conn.execute("UPDATE howdah.leases SET claimed_at = claimed_at - interval '1 hour'")
            conn.execute("SELECT howdah.recover_stale_jobs('1 minute')")
        job = await ended(handle)
    assert job.status == Status.COMPLETED
    assert job.result == 2  # of the second run
    assert "1 stopped" in path.read_text()
    # What the first run reported after the second claim did not count for the second run.
    kinds = conn.execute(
        "SELECT attempt, data->>'run' FROM howdah.job_events WHERE kind = 'step' AND event_id > ("
        "SELECT min(event_id) FROM howdah.job_events WHERE data->>'run' = '2')"
    ).fetchall()
    assert {run for _, run in kinds} == {"2"}


async def test_a_report_of_a_stale_run_is_rejected_although_its_job_runs_again(
    app: App, running_worker: RunWorker
) -> None:
    """The thread of the first run continues, with the context of the first run."""
    gate, entered = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    runs: list[Any] = []

    @app.task
    def work() -> str:
        context = current()
        runs.append(context)
        if len(runs) == 1:
            entered.set()
            gate.wait(60)
            try:
                context.progress(90, "stale")
            except BaseException as error:
                errors.append(error)
            return "first"
        context.progress(10, "fresh")
        gate.set()
        while not errors:
            time.sleep(0.01)
        return "second"

    async with running_worker(app, concurrency=4):
        handle = await work.aenqueue()
        await eventually(entered.is_set)
        assert await app.atakeover(handle)
        job = await ended(handle)
    assert job.result == "second"
    assert job.current_stage != "stale"
    assert isinstance(errors[0], Aborted)
