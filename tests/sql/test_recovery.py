"""Recovery: it needs no lane, one job that cannot be recovered does not keep the others, and no lease is forgotten."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from calls import (
    claim,
    complete,
    complete_runs,
    enqueue,
    enqueue_bulk,
    expire,
    expire_leases,
    fences,
    get,
    maintain,
    rows,
    status,
    value,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


# What stops the end or the requeueing of single jobs, whatever its cause.
POISON = """
CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN IF OLD.data ? ''poison'' THEN RAISE ''poisoned''; END IF;
     IF TG_OP = ''DELETE'' THEN RETURN OLD; END IF; RETURN NEW; END';
CREATE TRIGGER poison BEFORE UPDATE OF status OR DELETE ON howdah.live_jobs
    FOR EACH ROW EXECUTE FUNCTION poison();
"""


@pytest.mark.parametrize("call", ["recover_stale_jobs()", "recover_expired()", "recover_late()"])
@pytest.mark.parametrize("max_attempts", [1, 3], ids=["ended", "requeued"])
def test_a_poisoned_row_keeps_nobody_else(conn: Connection, call: str, max_attempts: int) -> None:
    work = WORK | {"max_attempts": max_attempts}
    ids = enqueue(
        conn, *[work | {"data": {"poison": 1} if n in (3, 17) else {}} for n in range(40)]
    )
    expire(conn, *claim(conn, 100, started=True))
    conn.execute(POISON)
    conn.execute(f"SELECT howdah.{call}".encode())
    expected = "failed" if max_attempts == 1 else "pending"
    states = [status(conn, job_id) for job_id in ids]
    assert [n for n, state in enumerate(states) if state != expected] == [3, 17]
    assert get(conn, ids[3]).last_error == f"job {ids[3]} could not be recovered: poisoned"


def test_a_job_that_was_enqueued_twice_under_one_id_keeps_nobody_else(conn: Connection) -> None:
    doubled, other = enqueue(conn, *[WORK | {"max_attempts": 1}] * 2)
    expire(conn, *claim(conn, started=True))
    columns = "id, seq, run_at, created_at, completed_at, priority, attempts, max_attempts, claims"
    conn.execute(
        f"INSERT INTO howdah.finished_jobs ({columns}, events_count, progress, cancel_requested, "
        "status, queue, job_type, data, drop_on) SELECT id, seq, run_at, created_at, now(), priority, "
        "attempts, max_attempts, claims, 0, 0, false, 'failed', queue, job_type, data, "
        "(now() AT TIME ZONE 'UTC')::date + 31 FROM howdah.live_jobs WHERE id = %s",
        (doubled,),
    )
    conn.execute("SELECT howdah.recover_stale_jobs()")
    assert status(conn, other) == "failed"


def test_a_poisoned_row_is_reported_and_retried_after_a_minute(conn: Connection) -> None:
    (job_id,) = enqueue(conn, WORK | {"data": {"poison": 1}})
    expire(conn, *claim(conn))
    conn.execute(POISON)
    conn.execute("UPDATE howdah.maintenance SET due_at = 'infinity' WHERE duty <> 'recover'")
    (ran,) = rows(conn, "SELECT * FROM howdah.run_due_duty()")
    assert (ran.duty, ran.error) == ("recover", f"job {job_id} could not be recovered: poisoned")
    left = value(conn, "SELECT lease_expires_at - now() FROM howdah.jobs")
    assert 50 < left.total_seconds() <= 60
    conn.execute("DROP TRIGGER poison ON howdah.live_jobs")
    expire_leases(conn)
    maintain(conn, "recover")
    assert status(conn, job_id) == "pending"


def test_a_row_that_cannot_be_changed_at_all_keeps_nobody_else(conn: Connection) -> None:
    ids = enqueue(conn, *[WORK | {"data": {"poison": 1} if n == 1 else {}} for n in range(3)])
    expire(conn, *claim(conn))
    conn.execute(POISON.replace("UPDATE OF status", "UPDATE"))
    for _ in range(2):
        conn.execute(
            "UPDATE howdah.maintenance SET due_at = clock_timestamp() WHERE duty = 'recover'"
        )
        conn.execute("SELECT * FROM howdah.run_due_duty()")
    assert [status(conn, job_id) for job_id in ids] == ["pending", "claimed", "pending"]


def test_a_claimed_job_without_a_lane_is_recovered(conn: Connection) -> None:
    (job_id,) = enqueue(conn, WORK)
    expire(conn, *claim(conn))
    conn.execute("DELETE FROM howdah.lanes")
    maintain(conn, "recover")
    assert status(conn, job_id) == "pending"


@pytest.mark.parametrize("call", ["recover_stale_jobs()", "recover_expired()", "recover_late()"])
def test_an_expired_job_that_is_locked_is_tried_again_a_second_later(
    conn: Connection, connect: Connect, call: str
) -> None:
    enqueue(conn, WORK)
    (job,) = claim(conn)
    expire(conn, job)
    handler = connect(autocommit=False)
    complete_runs(handler, job)
    for _ in range(2):
        conn.execute(f"SELECT howdah.{call}".encode())
        left = value(conn, "SELECT lease_expires_at - clock_timestamp() FROM howdah.jobs")
        assert 0 < left.total_seconds() <= 1
        wait_until(
            lambda: value(conn, "SELECT lease_expires_at < clock_timestamp() FROM howdah.jobs"),
            "the second has passed",
        )
    handler.rollback()
    conn.execute(f"SELECT howdah.{call}".encode())
    assert status(conn, job.id) == "pending"


@pytest.mark.parametrize("call", ["recover_stale_jobs()", "recover_expired()", "recover_late()"])
def test_a_locked_job_does_not_keep_the_others_of_its_lease(
    conn: Connection, connect: Connect, call: str
) -> None:
    enqueue(conn, *[WORK] * 4)
    jobs = claim(conn)
    expire(conn, *jobs)
    operator = connect(autocommit=False)
    operator.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (jobs[1].id,))
    conn.execute(f"SELECT howdah.{call}".encode())
    assert [status(conn, job.id) for job in jobs] == ["pending", "claimed", "pending", "pending"]
    operator.rollback()
    expire_leases(conn)
    conn.execute(f"SELECT howdah.{call}".encode())
    assert status(conn, jobs[1].id) == "pending"


def test_an_expired_lease_that_is_locked_is_tried_again_by_its_id(
    conn: Connection, connect: Connect
) -> None:
    enqueue(conn, WORK)
    (job,) = claim(conn)
    expire(conn, job)
    worker = connect(autocommit=False)
    worker.execute("SELECT howdah.extend_jobs(%s, %s)", fences([job]))
    maintain(conn, "recover")
    # The search does not come back to it: what was locked is remembered.
    conn.execute("UPDATE howdah.maintenance SET reached = clock_timestamp() WHERE duty = 'recover'")
    assert value(
        conn, "SELECT state -> 'locked' FROM howdah.maintenance WHERE duty = 'recover'"
    ) == [str(job.lease_id)]
    worker.rollback()
    maintain(conn, "recover")
    assert status(conn, job.id) == "pending"


@pytest.mark.parametrize("call", ["recover_stale_jobs()", "recover_expired()", "recover_late()"])
def test_recovery_removes_leases_without_jobs_and_keeps_those_that_have_not_expired(
    conn: Connection, call: str
) -> None:
    enqueue(conn, *[WORK] * 4)
    jobs = [claim(conn, 1)[0] for _ in range(4)]
    complete_runs(conn, jobs[0], jobs[2])
    conn.execute("SELECT howdah.takeover_jobs(%s)", ([jobs[1].id],))
    expire_leases(conn, *[job.id for job in jobs[:2]])
    conn.execute(f"SELECT howdah.{call}".encode())
    left = {row.lease_id for row in rows(conn, "SELECT lease_id FROM howdah.leases")}
    assert left == {job.lease_id for job in jobs[2:]}
    assert [status(conn, job.id) for job in jobs] == [
        "completed",
        "pending",
        "completed",
        "claimed",
    ]


@pytest.mark.parametrize("call", ["recover_stale_jobs()", "recover_expired()", "recover_late()"])
def test_a_lease_is_kept_while_the_end_of_its_job_may_be_rolled_back(
    conn: Connection, connect: Connect, call: str
) -> None:
    enqueue(conn, WORK)
    (job,) = claim(conn)
    handler = connect(autocommit=False)
    complete_runs(handler, job)
    expire_leases(conn)
    conn.execute(f"SELECT howdah.{call}".encode())
    conn.execute("SELECT howdah.extend_jobs('{}', '{}', p_ended_leases => %s)", ([job.lease_id],))
    handler.rollback()
    expire_leases(conn)
    conn.execute(f"SELECT howdah.{call}".encode())
    assert status(conn, job.id) == "pending"


def test_a_heartbeat_that_commits_after_its_lease_expired_is_recovered(
    conn: Connection, connect: Connect
) -> None:
    """Recovery has passed the time to which it was extended."""
    enqueue(conn, WORK)
    (job,) = claim(conn)
    for _ in range(3):
        maintain(conn, "recover", "late")
    slow = connect(autocommit=False)
    slow.execute("SELECT howdah.extend_jobs(%s, %s, '1 millisecond')", fences([job]))
    extended = value(slow, "SELECT expires_at FROM howdah.leases")
    wait_until(
        lambda: value(conn, "SELECT clock_timestamp() - %s > '2 s'", extended),
        "the lease is older than the margin",
    )
    for _ in range(3):
        maintain(conn, "recover", "late")
    slow.commit()
    for _ in range(3):
        maintain(conn, "recover", "late")
    assert status(conn, job.id) == "pending"


def test_a_claim_that_commits_after_its_lease_expired_is_recovered(
    conn: Connection, connect: Connect
) -> None:
    (job_id,) = enqueue(conn, WORK)
    for _ in range(3):
        maintain(conn, "recover", "late")
    slow = connect(autocommit=False)
    (job,) = claim(slow, lease="1 millisecond")
    wait_until(
        lambda: value(conn, "SELECT clock_timestamp() - %s > '2 s'", job.lease_expires_at),
        "the lease is older than the margin",
    )
    for _ in range(3):
        maintain(conn, "recover", "late")
    slow.commit()
    maintain(conn, "recover")
    assert status(conn, job_id) == "claimed"
    maintain(conn, "late")
    assert status(conn, job_id) == "pending"


def test_a_late_claim_is_found_whatever_other_transactions_ended_meanwhile(
    conn: Connection, connect: Connect
) -> None:
    """Each wait of the duty ends with another transaction."""
    (job_id,) = enqueue(conn, WORK)
    maintain(conn, "late")
    writers = [connect(autocommit=False) for _ in range(3)]
    (_job,) = claim(writers[0], lease="1 millisecond")
    for writer in writers[1:]:
        writer.execute("SELECT pg_current_xact_id()")
        maintain(conn, "late")
    for writer in reversed(writers):
        writer.commit()
        maintain(conn, "late")
    assert status(conn, job_id) == "pending"


@pytest.mark.parametrize("writes", ["another table", "jobs", "nothing"])
def test_a_late_claim_does_not_wait_for_an_unrelated_transaction(
    conn: Connection, connect: Connect, writes: str
) -> None:
    """Which began before the claim and stays open until the end of the test."""
    conn.execute("CREATE TABLE unrelated (n int)")
    other = connect(autocommit=False)
    if writes == "another table":
        other.execute("INSERT INTO unrelated VALUES (1)")
    elif writes == "jobs":
        enqueue(other, {"job_type": "other"})
    else:
        other.execute("SELECT pg_current_xact_id()")
    maintain(conn, "late")
    (job_id,) = enqueue(conn, WORK)
    slow = connect(autocommit=False)
    (job,) = claim(slow, lease="1 millisecond")
    wait_until(
        lambda: value(conn, "SELECT clock_timestamp() - %s > '2 s'", job.lease_expires_at),
        "the lease is older than the margin",
    )
    for _ in range(3):
        maintain(conn, "recover", "late")
    slow.commit()
    maintain(conn, "late")
    assert status(conn, job_id) == "pending"


@pytest.mark.parametrize("locked", ["live_jobs", "leases"])
def test_a_late_claim_that_is_locked_is_found_when_the_lock_is_gone(
    conn: Connection, connect: Connect, locked: str
) -> None:
    (job_id,) = enqueue(conn, WORK)
    maintain(conn, "late")
    slow, operator = connect(autocommit=False), connect(autocommit=False)
    (job,) = claim(slow, lease="1 millisecond")
    wait_until(
        lambda: value(conn, "SELECT clock_timestamp() - %s > '2 s'", job.lease_expires_at),
        "the lease is older than the margin",
    )
    maintain(conn, "late")
    slow.commit()
    operator.execute(f"SELECT FROM howdah.{locked} FOR UPDATE".encode())
    for _ in range(3):
        maintain(conn, "late")
    operator.rollback()
    if locked == "live_jobs":
        wait_until(
            lambda: value(conn, "SELECT lease_expires_at < clock_timestamp() FROM howdah.jobs"),
            "the second has passed",
        )
    maintain(conn, "late")
    assert status(conn, job_id) == "pending"


@pytest.mark.parametrize("call", ["run_maintenance()", "run_due_duty()"])
def test_a_transaction_that_ran_maintenance_and_stays_open_does_not_stop_recovery(
    conn: Connection, connect: Connect, call: str
) -> None:
    (job_id,) = enqueue(conn, WORK)
    idle = connect(autocommit=False)
    idle.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
    idle.execute("SELECT * FROM howdah.run_maintenance()")
    expire(conn, *claim(conn))

    def is_recovered() -> bool:
        conn.execute(f"SELECT * FROM howdah.{call}".encode())
        return bool(status(conn, job_id) == "pending")

    wait_until(is_recovered, "another caller recovers the job")


def test_recovery_after_a_restore_on_another_server_does_not_wait_for_its_transactions(
    conn: Connection,
) -> None:
    enqueue(conn, WORK)
    conn.execute(
        "UPDATE howdah.maintenance SET state = '{\"awaited\": \"4000000000\"}' WHERE duty = 'late'"
    )
    expire(conn, *claim(conn))
    maintain(conn, "late")
    assert value(conn, "SELECT status FROM howdah.live_jobs") == "pending"


def claim_all(conn: Connection, size: int) -> None:
    """Claim all jobs, so many under each lease."""
    conn.execute(
        "DO $$ BEGIN WHILE EXISTS (SELECT FROM howdah.live_jobs WHERE status = 'pending') LOOP "
        f"PERFORM howdah.claim_job_batch('worker', NULL, {size}, p_started => true); END LOOP; END $$".encode()
    )


# The last step of the second finds no lease, as the one before had as many as a step handles.
@pytest.mark.parametrize(("size", "expected_steps"), [(8000, 8), (1, 9)])
def test_8000_stale_jobs_are_recovered_in_steps_within_five_seconds(
    conn: Connection, size: int, expected_steps: int
) -> None:
    enqueue_bulk(conn, 8000)
    claim_all(conn, size)
    conn.execute(
        "UPDATE howdah.live_jobs SET max_attempts = 1 + (seq % 2)::int * 2, "
        "started_at = CASE WHEN seq % 2 = 0 THEN now() END"
    )
    expire_leases(conn)
    conn.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
    conn.execute("SET statement_timeout = '1s'")
    began = time.monotonic()
    steps = 0
    while True:
        (step,) = rows(conn, "SELECT * FROM howdah.run_due_duty()")
        assert (step.duty, step.error) == ("recover", None)
        steps += 1
        if not step.more:
            break
    took = time.monotonic() - began
    assert value(conn, "SELECT count(*) FROM howdah.live_jobs WHERE status = 'claimed'") == 0
    assert steps == expected_steps
    assert took < 5


# ── missed heartbeats (decision 0042) ─────────────────────────────────────────────────────────────────


def pass_time(conn: Connection, seconds: float) -> None:
    """What a server shows that was away for so long, or whose clock stepped forward."""
    conn.execute(
        "UPDATE howdah.maintenance SET due_at = due_at - make_interval(secs => %(s)s), "
        "last_run_at = last_run_at - make_interval(secs => %(s)s), "
        "reached = reached - make_interval(secs => %(s)s)",
        {"s": seconds},
    )
    conn.execute(
        "UPDATE howdah.leases SET written_at = written_at - make_interval(secs => %(s)s), "
        "expires_at = expires_at - make_interval(secs => %(s)s)",
        {"s": seconds},
    )


def register(conn: Connection) -> None:
    conn.execute("SELECT howdah.register_worker('worker', 'host', 1, '{default}', '{work}')")


def claim_before_outage(conn: Connection, *, registered: bool = True) -> Any:
    """A job that was started before the server was away for an hour, by a worker or in a bare loop."""
    if registered:
        register(conn)
    enqueue(conn, WORK | {"max_attempts": 2})
    (job,) = claim(conn, 1, worker="worker", started=True)
    maintain(conn)
    pass_time(conn, 3600)
    return job


def recover(conn: Connection) -> None:
    """The duties `late` and `recover`, in the worse order."""
    conn.execute("SELECT howdah.run_duty('late')")
    assert not [
        row.error for row in rows(conn, "SELECT * FROM howdah.run_maintenance()") if row.error
    ]


def outlast_excuse(conn: Connection) -> None:
    """The three seconds of the excuse have passed, and no heartbeat has come."""
    conn.execute("UPDATE howdah.leases SET expires_at = clock_timestamp() WHERE is_excused")


def test_a_worker_that_beats_when_the_server_is_back_keeps_its_jobs(
    conn: Connection, connect: Connect
) -> None:
    listener = connect()
    listener.execute('LISTEN "howdah:cancel"')
    job = claim_before_outage(conn)
    recover(conn)
    assert status(conn, job.id) == "running"
    assert {each.payload for each in listener.notifies(timeout=10, stop_after=1)} == {"[]"}
    answers = rows(conn, "SELECT * FROM howdah.extend_jobs(%s, %s)", [job.id], [job.lease_id])
    assert [answer.extended for answer in answers] == [True]
    pass_time(conn, 20)  # the duties were away again, and the lease has not expired
    recover(conn)
    assert status(conn, job.id) == "running"


def test_a_worker_that_does_not_beat_when_the_server_is_back_loses_its_jobs_within_seconds(
    conn: Connection,
) -> None:
    job = claim_before_outage(conn)
    recover(conn)
    outlast_excuse(conn)
    maintain(conn, "recover")
    assert status(conn, job.id) == "pending"


def test_a_lease_is_excused_once_although_recovery_runs_rarely(conn: Connection) -> None:
    """As with SQL callers whose only maintenance is a cron job: it is always overdue."""
    job = claim_before_outage(conn)
    recover(conn)
    outlast_excuse(conn)
    pass_time(conn, 60)
    recover(conn)
    assert status(conn, job.id) == "pending"


def test_jobs_of_a_bare_loop_are_recovered_although_recovery_is_overdue(conn: Connection) -> None:
    """It sends no heartbeats, so it has missed none."""
    job = claim_before_outage(conn, registered=False)
    recover(conn)
    assert status(conn, job.id) == "pending"


@pytest.mark.parametrize("duty", ["recover", "late"])
def test_a_second_run_that_comes_before_the_first_has_excused_recovers_nothing(
    conn: Connection, connect: Connect, duty: str
) -> None:
    """After an outage every worker runs the duties at once. The first has locked the row of its duty."""
    job = claim_before_outage(conn)
    first = connect(autocommit=False)
    first.execute("SELECT FROM howdah.maintenance WHERE duty = %s FOR NO KEY UPDATE", (duty,))
    recover(conn)
    first.execute("SELECT howdah.run_step(%s)", (duty,))
    first.commit()
    assert status(conn, job.id) == "running"
    assert value(conn, "SELECT count(*) FROM howdah.leases WHERE is_excused") == 1


def test_an_overdue_recovery_whose_row_stays_held_excuses_once_and_recovers(
    conn: Connection, connect: Connect
) -> None:
    job = claim_before_outage(conn)
    holder = connect(autocommit=False)
    holder.execute("SELECT FROM howdah.maintenance WHERE duty = 'recover' FOR UPDATE")
    for _ in range(2):
        recover(conn)
        assert status(conn, job.id) == "running"
    outlast_excuse(conn)
    recover(conn)
    assert status(conn, job.id) == "pending"


def test_a_job_that_was_locked_past_its_lease_before_the_outage_is_excused(
    conn: Connection, connect: Connect
) -> None:
    """Its worker sent heartbeats, and the outage ended the transaction that held the lock."""
    register(conn)
    enqueue(conn, WORK | {"max_attempts": 1})
    (job,) = claim(conn, 1, worker="worker", started=True)
    maintain(conn)
    conn.execute(
        "UPDATE howdah.maintenance SET state = '{}'"
    )  # that was the first run, which is overdue
    expire(conn, job)
    operator = connect(autocommit=False)
    operator.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (job.id,))
    conn.execute("SELECT howdah.extend_jobs(%s, %s)", ([job.id], [job.lease_id]))
    maintain(conn)
    operator.rollback()
    pass_time(conn, 3600)
    recover(conn)
    assert status(conn, job.id) == "running"


def test_a_lease_that_a_heartbeat_had_locked_past_its_end_is_excused(
    conn: Connection, connect: Connect
) -> None:
    """That heartbeat was rolled back, and recovery was not overdue: the worker may send another one."""
    register(conn)
    enqueue(conn, WORK)
    (job,) = claim(conn, 1, worker="worker", started=True)
    maintain(conn)
    conn.execute("UPDATE howdah.maintenance SET state = '{}'")  # that run was overdue
    expire(conn, job)
    worker = connect(autocommit=False)
    worker.execute("SELECT howdah.extend_jobs(%s, %s)", fences([job]))
    maintain(conn, "recover")
    worker.rollback()
    maintain(conn, "recover")
    assert status(conn, job.id) == "running"
    outlast_excuse(conn)
    maintain(conn, "recover")
    assert status(conn, job.id) == "pending"


def test_all_jobs_of_a_lease_share_its_excuse(conn: Connection) -> None:
    register(conn)
    enqueue(conn, *[WORK] * 3)
    jobs = claim(conn, worker="worker", started=True)
    maintain(conn)
    complete(conn, jobs[0])
    pass_time(conn, 3600)
    recover(conn)
    assert [status(conn, job.id) for job in jobs] == ["completed", "running", "running"]
    outlast_excuse(conn)
    maintain(conn, "recover")
    assert [status(conn, job.id) for job in jobs[1:]] == ["pending", "pending"]


def test_a_lease_is_excused_again_after_a_heartbeat(conn: Connection) -> None:
    job = claim_before_outage(conn)
    for _ in range(2):
        recover(conn)
        outlast_excuse(conn)
        conn.execute("SELECT howdah.extend_jobs(%s, %s)", ([job.id], [job.lease_id]))
        pass_time(conn, 3600)
    recover(conn)
    assert status(conn, job.id) == "running"


def test_a_lease_that_was_locked_when_its_excuse_ended_is_excused_again(
    conn: Connection, connect: Connect
) -> None:
    """The heartbeats of its worker could not reach it: a transaction that rolls back had locked it."""
    job = claim_before_outage(conn)
    recover(conn)
    outlast_excuse(conn)
    handler = connect(autocommit=False)
    complete(handler, job)
    conn.execute("SELECT howdah.recover_expired()")
    handler.rollback()
    conn.execute("SELECT howdah.recover_expired()")
    assert status(conn, job.id) == "running"
    outlast_excuse(conn)
    conn.execute("SELECT howdah.recover_expired()")
    assert status(conn, job.id) == "pending"


CLAIMS = {
    "claim_runs": "claim_runs('worker', NULL, 1, '1 second', '{default}')",
    "claim_job_batch": "claim_job_batch('worker', NULL, 1, '1 second')",
    "enqueue_and_claim": """enqueue_and_claim('{"job_type": "work"}', 'worker', '1 second')""",
}


@pytest.mark.parametrize(
    ("call", "table"),
    [(call, table) for call in CLAIMS for table in ("live_jobs", "leases", "lanes")]
    + [("claim_runs", "sweeps"), ("claim_job_batch", "sweeps")],
)
def test_a_claim_that_waited_for_a_table_has_a_lease_that_begins_after_the_wait(
    conn: Connection, connect: Connect, call: str, table: str
) -> None:
    """While it waits it is not among the writers that `late` notes: nobody would find a lease that has expired."""
    enqueue(conn, WORK)
    maintenance, worker = connect(autocommit=False), connect()
    maintenance.execute(f"LOCK TABLE howdah.{table} IN ACCESS EXCLUSIVE MODE".encode())
    claiming = threading.Thread(
        target=worker.execute, args=(f"SELECT howdah.{CLAIMS[call]}".encode(),)
    )
    claiming.start()
    wait_until(
        lambda: value(
            conn,
            "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
            worker.info.backend_pid,
        ),
        "the claim waits",
    )
    asked = value(conn, "SELECT clock_timestamp()")
    wait_until(lambda: value(conn, "SELECT clock_timestamp() - %s > '1 s'", asked), "a second")
    released = value(conn, "SELECT clock_timestamp()")
    maintenance.rollback()
    claiming.join()
    assert value(conn, "SELECT expires_at - %s >= '1 s' FROM howdah.leases", released)


@pytest.mark.parametrize("size", [1000, 1])
def test_a_fleet_that_was_killed_with_many_jobs_is_recovered_after_the_excuse(
    conn: Connection, size: int
) -> None:
    """More jobs, or leases, than the duty keeps by id. Its only maintenance is a cron job."""
    register(conn)
    enqueue_bulk(conn, 2500)
    claim_all(conn, size)
    maintain(conn)
    pass_time(conn, 3600)
    recover(conn)
    claimed = "SELECT count(*) FROM howdah.live_jobs WHERE status = 'claimed'"
    assert value(conn, claimed) == 2500
    pass_time(conn, 60)
    conn.execute("UPDATE howdah.maintenance SET due_at = 'infinity' WHERE duty = 'late'")
    recover(conn)
    assert value(conn, claimed) == 0


def test_late_runs_while_the_row_of_recover_is_held(conn: Connection, connect: Connect) -> None:
    """A claim that commits after its lease has expired, and after `recover` has passed that time."""
    enqueue(conn, WORK)
    maintain(conn)
    slow = connect(autocommit=False)
    (job,) = claim(slow, 1, started=True, lease="1 millisecond")
    conn.execute("UPDATE howdah.maintenance SET reached = clock_timestamp() WHERE duty = 'recover'")
    holder = connect(autocommit=False)
    holder.execute("SELECT FROM howdah.maintenance WHERE duty = 'recover' FOR UPDATE")
    slow.commit()
    conn.execute("SELECT howdah.run_duty('late')")
    assert status(conn, job.id) == "pending"


def test_a_run_that_fails_after_an_outage_leaves_the_excuse_to_the_next_one(
    conn: Connection,
) -> None:
    job = claim_before_outage(conn)
    conn.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;"
        "CREATE TRIGGER fail BEFORE UPDATE ON howdah.leases FOR EACH ROW EXECUTE FUNCTION fail()"
    )
    ran = rows(conn, "SELECT * FROM howdah.run_maintenance()")
    assert [row.error for row in ran if row.duty == "recover"] == ["no"]
    conn.execute("DROP TRIGGER fail ON howdah.leases")
    conn.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
    recover(conn)
    assert status(conn, job.id) == "running"


def test_the_first_run_asks_workers_for_a_heartbeat(conn: Connection, connect: Connect) -> None:
    listener = connect()
    listener.execute('LISTEN "howdah:cancel"')
    register(conn)
    enqueue(conn, WORK)
    (job,) = claim(conn, 1, worker="worker", started=True)
    expire(conn, job)
    conn.execute("UPDATE howdah.maintenance SET reached = '-infinity', state = '{}'")
    maintain(conn, "recover")
    assert status(conn, job.id) == "running"
    assert {each.payload for each in listener.notifies(timeout=10, stop_after=1)} == {"[]"}


def test_a_lease_that_a_step_of_the_clock_has_shortened_is_excused(
    conn: Connection, connect: Connect
) -> None:
    """The first run after the step finds no expired lease. The next heartbeat is due after the lease has expired."""
    listener = connect()
    listener.execute('LISTEN "howdah:cancel"')
    register(conn)
    enqueue(conn, WORK | {"max_attempts": 1})
    (job,) = claim(conn, 1, worker="worker", started=True, lease="30 seconds")
    maintain(conn)
    pass_time(conn, 25)
    recover(conn)
    assert {each.payload for each in listener.notifies(timeout=10, stop_after=1)} == {"[]"}
    expire(conn, job)
    maintain(conn, "recover")
    assert status(conn, job.id) == "running"
    outlast_excuse(conn)
    maintain(conn, "recover")
    assert status(conn, job.id) == "failed"


def test_an_operator_recovers_no_job_whose_worker_could_not_beat(conn: Connection) -> None:
    job = claim_before_outage(conn)
    assert value(conn, "SELECT howdah.recover_stale_jobs()") == 0
    assert status(conn, job.id) == "running"
    outlast_excuse(conn)
    assert value(conn, "SELECT howdah.recover_stale_jobs()") == 1


def test_a_run_leaves_a_job_that_another_run_has_excused_since_it_began(conn: Connection) -> None:
    job = claim_before_outage(conn)
    began = value(conn, "SELECT clock_timestamp()")
    recover(conn)
    lock = "SELECT howdah.lock_leases(10, '-infinity', %s, %s::uuid[], NULL)"
    assert value(conn, lock, began, []) == []
    assert value(conn, lock, began, [job.lease_id]) == []  # as one that was locked when it expired
    assert status(conn, job.id) == "running"


def test_an_excuse_of_a_clock_that_was_ahead_is_forgotten_when_it_went_back(
    conn: Connection,
) -> None:
    """It would count as the one excuse of the lease after the next step."""
    claim_before_outage(conn)
    recover(conn)
    assert value(conn, "SELECT count(*) FROM howdah.leases WHERE is_excused") == 1
    conn.execute(
        "UPDATE howdah.leases SET written_at = written_at + interval '1 hour', "
        "expires_at = expires_at + interval '1 hour'"
    )
    conn.execute(
        "UPDATE howdah.maintenance SET reached = clock_timestamp() + interval '1 hour' WHERE duty = 'clock'"
    )
    maintain(conn, "clock")
    assert value(conn, "SELECT count(*) FROM howdah.leases WHERE is_excused") == 0
