"""Logging that raises, as the handlers and filters of a program may: no log call changes what a worker does. And a part
of the worker that ends is seen."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import TYPE_CHECKING, Any

import pytest

from howdah import Retry, Status
from howdah.worker.completer import Completer
from howdah.worker.fetcher import Fetcher
from waiting import ended, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from conftest import RunWorker
    from howdah import App, StateChange

FAULTS = ("handler", "filter", "record factory", "closed stream")


class Shipper(logging.Handler):
    """Sends lines to a server that is down, and does not call `handleError`."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError("the log server is down")


def refuse(*args: Any, **options: Any) -> Any:
    raise ZeroDivisionError("a filter or a factory is wrong")


@contextlib.contextmanager
def broken_logging(fault: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every log call of Howdah raise."""
    ours = logging.getLogger("howdah")
    level, factory = ours.level, logging.getLogRecordFactory()
    handler: logging.Handler = Shipper()
    if fault == "closed stream":
        # `handleError` writes to `sys.stderr`, which is closed too.
        stream = io.StringIO()
        stream.close()
        handler = logging.StreamHandler(stream)
        monkeypatch.setattr("sys.stderr", stream)
    elif fault == "filter":
        handler = logging.NullHandler()
        ours.addFilter(refuse)
        handler.addFilter(refuse)
    elif fault == "record factory":
        logging.setLogRecordFactory(refuse)
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        ours.setLevel(level)
        ours.removeHandler(handler)
        ours.removeFilter(refuse)
        logging.setLogRecordFactory(factory)
        monkeypatch.undo()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_log_call_that_raises_changes_nothing_that_a_worker_does(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    @app.task(max_attempts=2, retry=Retry.fixed(0.1))
    async def fails() -> None:
        raise ValueError("a failure")

    @app.task
    def fine() -> str:
        return "fine"

    async with running_worker(app, lease=1) as worker:
        with broken_logging(fault, monkeypatch):
            job = await ended(await fails.aenqueue())
            assert (job.status, job.attempts) == (Status.FAILED, 2)
            # The heartbeat, the fetcher and the listener log that they have lost their connections.
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            assert await (await fine.aenqueue()).aresult(60) == "fine"
            await eventually(lambda: worker.health()["ready"])
            assert worker._heartbeat.is_alive()


@pytest.mark.parametrize("logs", ["whole", *FAULTS])
@pytest.mark.parametrize("part", [Fetcher, Completer])
async def test_a_part_that_fails_stops_the_worker_whatever_happens_to_logging(
    app: App,
    running_worker: RunWorker,
    monkeypatch: pytest.MonkeyPatch,
    part: type[Any],
    logs: str,
) -> None:
    class Bug(BaseException):
        """Also what is not an `Exception`."""

    async def fail(*args: Any) -> None:
        raise Bug

    @app.task
    async def fine() -> None: ...

    monkeypatch.setattr(part, "run", fail)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if logs != "whole":
            stack.enter_context(broken_logging(logs, patch))
        with pytest.raises(Bug):  # noqa: PT012 - raised by the end of the worker
            async with running_worker(app) as worker:
                await eventually(worker._stopping.is_set)
                assert not worker.health()["ready"]


async def test_a_worker_stops_after_the_thread_of_its_heartbeat_has_ended(
    app: App, running_worker: RunWorker
) -> None:
    @app.task
    async def fine() -> None: ...

    with pytest.raises(RuntimeError, match="the heartbeat's thread has ended"):  # noqa: PT012
        async with running_worker(app) as worker:
            worker._heartbeat.stop()
            assert not worker.health()["ready"]
            await eventually(worker._stopping.is_set)


async def test_a_hook_whose_error_has_no_text_is_called_for_the_next_job(
    app: App, running_worker: RunWorker
) -> None:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    states: list[str] = []

    @app.on_state_change
    def hook(change: StateChange) -> None:
        states.append(change.state)
        raise Unreadable

    @app.task
    async def fine() -> None: ...

    async with running_worker(app):
        for _ in range(2):
            await ended(await fine.aenqueue())
        await eventually(lambda: states.count("completed") == 2)
