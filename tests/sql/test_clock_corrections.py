"""The server's clock was an hour ahead and went back: jobs that the first search could not correct, because their
transaction was open or their row was locked, are corrected when that ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from calls import claim, enqueue, fences, maintain, rows, value
from psycopg import IsolationLevel

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}
AHEAD = "interval '1 hour'"
ENQUEUED_AHEAD = f"run_at = run_at + {AHEAD}, created_at = created_at + {AHEAD}"
CLAIMED_AHEAD = f"claimed_at = claimed_at + {AHEAD}"
STATE = "SELECT state FROM howdah.maintenance WHERE duty = 'clock'"


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


def go_back(conn: Connection, by: str = AHEAD) -> None:
    """The duty saw a clock that was ahead; now it is right."""
    conn.execute(
        f"UPDATE howdah.maintenance SET reached = clock_timestamp() + {by} WHERE duty = 'clock'".encode()
    )


def hidden_jobs(conn: Connection) -> int:
    """Jobs that are due, or whose lease ends, after more than half an hour."""
    found: int = value(
        conn,
        "SELECT count(*) FROM howdah.jobs "
        "WHERE coalesce(lease_expires_at, run_at) > now() + interval '30 minutes'",
    )
    return found


def set_ahead(conn: Connection, columns: str, *ids: Any) -> None:
    conn.execute(
        f"UPDATE howdah.live_jobs SET {columns} WHERE id = ANY (%s)".encode(), (list(ids),)
    )


def set_leases_ahead(conn: Connection, *ids: Any, by: str = AHEAD, claimed: bool = False) -> None:
    """The clock that was ahead has extended the leases of these jobs, or also claimed them."""
    columns = ["written_at", "expires_at"] + ["claimed_at"] * claimed
    values = ", ".join(f"{column} = {column} + {by}" for column in columns)
    conn.execute(f"UPDATE howdah.leases SET {values} WHERE job_ids && %s".encode(), (list(ids),))


def test_a_job_whose_enqueue_commits_after_the_search_becomes_due(
    conn: Connection, connect: Connect
) -> None:
    producer = connect(autocommit=False)
    (job_id,) = enqueue(producer, WORK)
    set_ahead(producer, ENQUEUED_AHEAD, job_id)
    go_back(conn)
    maintain(conn, "clock")
    maintain(conn, "clock")
    producer.commit()
    assert claim(conn) == []
    maintain(conn, "clock")
    assert [job.id for job in claim(conn)] == [job_id]
    assert value(conn, STATE) == {}


def test_a_retry_whose_failure_commits_after_the_search_starts_again(
    conn: Connection, connect: Connect
) -> None:
    enqueue(conn, WORK)
    (job,) = claim(conn)
    worker = connect(autocommit=False)
    worker.execute(
        "SELECT howdah.fail_jobs(%s, %s, '{no}', NULL, ARRAY[interval '30 seconds'])", fences([job])
    )
    set_ahead(worker, f"run_at = run_at + {AHEAD}", job.id)
    worker.execute(f"UPDATE howdah.job_events SET at = at + {AHEAD}".encode())
    go_back(conn)
    maintain(conn, "clock")
    worker.commit()
    maintain(conn, "clock")
    left = value(conn, "SELECT run_at - now() FROM howdah.live_jobs")
    assert 20 < left.total_seconds() <= 31


def test_a_lease_whose_claim_commits_after_the_search_starts_again(
    conn: Connection, connect: Connect
) -> None:
    (job_id,) = enqueue(conn, WORK)
    worker = connect(autocommit=False)
    claim(worker, lease="30 seconds")
    set_ahead(worker, CLAIMED_AHEAD, job_id)
    set_leases_ahead(worker, job_id, claimed=True)
    go_back(conn)
    maintain(conn, "clock")
    worker.commit()
    maintain(conn, "clock")
    left = value(conn, "SELECT lease_expires_at - now() FROM howdah.jobs")
    assert 20 < left.total_seconds() <= 30


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_job_that_was_locked_during_the_search_becomes_due_when_the_lock_ends(
    conn: Connection, connect: Connect, end: str
) -> None:
    locked, other = enqueue(conn, WORK, WORK)
    set_ahead(conn, ENQUEUED_AHEAD, locked, other)
    holder = connect(autocommit=False)
    holder.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (locked,))
    go_back(conn)
    maintain(conn, "clock")
    assert [job.id for job in claim(conn)] == [other]
    maintain(conn, "clock")
    getattr(holder, end)()
    maintain(conn, "clock")
    assert [job.id for job in claim(conn)] == [locked]
    assert value(conn, STATE) == {}


def test_a_lease_that_was_extended_ahead_starts_again_although_its_job_is_locked(
    conn: Connection, connect: Connect
) -> None:
    """The operator's transaction rolls back after the worker has died: recovery must not wait for an hour."""
    (job_id,) = enqueue(conn, WORK)
    claim(conn, lease="30 seconds")
    set_leases_ahead(conn, job_id)
    operator = connect(autocommit=False)
    operator.execute("SELECT * FROM howdah.cancel_jobs(%s)", ([job_id],))
    go_back(conn)
    maintain(conn, "clock")
    left = value(conn, "SELECT lease_expires_at - now() FROM howdah.jobs")
    assert 20 < left.total_seconds() <= 30


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_locked_lease_that_was_extended_ahead_starts_again_when_the_lock_ends(
    conn: Connection, connect: Connect, end: str
) -> None:
    (job_id,) = enqueue(conn, WORK)
    (job,) = claim(conn, lease="30 seconds")
    worker = connect(autocommit=False)
    if end == "commit":  # the open heartbeat is that of the clock that was ahead
        worker.execute("SELECT howdah.extend_jobs(%s, %s, '30 seconds')", fences([job]))
        set_leases_ahead(worker, job_id)
    else:
        set_leases_ahead(conn, job_id)
        worker.execute("SELECT howdah.extend_jobs(%s, %s, '30 seconds')", fences([job]))
    go_back(conn)
    maintain(conn, "clock")
    maintain(conn, "clock")
    getattr(worker, end)()
    assert hidden_jobs(conn) == 1
    maintain(conn, "clock")
    left = value(conn, "SELECT lease_expires_at - now() FROM howdah.jobs")
    assert 20 < left.total_seconds() <= 30
    assert value(conn, STATE) == {}


def test_an_operator_recovers_a_job_that_was_claimed_ahead_by_the_time_of_its_claim(
    conn: Connection,
) -> None:
    """A heartbeat came after the clock went back and before the duty."""
    (job_id,) = enqueue(conn, WORK)
    (job,) = claim(conn)
    set_ahead(conn, CLAIMED_AHEAD, job_id)
    set_leases_ahead(conn, job_id, claimed=True)
    conn.execute("SELECT howdah.extend_jobs(%s, %s)", fences([job]))
    go_back(conn)
    maintain(conn, "clock")
    assert value(conn, "SELECT howdah.recover_stale_jobs(interval '0')") == 1


def test_more_locked_jobs_than_are_noted_become_due_when_their_locks_end(
    conn: Connection, connect: Connect
) -> None:
    ids = enqueue(conn, *[WORK] * 2500)
    set_ahead(conn, ENQUEUED_AHEAD, *ids)
    first, second = connect(autocommit=False), connect(autocommit=False)
    first.execute("SELECT * FROM howdah.cancel_jobs(%s)", (ids[:1500],))
    second.execute("SELECT * FROM howdah.cancel_jobs(%s)", (ids[1500:],))
    go_back(conn)
    maintain(conn, "clock")
    second.rollback()
    maintain(conn, "clock")
    assert hidden_jobs(conn) == 1500
    first.rollback()
    maintain(conn, "clock")
    maintain(conn, "clock")
    assert hidden_jobs(conn) == 0
    assert value(conn, STATE) == {}


def test_the_table_is_not_read_again_while_no_transaction_ends(
    conn: Connection, connect: Connect
) -> None:
    open_writer = connect(autocommit=False)
    enqueue(open_writer, WORK)
    locked, *_ = enqueue(conn, *[WORK] * 50)
    set_ahead(conn, ENQUEUED_AHEAD, locked)
    holder = connect(autocommit=False)
    holder.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (locked,))
    go_back(conn)
    assert value(conn, "SELECT more FROM howdah.correct_clock(40)")
    assert not value(conn, "SELECT more FROM howdah.correct_clock(40)")
    later = connect(autocommit=False)
    enqueue(later, WORK)
    more = [value(conn, "SELECT more FROM howdah.correct_clock(40)") for _ in range(3)]
    # A transaction that began since wrote no wrong time.
    later.commit()
    more.append(value(conn, "SELECT more FROM howdah.correct_clock(40)"))
    assert more == [False] * 4
    open_writer.commit()
    assert value(conn, "SELECT more FROM howdah.correct_clock(40)")
    assert not value(conn, "SELECT more FROM howdah.correct_clock(40)")
    assert value(conn, STATE) != {}
    holder.rollback()  # one that locks jobs may write them
    assert value(conn, "SELECT more FROM howdah.correct_clock(40)")
    assert not value(conn, "SELECT more FROM howdah.correct_clock(40)")
    assert value(conn, STATE) == {}
    assert hidden_jobs(conn) == 0


def test_a_transaction_that_ends_between_two_steps_of_a_search_causes_another(
    conn: Connection, connect: Connect
) -> None:
    """The search has passed the place of its job."""
    producer = connect(autocommit=False)
    (job_id,) = enqueue(producer, WORK)
    set_ahead(producer, ENQUEUED_AHEAD, job_id)
    enqueue(conn, *[WORK] * 9)
    go_back(conn)
    assert value(conn, "SELECT more FROM howdah.correct_clock(5)")
    producer.commit()
    for _ in range(4):
        conn.execute("SELECT howdah.correct_clock(5)")
    assert hidden_jobs(conn) == 0
    assert value(conn, STATE) == {}


@pytest.mark.parametrize("steps", [1, 100])
def test_a_clock_that_goes_back_twice_is_corrected_for_both_times(
    conn: Connection, connect: Connect, steps: int
) -> None:
    """Leases that were extended, and jobs that were enqueued."""
    ids = enqueue(conn, *[WORK] * 4)
    for _ in ids:
        claim(conn, 1, lease="30 seconds")
    waiting = enqueue(conn, *[WORK] * 4)
    set_leases_ahead(conn, *ids[:2], by="interval '3 hours'")
    set_ahead(conn, ENQUEUED_AHEAD.replace(AHEAD, "interval '3 hours'"), *waiting[:2])
    holder = connect(autocommit=False)
    holder.execute("SELECT FROM howdah.leases WHERE job_ids = %s FOR UPDATE", (ids[:1],))
    holder.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (waiting[0],))
    go_back(conn, "interval '3 hours'")
    conn.execute("SELECT howdah.correct_clock(%s)", (steps,))
    set_leases_ahead(conn, *ids[2:])
    set_ahead(conn, ENQUEUED_AHEAD, *waiting[2:])
    go_back(conn)
    for _ in range(10):
        conn.execute("SELECT howdah.correct_clock(%s)", (steps,))
    assert hidden_jobs(conn) == 2
    holder.rollback()
    for _ in range(10):
        conn.execute("SELECT howdah.correct_clock(%s)", (steps,))
    assert hidden_jobs(conn) == 0
    assert value(conn, STATE) == {}


def test_a_later_search_keeps_what_the_right_clock_has_written(
    conn: Connection, connect: Connect
) -> None:
    retried, claimed = enqueue(conn, WORK, WORK)
    (job,) = claim(conn, 1)
    fail = "SELECT howdah.fail_jobs(%s, %s, '{no}', NULL, ARRAY[interval '10 minutes'])"
    conn.execute(fail, fences([job]))
    set_ahead(conn, f"run_at = run_at + {AHEAD}", retried)
    conn.execute(f"UPDATE howdah.job_events SET at = at + {AHEAD}".encode())
    writer = connect(autocommit=False)
    enqueue(writer, WORK)
    go_back(conn)
    maintain(conn, "clock")
    # It ends after the time that the clock had reached.
    claim(conn, 1, lease="61 minutes")
    writer.commit()
    maintain(conn, "clock")
    assert value(conn, STATE) == {}
    left = rows(
        conn,
        "SELECT coalesce(lease_expires_at, run_at) - now() AS left FROM howdah.jobs "
        "WHERE id = ANY (%s) ORDER BY id",
        [retried, claimed],
    )
    assert 590 < left[0].left.total_seconds() <= 600
    assert 3600 < left[1].left.total_seconds() <= 3660


def test_a_clock_that_has_caught_up_needs_no_correction(conn: Connection, connect: Connect) -> None:
    writer = connect(autocommit=False)
    enqueue(writer, WORK)
    go_back(conn)
    maintain(conn, "clock")
    conn.execute(
        "UPDATE howdah.maintenance SET state = jsonb_set(state, '{seen}', "
        "to_jsonb(clock_timestamp())) WHERE duty = 'clock'"
    )
    maintain(conn, "clock")
    assert value(conn, STATE) == {}


def test_a_stricter_transaction_leaves_the_correction_to_others(
    conn: Connection, connect: Connect
) -> None:
    (job_id,) = enqueue(conn, WORK)
    set_ahead(conn, ENQUEUED_AHEAD, job_id)
    go_back(conn)
    strict = connect(autocommit=False)
    strict.isolation_level = IsolationLevel.REPEATABLE_READ
    strict.execute("SELECT howdah.correct_clock()")
    strict.commit()
    assert hidden_jobs(conn) == 1
    maintain(conn, "clock")
    assert hidden_jobs(conn) == 0


@pytest.mark.parametrize("duty", ["clock", "late"])
def test_what_a_duty_remembers_is_read_by_a_session_with_another_date_style(
    conn: Connection, connect: Connect, duty: str
) -> None:
    maintain(conn, duty)
    writer = connect(autocommit=False)
    enqueue(writer, WORK)
    go_back(conn)
    conn.execute("SET datestyle = 'SQL, DMY'")
    maintain(conn, duty)
    conn.execute("SET datestyle = 'ISO, MDY'")
    writer.commit()
    maintain(conn, duty)


def test_the_lease_of_an_enqueue_that_waited_begins_when_the_wait_ends(conn: Connection) -> None:
    """An enqueue may wait for an idempotency key. A lease from before it may have expired, and the job runs twice; or a
    clock that was ahead set it, and no transaction that had written jobs was open."""
    conn.execute(
        "CREATE FUNCTION delay() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END'; CREATE TRIGGER delay "
        "BEFORE INSERT ON howdah.live_jobs FOR EACH ROW EXECUTE FUNCTION delay()"
    )
    job = json.dumps(WORK)
    conn.execute("SELECT howdah.enqueue_and_claim(%s, 'worker', '400 milliseconds')", (job,))
    left = value(conn, "SELECT lease_expires_at - created_at FROM howdah.jobs")
    assert left.total_seconds() >= 0.9
