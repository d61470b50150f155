"""The parts of a worker after a handler cancelled every task of the event loop: each part goes on with its duty."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any

import pytest

from howdah import App, Context, Status
from howdah.database import loop_pool
from howdah.database.service_task import ServiceTask, running_job
from howdah.worker import fetcher
from waiting import ended, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from conftest import RunWorker

LEASE_SECONDS = 2.0


def cancel_all() -> None:
    """Cancel every task but those of the test."""
    for task in asyncio.all_tasks(asyncio.get_running_loop()):
        if not task.get_name().startswith("test-"):
            task.cancel()


async def at_once() -> None:
    cancel_all()


async def in_a_timer() -> None:
    asyncio.get_running_loop().call_later(0.01, cancel_all)


async def in_a_task() -> None:
    async def cancel() -> None:
        cancel_all()

    asyncio.create_task(cancel(), name="test-vandal")  # noqa: RUF006


async def from_a_thread_of_the_loop() -> None:
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(loop.call_soon_threadsafe, cancel_all)


async def from_a_plain_thread() -> None:
    # Which inherits no context variables.
    loop = asyncio.get_running_loop()
    threading.Thread(target=loop.call_soon_threadsafe, args=(cancel_all,)).start()


WAYS = [at_once, in_a_timer, in_a_task, from_a_thread_of_the_loop, from_a_plain_thread]


@pytest.fixture
def app(database: str) -> App:
    return App(database, lease=LEASE_SECONDS)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_every_part_of_a_worker_goes_on_after_a_handler_cancelled_all_tasks(
    app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch, way: Callable[..., Any]
) -> None:
    # Only notifications and timers wake the fetcher.
    monkeypatch.setattr(fetcher, "POLL_SECONDS", 600.0)
    monkeypatch.setattr(fetcher, "POLL_SECONDS_LISTENING", 600.0)
    gate = asyncio.Event()

    @app.task(max_attempts=1)
    async def vandal() -> None:
        await way()
        await asyncio.sleep(0.2)

    @app.task(max_attempts=1)
    async def reports(ctx: Context) -> None:
        ctx.progress(50)
        await gate.wait()

    @app.task(max_attempts=1)
    async def waits() -> None:
        await asyncio.Event().wait()

    @app.task(max_attempts=1)
    async def in_loop() -> str:
        return "loop"

    @app.task(max_attempts=1)
    def in_thread() -> str:
        return "thread"

    asyncio.current_task().set_name("test-main")  # type: ignore[union-attr]
    async with running_worker(app, concurrency=4) as worker:
        assert (await ended(await vandal.aenqueue())).status in (Status.FAILED, Status.COMPLETED)
        # Listener, fetcher, slots and completer.
        assert await (await in_loop.aenqueue()).aresult(60) == "loop"
        assert await (await in_thread.aenqueue()).aresult(60) == "thread"
        # The timer of the next due time.
        assert await (await in_loop.using(delay=0.5).aenqueue()).aresult(60) == "loop"
        # The heartbeat: progress, leases and cancellations.
        reporting, waiting = await reports.aenqueue(), await waits.aenqueue()

        async def reported() -> bool:
            return (await reporting.ajob()).progress == 50

        await eventually(reported, "progress was written")
        await asyncio.sleep(2 * LEASE_SECONDS)
        await waiting.acancel()
        assert (await ended(waiting)).status == Status.CANCELLED
        gate.set()
        assert (await ended(reporting)).attempts == 1
        # Maintenance: the job of a worker that is gone is recovered, and runs here.
        left = await app.aqueue.enqueue("left")
        app.task(name="left", max_attempts=3)(in_loop.function)
        assert await app.aqueue.claim_one("left", lease=1) is not None

        async def recovered() -> bool:
            return (await app.aqueue.get(left.id)).status == Status.PENDING

        await eventually(recovered, "a stale job was recovered")
        assert worker.health()["ready"]
    await app.aclose()
    await asyncio.to_thread(app.close)


async def test_a_timer_that_a_handler_moved_still_interrupts_a_service_task() -> None:
    """A handler's call may move the deadline of a part, for example to an earlier due time. The timer then belongs to
    the context of the handler, which may not cancel the part."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[asyncio.Event] = loop.create_future()
    timed_out = asyncio.Event()

    async def part() -> None:
        woken = asyncio.Event()
        waiting.set_result(woken)
        await woken.wait()
        timed_out.set()

    task = ServiceTask(part(), name="part")
    woken = await waiting

    def as_handler() -> None:
        running_job.set(object())
        assert task.cancel() is False
        loop.call_later(0.01, woken.set)

    contextvars.copy_context().run(as_handler)
    await asyncio.wait_for(timed_out.wait(), 30)
    await task


async def test_a_service_task_has_its_own_timeouts_although_a_handler_started_it() -> None:
    """The first enqueue of a process may start a part from within a handler."""
    token = running_job.set(object())
    ended_by: list[str] = []

    async def part() -> None:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            ended_by.append("its timeout")

    try:
        task = ServiceTask(part(), name="part")
        assert task.cancel() is False
    finally:
        running_job.reset(token)
    await asyncio.wait_for(asyncio.shield(task), 30)
    assert ended_by == ["its timeout"]


@pytest.mark.parametrize("kept", [2, 0])
async def test_a_handler_that_cancels_all_tasks_cancels_no_enqueue_of_another(
    app: App, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Enqueues of one event loop share statements. Each makes exactly one job, whenever the tasks that send them, and
    those in which the driver waits, are cancelled."""
    # Without kept connections, the driver's pool waits in its own tasks.
    monkeypatch.setattr(loop_pool, "KEPT_CONNECTIONS", kept)
    loop = asyncio.get_running_loop()
    asyncio.current_task().set_name("test-main")  # type: ignore[union-attr]

    @app.task
    async def work(n: int) -> None: ...

    async def enqueue(n: int) -> UUID:
        return (await work.aenqueue(n)).id

    def vandal(steps: int) -> None:
        if steps:
            loop.call_soon(vandal, steps - 1)
        else:
            running_job.set(object())
            cancel_all()
            struck.set()

    ids: list[UUID] = []
    struck = asyncio.Event()
    for steps in range(40):  # of the event loop, until all tasks are cancelled
        tasks = [asyncio.create_task(enqueue(n), name=f"test-{n}") for n in range(10)]
        contextvars.copy_context().run(vandal, steps)
        ids += await asyncio.wait_for(asyncio.gather(*tasks), 60)
        await struck.wait()  # or it would strike what follows
        struck.clear()
    assert len(set(ids)) == 400
    assert app.queue.pending() == 400
    await app.aclose()
    await asyncio.to_thread(app.close)
