"""An app on a fresh database, and workers that run in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
import pytest
import tasks_module

from howdah import App, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager

    from howdah.embedded import EmbeddedServer

_numbers = itertools.count(1)


class RunWorker(Protocol):
    """Runs a worker of an app for as long as the block lasts."""

    def __call__(self, app: App, **options: Any) -> AbstractAsyncContextManager[Worker]: ...


@pytest.fixture(scope="module")
def module_database(server: EmbeddedServer, template: str) -> Iterator[str]:
    """One database for all tests of a module, where none is disturbed by the jobs of another."""
    name = f"module_{next(_numbers)}"
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
    yield server.url.replace("/howdah?", f"/{name}?")
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
async def app(database: str) -> AsyncIterator[App]:
    """An app without tasks."""
    app = App(database)
    yield app
    await app.aclose()
    await asyncio.to_thread(app.close)


@pytest.fixture
def sync_app(database: str) -> Iterator[App]:
    """An app without tasks, for tests that have no event loop."""
    app = App(database)
    yield app
    app.close()


@pytest.fixture
def module_app(app: App, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """An app with the tasks of `tasks_module`, which processes find there."""
    monkeypatch.setenv("HOWDAH_DATABASE_URL", database)
    for task in tasks_module.plain.tasks.values():
        app._register(task.function, task.name, task.options)
    yield app
    tasks_module.plain.close()


@pytest.fixture
def running_worker() -> RunWorker:
    @contextlib.asynccontextmanager
    async def run(app: App, **options: Any) -> AsyncIterator[Worker]:
        worker = Worker(app, **{"concurrency": 4, "processes": 1, "grace": 20} | options)
        running = asyncio.create_task(worker.run())
        ready = asyncio.create_task(worker.ready.wait())
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED, timeout=120)
        if not ready.done():
            ready.cancel()
            await running
        try:
            yield worker
        finally:
            worker.stop()
            await asyncio.wait_for(running, 120)

    return run
