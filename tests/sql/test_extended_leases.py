"""A lock that outlasts the lease: the worker's heartbeats go on, so recovery leaves the job to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from calls import claim, complete, enqueue, fences, maintain, rows, status, value, wait_until
from psycopg import IsolationLevel

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}
RECOVERIES = ["recover_stale_jobs()", "recover_expired()", "recover_late()", "run_maintenance()"]


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


def locked_past_its_lease(conn: Connection, operator: Connection, extension: str) -> Any:
    """A job whose lease expired while the operator had its row locked and its worker sent heartbeats."""
    enqueue(conn, WORK)
    (job,) = claim(conn, lease="1 millisecond", started=True)
    operator.execute("SELECT * FROM howdah.cancel_jobs(%s)", ([job.id],))
    (answer,) = rows(
        conn, "SELECT * FROM howdah.extend_jobs(%s, %s, %s)", *fences([job]), extension
    )
    assert (answer.extended, answer.mine) == (False, True)
    wait_until(
        lambda: value(conn, "SELECT %s < clock_timestamp()", job.lease_expires_at),
        "the lease has expired",
    )
    return job


def extensions_have_ended(conn: Connection) -> bool:
    return bool(
        value(conn, "SELECT max(expires_at) < clock_timestamp() FROM howdah.extended_leases")
    )


@pytest.mark.parametrize("call", RECOVERIES)
def test_a_job_with_heartbeats_is_not_recovered_when_a_lock_past_its_lease_ends(
    conn: Connection, connect: Connect, call: str
) -> None:
    operator = connect(autocommit=False)
    job = locked_past_its_lease(conn, operator, "1 minute")
    operator.rollback()
    conn.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
    conn.execute(f"SELECT * FROM howdah.{call}".encode())
    assert status(conn, job.id) == "running"
    (answer,) = rows(conn, "SELECT * FROM howdah.extend_jobs(%s, %s, '1 minute')", *fences([job]))
    assert answer.extended
    assert complete(conn, job) == [job.id]


def test_an_outcome_is_accepted_when_a_lock_past_its_lease_ends(
    conn: Connection, connect: Connect
) -> None:
    """The worker asks held_jobs, and sends the outcome again after recovery ran."""
    operator = connect(autocommit=False)
    job = locked_past_its_lease(conn, operator, "1 minute")
    assert complete(conn, job) == []
    assert rows(conn, "SELECT * FROM howdah.held_jobs(%s, %s)", *fences([job])) == [
        (job.id, job.lease_id)
    ]
    operator.rollback()
    maintain(conn, "recover", "late")
    assert complete(conn, job) == [job.id]


@pytest.mark.parametrize("duty", ["recover", "late"])
def test_a_job_whose_worker_died_during_the_lock_is_recovered_when_its_heartbeats_expire(
    conn: Connection, connect: Connect, duty: str
) -> None:
    operator = connect(autocommit=False)
    job = locked_past_its_lease(conn, operator, "200 milliseconds")
    operator.rollback()
    maintain(conn, duty)
    wait_until(lambda: extensions_have_ended(conn), "the last heartbeat expires")
    # The search does not come back to the job: the duty has noted it.
    conn.execute("UPDATE howdah.maintenance SET reached = clock_timestamp() WHERE duty = 'recover'")
    maintain(conn, duty)
    assert status(conn, job.id) == "pending"


def test_an_operator_recovers_a_job_with_heartbeats_by_the_time_of_its_claim(
    conn: Connection, connect: Connect
) -> None:
    operator = connect(autocommit=False)
    job = locked_past_its_lease(conn, operator, "1 minute")
    operator.rollback()
    assert value(conn, "SELECT howdah.recover_stale_jobs(interval '0')") == 1
    assert status(conn, job.id) == "pending"


def test_a_heartbeat_of_an_earlier_claim_protects_no_later_one(
    conn: Connection, connect: Connect
) -> None:
    operator = connect(autocommit=False)
    job = locked_past_its_lease(conn, operator, "1 minute")
    operator.rollback()
    conn.execute("SELECT howdah.takeover_jobs(%s)", ([job.id],))
    (again,) = claim(conn, lease="1 microsecond")
    assert (again.id, again.lease_id != job.lease_id) == (job.id, True)
    maintain(conn, "recover")
    assert status(conn, job.id) == "pending"


def test_a_heartbeat_of_a_clock_that_was_ahead_protects_nothing_when_it_went_back(
    conn: Connection, connect: Connect
) -> None:
    operator = connect(autocommit=False)
    job = locked_past_its_lease(conn, operator, "1 minute")
    conn.execute(
        "UPDATE howdah.extended_leases SET written_at = written_at + interval '1 hour', "
        "expires_at = expires_at + interval '1 hour'"
    )
    operator.rollback()
    maintain(conn, "recover")
    assert status(conn, job.id) == "pending"


def test_recovery_with_an_old_snapshot_leaves_a_job_whose_heartbeats_it_does_not_show(
    conn: Connection, connect: Connect
) -> None:
    late = connect(autocommit=False)
    late.isolation_level = IsolationLevel.REPEATABLE_READ
    operator = connect(autocommit=False)
    enqueue(conn, WORK)
    (job,) = claim(conn, lease="500 milliseconds")
    late.execute("SELECT 1")
    assert value(conn, "SELECT %s > clock_timestamp()", job.lease_expires_at)
    operator.execute("SELECT * FROM howdah.cancel_jobs(%s)", ([job.id],))
    conn.execute("SELECT howdah.extend_jobs(%s, %s, '1 minute')", fences([job]))
    wait_until(
        lambda: value(conn, "SELECT %s < clock_timestamp()", job.lease_expires_at),
        "the lease has expired",
    )
    operator.rollback()
    assert value(late, "SELECT howdah.recover_stale_jobs()") == 0
    late.commit()
    assert status(conn, job.id) == "claimed"


def test_a_heartbeat_records_only_the_leases_of_locked_jobs(
    conn: Connection, connect: Connect
) -> None:
    enqueue(conn, WORK, WORK, WORK)
    jobs = claim(conn)
    operator = connect(autocommit=False)
    operator.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (jobs[0].id,))
    conn.execute("SELECT howdah.release_jobs(%s, %s)", fences(jobs[1:2]))
    conn.execute("SELECT howdah.extend_jobs(%s, %s)", fences(jobs))
    assert rows(conn, "SELECT job_id, lease_id FROM howdah.extended_leases") == [
        (jobs[0].id, jobs[0].lease_id)
    ]


def test_expired_extensions_are_removed_in_steps(conn: Connection) -> None:
    conn.execute(
        "INSERT INTO howdah.extended_leases (job_id, lease_id, written_at, expires_at) "
        "SELECT gen_random_uuid(), gen_random_uuid(), clock_timestamp() - ago, "
        "clock_timestamp() - ago + interval '30 seconds' "
        "FROM (SELECT CASE WHEN n <= 25 THEN interval '1 hour' ELSE interval '0' END AS ago "
        "      FROM generate_series(1, 27) AS n) AS s"
    )
    left = []
    more = True
    while more:
        more = value(conn, "SELECT more FROM howdah.prune(10)")
        left.append(value(conn, "SELECT count(*) FROM howdah.extended_leases"))
    assert left == [17, 7, 2]
