"""Two releases at once on one database: processes of the old one keep working, or fail with an error that says what
to do."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from builds import newer_build, pointing_to

from children import Children, all_ended, statuses, until
from howdah import JobQueue
from next_release import EDITS, STEP, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from uuid import UUID

pytestmark = pytest.mark.slow

# A user of the bare queue: enqueues, claims and completes until SIGTERM.
OLD_PROGRAM = """
import signal, sys, time
from howdah import JobQueue
queue, stop = JobQueue(sys.argv[1], lease=5), []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
made = done = 0
while not stop or queue.pending("default", "old"):
    if not stop:
        queue.enqueue_many([("old", {"n": n}) for n in range(5)])
        made += 5
    jobs = queue.claim(["old"], batch_size=3)
    queue.complete(jobs)
    done += len(jobs)
    print(made, done, flush=True)
"""


@pytest.fixture
def children(tmp_path: Path, empty_database: str) -> Iterator[Children]:
    children = Children(tmp_path, empty_database)
    yield children
    children.close()


@pytest.fixture
def conn(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        yield conn


def version(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("SELECT max(version) FROM howdah.migrations").fetchone()
    assert row is not None
    return int(row[0])


def last_line(file: Path) -> list[int]:
    lines = file.read_text().rpartition("\n")[0].splitlines()
    return [int(n) for n in lines[-1].split()] if lines else [0, 0]


def test_an_old_release_keeps_working_while_the_next_one_migrates_and_works(
    children: Children, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    new_build = newer_build(tmp_path / "next", STEP, edits=EDITS, oldest_code=1)
    output = tmp_path / "output"
    with output.open("wb") as file:
        queue = subprocess.Popen(
            [sys.executable, "-c", OLD_PROGRAM, children.database], stdout=file, stderr=file
        )
    try:
        until(lambda: last_line(output)[1] > 20, "the old release works")
        assert version(conn) == VERSION - 1
        old_worker = children.start().ready()
        children.start(**pointing_to(new_build)).ready()
        assert version(conn) == VERSION
        with contextlib.closing(JobQueue(children.database)) as new:
            new.enqueue_many([("nap", {"seconds": 0.0})] * 50)
        (_, before) = last_line(output)
        until(lambda: last_line(output)[1] > before + 50, "the old release keeps working")
        # A process of the old release that starts now works too, and leaves the new functions alone.
        late = children.start().ready()
        assert "p_next_release" in arguments_of_claim(conn)
        assert old_worker.process.poll() is late.process.poll() is None
    finally:
        queue.terminate()
    assert queue.wait(60) == 0, output.read_text()[-2000:]
    until(lambda: all_ended(conn), "every job ended")
    made, done = last_line(output)
    assert made == done
    assert statuses(conn) == {"completed": made + 50}
    assert "p_next_release" in arguments_of_claim(conn)


def arguments_of_claim(conn: psycopg.Connection[Any]) -> str:
    query = "SELECT pg_get_function_arguments('howdah.claim_job_batch'::regproc)"
    row = conn.execute(query).fetchone()
    assert row is not None
    return str(row[0])


WHAT_TO_DO = "Upgrade the howdah package in this environment"


def incompatible(home: Path) -> Path:
    """A release whose schema older code cannot use: it lacks a function that this code calls."""
    step = "-- drops: extend_jobs(uuid[], uuid[], interval, float8[])\n"
    edits = {"progress.sql": {"FUNCTION extend_jobs(": "FUNCTION extend_jobs_next("}}
    return newer_build(home, step, edits=edits, oldest_code=VERSION)


def test_a_worker_that_is_too_old_for_the_schema_reports_it_and_what_to_do(
    children: Children, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    running = children.start("--concurrency", "2", FAULT_APP_LEASE="1").ready()
    with contextlib.closing(JobQueue(children.database)) as queue:
        handle = queue.enqueue("nap", {"seconds": 600.0}, max_attempts=5)
        until(lambda: children.ledger("start"), "the job runs")
        subprocess.run(
            [sys.executable, "-m", "howdah", "migrate"],
            env=children.environment(**pointing_to(incompatible(tmp_path / "next"))),
            check=True,
        )
        assert version(conn) == VERSION
        late = children.start()
        assert late.wait() != 0
        assert WHAT_TO_DO in late.log.read_text()
        assert "Traceback" not in late.log.read_text()
        # The running worker reports the same, not missing tables.
        until(lambda: WHAT_TO_DO in running.log.read_text(), "the running worker reports it")
    assert statuses(conn)["completed"] == statuses(conn)["failed"] == 0
    assert queue_has(conn, handle.id)


def queue_has(conn: psycopg.Connection[Any], job_id: UUID) -> bool:
    found = conn.execute("SELECT 1 FROM howdah.live_jobs WHERE id = %s", [job_id]).fetchone()
    return found is not None
