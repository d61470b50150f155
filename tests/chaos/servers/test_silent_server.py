"""A server that answers nothing for a while: its processes are stopped, or it is shut down."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from embedded_servers import running_server, stopped, workspace

from children import Children, all_ended, statuses
from howdah import JobQueue
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from howdah.embedded import EmbeddedServer

GRACE_SECONDS = 1
STOP_SECONDS = 15
"""The time after the grace period that docs/operations/deploying.md promises."""


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with workspace("silent") as directory, running_server(directory / "pg") as server:
        yield server


@pytest.fixture
def children(tmp_path: Path, own_server: EmbeddedServer) -> Iterator[Children]:
    children = Children(tmp_path, own_server.url)
    yield children
    children.close()


@pytest.fixture
def own_queue(own_server: EmbeddedServer) -> Iterator[JobQueue]:
    with contextlib.closing(JobQueue(own_server.url)) as queue:
        yield queue


@pytest.mark.parametrize("jobs", [("nap", "thread_nap", "process_nap"), ()], ids=["busy", "idle"])
def test_a_stop_keeps_its_time_while_the_processes_of_the_server_are_stopped(
    own_server: EmbeddedServer, own_queue: JobQueue, children: Children, jobs: tuple[str, ...]
) -> None:
    own_queue.pending()  # creates the schema
    worker = children.start("--grace", str(GRACE_SECONDS)).ready()
    for kind in jobs:
        own_queue.enqueue(kind, {"seconds": 3600})
    until(lambda: len(children.ledger("start")) == len(jobs), "the jobs started")
    with stopped(own_server):
        began = time.monotonic()
        worker.send(signal.SIGTERM)
        worker.wait()
        assert time.monotonic() - began < GRACE_SECONDS + STOP_SECONDS, worker.log.read_text()
    # Whether the worker could release its jobs or not, none has ended.
    with psycopg.connect(own_server.url, autocommit=True) as conn:
        assert statuses(conn).total() == len(jobs)
        assert statuses(conn).keys() <= {"pending", "claimed", "running"}


def test_a_worker_goes_on_after_the_processes_of_the_server_were_stopped(
    own_server: EmbeddedServer, own_queue: JobQueue, children: Children
) -> None:
    own_queue.pending()
    worker = children.start(FAULT_APP_LEASE="2").ready()
    own_queue.enqueue_many([{"job_type": "nap", "data": {"seconds": 0.01}}] * 200)
    until(lambda: len(children.ledger("effect")) > 20, "some jobs ran")
    with stopped(own_server):
        time.sleep(5)  # the fault itself: longer than a lease and the timeout of a statement
    own_queue.enqueue("nap")
    with psycopg.connect(own_server.url, autocommit=True) as conn:
        until(lambda: all_ended(conn), "all jobs ended")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.log.read_text()


def test_an_outage_that_is_longer_than_the_lease_costs_healthy_workers_no_job(
    own_server: EmbeddedServer, own_queue: JobQueue, children: Children
) -> None:
    """Two workers: each runs the duties when the server is back, before or after the heartbeat of the other."""
    own_queue.pending()
    for _ in range(2):
        children.start(FAULT_APP_LEASE="2").ready()
    kinds = ["nap", "thread_nap", "process_nap"] * 2
    for kind in kinds:
        own_queue.enqueue(kind, {"seconds": 12}, max_attempts=1)
    until(lambda: len(children.ledger("start")) == len(kinds), "the jobs started")
    own_server.stop()
    time.sleep(7)  # the fault itself
    own_server.start()
    with psycopg.connect(own_server.url, autocommit=True) as conn:
        until(lambda: all_ended(conn), "all jobs ended")
        assert statuses(conn) == {"completed": len(kinds)}
    assert len(children.ledger("start")) == len(kinds)
