"""What a heartbeat says of the runs it asked about, and of no other."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from howdah.database.store import Store
from howdah.execution.heartbeat import SUSPECT_SECONDS, Heartbeat
from howdah.execution.run import Run
from howdah.protocol.worker_statements import WorkerStatements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from howdah import JobQueue
    from howdah.protocol.statements import Statement

LEASE = timedelta(seconds=30)


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    with contextlib.closing(Store(database, "howdah", create=False)) as store:
        yield store


def claim(queue: JobQueue) -> Run:
    (job,) = queue.claim(["nap"])
    assert job.lease_id is not None
    return Run(job.id, job.lease_id, job, task=None)


def test_a_job_that_is_ours_again_is_not_taken_for_the_run_that_ended(
    queue: JobQueue, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is retried and claimed again while the statement is on its way that extends the old lease."""
    handle = queue.enqueue("nap")
    first = claim(queue)
    told: list[Run] = []
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, told.append)
    heartbeat.add(first)
    runs: list[Run] = []
    run_statement = store.run

    def run_late(statement: Statement[Any]) -> Any:
        if not runs:
            queue.fail(handle.id, reason="again", retry=True)
            runs.append(claim(queue))
            heartbeat.add(runs[0])
            heartbeat.remove([first])
        return run_statement(statement)

    monkeypatch.setattr(store, "run", run_late)
    heartbeat.beat()
    assert heartbeat.runs() == runs
    assert told == []
    assert runs[0].abort_reason is None
    # The new one is extended, and heard of when it is lost, as ever.
    queue.fail(handle.id, reason="again", retry=True)
    heartbeat.beat()
    assert told == runs
    assert runs[0].abort_reason == "lost"


def test_a_run_that_has_just_begun_is_not_told_of(
    queue: JobQueue, store: Store, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    queue.enqueue("nap")
    run = claim(queue)
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, lambda *_: None)
    heartbeat.add(run)
    status = "SELECT status FROM howdah.jobs"
    run.started = time.monotonic()
    heartbeat.beat()
    assert connect().execute(status).fetchone() == ("claimed",)
    run.started -= SUSPECT_SECONDS
    heartbeat.beat()
    assert connect().execute(status).fetchone() == ("running",)
