"""Recovery: it needs no lane, one job that cannot be recovered does not keep the others, and no lease is forgotten."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from calls import (
    claim,
    complete,
    enqueue,
    enqueue_bulk,
    expire,
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
    left = value(conn, "SELECT lease_expires_at - now() FROM howdah.live_jobs")
    assert 50 < left.total_seconds() <= 60
    conn.execute("DROP TRIGGER poison ON howdah.live_jobs")
    conn.execute("UPDATE howdah.live_jobs SET lease_expires_at = clock_timestamp()")
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


def test_a_locked_expired_job_is_tried_again_by_its_id(conn: Connection, connect: Connect) -> None:
    enqueue(conn, WORK)
    (job,) = claim(conn)
    expire(conn, job)
    handler = connect(autocommit=False)
    complete(handler, job)
    maintain(conn, "recover")
    # The search does not come back to it: what was locked is remembered.
    conn.execute("UPDATE howdah.maintenance SET reached = clock_timestamp() WHERE duty = 'recover'")
    assert value(
        conn, "SELECT state -> 'locked' FROM howdah.maintenance WHERE duty = 'recover'"
    ) == [str(job.id)]
    handler.rollback()
    maintain(conn, "recover")
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


def test_a_late_claim_that_is_locked_is_found_when_the_lock_is_gone(
    conn: Connection, connect: Connect
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
    operator.execute("SELECT FROM howdah.live_jobs FOR UPDATE")
    for _ in range(3):
        maintain(conn, "late")
    operator.rollback()
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


def test_8000_stale_jobs_are_recovered_in_steps_within_five_seconds(conn: Connection) -> None:
    enqueue_bulk(conn, 8000)
    jobs = claim(conn, 8000)
    conn.execute(
        "UPDATE howdah.live_jobs SET max_attempts = 1, started_at = now() WHERE seq % 2 = 0"
    )
    expire(conn, *jobs)
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
    assert steps == 9
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
        "UPDATE howdah.live_jobs SET lease_expires_at = lease_expires_at - make_interval(secs => %s)",
        (seconds,),
    )
    conn.execute(
        "UPDATE howdah.extended_leases SET written_at = written_at - make_interval(secs => %(s)s), "
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
    conn.execute("UPDATE howdah.extended_leases SET expires_at = clock_timestamp() WHERE is_excuse")


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
    assert value(conn, "SELECT count(*) FROM howdah.extended_leases") >= 1


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
    """The heartbeats of its worker were recorded beside it, and the outage ended the transaction that held the lock."""
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


def test_a_lease_is_excused_again_after_a_heartbeat(conn: Connection) -> None:
    job = claim_before_outage(conn)
    for _ in range(2):
        recover(conn)
        outlast_excuse(conn)
        conn.execute("SELECT howdah.extend_jobs(%s, %s)", ([job.id], [job.lease_id]))
        pass_time(conn, 3600)
    recover(conn)
    assert status(conn, job.id) == "running"


def test_a_fleet_that_was_killed_with_many_jobs_is_recovered_after_the_excuse(
    conn: Connection,
) -> None:
    """More than the duty keeps by id. Its only maintenance is a cron job."""
    register(conn)
    enqueue_bulk(conn, 2500)
    for _ in range(3):
        claim(conn, 1000, worker="worker", started=True)
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
        "CREATE TRIGGER fail BEFORE INSERT ON howdah.extended_leases FOR EACH ROW EXECUTE FUNCTION fail()"
    )
    ran = rows(conn, "SELECT * FROM howdah.run_maintenance()")
    assert [row.error for row in ran if row.duty == "recover"] == ["no"]
    conn.execute("DROP TRIGGER fail ON howdah.extended_leases")
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
    lock = "SELECT howdah.lock_stale_jobs(NULL, 10, '-infinity', %s)"
    assert value(conn, lock, began) == []
    assert status(conn, job.id) == "running"


def test_an_excuse_of_a_clock_that_was_ahead_is_forgotten_when_it_went_back(
    conn: Connection,
) -> None:
    """It would count as the one excuse of the lease after the next step."""
    claim_before_outage(conn)
    recover(conn)
    conn.execute(
        "UPDATE howdah.extended_leases SET written_at = written_at + interval '1 hour', "
        "expires_at = expires_at + interval '1 hour'"
    )
    conn.execute(
        "UPDATE howdah.maintenance SET reached = clock_timestamp() + interval '1 hour' WHERE duty = 'clock'"
    )
    maintain(conn, "clock")
    assert value(conn, "SELECT count(*) FROM howdah.extended_leases") == 0
