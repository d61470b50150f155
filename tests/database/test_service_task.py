"""Tasks of Howdah itself, which share an event loop with handlers."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from typing import TYPE_CHECKING, Any

import pytest

from howdah.database.service_task import ServiceTask, WorkerTask, running_job

if TYPE_CHECKING:
    from collections.abc import Callable


def as_job(function: Callable[[], Any], job: object = "a job") -> Any:
    """Call a function as a handler does: its timers, callbacks and tasks inherit the context."""

    def call() -> Any:
        running_job.set(job)
        return function()

    return contextvars.copy_context().run(call)


async def ended(task: asyncio.Task[Any]) -> None:
    async with asyncio.timeout(20):
        await asyncio.wait([task])


@pytest.mark.parametrize("kind", [ServiceTask, WorkerTask])
async def test_a_handler_cannot_cancel_a_service_task_in_any_way(kind: type[ServiceTask]) -> None:
    refused: list[object] = []
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def wait() -> None:
        await gate.wait()

    async def cancel_later() -> None:
        await asyncio.sleep(0)
        task.cancel()

    task = kind(wait(), name="service", on_refused=refused.append)
    assert as_job(task.cancel) is False
    as_job(lambda: loop.call_soon(task.cancel))
    as_job(lambda: loop.call_later(0.01, task.cancel))
    helper = as_job(lambda: asyncio.ensure_future(cancel_later()))
    await helper
    async with asyncio.timeout(20):
        while len(refused) < 4:  # noqa: ASYNC110 - the callbacks set no event
            await asyncio.sleep(0.01)
    assert refused == ["a job"] * 4
    assert not task.done()
    assert not task.cancelling()
    gate.set()
    await ended(task)
    assert task.exception() is None


async def test_a_handler_whose_wait_for_a_service_task_is_cancelled_leaves_that_alone() -> None:
    """`await task` passes a cancellation on to the task."""
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    async def follow() -> None:
        await task

    task = ServiceTask(wait(), name="service")
    follower = as_job(lambda: asyncio.ensure_future(follow()))
    await asyncio.sleep(0)
    as_job(follower.cancel)
    await asyncio.sleep(0.01)
    assert not task.done()
    gate.set()
    await ended(task)
    await ended(follower)


@pytest.mark.parametrize("kind", [ServiceTask, WorkerTask])
async def test_timeouts_of_a_service_task_work_although_a_handler_created_it(
    kind: type[ServiceTask],
) -> None:
    seen: list[str] = []

    async def wait() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        seen.append("timeout")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        seen.append("wait_for")

    await ended(as_job(lambda: kind(wait(), name="service")))
    assert seen == ["timeout", "wait_for"]


async def test_a_timer_of_a_handler_wakes_a_service_task() -> None:
    """What a handler may do to a service is to give it work."""
    event = asyncio.Event()

    async def wait() -> None:
        async with asyncio.timeout(20):
            await event.wait()

    task = ServiceTask(wait(), name="service")
    loop = asyncio.get_running_loop()
    as_job(lambda: loop.call_later(0.01, event.set))
    await ended(task)
    assert task.exception() is None


@pytest.mark.parametrize("kind", [ServiceTask, WorkerTask])
async def test_the_owner_of_a_service_task_can_cancel_it(kind: type[ServiceTask]) -> None:
    task = kind(asyncio.Event().wait(), name="service")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    as_job(task.end)  # whatever the context
    await ended(task)
    assert task.cancelled()


@pytest.mark.parametrize("kind", [ServiceTask, WorkerTask])
async def test_a_thread_of_a_handler_cannot_cancel_a_service_task(kind: type[ServiceTask]) -> None:
    """A new thread inherits no context variables, so nothing tells which job has started it."""
    refused: list[object] = []
    gate, called = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    task = kind(gate.wait(), name="service", on_refused=refused.append)  # type: ignore[arg-type]
    await asyncio.sleep(0)

    def work() -> None:
        loop.call_soon_threadsafe(task.cancel)
        loop.call_soon_threadsafe(called.set)

    as_job(threading.Thread(target=work).start)
    async with asyncio.timeout(20):
        await called.wait()
    assert refused == [None]
    gate.set()
    await ended(task)
    assert not task.cancelled()


def test_the_end_of_an_event_loop_cancels_services_and_leaves_workers_to_stop_their_parts() -> None:
    order: list[str] = []

    async def part() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("part")

    async def run_worker() -> None:
        own = WorkerTask(part(), name="part")
        try:
            await asyncio.Event().wait()
        finally:
            order.append("worker")
            own.end()
            await asyncio.wait([own])

    async def main() -> None:
        kept.append(asyncio.create_task(run_worker()))
        kept.append(ServiceTask(asyncio.Event().wait(), name="service"))  # type: ignore[arg-type]
        await asyncio.sleep(0)

    kept: list[asyncio.Task[Any]] = []
    asyncio.run(main())
    assert order == ["worker", "part"]
    assert kept[1].cancelled()
