"""Threads that run handlers, and exceptions that libraries raise in them from outside."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from typing import TYPE_CHECKING

from waiting import ended, eventually

if TYPE_CHECKING:
    import pytest

    from conftest import RunWorker
    from howdah import App


def raise_in(thread: int) -> None:
    """As libraries do that limit the time of a call in a thread: some are late."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(TimeoutError)
    )


async def test_a_job_given_to_a_thread_that_was_killed_starts_in_another(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(max_attempts=1)
    def thread_of() -> int:
        return threading.get_ident()

    async with running_worker(app, concurrency=1) as worker:
        killed = await (await thread_of.aenqueue()).aresult(60)
        raise_in(killed)  # it waits for work, and raises when it gets some
        handle = await thread_of.aenqueue()
        await handle.aresult(60)
        assert (await handle.ajob()).attempts == 1
        assert worker.health()["ready"]
    assert "a thread of handlers was killed" in caplog.text


async def test_every_job_ends_although_exceptions_are_raised_in_the_threads_at_any_time(
    app: App, running_worker: RunWorker
) -> None:
    @app.task(max_attempts=1)
    def short() -> None:
        time.sleep(0.001)

    before = set(threading.enumerate())

    async with running_worker(app, concurrency=4) as worker:
        handles = [await short.aenqueue() for _ in range(300)]

        async def is_over() -> bool:
            for thread in set(threading.enumerate()) - before:
                if thread.name == "howdah-task" and thread.ident is not None:
                    raise_in(thread.ident)
            await asyncio.sleep(0.01)
            return all([(await handle.ajob()).status.is_final for handle in handles[-4:]])

        await eventually(is_over)
        for handle in handles:
            await ended(handle)
        await eventually(lambda: worker.health()["running"] == 0)
        assert worker.health()["ready"]
    assert worker.abandoned == 0
