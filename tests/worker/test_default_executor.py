"""The default executor of the event loop belongs to the handlers. Nothing of a worker waits for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from howdah import App, Status, Worker
from howdah.database.own_thread import own_name_resolution, run_in_own_thread
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from children import Children
    from howdah import JobQueue


def test_handlers_that_fill_the_default_executor_delay_no_acknowledgement_and_no_shutdown(
    children: Children, queue: JobQueue, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    naps = queue.enqueue_many([{"job_type": "executor_nap", "data": {"seconds": 40}}] * 40)
    worker = children.start("--grace", "3", "--concurrency", "64").ready()
    until(lambda: len(children.ledger("start")) == 40, "the default executor is full")
    handle = queue.enqueue("reporting")
    until(lambda: queue.get(handle.id).status == Status.COMPLETED, "a job with a report", 20)
    assert queue.get(handle.id).current_stage == "half"
    worker.send(signal.SIGTERM)
    began = time.monotonic()
    assert worker.wait(60) == 0
    assert (
        time.monotonic() - began < 3 + 9
    )  # the exit timeout is 3 s; a busy machine needs some more
    rows = connect().execute(
        "SELECT status, attempts, count(*) FROM howdah.live_jobs GROUP BY 1, 2"
    )
    assert rows.fetchall() == [("pending", 0, len(list(naps)))]


@pytest.fixture
async def full_executor() -> Any:
    """The default executor of this loop has one thread, and that is busy."""
    gate = threading.Event()
    executor = concurrent.futures.ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(executor)
    busy = loop.run_in_executor(None, gate.wait, 60)
    yield
    gate.set()
    await busy


@pytest.mark.usefixtures("full_executor")
async def test_host_names_are_resolved_while_the_default_executor_is_full() -> None:
    loop = asyncio.get_running_loop()
    original = loop.getaddrinfo
    with own_name_resolution():
        async with asyncio.timeout(20):
            assert await loop.getaddrinfo("localhost", 5432)
    assert loop.getaddrinfo == original


@pytest.mark.usefixtures("full_executor")
async def test_a_call_in_its_own_thread_gives_its_result_or_its_exception() -> None:
    async with asyncio.timeout(20):
        assert await run_in_own_thread(max, 1, 2) == 2
        with pytest.raises(ZeroDivisionError):
            await run_in_own_thread(divmod, 1, 0)


def test_a_handler_that_stops_the_loop_of_a_program_gives_the_jobs_of_its_worker_back(
    database: str, queue: JobQueue
) -> None:
    """`asyncio.run(worker.run())` ends with an error, and the worker stops in order before."""
    app = App(database)
    started = threading.Event()

    @app.task
    async def neighbour() -> None:
        started.set()
        await asyncio.sleep(3600)

    @app.task
    async def stops() -> None:
        while not started.is_set():  # noqa: ASYNC110 - another thread's event
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().stop()
        await asyncio.sleep(3600)

    handles = [neighbour.enqueue(), stops.enqueue()]
    with pytest.raises(RuntimeError, match="stopped before"):
        asyncio.run(Worker(app, concurrency=4).run())
    for handle in handles:
        job = queue.get(handle.id)
        assert (job.status, job.attempts) == (Status.PENDING, 0)
    app.close()
