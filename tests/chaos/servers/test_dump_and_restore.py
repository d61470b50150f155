"""A dump taken while workers run, restored into another database: a whole queue, from which work goes on."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from embedded_servers import SETTINGS, workspace
from strict_scenarios import NO_SYSTEM_POSTGRESQL, system_binaries

from children import Children, all_ended, statuses, until
from howdah import JobQueue, NewJob
from howdah.database import migrate, sql_steps
from howdah.embedded import EmbeddedServer
from howdah.embedded.binaries import find_binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOBS = 150


@pytest.fixture(params=["embedded", "system"])
def programs(request: pytest.FixtureRequest) -> Path:
    """The directory with the programs of a PostgreSQL."""
    found = system_binaries() if request.param == "system" else find_binaries().directory
    if found is None:
        pytest.skip(NO_SYSTEM_POSTGRESQL)
    return found


@pytest.fixture
def server(programs: Path) -> Iterator[EmbeddedServer]:
    with workspace("dump") as home:
        server = EmbeddedServer(home / "pg", settings=SETTINGS, bin_directory=programs)
        server.start()
        yield server
        server.remove()


def enqueue(queue: JobQueue) -> set[Any]:
    """Jobs with and without ordering keys and idempotency keys."""
    jobs = [
        NewJob(
            job_type="nap", data={"seconds": 0.02}, max_attempts=5,
            ordering_key=f"key-{n % 5}" if n % 3 == 0 else None,
            idempotency_key=f"once-{n}" if n % 3 == 1 else None,
        )
        for n in range(JOBS)
    ]  # fmt: skip
    return {handle.id for handle in queue.enqueue_many(jobs)}


def restore(server: EmbeddedServer, programs: Path, dump: Path) -> str:
    """Restore the dump into a new database, whose URL is returned."""
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("CREATE DATABASE restored")
    url = server.url.replace("/howdah?", "/restored?")
    run(programs / "pg_restore", "--exit-on-error", "--dbname", url, str(dump))
    return url


def run(program: Path, *arguments: str) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_work_goes_on_from_a_dump_that_was_taken_while_workers_ran(
    server: EmbeddedServer, programs: Path, tmp_path: Path
) -> None:
    queue = JobQueue(server.url, lease=2)
    ids = enqueue(queue)
    original, restored = tmp_path / "original", tmp_path / "restored"
    original.mkdir()
    restored.mkdir()
    workers = Children(original, server.url)
    try:
        workers.start("--concurrency", "4", FAULT_APP_LEASE="2").ready()
        with psycopg.connect(server.url, autocommit=True) as conn:
            until(lambda: statuses(conn)["completed"] > 10, "some jobs were completed")
            run(
                programs / "pg_dump",
                "-Fc",
                "--file",
                str(tmp_path / "dump"),
                "--dbname",
                server.url,
            )
            url = restore(server, programs, tmp_path / "dump")
            until(lambda: all_ended(conn), "the dump stopped no worker")
            assert statuses(conn) == {"completed": JOBS}
    finally:
        workers.close()
        queue.close()
    workers = Children(restored, url)
    try:
        with psycopg.connect(url, autocommit=True) as conn:
            assert {row[0] for row in conn.execute("SELECT id FROM howdah.jobs")} == ids
            assert statuses(conn)["completed"] < JOBS, (
                "the dump was taken too late to prove anything"
            )
            _, needs_functions, differences = sql_steps.drive(conn, migrate.inspect("howdah"))
            assert (needs_functions, differences) == (False, [])
            workers.start("--concurrency", "4", FAULT_APP_LEASE="2").ready()
            until(lambda: all_ended(conn), "the jobs of the restored queue ended")
            assert statuses(conn) == {"completed": JOBS}
    finally:
        workers.close()
