"""Handles: waiting for results, and watching a job before, during and after its run."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from howdah import Context, JobCancelled, JobFailed, JobNotFound, ResultTimeout, Retry, Status
from howdah.database import listener
from howdah.execution import watch
from howdah.protocol.worker_statements import WorkerStatements
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import psycopg

    from conftest import RunWorker
    from howdah import App, Change, TaskHandle, Worker


class Gate:
    """Holds a job between its two stages."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.release = threading.Event()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def stepping(app: App, gate: Gate) -> Any:
    @app.task(max_attempts=2, retry=Retry.fixed(0))
    def stepping(ctx: Context, fail: bool = False) -> str:
        ctx.progress(10, stage="one")
        ctx.event("step", 1)
        gate.began.set()
        gate.release.wait(120)
        for n in range(2, 8):
            ctx.event("step", n)
        ctx.progress(90, stage="two")
        if fail:
            raise OSError("torn")
        return "done"

    return stepping


@pytest.fixture
async def worker(
    app: App, stepping: Any, gate: Gate, running_worker: RunWorker
) -> AsyncIterator[Worker]:
    async with running_worker(app) as worker:
        yield worker
        gate.release.set()


def steps(changes: list[Change]) -> list[Any]:
    return [event.data for change in changes for event in change.events if event.kind == "step"]


async def follow(handle: TaskHandle[Any]) -> list[Change]:
    return [change async for change in handle.awatch()]


# ── watching ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_watcher_misses_no_event_whenever_it_joins(
    app: App, stepping: Any, gate: Gate, running_worker: RunWorker
) -> None:
    handle = await stepping.aenqueue()
    early = handle.awatch()
    seen = [[await anext(early)]]
    assert seen[0][0].status is Status.PENDING

    async def go_on() -> None:
        seen[0].extend([change async for change in early])

    before = asyncio.create_task(go_on())
    async with running_worker(app):
        await eventually(gate.began.is_set)
        during = asyncio.create_task(follow(handle))
        gate.release.set()
        seen.append(await asyncio.wait_for(during, 120))
        await asyncio.wait_for(before, 120)
    seen.append(await follow(handle))
    for changes in seen:
        assert steps(changes) == [1, 2, 3, 4, 5, 6, 7]
        last = changes[-1]
        assert (last.status, last.progress, last.stage) == (Status.COMPLETED, 100, "two")
        assert last.job.result == "done"
        progress = [change.progress for change in changes]
        assert progress == sorted(progress)
    assert len(seen[2]) == 1


async def test_a_watcher_follows_a_job_through_its_retries(
    stepping: Any, gate: Gate, worker: Worker
) -> None:
    gate.release.set()
    handle = await stepping.aenqueue(fail=True)
    changes = await asyncio.wait_for(follow(handle), 120)
    assert steps(changes) == [1, 2, 3, 4, 5, 6, 7] * 2
    errors = [event for change in changes for event in change.events if event.kind == "error"]
    assert [event.attempt for event in errors] == [1, 2]
    assert changes[-1].status is Status.FAILED


async def test_a_watcher_needs_no_polling_while_notifications_arrive(
    stepping: Any, gate: Gate, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 3600.0)
    handle = await stepping.aenqueue()
    changes = handle.awatch()
    async for change in changes:
        if change.stage == "one":
            break
    gate.release.set()
    rest = [change async for change in changes]
    assert rest[-1].status is Status.COMPLETED


async def test_a_watcher_polls_when_notifications_are_lost(
    stepping: Any, gate: Gate, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(watch.Watcher, "_on_notification", lambda self, payload: None)
    gate.release.set()
    handle = await stepping.aenqueue()
    assert steps(await asyncio.wait_for(follow(handle), 120)) == [1, 2, 3, 4, 5, 6, 7]


async def test_a_watcher_whose_listener_was_terminated_misses_no_event(
    app: App,
    stepping: Any,
    gate: Gate,
    worker: Worker,
    connect: Callable[..., psycopg.Connection[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 3600.0)
    # The listener must detect it without a ping.
    monkeypatch.setattr(listener, "PING_SECONDS", 3600.0)
    handle = await stepping.aenqueue()
    following = asyncio.create_task(follow(handle))
    await eventually(gate.began.is_set)
    watcher = app._watcher()
    await eventually(lambda: watcher._listener is not None and watcher._listener.connected.is_set())
    connect().execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'NOTIFY %'"
    )
    gate.release.set()
    assert steps(await asyncio.wait_for(following, 120)) == [1, 2, 3, 4, 5, 6, 7]


async def test_a_closed_watcher_leaves_no_row_and_no_state(
    app: App,
    stepping: Any,
    gate: Gate,
    worker: Worker,
    connect: Callable[..., psycopg.Connection[Any]],
) -> None:
    conn = connect()
    handle = await stepping.aenqueue()
    changes = handle.awatch()
    await anext(changes)

    def watchers() -> list[Any]:
        query = "SELECT FROM howdah.watchers WHERE job_id = %s"
        return conn.execute(query, [handle.id]).fetchall()

    assert len(watchers()) == 1
    await changes.aclose()  # type: ignore[attr-defined]
    assert watchers() == []
    assert app._watcher()._watched == {}


async def test_a_thread_without_an_event_loop_can_watch(
    stepping: Any, gate: Gate, worker: Worker
) -> None:
    def watch() -> tuple[list[Change], str]:
        handle = stepping.enqueue()
        for change in handle.watch():  # this watcher stops early
            assert change.job.id == handle.id
            break
        changes = []
        for change in handle.watch():
            changes.append(change)
            gate.release.set()
        return changes, handle.result(120)

    changes, result = await asyncio.to_thread(watch)
    assert steps(changes) == [1, 2, 3, 4, 5, 6, 7]
    assert (changes[-1].status, result) == (Status.COMPLETED, "done")


# ── results ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_result_timeout_does_not_affect_the_job(
    stepping: Any, gate: Gate, worker: Worker
) -> None:
    handle = await stepping.aenqueue()
    await eventually(gate.began.is_set)
    with pytest.raises(ResultTimeout, match=r"did not end within 0\.2 seconds; it continues"):
        await handle.aresult(0.2)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(handle.result, 0.2)
    gate.release.set()
    assert await handle.aresult(120) == "done"
    # An existing result is returned even with a timeout of 0.
    assert await handle.aresult(0) == "done"
    assert await asyncio.to_thread(handle.result, 0) == "done"


async def test_waiting_for_a_failed_job_raises_job_failed_with_its_error(
    stepping: Any, gate: Gate, worker: Worker
) -> None:
    gate.release.set()
    handle = await stepping.aenqueue(fail=True)
    with pytest.raises(JobFailed, match=r"failed after 2 attempts: OSError: torn") as caught:
        await handle.aresult(120)
    assert caught.value.job.id == handle.id
    with pytest.raises(JobFailed):
        await asyncio.to_thread(handle.result, 120)


async def test_waiting_for_a_job_that_is_cancelled_raises_job_cancelled(stepping: Any) -> None:
    handle = await stepping.aenqueue()
    waiting = asyncio.create_task(handle.aresult(120))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(handle.cancel)
    with pytest.raises(JobCancelled):
        await waiting
    assert not await handle.acancel()
    assert (await asyncio.to_thread(handle.job)).status is Status.CANCELLED


async def test_waiting_for_a_removed_job_raises_job_not_found(stepping: Any, app: App) -> None:
    handle = await stepping.aenqueue()
    await handle.acancel()
    await app.aqueue.clear()
    with pytest.raises(JobNotFound):
        await handle.aresult(120)


async def test_an_app_makes_a_handle_from_an_id(stepping: Any, app: App, gate: Gate) -> None:
    handle = await stepping.aenqueue()
    again: TaskHandle[Any] = await asyncio.to_thread(app.handle, str(handle.id))
    assert (again.id, again.is_new) == (handle.id, False)
    assert await app.aqueue.get(again) == await handle.ajob()
    await again.acancel()


async def test_many_waiters_share_one_listening_connection(
    app: App,
    stepping: Any,
    gate: Gate,
    worker: Worker,
    connect: Callable[..., psycopg.Connection[Any]],
) -> None:
    handles = await stepping.aenqueue_many([()] * 20)
    waiting = [asyncio.create_task(handle.aresult(120)) for handle in handles]
    await eventually(lambda: len(app._watcher()._watched) == 20)
    listening = connect().execute(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'NOTIFY %'"
    )
    assert listening.fetchone()[0] <= 2  # type: ignore[index] # the worker's, and the watchers'
    gate.release.set()
    assert await asyncio.gather(*waiting) == ["done"] * 20


async def test_waiters_that_poll_read_together(
    app: App, stepping: Any, gate: Gate, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without notifications, as through a pooler in transaction mode."""
    monkeypatch.setattr(listener.Listener, "start", lambda listener: None)
    monkeypatch.setattr(watch, "CONNECT_TIMEOUT_SECONDS", 0.0)
    sent: list[int] = []
    read = WorkerStatements.get_many

    def counted(statements: WorkerStatements, ids: list[Any]) -> Any:
        sent.append(len(ids))
        return read(statements, ids)

    monkeypatch.setattr(WorkerStatements, "get_many", counted)
    handles = await stepping.aenqueue_many([()] * 200)
    waiting = [asyncio.create_task(handle.aresult(120)) for handle in handles]
    await eventually(lambda: len(app._watcher()._watched) == 200)
    await eventually(lambda: len(sent) >= 4)
    for task in waiting[:50]:  # a waiter that gives up does not harm the others
        task.cancel()
    gate.release.set()
    assert await asyncio.gather(*waiting[50:]) == ["done"] * 150
    # If each read by itself, most statements would be for one job.
    assert len(sent) < 60
    assert max(sent) == 200
