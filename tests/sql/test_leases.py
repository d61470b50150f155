"""Heartbeats extend leases: no lock on a job keeps them from it, and no other transaction waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from calls import (
    Waits,
    claim,
    complete,
    complete_runs,
    enqueue,
    expire_leases,
    fences,
    get,
    maintain,
    rows,
    status,
    value,
    wait_until,
)
from psycopg import IsolationLevel

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}
RECOVERIES = ["recover_stale_jobs()", "recover_expired()", "recover_late()", "run_maintenance()"]


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


def extend(
    conn: Connection,
    *jobs: Any,
    lease: str = "1 minute",
    elapsed: list[float | None] | None = None,
    more: list[UUID] | None = None,
    ended: list[UUID] | None = None,
) -> list[Any]:
    """A heartbeat: its answers, in the order of the jobs and of the further leases."""
    answers = rows(
        conn,
        "SELECT * FROM howdah.extend_jobs(%s::uuid[], %s::uuid[], %s, %s::float8[], %s::uuid[], %s::uuid[])",
        *fences(jobs),
        lease,
        elapsed,
        more or [],
        ended or [],
    )
    order = [(job.id, job.lease_id) for job in jobs] + [(None, lease_id) for lease_id in more or []]
    assert len(answers) == len(order)
    return sorted(answers, key=lambda answer: order.index((answer.id, answer.lease_id)))


def extended(answers: list[Any]) -> list[tuple[bool, bool]]:
    return [(answer.extended, answer.mine) for answer in answers]


def seconds_left(conn: Connection, *jobs: Any) -> list[float]:
    """Until the leases of claimed jobs expire."""
    return [
        float(
            value(
                conn,
                "SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM howdah.leases "
                "WHERE lease_id = %s",
                job.lease_id,
            )
        )
        for job in jobs
    ]


def lease_ids(conn: Connection) -> set[UUID]:
    return {row.lease_id for row in rows(conn, "SELECT lease_id FROM howdah.leases")}


def claim_each(conn: Connection, count: int, **options: Any) -> list[Any]:
    """Jobs that were claimed one by one: each has its own lease."""
    enqueue(conn, *[WORK] * count)
    return [claim(conn, 1, **options)[0] for _ in range(count)]


def has_expired(conn: Connection) -> bool:
    return bool(value(conn, "SELECT max(expires_at) < clock_timestamp() FROM howdah.leases"))


def recover(conn: Connection, call: str) -> None:
    conn.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
    conn.execute(f"SELECT * FROM howdah.{call}".encode())


# ── a lock on the job ─────────────────────────────────────────────────────────────────────────────


def locked_past_its_lease(conn: Connection, operator: Connection, extension: str) -> Any:
    """A job whose lease expired while the operator had its row locked and its worker sent heartbeats."""
    enqueue(conn, WORK)
    (job,) = claim(conn, lease="1 millisecond", started=True)
    operator.execute("SELECT * FROM howdah.cancel_jobs(%s)", ([job.id],))
    assert extended(extend(conn, job, lease=extension)) == [(True, True)]
    wait_until(
        lambda: value(conn, "SELECT %s < clock_timestamp()", job.lease_expires_at),
        "the lease has expired",
    )
    return job


@pytest.mark.parametrize("call", RECOVERIES)
def test_a_job_with_heartbeats_is_not_recovered_when_a_lock_past_its_lease_ends(
    conn: Connection, connect: Connect, call: str
) -> None:
    operator = connect(autocommit=False)
    job = locked_past_its_lease(conn, operator, "1 minute")
    operator.rollback()
    recover(conn, call)
    assert status(conn, job.id) == "running"
    assert extended(extend(conn, job)) == [(True, True)]
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
@pytest.mark.parametrize("ends", ["the lock", "the lease"])
def test_a_job_whose_worker_died_while_it_was_locked_is_recovered_when_lock_and_lease_have_ended(
    conn: Connection, connect: Connect, duty: str, ends: str
) -> None:
    operator = connect(autocommit=False)
    job = locked_past_its_lease(conn, operator, "200 milliseconds")
    if ends == "the lock":
        operator.rollback()
        maintain(conn, duty)
    wait_until(lambda: has_expired(conn), "the last heartbeat expires")
    if ends == "the lease":
        maintain(conn, duty)
        assert status(conn, job.id) == "running"
        operator.rollback()
        wait_until(lambda: has_expired(conn), "the job is due for recovery again")
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
    extend(conn, job)
    wait_until(
        lambda: value(conn, "SELECT %s < clock_timestamp()", job.lease_expires_at),
        "the lease has expired",
    )
    operator.rollback()
    assert value(late, "SELECT howdah.recover_stale_jobs()") == 0
    late.commit()
    assert status(conn, job.id) == "claimed"


def test_the_start_of_a_locked_job_is_recorded_by_a_heartbeat_after_the_lock(
    conn: Connection, connect: Connect
) -> None:
    job, other = claim_each(conn, 2)
    operator = connect(autocommit=False)
    operator.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (job.id,))
    for expected in ("claimed", "running"):
        assert extended(extend(conn, job, other, elapsed=[1, 1])) == [(True, True)] * 2
        assert (status(conn, job.id), status(conn, other.id)) == (expected, "running")
        operator.rollback()


def test_a_heartbeat_reports_a_cancellation(conn: Connection) -> None:
    job, other = claim_each(conn, 2)
    conn.execute("SELECT howdah.cancel_jobs(%s)", ([job.id],))
    answers = extend(conn, job, other)
    assert [answer.cancel_requested for answer in answers] == [True, False]


# ── whose lease it is ─────────────────────────────────────────────────────────────────────────────


def test_jobs_that_were_claimed_together_share_a_lease(conn: Connection) -> None:
    enqueue(conn, *[WORK] * 3)
    jobs = claim(conn)
    other = claim_each(conn, 1)[0]
    assert len({job.lease_id for job in jobs}) == 1
    assert [(answer.id, answer.extended) for answer in extend(conn, jobs[0], lease="1 hour")] == [
        (jobs[0].id, True)
    ]
    assert all(3590 < left <= 3600 for left in seconds_left(conn, *jobs))
    assert {get(conn, job.id).lease_expires_at for job in jobs} == {
        value(conn, "SELECT expires_at FROM howdah.leases WHERE lease_id = %s", jobs[0].lease_id)
    }
    assert seconds_left(conn, other)[0] <= 30


def test_each_lane_of_a_claim_has_its_own_lease(conn: Connection) -> None:
    enqueue(conn, WORK, WORK, {"job_type": "other"}, WORK | {"priority": 5})
    leases: dict[Any, set[UUID]] = {}
    for job in claim(conn):
        leases.setdefault(job.lease_id, set()).add((job.job_type, job.priority))
    assert sorted(len(lanes) for lanes in leases.values()) == [1, 1, 1]


def test_a_stale_fence_extends_nothing(conn: Connection, connect: Connect) -> None:
    """Not even while the lease of the earlier claim is still there."""
    jobs = claim_each(conn, 2)
    conn.execute("SELECT howdah.takeover_jobs(%s)", ([jobs[0].id],))
    (again,) = claim(conn)
    assert again.id == jobs[0].id
    assert jobs[0].lease_id in lease_ids(conn)
    assert extended(extend(conn, *jobs, lease="1 hour")) == [(False, False), (True, True)]
    assert all(left <= 30 for left in seconds_left(conn, jobs[0], again))
    assert complete(conn, jobs[0]) == []


def test_the_fence_of_another_job_extends_nothing(conn: Connection) -> None:
    mine, other = claim_each(conn, 2)
    answers = rows(
        conn, "SELECT * FROM howdah.extend_jobs(%s, %s, '1 hour')", [mine.id], [other.lease_id]
    )
    assert extended(answers) == [(False, False)]
    assert all(left <= 30 for left in seconds_left(conn, mine, other))


def test_a_released_job_is_not_extended_and_its_neighbours_are(conn: Connection) -> None:
    jobs = claim_each(conn, 3)
    conn.execute("SELECT howdah.release_jobs(%s, %s)", fences(jobs[1:2]))
    assert extended(extend(conn, *jobs)) == [(True, True), (False, False), (True, True)]
    assert [left > 30 for left in seconds_left(conn, jobs[0], jobs[2])] == [True, True]
    assert lease_ids(conn) == {jobs[0].lease_id, jobs[2].lease_id}


@pytest.mark.parametrize("call", RECOVERIES)
def test_an_expired_lease_that_was_not_recovered_yet_is_extended(
    conn: Connection, call: str
) -> None:
    (job,) = claim_each(conn, 1, started=True)
    expire_leases(conn)
    assert extended(extend(conn, job)) == [(True, True)]
    recover(conn, call)
    assert status(conn, job.id) == "running"


def test_a_recovered_job_is_not_extended(conn: Connection) -> None:
    (job,) = claim_each(conn, 1)
    expire_leases(conn)
    maintain(conn, "recover")
    assert extended(extend(conn, job, more=[job.lease_id])) == [(False, False)] * 2


# ── open heartbeats ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", RECOVERIES)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_recovery_does_not_wait_for_an_open_heartbeat_and_keeps_the_job_if_it_commits(
    conn: Connection, connect: Connect, call: str, end: str
) -> None:
    (job,) = claim_each(conn, 1, started=True)
    expire_leases(conn)
    worker = connect(autocommit=False)
    assert extended(extend(worker, job)) == [(True, True)]
    waits = Waits(conn)
    recover(conn, call)
    assert waits.count == 0
    assert status(conn, job.id) == "running"
    getattr(worker, end)()
    recover(conn, call)
    assert status(conn, job.id) == ("running" if end == "commit" else "pending")


def test_a_heartbeat_does_not_wait_for_recovery_and_the_worker_keeps_the_job_if_it_is_rolled_back(
    conn: Connection, connect: Connect
) -> None:
    (job,) = claim_each(conn, 1, started=True)
    expire_leases(conn)
    recovery = connect(autocommit=False)
    assert value(recovery, "SELECT howdah.recover_stale_jobs()") == 1
    waits = Waits(conn)
    assert extended(extend(conn, job, more=[job.lease_id])) == [(False, True)] * 2
    assert waits.count == 0
    recovery.rollback()
    assert extended(extend(conn, job)) == [(True, True)]


def test_a_locked_lease_is_neither_extended_nor_lost(conn: Connection, connect: Connect) -> None:
    locked, free = claim_each(conn, 2)
    holder = connect(autocommit=False)
    holder.execute("SELECT FROM howdah.leases WHERE lease_id = %s FOR UPDATE", (locked.lease_id,))
    waits = Waits(conn)
    answers = extend(conn, locked, free, more=[locked.lease_id, free.lease_id])
    assert waits.count == 0
    assert extended(answers) == [(False, True), (True, True)] * 2
    holder.rollback()
    assert extended(extend(conn, locked)) == [(True, True)]


# ── leases whose jobs the worker does not ask about ───────────────────────────────────────────────


def test_a_heartbeat_extends_more_leases_and_says_which_exist(conn: Connection) -> None:
    job, unstarted, ended, removed = claim_each(conn, 4)
    complete_runs(conn, ended, removed)
    extend(conn, ended=[removed.lease_id])
    answers = extend(
        conn, job, lease="1 hour", more=[each.lease_id for each in (unstarted, ended, removed)]
    )
    assert [(a.id, a.lease_id, a.extended, a.mine, a.cancel_requested) for a in answers] == [
        (job.id, job.lease_id, True, True, False),
        (None, unstarted.lease_id, True, True, False),
        (None, ended.lease_id, True, True, False),
        (None, removed.lease_id, False, False, False),
    ]
    assert all(left > 3590 for left in seconds_left(conn, job, unstarted, ended))


def test_a_heartbeat_of_leases_alone_extends_them(conn: Connection) -> None:
    (job,) = claim_each(conn, 1)
    assert extended(extend(conn, more=[job.lease_id])) == [(True, True)]
    assert seconds_left(conn, job)[0] > 30


def test_a_heartbeat_removes_ended_leases_and_none_that_still_has_a_claimed_job(
    conn: Connection, connect: Connect
) -> None:
    enqueue(conn, *[WORK] * 2)
    first, second = claim(conn)
    completed, released, uncommitted, other = claim_each(conn, 4)
    complete_runs(conn, first, completed)
    conn.execute("SELECT howdah.release_jobs(%s, %s)", fences([released]))
    complete_runs(connect(autocommit=False), uncommitted)
    waits = Waits(conn)
    extend(conn, ended=[j.lease_id for j in (second, completed, released, uncommitted)])
    assert waits.count == 0
    assert lease_ids(conn) == {second.lease_id, uncommitted.lease_id, other.lease_id}
    complete(conn, second)
    extend(conn, ended=[second.lease_id])
    assert lease_ids(conn) == {uncommitted.lease_id, other.lease_id}


def test_a_heartbeat_leaves_an_ended_lease_that_is_locked_to_recovery(
    conn: Connection, connect: Connect
) -> None:
    locked, free = claim_each(conn, 2)
    complete_runs(conn, locked, free)
    holder = connect(autocommit=False)
    holder.execute("SELECT FROM howdah.leases WHERE lease_id = %s FOR UPDATE", (locked.lease_id,))
    waits = Waits(conn)
    extend(conn, ended=[locked.lease_id, free.lease_id])
    assert waits.count == 0
    assert lease_ids(conn) == {locked.lease_id}
    holder.rollback()
    expire_leases(conn)
    maintain(conn, "recover")
    assert lease_ids(conn) == set()


@pytest.mark.parametrize(
    "call",
    [
        "complete_jobs(%s, %s)",
        "fail_jobs(%s, %s, '{no}', '{NULL}')",
        "fail_jobs(%s, %s, '{no}')",
        "release_jobs(%s, %s)",
        "stop_jobs(%s, %s)",
    ],
)
def test_a_lease_goes_with_the_acknowledgement_of_its_last_job(conn: Connection, call: str) -> None:
    """A bare loop sends no heartbeats, and its lease may be long."""
    enqueue(conn, *[WORK] * 3)
    jobs = claim(conn, lease="1 day")
    for job in (jobs[1], jobs[2], jobs[0]):
        assert lease_ids(conn) == {job.lease_id}
        conn.execute(f"SELECT howdah.{call}".encode(), fences([job]))
    assert lease_ids(conn) == set()


def test_the_lease_of_a_completion_that_is_rolled_back_is_still_there(
    conn: Connection, connect: Connect
) -> None:
    (job,) = claim_each(conn, 1)
    handler = connect(autocommit=False)
    complete(handler, job)
    waits = Waits(conn)
    (answer,) = extend(conn, job)
    assert (answer.extended, answer.mine) == (False, True)
    maintain(conn, "recover", "late")
    assert waits.count == 0
    handler.rollback()
    assert extended(extend(conn, job)) == [(True, True)]
    expire_leases(conn)
    maintain(conn, "recover")
    assert status(conn, job.id) == "pending"


def test_ended_leases_that_expired_are_removed_in_steps(conn: Connection) -> None:
    conn.execute(
        "INSERT INTO howdah.leases (lease_id, worker_id, claimed_at, written_at, expires_at, job_ids) "
        "SELECT gen_random_uuid(), 'worker', clock_timestamp() - ago, clock_timestamp() - ago, "
        "clock_timestamp() - ago + interval '30 seconds', ARRAY[gen_random_uuid()] "
        "FROM (SELECT CASE WHEN n <= 25 THEN interval '1 hour' ELSE interval '0' END AS ago "
        "      FROM generate_series(1, 27) AS n) AS s"
    )
    left = []
    more = True
    while more:
        more = value(conn, "SELECT more FROM howdah.recover_expired(10)")
        left.append(len(lease_ids(conn)))
    assert left == [17, 7, 2]
