"""The fixtures, in real projects with a pytest of their own."""

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

async def test_async_code_finds_it_too(howdah_database):
    await shop.greet.aenqueue("you")
    assert_enqueued(shop.greet, "you")
    await shop.app.aclose()

def test_a_transaction_is_left_open(howdah_database):
    conn = psycopg.connect(howdah_database)
    leaked.append(conn)
    shop.greet.enqueue("locked")
    conn.execute("SELECT * FROM howdah.live_jobs FOR UPDATE")

def test_and_ended_by_the_next_test(howdah_database):
    assert_not_enqueued(shop.greet)
    leaked.pop().close()

def test_the_environment_is_as_it_was_without_it():
    assert "HOWDAH_DATABASE_URL" not in os.environ
"""

# Says what the plugins have imported before any test module was.
CONFTEST = """
import pathlib
import sys

def pytest_configure(config):
    pathlib.Path("loaded").write_text(" ".join(sys.modules))
"""
# The last test: says where the server is.
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


# ── an embedded PostgreSQL ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Session:
    """A pytest that has ended."""

    directory: Path
    output: str

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()


def is_gone(project: Path) -> bool:
    socket, data = (project / "places").read_text().splitlines()
    return not Path(socket).exists() and not Path(data).exists()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """One session for several questions: it passes a few tests, and is then interrupted by Ctrl-C."""
    project = make_project(tmp_path_factory.mktemp("shop"), TESTS + PLACES)
    with (project / "test_shop.py").open("a") as tests:
        tests.write("    os.kill(os.getpid(), 2)\n    time.sleep(60)\n")
    run = pytest_in(project, "--durations=0", "--durations-min=0.0001")
    output, _ = run.communicate(timeout=240)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "9 passed" in output
    return Session(project, output)


def test_each_test_has_an_empty_queue_in_milliseconds(session: Session) -> None:
    setups = [line for line in session.output.splitlines() if "s setup " in line]
    rounds = [float(line.split("s ")[0]) for line in setups if "works[" in line]
    assert len(rounds) == 5
    first = max(rounds)  # which started the server
    assert sorted(rounds)[2] < first / 20, rounds


def test_nothing_of_howdah_is_imported_until_a_fixture_is_used(session: Session) -> None:
    loaded = session.read("loaded").split()
    assert "pytest_howdah" in loaded
    assert {"howdah", "psycopg", "asyncpg", "msgspec", "click"}.isdisjoint(loaded)


def test_the_server_goes_when_pytest_is_interrupted(session: Session) -> None:
    assert is_gone(session.directory)


def test_the_server_goes_when_pytest_is_killed(tmp_path: Path) -> None:
    project = make_project(tmp_path, "import os\nimport psycopg\n" + PLACES)
    with (project / "test_shop.py").open("a") as tests:
        tests.write("    os.kill(os.getpid(), 9)\n")
    run = pytest_in(project)
    run.communicate(timeout=240)
    assert run.returncode == -9
    give_up = time.monotonic() + 120
    while not is_gone(project):
        assert time.monotonic() < give_up, "the server was left behind"
        time.sleep(0.02)


# ── a database that exists ────────────────────────────────────────────────────────────────────────


def schemas(url: str) -> set[str]:
    with psycopg.connect(url) as conn:
        return {name for (name,) in conn.execute("SELECT nspname FROM pg_namespace")}


def test_workers_of_xdist_have_schemas_of_their_own_in_an_existing_database(
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


def test_a_schema_that_somebody_else_made_is_left_alone(database: str) -> None:
    queue = JobQueue(database)
    queue.enqueue("precious")
    with (
        pytest.raises(HowdahError, match=r'schema "howdah" of .* was not made by howdah_database'),
        session_schema(database, "howdah", drop=True),
    ):
        pass
    assert queue.pending() == 1
    queue.close()


def test_a_schema_that_a_killed_session_left_is_made_anew(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(f"CREATE SCHEMA howdah; COMMENT ON SCHEMA howdah IS '{MARK}'".encode())
        conn.execute("CREATE TABLE howdah.half_of_it (id int)")
    with session_schema(empty_database, "howdah", drop=True):
        app = App(empty_database)
        assert app.queue.pending() == 0
        app.close()
    assert "howdah" not in schemas(empty_database)


def test_a_schema_is_used_by_one_session_at_a_time(empty_database: str) -> None:
    schema = f"jobs_{uuid4().hex[:8]}"
    with (
        session_schema(empty_database, schema, drop=True),
        pytest.raises(HowdahError, match=r"another pytest is using schema .*write \{worker\}"),
        session_schema(empty_database, schema, drop=True),
    ):
        pass


def test_what_a_migration_put_there_stays(empty_database: str) -> None:
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
