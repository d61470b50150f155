"""The heartbeat aborts the runs that it sent, and no others."""

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


def test_a_new_run_of_a_job_is_not_aborted_for_the_lost_lease_of_the_old_run(
    queue: JobQueue, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is retried and claimed again while the statement that extends the old lease is being sent."""
    handle = queue.enqueue("nap")
    first = claim(queue)
    aborted: list[Run] = []
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, aborted.append)
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
    # The new claim has taken the lease of the old run.
    assert aborted == [first]
    assert (first.abort_reason, runs[0].abort_reason) == ("lost", None)
    # The new run is aborted when its own lease is lost.
    queue.fail(handle.id, reason="again", retry=True)
    heartbeat.beat()
    assert aborted == [first, *runs]
    assert runs[0].abort_reason == "lost"


def test_the_start_of_a_run_is_written_only_after_suspect_seconds(
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


def test_a_beat_that_always_fails_is_logged_once_a_minute(
    queue: JobQueue, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    queue.enqueue("nap")
    heartbeat = Heartbeat(store, WorkerStatements("missing"), LEASE, lambda run: None)
    heartbeat.add(claim(queue))
    for _ in range(5):
        assert not heartbeat._try(heartbeat.beat)
    (record,) = caplog.records
    assert record.message == "heartbeat failed; retrying"
    assert record.exc_info is not None
