"""The fixture `howdah_database`, in projects that run in a separate pytest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from howdah import App, HowdahError, JobQueue
from howdah.testing.database import MARK, session_schema

SHOP = """
from howdah import App, JobQueue

app = App()
queue = JobQueue()

@app.task
def greet(name: str) -> str:
    return f"Hello, {name}"
"""
TESTS = """
import os
import time

import psycopg
import pytest

import shop
from howdah.testing import assert_enqueued, assert_not_enqueued, drain

leaked = []

@pytest.mark.parametrize("round", range(5))
def test_the_queue_is_empty_and_works(howdah_database, round):
    assert os.environ["HOWDAH_DATABASE_URL"] == howdah_database
    assert shop.queue.pending() == 0
    assert_not_enqueued(shop.greet)
    handle = shop.greet.using(idempotency_key="the same", ordering_key="k").enqueue("you")
    assert handle.is_new
    shop.queue.enqueue("left behind")
    assert drain(shop.app).completed == 1
    assert handle.result() == "Hello, you"

async def test_async_code_uses_it(howdah_database):
    await shop.greet.aenqueue("you")
    assert_enqueued(shop.greet, "you")
    await shop.app.aclose()

def test_that_leaves_a_transaction_open(howdah_database):
    conn = psycopg.connect(howdah_database)
    leaked.append(conn)
    shop.greet.enqueue("locked")
    conn.execute("SELECT * FROM howdah.live_jobs FOR UPDATE")

def test_that_the_transaction_was_ended(howdah_database):
    assert_not_enqueued(shop.greet)
    leaked.pop().close()

def test_without_the_fixture_the_variable_is_not_set():
    assert "HOWDAH_DATABASE_URL" not in os.environ
"""

# Records the modules that the plugins import before any test module.
CONFTEST = """
import pathlib
import sys

def pytest_configure(config):
    pathlib.Path("loaded").write_text(" ".join(sys.modules))
"""
# The last test: records the directories of the server.
PLACES = """
def test_where_the_server_is(howdah_database):
    with psycopg.connect(howdah_database) as conn:
        socket = conn.info.host
        (data,) = conn.execute("SHOW data_directory").fetchone()
    with open("places", "w") as places:
        places.write(f"{socket}\\n{data}")
    assert os.path.exists(socket)
"""


def pytest_in(project: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST") and not name.endswith("DATABASE_URL")
    }
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", *arguments],
        cwd=project,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def make_project(directory: Path, tests: str) -> Path:
    (directory / "shop.py").write_text(SHOP)
    (directory / "test_shop.py").write_text(tests)
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    return directory


# ── an embedded server ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Session:
    """A finished pytest session."""

    directory: Path
    output: str

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()


def is_gone(project: Path) -> bool:
    socket, data = (project / "places").read_text().splitlines()
    return not Path(socket).exists() and not Path(data).exists()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A session that passes nine tests and is then interrupted by Ctrl-C."""
    project = make_project(tmp_path_factory.mktemp("shop"), TESTS + PLACES)
    with (project / "test_shop.py").open("a") as tests:
        tests.write("    os.kill(os.getpid(), 2)\n    time.sleep(60)\n")
    run = pytest_in(project, "--durations=0", "--durations-min=0.0001")
    output, _ = run.communicate(timeout=240)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "9 passed" in output
    return Session(project, output)


def test_emptying_the_queue_takes_a_twentieth_of_starting_the_server(session: Session) -> None:
    setups = [line for line in session.output.splitlines() if "s setup " in line]
    rounds = [float(line.split("s ")[0]) for line in setups if "works[" in line]
    assert len(rounds) == 5
    first = max(rounds)  # it started the server
    assert sorted(rounds)[2] < first / 20, rounds


def test_the_plugin_imports_howdah_only_when_a_fixture_is_used(session: Session) -> None:
    loaded = session.read("loaded").split()
    assert "pytest_howdah" in loaded
    assert {"howdah", "psycopg", "asyncpg", "msgspec", "click"}.isdisjoint(loaded)


def test_the_server_is_removed_when_pytest_is_interrupted(session: Session) -> None:
    assert is_gone(session.directory)


def test_the_server_is_removed_when_pytest_is_killed(tmp_path: Path) -> None:
    project = make_project(tmp_path, "import os\nimport psycopg\n" + PLACES)
    with (project / "test_shop.py").open("a") as tests:
        tests.write("    os.kill(os.getpid(), 9)\n")
    run = pytest_in(project)
    run.communicate(timeout=240)
    assert run.returncode == -9
    give_up = time.monotonic() + 120
    while not is_gone(project):
        assert time.monotonic() < give_up, "the server was not removed"
        time.sleep(0.02)


# ── an existing database ──────────────────────────────────────────────────────────────────────────


def schemas(url: str) -> set[str]:
    with psycopg.connect(url) as conn:
        return {name for (name,) in conn.execute("SELECT nspname FROM pg_namespace")}


def test_each_xdist_worker_has_its_own_schema_in_an_existing_database(
    tmp_path: Path, empty_database: str
) -> None:
    project = make_project(tmp_path, TESTS.partition("async def")[0])
    alike = SHOP.replace("App()", "App(schema=SCHEMA)").replace("Queue()", "Queue(schema=SCHEMA)")
    worker = "import os\nSCHEMA = 'jobs_' + os.environ['PYTEST_XDIST_WORKER']\n"
    (project / "shop.py").write_text(worker + alike)
    before = schemas(empty_database)
    with (project / "pytest.ini").open("a") as settings:
        settings.write("howdah_schema = jobs_{worker}\n")
    runs = [
        pytest_in(
            project, "-o", f"howdah_database_url={empty_database}", PYTEST_XDIST_WORKER="gw0"
        ),
        pytest_in(project, f"--howdah-database-url={empty_database}", PYTEST_XDIST_WORKER="gw1"),
    ]
    for run in runs:
        output, _ = run.communicate(timeout=240)
        assert run.returncode == 0, output
        assert "5 passed" in output
    assert schemas(empty_database) == before


def test_a_schema_that_the_plugin_did_not_create_is_rejected_and_kept(database: str) -> None:
    queue = JobQueue(database)
    queue.enqueue("precious")
    with (
        pytest.raises(
            HowdahError, match=r'schema "howdah" of .* was not created by howdah_database'
        ),
        session_schema(database, "howdah", drop=True),
    ):
        pass
    assert queue.pending() == 1
    queue.close()


def test_a_schema_that_a_killed_session_left_is_replaced(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(f"CREATE SCHEMA howdah; COMMENT ON SCHEMA howdah IS '{MARK}'".encode())
        conn.execute("CREATE TABLE howdah.half_of_it (id int)")
    with session_schema(empty_database, "howdah", drop=True):
        app = App(empty_database)
        assert app.queue.pending() == 0
        app.close()
    assert "howdah" not in schemas(empty_database)


def test_a_second_session_in_the_same_schema_is_rejected(empty_database: str) -> None:
    schema = f"jobs_{uuid4().hex[:8]}"
    with (
        session_schema(empty_database, schema, drop=True),
        pytest.raises(HowdahError, match=r"another pytest is using schema .*write \{worker\}"),
        session_schema(empty_database, schema, drop=True),
    ):
        pass


def test_emptying_keeps_the_rows_of_migrations(empty_database: str) -> None:
    with session_schema(empty_database, "howdah", drop=True) as schema:
        queue = JobQueue(empty_database)
        queue.enqueue("a", ordering_key="k", idempotency_key="i")
        schema.empty()
        assert queue.pending() == 0
        assert queue.enqueue("a", idempotency_key="i").is_new
        with psycopg.connect(empty_database) as conn:
            for table in ("maintenance", "migrations"):
                row = conn.execute(f"SELECT count(*) > 0 FROM howdah.{table}".encode()).fetchone()
                assert row == (True,)
        queue.close()
