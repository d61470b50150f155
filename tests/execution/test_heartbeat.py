"""The heartbeat extends leases and removes those that have ended. It aborts the runs that it sent, and no others."""

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
from waiting import until

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


@pytest.fixture
def conn(connect: Callable[..., psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    return connect()


def claim(queue: JobQueue) -> Run:
    (run,) = claim_many(queue, 1)
    return run


def claim_many(queue: JobQueue, count: int) -> list[Run]:
    jobs = queue.claim(["nap"], batch_size=count)
    assert len(jobs) == count
    return [Run(job.id, job.lease_id, job, task=None) for job in jobs if job.lease_id is not None]


def leases(conn: psycopg.Connection[Any]) -> list[Any]:
    """The ids of the leases in the database."""
    query = "SELECT lease_id FROM howdah.leases ORDER BY lease_id"
    return [lease_id for (lease_id,) in conn.execute(query)]


def test_a_new_run_of_a_job_is_not_aborted_for_the_lost_lease_of_the_old_run(
    queue: JobQueue, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is retried and claimed again while the statement that extends the old lease is being sent."""
    handle = queue.enqueue("nap")
    first = claim(queue)
    aborted: list[Run] = []
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, aborted.append)
    heartbeat.add([first])
    runs: list[Run] = []
    run_statement = store.run

    def run_late(statement: Statement[Any]) -> Any:
        if not runs:
            queue.fail(handle.id, reason="again", retry=True)
            runs.append(claim(queue))
            heartbeat.add(runs)
            heartbeat.remove([first], is_accepted=False)
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
    heartbeat.add([run])
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
    heartbeat.add([claim(queue)])
    for _ in range(5):
        assert not heartbeat._try(heartbeat.beat)
    (record,) = caplog.records
    assert record.message == "heartbeat failed; retrying"
    assert record.exc_info is not None


def test_a_new_run_with_the_same_number_of_claims_is_not_aborted_for_the_old_run(
    queue: JobQueue, store: Store
) -> None:
    """The job failed elsewhere and an operator retried it: its claims are counted from the start again."""
    handle = queue.enqueue("nap", max_attempts=1)
    first = claim(queue)
    aborted: list[Run] = []
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, aborted.append)
    heartbeat.add([first])
    queue.fail(handle.id, reason="recovered", retry=False)
    assert queue.retry(handle.id)
    second = claim(queue)
    heartbeat.add([second])
    heartbeat.beat()
    assert (first.abort_reason, second.abort_reason) == ("lost", None)
    assert aborted == [first]


# ── rows of leases ────────────────────────────────────────────────────────────────────────────────


def test_a_heartbeat_extends_the_lease_of_a_thousand_jobs_by_writing_one_row(
    queue: JobQueue, store: Store, conn: psycopg.Connection[Any]
) -> None:
    queue.enqueue_many([("nap", {})] * 1000)
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, lambda run: None)
    heartbeat.add(claim_many(queue, 1000))
    written = "SELECT ctid::text, xmin::text FROM howdah.live_jobs ORDER BY id"
    lease = "SELECT lease_id, cardinality(job_ids) FROM howdah.leases"
    jobs, ((lease_id, count),) = conn.execute(written).fetchall(), conn.execute(lease).fetchall()
    assert count == 1000
    conn.execute("UPDATE howdah.leases SET expires_at = clock_timestamp()")
    heartbeat.beat()
    assert conn.execute(written).fetchall() == jobs
    extended = "SELECT lease_id, expires_at > clock_timestamp() FROM howdah.leases"
    assert conn.execute(extended).fetchall() == [(lease_id, True)]
    assert queue.recover_stale_jobs() == 0


def test_leases_whose_outcomes_were_all_accepted_are_removed_by_the_next_heartbeat(
    queue: JobQueue, store: Store, conn: psycopg.Connection[Any]
) -> None:
    statements = WorkerStatements("howdah")
    heartbeat = Heartbeat(store, statements, LEASE, lambda run: None)
    queue.enqueue_many([("nap", {})] * 5)
    ended, unfinished = claim_many(queue, 3), claim_many(queue, 2)
    heartbeat.add([*ended, *unfinished])
    done = [*ended, unfinished[0]]
    ids = [run.id for run in done]
    accepted = store.run(
        statements.complete_runs(ids, [run.lease_id for run in done], [None] * 4, None)
    )
    assert set(accepted) == set(ids)
    heartbeat.remove(done[:2], is_accepted=True)
    heartbeat.beat()
    assert leases(conn) == sorted([ended[0].lease_id, unfinished[0].lease_id])
    heartbeat.remove(done[2:], is_accepted=True)
    heartbeat.beat()
    # A job of the other lease still runs.
    assert leases(conn) == [unfinished[0].lease_id]
    assert heartbeat.runs() == unfinished[1:]
    queue.complete(unfinished[1].job)
    heartbeat.remove(unfinished[1:], is_accepted=True)
    heartbeat.beat()
    assert leases(conn) == []


def test_a_lease_with_a_rejected_outcome_is_left_to_recovery(
    queue: JobQueue, store: Store, conn: psycopg.Connection[Any]
) -> None:
    """A job whose outcome could not be written still has the lease: without it, nothing would recover the job."""
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, lambda run: None)
    queue.enqueue_many([("nap", {})] * 2)
    written, rejected = runs = claim_many(queue, 2)
    heartbeat.add(runs)
    queue.complete(written.job)
    heartbeat.remove([rejected], is_accepted=False)
    heartbeat.remove([written], is_accepted=True)
    heartbeat.beat()
    expiry = conn.execute("SELECT expires_at FROM howdah.leases").fetchall()
    assert leases(conn) == [rejected.lease_id]
    heartbeat.beat()
    assert conn.execute("SELECT expires_at FROM howdah.leases").fetchall() == expiry
    conn.execute("UPDATE howdah.leases SET expires_at = clock_timestamp()")
    assert queue.recover_stale_jobs() == 1
    assert queue.get(rejected.id).status == "pending"
    assert leases(conn) == []


def test_a_lease_that_still_has_a_job_is_not_removed_although_its_outcomes_count_as_accepted(
    queue: JobQueue, store: Store, conn: psycopg.Connection[Any]
) -> None:
    """The answer is believed by this process, and checked by the database."""
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, lambda run: None)
    queue.enqueue("nap")
    run = claim(queue)
    heartbeat.add([run])
    heartbeat.remove([run], is_accepted=True)
    heartbeat.beat()
    assert leases(conn) == [run.lease_id]


IS_EXTENDED = "SELECT expires_at > clock_timestamp() FROM howdah.leases"


def test_a_lock_on_a_job_does_not_keep_its_lease_from_being_extended(
    queue: JobQueue, store: Store, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    """The start of the job is recorded by a heartbeat after the lock."""
    conn, locker = connect(), connect(autocommit=False)
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, lambda run: None)
    queue.enqueue("nap")
    run = claim(queue)
    run.started = time.monotonic() - SUSPECT_SECONDS
    heartbeat.add([run])
    locker.execute("SELECT FROM howdah.live_jobs FOR UPDATE")
    conn.execute("UPDATE howdah.leases SET expires_at = clock_timestamp()")
    heartbeat.beat()
    assert conn.execute(IS_EXTENDED).fetchone() == (True,)
    assert queue.get(run.id).status == "claimed"
    locker.rollback()
    heartbeat.beat()
    assert queue.get(run.id).status == "running"


def test_a_lease_that_another_transaction_has_locked_is_extended_by_a_heartbeat_soon_after(
    queue: JobQueue,
    store: Store,
    connect: Callable[..., psycopg.Connection[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one in the period would be an hour later."""
    monkeypatch.setattr("howdah.execution.heartbeat.MAX_PERIOD_SECONDS", 3600.0)
    conn, locker = connect(), connect(autocommit=False)
    beats: list[bool] = []
    aborted: list[Run] = []
    heartbeat = Heartbeat(
        store,
        WorkerStatements("howdah"),
        timedelta(hours=3),
        aborted.append,
        on_beat=lambda: beats.append(True),
    )
    queue.enqueue("nap")
    heartbeat.add([claim(queue)])
    conn.execute("UPDATE howdah.leases SET expires_at = clock_timestamp()")
    locker.execute("SELECT FROM howdah.leases FOR UPDATE")
    heartbeat.start()
    heartbeat.beat_soon()
    until(lambda: beats, "a beat has found the lease locked")
    assert conn.execute(IS_EXTENDED).fetchone() == (False,)
    locker.rollback()
    until(lambda: conn.execute(IS_EXTENDED).fetchone() == (True,), "it is extended")
    assert aborted == []
    heartbeat.stop()


def test_a_job_that_was_given_up_is_released_when_it_is_no_longer_locked(
    queue: JobQueue, store: Store, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    """Its lease is extended for another job of the same claim, so it would never expire."""
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, lambda run: None)
    heartbeat.start()
    try:
        queue.enqueue_many([("nap", {})] * 3)
        running, locked, free = claim_many(queue, 3)
        heartbeat.add([running, locked, free])
        operator = connect(autocommit=False)
        operator.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (locked.id,))
        heartbeat.give_up([locked, free])
        until(lambda: queue.get(free.id).status == "pending", "the free job was released")
        heartbeat.beat()
        assert queue.get(locked.id).status == "claimed"
        operator.rollback()
        until(lambda: queue.get(locked.id).status == "pending", "the locked job was released")
        assert queue.get(running.id).status == "claimed"
        assert heartbeat.runs() == [running]
    finally:
        heartbeat.stop()


def test_a_job_that_cannot_be_released_keeps_no_other(
    queue: JobQueue, store: Store, conn: psycopg.Connection[Any]
) -> None:
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, lambda run: None)
    queue.enqueue("nap", {"poison": True})
    queue.enqueue_many([("nap", {})] * 3)
    poisoned, *others = runs = claim_many(queue, 4)
    heartbeat.add(runs)
    conn.execute(
        "CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN IF OLD.data ? ''poison'' THEN RAISE ''poisoned''; END IF; RETURN NEW; END';"
        "CREATE TRIGGER poison BEFORE UPDATE OF status ON howdah.live_jobs "
        "FOR EACH ROW EXECUTE FUNCTION poison()"
    )
    heartbeat.start()
    try:
        heartbeat.give_up(runs)
        until(
            lambda: all(queue.get(run.id).status == "pending" for run in others),
            "the others were released",
        )
        assert queue.get(poisoned.id).status == "claimed"
        conn.execute("DROP TRIGGER poison ON howdah.live_jobs")
        until(lambda: queue.get(poisoned.id).status == "pending", "it was released, too")
    finally:
        heartbeat.stop()


def test_a_removal_of_leases_that_fails_costs_no_lease_and_is_sent_again(
    queue: JobQueue, store: Store, conn: psycopg.Connection[Any]
) -> None:
    heartbeat = Heartbeat(store, WorkerStatements("howdah"), LEASE, lambda run: None)
    queue.enqueue("nap")
    run = claim(queue)
    heartbeat.add([run])
    queue_lease = run.lease_id
    store.run(WorkerStatements("howdah").complete_runs([run.id], [queue_lease], [None], None))
    heartbeat.remove([run], is_accepted=True)
    conn.execute("ALTER FUNCTION howdah.remove_ended_leases RENAME TO away")
    heartbeat.beat()
    assert heartbeat.can_extend
    assert leases(conn) == [queue_lease]
    conn.execute("ALTER FUNCTION howdah.away RENAME TO remove_ended_leases")
    heartbeat.beat()
    assert leases(conn) == []
