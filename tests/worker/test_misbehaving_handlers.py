"""Handlers that misbehave in every way an asyncio, anyio, threading or multiprocessing program can, in each executor.
One verdict: the neighbours and the worker are unharmed.

The workers live through all cases, one after the other: whatever a case leaves behind stays there for the next ones,
and at the end each worker still stops within its grace period."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import misbehaving_app
from children import Child, Children, offspring
from howdah import JobQueue, Status
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from databases import Databases
    from howdah import Job

EXECUTORS = ("async", "thread", "process")
GRACE_SECONDS = 3.0
CASE_SECONDS = 40.0


class Household:
    """A worker that has run many misbehaving handlers, its queue, and the ledger of all runs."""

    def __init__(self, directory: Path, database: str) -> None:
        self.children = Children(directory, database)
        self.queue = JobQueue(database)
        self.ledger = directory / "runs"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.worker: Child = self.children.start(
            "--concurrency", "6", "--grace", str(GRACE_SECONDS), "--health-port", str(self.port),
            app="misbehaving_app:app", MISBEHAVING_LEDGER=str(self.ledger),
        ).ready()  # fmt: skip

    def enqueue(self, name: str) -> Any:
        return self.queue.enqueue(name, max_attempts=2)

    def neighbours(self) -> list[Any]:
        """One well-behaved job for each executor."""
        return [
            self.queue.enqueue(f"{executor}:neighbour", max_attempts=1) for executor in EXECUTORS
        ]

    def ended(self, handle: Any) -> Job:
        def final() -> Job | None:
            assert self.worker.process.poll() is None, f"the worker ended: {self.log()}"
            job = self.queue.get(handle.id)
            return job if job.status.is_final else None

        job: Job = until(final, f"job {handle.id} ended: {self.log()}", CASE_SECONDS)
        return job

    def runs(self) -> Counter[str]:
        """How often the handler of each job was entered."""
        return Counter(line.split()[1] for line in self.ledger.read_text().splitlines())

    def is_ready(self) -> bool:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as answer,
        ):
            return bool(json.load(answer)["ready"])
        return False

    def log(self) -> str:
        return self.worker.log.read_text()[-3000:]

    def close(self) -> None:
        self.queue.close()
        descendants = set(offspring(self.worker.pid))
        self.children.close()
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def households(
    databases: Databases, template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Household]]:
    """The worker for the misbehaving handlers of each executor, started at its first case."""
    started: dict[str, Household] = {}
    names = []

    def household(executor: str) -> Household:
        last = started.get(executor)
        if last is None or last.worker.process.poll() is not None:
            names.append(databases.create(template))
            directory = tmp_path_factory.mktemp(executor)
            started[executor] = Household(directory, databases.url(names[-1]))
            everyone.append(started[executor])
        return started[executor]

    everyone: list[Household] = []
    yield household
    for each in everyone:
        each.close()
    for name in names:
        databases.drop(name)


@pytest.mark.parametrize("misbehaviour", misbehaving_app.MISBEHAVIOURS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_handler_that_misbehaves_harms_neither_its_neighbours_nor_the_worker(
    households: Callable[[str], Household], executor: str, misbehaviour: str
) -> None:
    household = households(executor)
    beside = household.neighbours()
    bad = household.enqueue(f"{executor}:{misbehaviour}")
    beside += household.neighbours()
    for neighbour in beside:
        job = household.ended(neighbour)
        assert (job.status, job.attempts) == (Status.COMPLETED, 1), (
            job.last_error,
            household.log(),
        )
        assert job.result == [True, True]
    job = household.ended(bad)
    assert job.attempts <= 2
    assert household.worker.process.poll() is None, household.log()
    for neighbour in household.neighbours():  # after it
        assert household.ended(neighbour).status == Status.COMPLETED
    runs = household.runs()
    assert [runs[str(neighbour.id)] for neighbour in beside] == [1] * 6
    assert runs[str(bad.id)] == job.attempts
    until(household.is_ready, f"the worker is ready: {household.log()}", CASE_SECONDS)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_worker_that_ran_misbehaving_handlers_stops_within_its_grace_period(
    households: Callable[[str], Household], executor: str
) -> None:
    household = households(executor)
    for name in ("fills_the_default_executor", "leaves_a_thread", "leaves_a_child_process"):
        household.ended(household.enqueue(f"{executor}:{name}"))
    household.worker.send(signal.SIGTERM)
    began = time.monotonic()
    assert household.worker.wait(60) == 0, household.log()
    # Grace, the exit timeout of three seconds, and what a busy machine takes.
    assert time.monotonic() - began < GRACE_SECONDS + 9
    with psycopg.connect(household.children.database) as conn:
        assert conn.execute("SELECT count(*) FROM howdah.live_jobs").fetchone() == (0,)
        assert conn.execute("SELECT count(*) FROM howdah.workers").fetchone() == (0,)
