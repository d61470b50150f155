"""The duties: each in its own transaction, recovery first, in bounded steps, none postponed by another or by a clock
that jumped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from calls import claim, enqueue, expire, rows, status, value

from howdah import JobQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}
DUTIES = {"recover", "keys", "sweep", "late", "clock", "prune", "partitions"}
MAKE_DUE = "UPDATE howdah.maintenance SET due_at = clock_timestamp()"
EXPIRED_KEYS = (
    "INSERT INTO howdah.idempotency_keys SELECT (jsonb_populate_record("
    "NULL::howdah.idempotency_keys, to_jsonb(k) || jsonb_build_object('key', k.key || n, "
    "'expires_at', now() - interval '1 day'))).* "
    "FROM howdah.idempotency_keys AS k, generate_series(1, %s) AS n"
)


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


def step(conn: Connection, *ran: str) -> Any:
    """One call as a client makes it, or None if nothing is due."""
    found = rows(conn, "SELECT * FROM howdah.run_due_duty(%s)", list(ran))
    return found[0] if found else None


def run_all(conn: Connection) -> list[Any]:
    """Every step until nothing is due."""
    steps = []
    while (ran := step(conn, *(each.duty for each in steps if not each.more))) is not None:
        steps.append(ran)
    return steps


def stale_job(conn: Connection) -> Any:
    (job_id,) = enqueue(conn, WORK)
    expire(conn, *claim(conn))
    return job_id


def make_slow(conn: Connection, table: str, seconds: float) -> None:
    """Every DELETE from this table takes so long."""
    conn.execute(
        f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        f"'BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END'; CREATE TRIGGER slow BEFORE DELETE "
        f"ON howdah.{table} FOR EACH STATEMENT EXECUTE FUNCTION slow()".encode()
    )


@pytest.mark.parametrize(
    ("took", "wait"),
    [(None, 0.5), (0.02, 1.0), (2, 5.0), (12, 12.0), (3600, 60.0)],
)
def test_a_slow_run_postpones_a_sweep_by_five_seconds_or_by_the_time_that_it_took(
    conn: Connection, took: float | None, wait: float
) -> None:
    seconds = "make_interval(secs => %s)"
    statement = f"SELECT howdah.duty_wait(period, spacing, {seconds}, false) = {seconds} FROM howdah.maintenance"
    assert value(conn, f"{statement} WHERE duty = 'sweep'", took, wait)


def test_each_step_is_one_duty_and_recovery_comes_first(conn: Connection) -> None:
    conn.execute(MAKE_DUE + " - interval '1 second'")
    conn.execute(MAKE_DUE + " WHERE duty = 'recover'")
    steps = run_all(conn)
    assert steps[0].duty == "recover"
    assert {each.duty for each in steps} == DUTIES
    assert [each for each in steps if each.error is not None] == []
    assert step(conn) is None


def test_with_a_statement_timeout_of_a_second_a_slow_prune_fails_alone(conn: Connection) -> None:
    job_id = stale_job(conn)
    make_slow(conn, "watchers", 5)
    conn.execute(MAKE_DUE)
    conn.execute("SET statement_timeout = '1s'")
    ran = {each.duty: each.error for each in run_all(conn)}
    assert ran.pop("prune") == "canceling statement due to statement timeout"
    assert ran == dict.fromkeys(DUTIES - {"prune"})
    assert status(conn, job_id) == "pending"
    # It is retried, but not at once, and its error can be read.
    assert step(conn) is None
    assert value(conn, "SELECT last_error FROM howdah.maintenance WHERE duty = 'prune'") == (
        "canceling statement due to statement timeout"
    )


def test_one_call_of_run_maintenance_under_a_timeout_keeps_what_it_recovered(
    conn: Connection,
) -> None:
    job_id = stale_job(conn)
    make_slow(conn, "watchers", 5)
    conn.execute(MAKE_DUE)
    conn.execute("SET statement_timeout = '1s'")
    ran = {row.duty: row.error for row in rows(conn, "SELECT * FROM howdah.run_maintenance()")}
    assert ran["recover"] is None
    assert ran["prune"] == "canceling statement due to statement timeout"
    assert status(conn, job_id) == "pending"


@pytest.mark.parametrize(
    "broken", ["recover", "keys", "sweep", "late", "clock", "prune", "partitions"]
)
def test_a_duty_that_fails_is_reported_and_the_others_run(conn: Connection, broken: str) -> None:
    functions = {
        "recover": "recover_expired", "keys": "assign_keys", "sweep": "sweep_lanes",
        "late": "recover_late", "clock": "correct_clock", "prune": "prune",
        "partitions": "maintain_partitions",
    }  # fmt: skip
    conn.execute(f"ALTER FUNCTION howdah.{functions[broken]} RENAME TO broken".encode())
    conn.execute(MAKE_DUE)
    ran = {each.duty: each.error for each in run_all(conn)}
    error = ran.pop(broken)
    recorded = value(conn, "SELECT last_error FROM howdah.maintenance WHERE duty = %s", broken)
    assert functions[broken] in recorded
    # It runs when its step commits, so its error is not in the answer.
    assert error == (None if broken == "partitions" else recorded)
    assert ran == dict.fromkeys(DUTIES - {broken})
    wait = value(conn, "SELECT due_at - now() FROM howdah.maintenance WHERE duty = %s", broken)
    assert 0 < wait.total_seconds() <= 60


def test_a_duty_that_another_session_runs_does_not_block_the_others(
    conn: Connection, connect: Connect
) -> None:
    conn.execute(MAKE_DUE)
    other = connect(autocommit=False)
    other.execute("SELECT FROM howdah.maintenance WHERE duty = 'prune' FOR UPDATE")
    assert {each.duty for each in run_all(conn)} == DUTIES - {"prune"}


def test_an_open_transaction_that_ran_maintenance_does_not_stop_recovery(
    conn: Connection, connect: Connect
) -> None:
    other = connect(autocommit=False)
    conn.execute(MAKE_DUE)
    other.execute("SELECT * FROM howdah.run_maintenance()")
    assert run_all(conn) == []  # the other session may be about to commit
    other.rollback()
    conn.execute(MAKE_DUE + " - interval '4 seconds'")
    other.execute("SELECT * FROM howdah.run_maintenance()")
    job_id = stale_job(conn)
    assert [each.duty for each in run_all(conn)] == ["recover", "keys", "sweep", "late", "clock"]
    assert status(conn, job_id) == "pending"


def test_an_open_transaction_that_ran_maintenance_does_not_stop_that_of_others(
    conn: Connection, connect: Connect
) -> None:
    other = connect(autocommit=False)
    conn.execute(MAKE_DUE)
    other.execute("SELECT * FROM howdah.run_maintenance()")
    assert rows(conn, "SELECT * FROM howdah.run_maintenance()") == []
    other.rollback()
    conn.execute(MAKE_DUE + " - interval '4 seconds'")
    other.execute("SELECT * FROM howdah.run_maintenance()")
    job_id = stale_job(conn)
    ran = rows(conn, "SELECT duty, error FROM howdah.run_maintenance()")
    assert ran == [(duty, None) for duty in ("recover", "keys", "sweep", "late", "clock")]
    assert status(conn, job_id) == "pending"


def test_expired_idempotency_keys_are_pruned_in_steps_until_none_is_left(conn: Connection) -> None:
    enqueue(conn, WORK | {"idempotency_key": "key"})
    conn.execute(EXPIRED_KEYS, (35_000,))
    conn.execute("UPDATE howdah.maintenance SET observed = now() - interval '1 minute'")
    conn.execute(MAKE_DUE)
    steps = [each for each in run_all(conn) if each.duty == "prune"]
    assert [each.more for each in steps] == [True, True, True, False]
    assert value(conn, "SELECT count(*) FROM howdah.idempotency_keys") == 1


KEYS = "INSERT INTO howdah.unassigned_keys (ordering_key) SELECT 'key ' || n FROM generate_series(1, %s) AS n"


def test_waiting_keys_are_assigned_in_steps_and_those_that_stay_unassigned_wait_for_the_next_run(
    conn: Connection, connect: Connect
) -> None:
    enqueue(conn, *[WORK | {"ordering_key": f"key {n + 1}"} for n in range(2500)])
    holder = connect(autocommit=False)
    holder.execute("SELECT FROM howdah.live_jobs FOR UPDATE")
    conn.execute("DELETE FROM howdah.unassigned_keys")
    conn.execute(KEYS, (2500,))
    conn.execute("UPDATE howdah.maintenance SET due_at = 'infinity' WHERE duty <> 'keys'")
    conn.execute(MAKE_DUE + " WHERE duty = 'keys'")
    assert [each.more for each in run_all(conn)] == [True, True, False]
    assert value(conn, "SELECT count(*) FROM howdah.unassigned_keys") == 2500
    holder.rollback()


def test_a_key_that_cannot_be_assigned_keeps_no_other(conn: Connection) -> None:
    first = [WORK | {"ordering_key": f"key {n}"} for n in (1, 2, 3)]
    enqueue(conn, *first)
    ids = enqueue(conn, *first)
    conn.execute("UPDATE howdah.live_jobs SET holds_key = false, blockers = 1")
    conn.execute("DELETE FROM howdah.live_jobs WHERE id <> ALL (%s)", (ids,))
    conn.execute(
        "CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN IF NEW.ordering_key = "
        "''key 2'' THEN RAISE ''poisoned''; END IF; RETURN NEW; END'; CREATE TRIGGER poison BEFORE "
        "UPDATE ON howdah.live_jobs FOR EACH ROW EXECUTE FUNCTION poison()"
    )
    conn.execute("DELETE FROM howdah.unassigned_keys")
    conn.execute(KEYS, (3,))
    conn.execute("UPDATE howdah.maintenance SET due_at = 'infinity' WHERE duty <> 'keys'")
    conn.execute(MAKE_DUE + " WHERE duty = 'keys'")
    (ran,) = run_all(conn)
    assert ran.error == "the ordering key key 2 could not be assigned: poisoned"
    held = rows(conn, "SELECT ordering_key FROM howdah.live_jobs WHERE holds_key ORDER BY 1")
    assert [row.ordering_key for row in held] == ["key 1", "key 3"]
    left = rows(conn, "SELECT ordering_key FROM howdah.unassigned_keys")
    assert [row.ordering_key for row in left] == ["key 2"]


def test_recovery_goes_between_the_steps_of_another_duty(conn: Connection) -> None:
    enqueue(conn, WORK | {"idempotency_key": "key"})
    conn.execute(EXPIRED_KEYS, (35_000,))
    conn.execute("UPDATE howdah.maintenance SET observed = now() - interval '1 minute'")
    conn.execute(MAKE_DUE + " WHERE duty = 'prune'")
    conn.execute("UPDATE howdah.maintenance SET due_at = 'infinity' WHERE duty <> 'prune'")
    assert step(conn).more
    job_id = stale_job(conn)
    conn.execute(MAKE_DUE + " WHERE duty = 'recover'")
    assert step(conn).duty == "recover"
    assert status(conn, job_id) == "pending"
    assert step(conn).duty == "prune"


def test_the_queue_and_its_claims_run_every_due_duty(conn: Connection, database: str) -> None:
    queue = JobQueue(database)
    job_id = stale_job(conn)
    conn.execute(MAKE_DUE)
    assert {duty for duty, _, _ in queue.maintain()} == DUTIES
    (again,) = claim(conn)
    assert again.id == job_id
    expire(conn, again)
    conn.execute(MAKE_DUE)
    assert [job.id for job in queue.claim()] == [job_id]
    queue.close()


# ── the server's clock ────────────────────────────────────────────────────────────────────────────

# What a clock that was an hour ahead for a while leaves behind.
AHEAD = "interval '1 hour'"


@pytest.mark.parametrize("jump", ["10 seconds", "1 hour", "400 days"])
@pytest.mark.parametrize("duty", ["recover", "keys", "clock"])
def test_a_due_time_from_a_clock_that_was_ahead_postpones_no_duty(
    conn: Connection, duty: str, jump: str
) -> None:
    conn.execute(MAKE_DUE)
    run_all(conn)
    conn.execute(
        "UPDATE howdah.maintenance SET due_at = due_at + %s::interval, "
        "last_run_at = last_run_at + %s::interval",
        (jump, jump),
    )
    assert duty in {each.duty for each in run_all(conn)}


def test_recovery_starts_over_if_it_had_reached_a_time_that_is_ahead(conn: Connection) -> None:
    job_id = stale_job(conn)
    conn.execute(f"UPDATE howdah.maintenance SET reached = now() + {AHEAD} WHERE duty = 'recover'")
    conn.execute(MAKE_DUE + " WHERE duty = 'recover'")
    step(conn)
    assert status(conn, job_id) == "pending"


def test_jobs_that_were_enqueued_while_the_clock_was_ahead_become_due(conn: Connection) -> None:
    ids = enqueue(conn, *[WORK] * 3, WORK | {"delay": 600}, WORK | {"delay": 7200})
    conn.execute(
        f"UPDATE howdah.live_jobs SET run_at = run_at + {AHEAD}, created_at = created_at + {AHEAD}"
    )
    assert claim(conn) == []
    conn.execute(f"UPDATE howdah.maintenance SET reached = now() + {AHEAD} WHERE duty = 'clock'")
    conn.execute(MAKE_DUE)
    run_all(conn)
    assert [job.id for job in claim(conn)] == ids[:3]
    due = rows(
        conn,
        "SELECT run_at - now() AS due FROM howdah.jobs WHERE id = ANY (%s) ORDER BY seq",
        ids[3:],
    )
    # A delay starts again. What lies further ahead was probably chosen by the caller.
    assert [round(row.due.total_seconds() / 60) for row in due] == [10, 180]


def test_a_retry_that_was_computed_while_the_clock_was_ahead_starts_again(conn: Connection) -> None:
    enqueue(conn, WORK, WORK)
    ahead, chosen = claim(conn)
    fail = "SELECT howdah.fail_jobs(%s, %s, '{no}', NULL, ARRAY[%s::interval])"
    conn.execute(fail, ([ahead.id], [ahead.lease_id], "30 seconds"))
    conn.execute(fail, ([chosen.id], [chosen.lease_id], "50 minutes"))
    conn.execute(
        f"UPDATE howdah.live_jobs SET run_at = run_at + {AHEAD} WHERE id = %s", (ahead.id,)
    )
    conn.execute(f"UPDATE howdah.job_events SET at = at + {AHEAD} WHERE job_id = %s", (ahead.id,))
    conn.execute(f"UPDATE howdah.maintenance SET reached = now() + {AHEAD} WHERE duty = 'clock'")
    conn.execute(MAKE_DUE)
    run_all(conn)
    due = rows(conn, "SELECT run_at - now() AS due FROM howdah.live_jobs ORDER BY seq")
    assert 20 < due[0].due.total_seconds() <= 30
    assert 2900 < due[1].due.total_seconds() <= 3000


def test_a_lease_that_was_extended_since_the_clock_went_back_is_kept(conn: Connection) -> None:
    """The job was claimed while the clock was ahead, and a heartbeat came before the duty."""
    enqueue(conn, WORK)
    (job,) = claim(conn, 1, lease="30 seconds", started=True)
    conn.execute(
        f"UPDATE howdah.live_jobs SET created_at = created_at + {AHEAD}, run_at = run_at + {AHEAD}, "
        f"claimed_at = claimed_at + {AHEAD}, started_at = started_at + {AHEAD}"
    )
    conn.execute(f"UPDATE howdah.leases SET claimed_at = claimed_at + {AHEAD}")
    conn.execute(f"UPDATE howdah.maintenance SET reached = now() + {AHEAD} WHERE duty = 'clock'")
    for _ in range(2):
        conn.execute(MAKE_DUE)
        run_all(conn)
    assert status(conn, job.id) == "running"
    left = value(conn, "SELECT lease_expires_at - now() FROM howdah.jobs")
    assert 20 < left.total_seconds() <= 30


def test_a_lease_that_was_extended_while_the_clock_was_ahead_starts_again(conn: Connection) -> None:
    enqueue(conn, WORK, WORK)
    claim(conn, 1, lease="30 seconds", started=True)
    claim(conn, 1, lease="2 hours", started=True)
    conn.execute(
        f"UPDATE howdah.leases SET written_at = written_at + {AHEAD}, expires_at = expires_at + {AHEAD} "
        "WHERE expires_at < now() + interval '1 hour'"
    )
    conn.execute(f"UPDATE howdah.maintenance SET reached = now() + {AHEAD} WHERE duty = 'clock'")
    conn.execute(MAKE_DUE)
    run_all(conn)
    left = rows(conn, "SELECT lease_expires_at - now() AS left FROM howdah.jobs ORDER BY 1")
    assert 20 < left[0].left.total_seconds() <= 30
    assert 7100 < left[1].left.total_seconds() <= 7200


def test_a_lease_from_a_clock_that_was_ahead_starts_again(conn: Connection) -> None:
    (job_id,) = enqueue(conn, WORK)
    claim(conn, lease="30 seconds", started=True)
    ahead = {
        "live_jobs": ("claimed_at", "started_at"),
        "leases": ("claimed_at", "written_at", "expires_at"),
    }
    for table, columns in ahead.items():
        values = ", ".join(f"{column} = {column} + {AHEAD}" for column in columns)
        conn.execute(f"UPDATE howdah.{table} SET {values}".encode())
    conn.execute(f"UPDATE howdah.maintenance SET reached = now() + {AHEAD} WHERE duty = 'clock'")
    conn.execute(MAKE_DUE)
    run_all(conn)
    assert status(conn, job_id) == "running"
    left = value(conn, "SELECT lease_expires_at - now() FROM howdah.jobs")
    assert 20 < left.total_seconds() <= 30
    for table in ahead:
        assert value(conn, f"SELECT claimed_at <= clock_timestamp() FROM howdah.{table}")


def test_a_correction_of_the_clock_starts_and_claims_no_job(conn: Connection) -> None:
    """A job that was claimed and not started must not count as started: its attempt would be charged."""
    (claimed,) = enqueue(conn, WORK)
    claim(conn, started=False)
    (waiting,) = enqueue(conn, WORK)
    conn.execute(
        f"UPDATE howdah.live_jobs SET created_at = created_at + {AHEAD}, claimed_at = claimed_at + {AHEAD}"
    )
    conn.execute(f"UPDATE howdah.maintenance SET reached = now() + {AHEAD} WHERE duty = 'clock'")
    conn.execute(MAKE_DUE)
    run_all(conn)
    assert status(conn, claimed) == "claimed"
    found = rows(
        conn,
        "SELECT id, started_at, claimed_at <= clock_timestamp() FROM howdah.live_jobs ORDER BY id",
    )
    assert found == [(claimed, None, True), (waiting, None, None)]


def test_jobs_are_corrected_in_steps(conn: Connection) -> None:
    enqueue(conn, *[WORK] * 12)
    conn.execute(
        f"UPDATE howdah.live_jobs SET run_at = run_at + {AHEAD}, created_at = created_at + {AHEAD}"
    )
    conn.execute(f"UPDATE howdah.maintenance SET reached = now() + {AHEAD} WHERE duty = 'clock'")
    more = [value(conn, "SELECT more FROM howdah.correct_clock(5)") for _ in range(4)]
    assert more == [True, True, False, False]
    assert len(claim(conn, 100)) == 12


def test_nothing_is_corrected_while_the_clock_goes_on(conn: Connection) -> None:
    enqueue(conn, WORK | {"delay": 600})
    before = rows(conn, "SELECT * FROM howdah.live_jobs")
    for _ in range(3):
        conn.execute(MAKE_DUE)
        run_all(conn)
    assert rows(conn, "SELECT * FROM howdah.live_jobs") == before


def test_a_clock_that_is_ahead_for_a_moment_removes_no_keys_and_no_workers(
    conn: Connection,
) -> None:
    enqueue(conn, WORK | {"idempotency_key": "key"})
    conn.execute("SELECT howdah.register_worker('worker', 'host', 1, '{default}', '{work}')")
    conn.execute(MAKE_DUE)
    run_all(conn)
    # Seen from a clock that is 30 days ahead, all times lie 30 days back.
    back = "interval '30 days'"
    conn.execute(f"UPDATE howdah.idempotency_keys SET expires_at = expires_at - {back}".encode())
    conn.execute(f"UPDATE howdah.workers SET seen_at = seen_at - {back}".encode())
    conn.execute(f"UPDATE howdah.maintenance SET observed = observed - {back}".encode())
    conn.execute(MAKE_DUE)
    run_all(conn)
    assert value(conn, "SELECT count(*) FROM howdah.idempotency_keys") == 1
    assert value(conn, "SELECT count(*) FROM howdah.workers") == 1
