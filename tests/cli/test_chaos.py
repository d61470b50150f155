"""`howdah chaos` on a user's database, and its cleanup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from stage import HOWDAH, invoke

from children import until
from howdah.chaos.checker import PROMISES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEMAS = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'howdah_chaos_')"
OTHERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)


@pytest.fixture
def database(fresh_database: str) -> str:
    """A new copy: the tests wait until nothing else is connected."""
    return fresh_database


class Chaos:
    """The command as a process."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        self.database = database
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HOWDAH_")}
        self.process = subprocess.Popen(
            [*HOWDAH, "chaos", "--database", self.database, *options],
            # The ledger's directory is in the environment of its children, which the test searches.
            env=environment | {"TMPDIR": str(self.directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def processes(self) -> list[int]:
        """The processes that it started, and their children."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"HOWDAH_CHAOS_LEDGER={self.directory}/".encode() in environ.read_bytes():
                    found.append(int(environ.parent.name))
            except OSError:
                continue
        return found


@pytest.fixture
def chaos(tmp_path: Path, database: str) -> Iterator[Chaos]:
    chaos = Chaos(tmp_path, database)
    yield chaos
    if chaos.process is not None and chaos.process.poll() is None:
        chaos.process.send_signal(signal.SIGTERM)
        chaos.process.communicate(timeout=60)


def assert_is_clean(chaos: Chaos, conn: psycopg.Connection[Any]) -> None:
    assert chaos.processes() == []
    assert list(chaos.directory.iterdir()) == []
    assert conn.execute(SCHEMAS).fetchall() == []
    until(lambda: conn.execute(OTHERS).fetchone() == (0,), "every connection was closed")


@pytest.mark.slow
def test_it_kills_workers_keeps_every_promise_and_cleans_up(
    chaos: Chaos, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    conn = connect()
    output, errors = chaos.start("--seconds", "8", "--seed", "3", "--json").communicate()
    verdict = json.loads(output)
    assert (verdict["findings"], verdict["notes"], errors) == ([], [], "")
    assert chaos.process is not None
    assert chaos.process.returncode == 0
    assert verdict["passed"] is True
    assert verdict["seed"] == 3
    assert verdict["promises"] == dict.fromkeys(PROMISES, 0)
    assert verdict["acknowledged"] == sum(verdict["statuses"].values()) > 100
    assert {"kill worker", "pause worker", "restart worker"} <= verdict["planned"].keys()
    assert verdict["hits"]
    assert_is_clean(chaos, conn)
    # The existing queue is untouched.
    assert conn.execute("SELECT count(*) FROM howdah.jobs").fetchone() == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_in_the_middle_cleans_up(
    chaos: Chaos, connect: Callable[..., psycopg.Connection[Any]], number: signal.Signals
) -> None:
    conn = connect()
    process = chaos.start("--seconds", "60")

    def has_workers() -> bool:
        assert process.poll() is None, process.communicate()
        names = [name for (name,) in conn.execute(SCHEMAS).fetchall()]
        ready = "SELECT to_regclass(%s) IS NOT NULL"
        if not names or conn.execute(ready, [f"{names[0]}.workers"]).fetchone() != (True,):
            return False
        return conn.execute(f"SELECT FROM {names[0]}.workers".encode()).rowcount > 0

    until(has_workers, "its workers have started", 180)
    assert chaos.processes()
    process.send_signal(number)
    process.communicate(timeout=180)
    assert process.returncode == 128 + number
    assert_is_clean(chaos, conn)


@pytest.mark.slow
def test_a_broken_promise_is_reported_for_each_job_and_is_code_1(
    chaos: Chaos, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    conn = connect()
    stop = threading.Event()

    def lose_jobs() -> None:
        """Delete finished jobs, as a queue that loses jobs would."""
        with psycopg.connect(chaos.database, autocommit=True) as other:
            while not stop.is_set():
                for (name,) in other.execute(SCHEMAS).fetchall():
                    delete = (
                        f"DELETE FROM {name}.finished_jobs WHERE id IN "
                        f"(SELECT id FROM {name}.finished_jobs LIMIT 1)"
                    )
                    try:
                        other.execute(delete.encode())
                    except psycopg.Error:
                        continue  # the schema is being created or dropped
                stop.wait(0.1)

    thread = threading.Thread(target=lose_jobs)
    thread.start()
    try:
        output, _ = chaos.start("--seconds", "4", "--json").communicate()
    finally:
        stop.set()
        thread.join()
    verdict = json.loads(output)
    assert chaos.process is not None
    assert chaos.process.returncode == 1
    assert verdict["passed"] is False
    assert verdict["promises"]["P1"] > 0
    lost = [finding for finding in verdict["findings"] if finding["promise"] == "P1"]
    assert all(finding["job"] and finding["lines"] for finding in lost)
    assert_is_clean(chaos, conn)


def test_an_unreachable_database_is_code_4() -> None:
    result = invoke("chaos", "--database", "postgresql://nobody@127.0.0.1:1/none")
    assert result.exit_code == 4
    assert 'cannot reach database "none" at 127.0.0.1' in result.stderr


def test_a_role_that_may_not_create_a_schema_is_an_error(
    database: str, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    conn = connect()
    conn.execute("CREATE ROLE chaos_guest LOGIN")
    try:
        guest = database.replace("//howdah@", "//chaos_guest@")
        result = invoke("chaos", "--database", guest)
        assert result.exit_code == 1
        assert 'role "chaos_guest" may not create a schema' in result.stderr
    finally:
        conn.execute("DROP ROLE chaos_guest")
