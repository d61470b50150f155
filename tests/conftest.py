"""One PostgreSQL server for each pytest process, and databases on it.

Tests use `database`, which is emptied before each test. A test that needs its own copy overrides it with
`fresh_database`. `--pg-bin DIR` runs the tests on another PostgreSQL than the embedded one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
import pytest

import tasks_module
from databases import Databases, SharedDatabase
from howdah import App, AsyncJobQueue, JobQueue, Worker
from howdah.database.async_store import AsyncStore
from howdah.database.store import Store
from howdah.embedded import EmbeddedServer
from proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from howdah.protocol.statements import Statement

# `make smoke` runs the test of the README without Hypothesis.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # The time of one example depends on the machine.
    settings.register_profile("howdah", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("howdah")

SETTINGS = {
    "fsync": "off",  # tests crash processes, not the machine
    "max_connections": "200",
    "shared_preload_libraries": "pg_stat_statements",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pg-bin", default=None, help="bin directory of the PostgreSQL to test on")


def pytest_configure() -> None:
    # A shell that starts pytest in the background ignores SIGINT, and all child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = (
    "chaos/", "examples/", "skill/", "cli/test_bench.py", "cli/test_chaos.py", "cli/test_demo.py",
    "cli/test_dev.py", "security/", "sql/test_dead_entries.py", "sql/test_dumps.py",
    "test_growth.py", "database/test_pooler.py",
    "testing/test_guide.py", "testing/test_plugin.py", "worker/test_misbehaving_handlers.py",
)  # fmt: skip


CHAOS = ("chaos/servers/", "chaos/test_broken_builds.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests (documentation pages, sessions in a terminal, chaos, fuzzing), which `make slow` runs, and
    the tests of the chaos checker, which `make chaos-tests` runs."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(CHAOS):
            item.add_marker("chaos")
        if name.startswith(SLOW):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server for this process: the embedded PostgreSQL, or the one in the directory of --pg-bin."""
    directory = Path(tempfile.mkdtemp(prefix="howdah-tests-"))
    directory.chmod(0o755)
    programs = request.config.getoption("--pg-bin")
    server = EmbeddedServer(
        directory / "pg", settings=SETTINGS, bin_directory=Path(programs) if programs else None
    )
    server.start()
    try:
        yield server
    finally:
        server.stop("immediate")
        server.remove()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def databases(server: EmbeddedServer) -> Databases:
    return Databases(server)


@pytest.fixture(scope="session")
def template(databases: Databases) -> str:
    """The name of a database with the newest schema `howdah` and no jobs, to be copied."""
    name = databases.create(name="template_howdah")
    queue = JobQueue(databases.url(name))
    queue.pending()
    queue.close()
    return name


@pytest.fixture
def make_database(databases: Databases) -> Iterator[Callable[[str | None], str]]:
    """Creates databases, from a template if one is named, and drops them after the test."""
    created: list[str] = []

    def create(template: str | None = None) -> str:
        created.append(databases.create(template))
        return databases.url(created[-1])

    yield create
    for name in created:
        databases.drop(name)


@pytest.fixture
def empty_database(make_database: Callable[[str | None], str]) -> str:
    """The URL of a new database without tables."""
    return make_database(None)


@pytest.fixture
def fresh_database(make_database: Callable[[str | None], str], template: str) -> str:
    """The URL of a new copy of the template, for tests that depend on planner statistics or dead rows, count
    connections or what the server does, or kill processes that may reconnect later."""
    return make_database(template)


@pytest.fixture(scope="session")
def shared_database(databases: Databases, template: str) -> Iterator[SharedDatabase]:
    shared = SharedDatabase(databases, template)
    yield shared
    shared.drop()


@pytest.fixture
def database(shared_database: SharedDatabase) -> str:
    """The URL of a database with the newest schema `howdah` and no jobs. No connection of another test is open,
    only the one that empties it."""
    return shared_database.empty()


@pytest.fixture
def connect(database: str) -> Iterator[Callable[..., psycopg.Connection]]:
    """Opens psycopg connections to `database`, by default in autocommit mode."""
    opened: list[psycopg.Connection] = []

    def open_one(*, autocommit: bool = True) -> psycopg.Connection:
        opened.append(psycopg.connect(database, autocommit=autocommit))
        return opened[-1]

    yield open_one
    for conn in opened:
        conn.close()


@pytest.fixture
def queue(database: str) -> Iterator[JobQueue]:
    queue = JobQueue(database)
    yield queue
    queue.close()


@pytest.fixture
async def aqueue(database: str) -> AsyncIterator[AsyncJobQueue]:
    queue = AsyncJobQueue(database)
    yield queue
    await queue.close()


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    """A proxy to the server that can cut its connections."""
    proxy = Proxy(server.socket_directory / ".s.PGSQL.5432")
    yield proxy
    proxy.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of the statements that stores of this process send."""
    operations: list[str] = []
    run, run_async = Store.run, AsyncStore.run

    def noted(self: Store, statement: Statement[Any], conn: Any = None) -> Any:
        operations.append(statement.operation)
        return run(self, statement, conn)

    async def noted_async(self: AsyncStore, statement: Statement[Any], conn: Any = None) -> Any:
        operations.append(statement.operation)
        return await run_async(self, statement, conn)

    monkeypatch.setattr(Store, "run", noted)
    monkeypatch.setattr(AsyncStore, "run", noted_async)
    return operations


class RunWorker(Protocol):
    """Runs a worker of an app during the block."""

    def __call__(self, app: App, **options: Any) -> AbstractAsyncContextManager[Worker]: ...


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
    """An app with the tasks of `tasks_module`, which task processes can import."""
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
