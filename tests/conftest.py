"""One real PostgreSQL for the whole run, and a fresh database for every test that asks for one.

`--pg-bin DIR` runs the tests on another PostgreSQL than the embedded one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
import pytest

import tasks_module
from howdah import App, AsyncJobQueue, JobQueue, Worker
from howdah.embedded import EmbeddedServer
from proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

with contextlib.suppress(ModuleNotFoundError):  # who follows the README has no Hypothesis
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's business.
    settings.register_profile("howdah", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("howdah")

SETTINGS = {
    "fsync": "off",  # the machine under the tests does not crash; processes do, and that needs no fsync
    "max_connections": "200",
    "shared_preload_libraries": "pg_stat_statements",
}
_numbers = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pg-bin", default=None, help="bin directory of the PostgreSQL to test on")


def pytest_configure() -> None:
    # A shell that runs us in the background has SIGINT ignored, and so would all of our children.
    signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = (
    "chaos/", "examples/", "skill/", "cli/test_bench.py", "cli/test_chaos.py", "cli/test_demo.py",
    "cli/test_dev.py", "security/", "sql/test_dead_entries.py", "test_growth.py", "database/test_pooler.py",
    "testing/test_guide.py", "testing/test_plugin.py",
)  # fmt: skip


CHAOS = ("chaos/servers/", "chaos/test_broken_builds.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what takes long: whole pages and sessions of a person, chaos, fuzzing. `make slow` runs it, and
    `make chaos-tests` what tests the chaos itself."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(CHAOS):
            item.add_marker("chaos")
        if name.startswith(SLOW):
            item.add_marker("slow")


def url_of(server: EmbeddedServer, database: str) -> str:
    return server.url.replace("/howdah?", f"/{database}?")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server of this run's own, on the embedded PostgreSQL or the one that --pg-bin names."""
    where = Path(tempfile.mkdtemp(prefix="howdah-tests-"))
    where.chmod(0o755)
    programs = request.config.getoption("--pg-bin")
    server = EmbeddedServer(
        where / "pg", settings=SETTINGS, bin_directory=Path(programs) if programs else None
    )
    server.start()
    try:
        yield server
    finally:
        server.stop("immediate")
        server.remove()
        shutil.rmtree(where, ignore_errors=True)


@pytest.fixture(scope="session")
def template(server: EmbeddedServer) -> str:
    """The name of a database with the newest schema, to be copied."""
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("CREATE DATABASE template_howdah")
    queue = JobQueue(url_of(server, "template_howdah"))
    queue.pending()
    queue.close()
    return "template_howdah"


@pytest.fixture
def make_database(server: EmbeddedServer) -> Iterator[Callable[[str | None], str]]:
    """Makes databases, from a template if one is named, and drops them after the test."""
    made: list[str] = []

    def make(template: str | None = None) -> str:
        name = f"test_{next(_numbers)}"
        with psycopg.connect(server.url, autocommit=True) as conn:
            source = f" TEMPLATE {template}" if template else ""
            conn.execute(f"CREATE DATABASE {name}{source}".encode())
        made.append(name)
        return url_of(server, name)

    yield make
    with psycopg.connect(server.url, autocommit=True) as conn:
        for name in made:
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def empty_database(make_database: Callable[[str | None], str]) -> str:
    """The URL of a database with nothing in it."""
    return make_database(None)


@pytest.fixture
def database(make_database: Callable[[str | None], str], template: str) -> str:
    """The URL of a fresh database with the newest schema `howdah`."""
    return make_database(template)


@pytest.fixture
def connect(database: str) -> Iterator[Callable[..., psycopg.Connection]]:
    """Opens raw connections to `database`, in autocommit mode unless told otherwise."""
    opened: list[psycopg.Connection] = []

    def open_one(*, autocommit: bool = True) -> psycopg.Connection:
        conn = psycopg.connect(database, autocommit=autocommit)
        opened.append(conn)
        return conn

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
    """A way to the server that can be cut."""
    proxy = Proxy(server.socket_directory / ".s.PGSQL.5432")
    yield proxy
    proxy.close()


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
