"""State-change hooks, middlewares and lifespans."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import tasks_module
from howdah import Cancel, Context, Fail, Retry, Snooze, StateChange, Status
from tasks_module import note
from waiting import ended, eventually, lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from conftest import RunWorker
    from howdah import App


# ── state changes ─────────────────────────────────────────────────────────────────────────────────


async def test_hooks_receive_every_state_change_after_its_commit(
    app: App, running_worker: RunWorker
) -> None:
    changes: list[tuple[str, str, int, str | None]] = []
    stored: list[tuple[str, Status]] = []

    @app.on_state_change
    def record(change: StateChange) -> None:
        assert change.request_id == "r-1"
        changes.append((change.job_type, change.state, change.attempt, change.error))
        if change.state not in ("running", "released", "retrying"):
            stored.append((change.state, app.queue.get(change.id).status))

    snoozed: list[int] = []

    @app.task
    async def completes() -> None: ...

    @app.task(retry=Retry.fixed(0), max_attempts=2)
    def fails() -> None:
        raise OSError("torn")

    @app.task
    def cancels() -> None:
        raise Cancel("no need")

    @app.task
    def snoozes() -> None:
        if not snoozed:
            snoozed.append(1)
            raise Snooze(0)
        raise Fail("enough")

    async with running_worker(app):
        for task in (completes, fails, cancels, snoozes):
            await ended(await task.using(request_id="r-1").aenqueue())
    # The next run may start before the hooks receive the end of the last.
    assert sorted(changes, key=_order) == [
        ("completes", "running", 1, None),
        ("completes", "completed", 1, None),
        ("fails", "running", 1, None),
        ("fails", "retrying", 1, "OSError: torn"),
        ("fails", "running", 2, None),
        ("fails", "failed", 2, "OSError: torn"),
        ("cancels", "running", 1, None),
        ("cancels", "cancelled", 1, "no need"),
        ("snoozes", "running", 1, None),
        ("snoozes", "running", 1, None),
        ("snoozes", "released", 1, None),
        ("snoozes", "failed", 1, "Fail: enough"),
    ]
    assert all(state == status for state, status in stored)
    assert len(stored) == 4


def _order(change: tuple[str, str, int, str | None]) -> tuple[int, int, int]:
    tasks = ("completes", "fails", "cancels", "snoozes")
    states = ("running", "retrying", "released", "completed", "failed", "cancelled")
    return tasks.index(change[0]), change[2], states.index(change[1])


async def test_a_hook_that_blocks_or_raises_does_not_slow_or_fail_a_worker(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    received: list[str] = []

    @app.on_state_change
    def blocks(change: StateChange) -> None:
        release.wait(120)
        raise SystemExit("a hook may do anything")

    @app.on_state_change
    async def coroutine(change: StateChange) -> None:
        await asyncio.sleep(0)
        received.append(change.state)

    @app.task
    async def quick(x: int) -> int:
        return x

    async with running_worker(app):
        handles = await quick.aenqueue_many([(n,) for n in range(50)])
        for handle in handles:
            assert (await ended(handle)).status is Status.COMPLETED
        assert received == []
        release.set()
        await eventually(lambda: len(received) == 100)
    assert received.count("completed") == 50
    assert caplog.text.count("state-change hook failed") == 1  # the others are counted


# ── middleware ────────────────────────────────────────────────────────────────────────────────────


def surround(app: App) -> None:
    """Add the middleware and lifespan of `tasks_module.app`, and its task in each executor."""
    app.middleware(tasks_module.around)
    app.lifespan(tasks_module.colours)
    function = tasks_module.surrounded.function

    async def in_loop(path: str, swallow: bool = False, fail: bool = False) -> Any:
        return function(path, swallow, fail)

    app.task(name="async", max_attempts=1)(in_loop)
    app.task(name="thread", max_attempts=1)(function)
    app._register(function, "surrounded", tasks_module.surrounded.options)


@pytest.mark.parametrize("name", ["async", "thread", "surrounded"])
async def test_a_middleware_wraps_runs_in_each_executor(
    app: App, running_worker: RunWorker, tmp_path: Path, name: str
) -> None:
    surround(app)
    task = app.tasks[name]
    async with running_worker(app):
        well = await (await task.aenqueue(str(tmp_path / "well"))).aresult(120)
        torn = await ended(await task.aenqueue(str(tmp_path / "torn"), fail=True))
        kept = await ended(await task.aenqueue(str(tmp_path / "kept"), fail=True, swallow=True))
    assert well == "returned"
    assert lines(tmp_path / "well") == ["before grey", "inside", "after"]
    assert (torn.status, torn.last_error) == (Status.FAILED, "OSError: torn")
    assert lines(tmp_path / "torn") == ["before grey", "inside", "raised torn"]
    assert (kept.status, kept.result) == (Status.COMPLETED, None)


async def test_middlewares_nest_in_order_of_registration_and_async_ones_wrap_async_tasks_only(
    app: App, running_worker: RunWorker
) -> None:
    order: list[str] = []

    @app.middleware
    def outer(ctx: Context) -> Iterator[None]:
        order.append(f"outer {ctx.job_type}")
        yield
        order.append("outer ends")

    @app.middleware
    async def inner(ctx: Context) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        order.append("inner")
        try:
            yield
        except KeyError:
            order.append("inner sees KeyError")
            raise

    @app.task(max_attempts=1)
    async def coroutine() -> None:
        order.append("runs")
        raise KeyError

    @app.task
    def thread() -> None:
        order.append("runs")

    async with running_worker(app):
        assert (await ended(await coroutine.aenqueue())).last_error == "KeyError"
        assert order == ["outer coroutine", "inner", "runs", "inner sees KeyError"]
        order.clear()
        assert (await ended(await thread.aenqueue())).status is Status.COMPLETED
        assert order == ["outer thread", "runs", "outer ends"]


async def test_a_middleware_that_raises_fails_the_job_before_its_handler_runs(
    app: App, running_worker: RunWorker
) -> None:
    ran: list[int] = []

    @app.middleware
    def refuses(ctx: Context) -> Iterator[None]:
        raise PermissionError("closed")
        yield

    @app.task(max_attempts=1)
    def never() -> None:
        ran.append(1)

    async with running_worker(app):
        job = await ended(await never.aenqueue())
    assert (job.status, job.last_error, ran) == (Status.FAILED, "PermissionError: closed", [])


# ── lifespans ─────────────────────────────────────────────────────────────────────────────────────


async def test_lifespans_run_when_a_worker_starts_and_stops_and_provide_resources(
    app: App, running_worker: RunWorker, tmp_path: Path
) -> None:
    life = str(tmp_path / "life")

    @app.lifespan
    def plain() -> Iterator[dict[str, str]]:
        note(life, "plain enters")
        yield {"plain": "p"}
        note(life, "plain leaves")

    @app.lifespan
    async def asynchronous() -> AsyncIterator[dict[str, str]]:
        note(life, "async enters")
        yield {"async": "a"}
        note(life, "async leaves")

    @app.lifespan
    def nothing_to_give() -> Iterator[None]:
        yield

    @app.task
    async def coroutine(ctx: Context) -> dict[str, str]:
        return dict(ctx.resources)

    @app.task
    def thread(ctx: Context) -> dict[str, str]:
        time.sleep(0)
        return dict(ctx.resources)

    async with running_worker(app):
        for task in (coroutine, thread):
            assert await (await task.aenqueue()).aresult(120) == {"plain": "p", "async": "a"}
        assert lines(life) == ["plain enters", "async enters"]
    assert lines(life) == ["plain enters", "async enters", "async leaves", "plain leaves"]


async def test_a_lifespan_that_raises_prevents_the_worker_from_starting(
    app: App, running_worker: RunWorker
) -> None:
    @app.lifespan
    def broken() -> Iterator[None]:
        raise OSError("no connection")
        yield

    @app.task
    def f() -> None: ...

    with pytest.raises(OSError, match="no connection"):
        async with running_worker(app):
            pass


async def test_a_hook_that_always_fails_is_logged_once_a_minute(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    @app.on_state_change
    def broken(change: StateChange) -> None:
        raise ValueError(f"no room for {change.id}")

    @app.task
    async def work() -> None: ...

    async with running_worker(app):
        for handle in [await work.aenqueue() for _ in range(20)]:
            await ended(handle)
    logged = [each for each in caplog.records if each.message == "state-change hook failed"]
    assert [each.exc_info is not None for each in logged] == [True]
    (left_out,) = [
        each.left_out  # type: ignore[attr-defined]
        for each in caplog.records
        if each.message == "similar lines were left out"
    ]
    assert left_out == 39
