"""Two releases at once on one database: the old one goes on, or says what to do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from builds import newer_build, older_build, pointing_to

from children import Children, all_ended, statuses, until
from howdah import JobQueue, sql

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from uuid import UUID

pytestmark = pytest.mark.slow

# What a user of the bare queue runs: enqueues, claims and completes until told to stop.
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


def test_queues_of_the_release_before_go_on_while_this_one_migrates_and_works(
    children: Children, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    latest = sql.latest_version()
    old = older_build(tmp_path / "old", latest - 1)
    said = tmp_path / "said"
    with said.open("wb") as file:
        queue = subprocess.Popen(
            [sys.executable, "-c", OLD_PROGRAM, children.database],
            env=os.environ | pointing_to(old),
            stdout=file,
            stderr=file,
        )
    try:
        until(lambda: last_line(said)[1] > 20, "the old release works")
        assert version(conn) == latest - 1
        children.start().ready()
        assert version(conn) == latest
        with contextlib.closing(JobQueue(children.database)) as new:
            new.enqueue_many([("nap", {"seconds": 0.0})] * 50)
        (_, before) = last_line(said)
        until(lambda: last_line(said)[1] > before + 50, "the old release goes on")
    finally:
        queue.terminate()
    assert queue.wait(60) == 0, said.read_text()[-2000:]
    until(lambda: all_ended(conn), "every job ended")
    made, done = last_line(said)
    assert made == done
    assert statuses(conn) == {"completed": made + 50}


WHAT_TO_DO = "Upgrade the howdah package in this environment"


def incompatible(home: Path) -> Path:
    """A release whose schema the code before it cannot use: a function it calls is gone."""
    text = "ALTER FUNCTION extend_jobs RENAME TO extend_jobs_anew;"
    return newer_build(home, text, oldest_code=sql.latest_version() + 1)


def test_a_worker_that_is_too_old_for_the_schema_says_so_and_what_to_do(
    children: Children, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    running = children.start("--concurrency", "2", FAULT_APP_LEASE="1").ready()
    with contextlib.closing(JobQueue(children.database)) as queue:
        handle = queue.enqueue("nap", {"seconds": 600.0}, max_attempts=5)
        until(lambda: children.ledger("start"), "it is at work")
        subprocess.run(
            [sys.executable, "-m", "howdah", "migrate"],
            env=children.environment(**pointing_to(incompatible(tmp_path / "next"))),
            check=True,
        )
        assert version(conn) == sql.latest_version() + 1
        late = children.start()
        assert late.wait() != 0
        assert WHAT_TO_DO in late.log.read_text()
        assert "Traceback" not in late.log.read_text()
        # One that runs already is told as well, instead of being sent to look for its tables.
        until(lambda: WHAT_TO_DO in running.log.read_text(), "the running worker says so")
    assert statuses(conn)["completed"] == statuses(conn)["failed"] == 0
    assert queue_has(conn, handle.id)


def queue_has(conn: psycopg.Connection[Any], job_id: UUID) -> bool:
    found = conn.execute("SELECT 1 FROM howdah.live_jobs WHERE id = %s", [job_id]).fetchone()
    return found is not None
