"""No statement of ours waits for somebody else's transaction."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import (
    Waits,
    claim,
    complete,
    enqueue,
    expire,
    fences,
    maintain,
    rows,
    status,
    value,
    wait_until,
)
from psycopg import IsolationLevel
from psycopg.rows import namedtuple_row

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    Connect = Callable[..., psycopg.Connection[Any]]
    Connection = psycopg.Connection[Any]

# The transactions stay open until the test ends: who waits for them without a limit meets this one.
FOR_EVER = "60s"


@dataclass(frozen=True, slots=True)
class Crowd:
    """Claimed jobs, of which one is busy in its handler's open transaction, and a worker's connection."""

    worker: Connection
    waits: Waits
    claimed: list[Any]
    busy: Any
    handler: Connection

    @property
    def neighbours(self) -> set[UUID]:
        return {job.id for job in self.claimed} - {self.busy.id}


def work(job_type: str = "a", key: str | None = None, **more: Any) -> dict[str, Any]:
    return {"job_type": job_type, "ordering_key": key, **more}


@pytest.fixture
def crowd(connect: Connect) -> Crowd:
    worker = connect()
    worker.execute(f"SET statement_timeout = '{FOR_EVER}'")
    jobs = [
        work("a"),
        work("b", "k1"),
        work("b", "k1"),
        work("a", "k2"),
        work("a", "k2"),
        work("b"),
    ]
    enqueue(worker, *jobs)
    claimed = claim(worker)
    assert len(claimed) == 4  # two wait behind their keys
    enqueue(worker, *jobs, work("a", delay=3600))

    for order in (1, -1):
        producer = connect(autocommit=False)
        new = [work("a", "k1"), work("b", "k2"), work("c", "k3"), work("d", "k4"), work("d")]
        for job in new[::order]:
            enqueue(producer, job)
    handler = connect(autocommit=False)
    busy = next(job for job in claimed if job.ordering_key == "k1")
    assert complete(handler, busy) == [busy.id]
    reader = connect(autocommit=False)
    reader.isolation_level = IsolationLevel.REPEATABLE_READ
    reader.execute("SELECT * FROM howdah.jobs").fetchall()
    reader.execute("SELECT * FROM howdah.lanes, howdah.unassigned_keys").fetchall()
    return Crowd(worker, Waits(worker), claimed, busy, handler)


def test_a_claim_takes_the_other_jobs_of_the_same_lanes(crowd: Crowd) -> None:
    jobs = claim(crowd.worker)
    assert crowd.waits.count == 0
    assert sorted((job.job_type, job.ordering_key) for job in jobs) == [("a", None), ("b", None)]


ACKNOWLEDGEMENTS = {
    "complete_jobs": "SELECT * FROM howdah.complete_jobs(%s, %s)",
    "fail_jobs": "SELECT * FROM howdah.fail_jobs(%s, %s, array_fill('no'::text, ARRAY[4]))",
    "fail_jobs for good": "SELECT * FROM howdah.fail_jobs(%s, %s, array_fill('no'::text, ARRAY[4]), "
    "array_fill(NULL::timestamptz, ARRAY[4]))",
    "start_jobs": "SELECT * FROM howdah.start_jobs(%s, %s)",
    "add_events": "SELECT * FROM howdah.add_events(%s, %s, array_fill('note'::text, ARRAY[4]), NULL)",
    "release_jobs": "SELECT * FROM howdah.release_jobs(%s, %s)",
}


@pytest.mark.parametrize("name", ACKNOWLEDGEMENTS)
def test_an_acknowledgement_accepts_the_neighbours_of_a_busy_job(crowd: Crowd, name: str) -> None:
    accepted = rows(crowd.worker, ACKNOWLEDGEMENTS[name], *fences(crowd.claimed))
    assert crowd.waits.count == 1  # for the busy job, and not for long
    assert {row[0] for row in accepted} == crowd.neighbours


@pytest.mark.parametrize("name", ACKNOWLEDGEMENTS)
def test_an_acknowledgement_without_the_busy_job_does_not_wait_at_all(
    crowd: Crowd, name: str
) -> None:
    mine = [job for job in crowd.claimed if job.id != crowd.busy.id]
    accepted = rows(crowd.worker, ACKNOWLEDGEMENTS[name], *fences(mine))
    assert crowd.waits.count == 0
    assert {row[0] for row in accepted} == crowd.neighbours


def test_progress_skips_a_busy_job_and_says_that_it_is_not_lost(crowd: Crowd) -> None:
    answers = rows(
        crowd.worker,
        "SELECT * FROM howdah.report_progress(%s, %s, '{1,2,3,4}')",
        *fences(crowd.claimed),
    )
    assert crowd.waits.count == 0
    assert {row.id for row in answers if row.reported} == crowd.neighbours
    assert all(row.mine for row in answers)


HEARTBEAT = (
    "SELECT * FROM howdah.extend_jobs(%(ids)s, %(fences)s, '1 minute', %(elapsed)s::float8[], "
    "%(fences)s, %(fences)s)"
)


def heartbeat(conn: Connection, jobs: list[Any], *, started: bool = True) -> list[Any]:
    """Of jobs whose start it records, or of jobs that have not started."""
    ids, lease_ids = fences(jobs)
    elapsed = [1.0 if started else None] * len(jobs)
    parameters = {"ids": ids, "fences": lease_ids, "elapsed": elapsed}
    with conn.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(HEARTBEAT, parameters).fetchall()


def test_a_heartbeat_extends_the_leases_of_busy_jobs_and_does_not_wait(crowd: Crowd) -> None:
    answers = heartbeat(crowd.worker, crowd.claimed)
    assert crowd.waits.count == 0
    assert {row.id for row in answers} == {None, *(job.id for job in crowd.claimed)}
    assert all(row.extended and row.mine for row in answers)


def test_a_heartbeat_does_not_wait_for_an_open_one(crowd: Crowd, connect: Connect) -> None:
    heartbeat(connect(autocommit=False), crowd.claimed)
    answers = heartbeat(crowd.worker, crowd.claimed)
    assert crowd.waits.count == 0
    assert {(row.extended, row.mine) for row in answers} == {(False, True)}


@pytest.mark.parametrize("name", ACKNOWLEDGEMENTS)
def test_an_acknowledgement_does_not_wait_for_an_open_heartbeat(
    crowd: Crowd, connect: Connect, name: str
) -> None:
    mine = [job for job in crowd.claimed if job.id != crowd.busy.id]
    open_heartbeat = heartbeat(connect(autocommit=False), crowd.claimed, started=False)
    assert all(row.extended for row in open_heartbeat)
    accepted = rows(crowd.worker, ACKNOWLEDGEMENTS[name], *fences(mine))
    assert crowd.waits.count == 0
    assert {row[0] for row in accepted} == crowd.neighbours


def test_recovery_takes_what_nobody_has_locked(crowd: Crowd) -> None:
    found = value(crowd.worker, "SELECT howdah.recover_stale_jobs(interval '0')")
    assert crowd.waits.count == 0
    assert found == len(crowd.neighbours)


@pytest.mark.parametrize(
    "call",
    [
        "assign_keys()",
        "sweep_lanes()",
        "next_due_at()",
        "run_maintenance()",
        "next_wake('worker', NULL, '{default}', true)",
        "pass_wake('worker')",
    ],
)
def test_upkeep_does_not_wait(crowd: Crowd, call: str) -> None:
    expire(crowd.worker, *(job for job in crowd.claimed if job.id != crowd.busy.id))
    crowd.worker.execute(
        "INSERT INTO howdah.unassigned_keys (ordering_key) VALUES ('k1'), ('k2'), ('k3')"
    )
    crowd.worker.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
    crowd.worker.execute(f"SELECT * FROM howdah.{call}".encode())
    assert crowd.waits.count == 0
    assert rows(crowd.worker, "SELECT * FROM howdah.maintenance WHERE last_error IS NOT NULL") == []


def test_the_busy_job_is_completed_when_its_handler_commits(crowd: Crowd) -> None:
    complete(crowd.worker, *crowd.claimed)
    crowd.handler.commit()
    assert status(crowd.worker, crowd.busy.id) == "completed"


def test_two_open_enqueues_with_the_same_new_lanes_and_keys_do_not_meet(
    connect: Connect, conn: Connection
) -> None:
    first, second = (connect(autocommit=False) for _ in range(2))
    for producer in (first, second):
        producer.execute("SET lock_timeout = '200ms'")
    jobs = [work(f"type {n}", f"key {n}") for n in range(4)]
    for one, other in zip(jobs, reversed(jobs), strict=True):
        enqueue(first, one)
        enqueue(second, other)
    second.commit()
    first.commit()
    done = 0
    while done < 8:
        maintain(conn, "keys", "sweep")
        taken = claim(conn)
        assert taken, f"only {done} of 8 were ever claimable"
        done += len(complete(conn, *taken))


def test_a_job_in_a_new_lane_does_not_wait_for_another_transaction_that_uses_it_first(
    connect: Connect, conn: Connection
) -> None:
    stranger = connect(autocommit=False)
    enqueue(stranger, work("new"))
    (mine,) = enqueue(conn, work("new"))
    maintain(conn, "sweep")
    assert [job.id for job in claim(conn)] == [mine]
    stranger.commit()
    assert len(claim(conn)) == 1


def test_a_lane_that_two_transactions_made_is_claimed_from_like_any_other(
    connect: Connect, conn: Connection
) -> None:
    stranger = connect(autocommit=False)
    enqueue(stranger, work("new"))
    enqueue(conn, *(work("new") for _ in range(5)))
    maintain(conn, "sweep")
    stranger.commit()
    taken = claim(conn, 3)
    conn.execute("SELECT howdah.release_jobs(%s, %s)", fences(taken))
    maintain(conn)
    assert len({job.id for job in claim(conn, 4)} | {job.id for job in claim(conn, 4)}) == 6


def test_a_cancel_that_meets_a_completion_in_the_opposite_order_gives_way(
    connect: Connect, conn: Connection
) -> None:
    first, second = enqueue(conn, work("a"), work("a"))
    jobs = {job.id: job for job in claim(conn)}
    worker, operator = connect(autocommit=False), connect()
    operator.execute("SET deadlock_timeout = '50ms'")
    complete(worker, jobs[second])
    with ThreadPoolExecutor(1) as pool:
        cancelling = pool.submit(
            operator.execute, "SELECT * FROM howdah.cancel_jobs(%s)", ([first, second],)
        )
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        wait_until(
            lambda: value(conn, waits, operator.info.backend_pid), "the cancel waits for the second"
        )
        assert complete(worker, jobs[first]) == [first]
        worker.commit()
        assert cancelling.result().fetchall() == []
    assert status(conn, first) == status(conn, second) == "completed"


def test_a_cancellation_in_a_deadlock_with_a_handler_is_ended_and_the_handler_goes_on(
    connect: Connect, conn: Connection
) -> None:
    """The caller holds a row that the handler needs, so no number of tries can help."""
    conn.execute("CREATE TABLE accounts (id int PRIMARY KEY)")
    conn.execute("INSERT INTO accounts VALUES (1)")
    enqueue(conn, work("work"))
    (job,) = claim(conn)
    caller, handler = (connect(autocommit=False) for _ in range(2))
    caller.execute("SET deadlock_timeout = '50ms'")
    handler.execute("SET deadlock_timeout = '10min'")  # so that the caller is the one to be ended
    caller.execute("SELECT FROM accounts FOR UPDATE")
    complete(handler, job)
    with ThreadPoolExecutor(1) as threads:
        needs = threads.submit(handler.execute, "SELECT FROM accounts FOR UPDATE")
        wait_until(
            lambda: value(
                conn,
                "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
                handler.info.backend_pid,
            ),
            "the handler waits for the caller",
        )
        message = "a transaction that has locked one of them waits for this transaction"
        with pytest.raises(psycopg.errors.DeadlockDetected, match=message):
            caller.execute("SELECT * FROM howdah.cancel_jobs(%s)", ([job.id],))
        caller.rollback()
        needs.result(60)
    handler.commit()
    assert status(conn, job.id) == "completed"
    conn.execute("DROP TABLE accounts")
