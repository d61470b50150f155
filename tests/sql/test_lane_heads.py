"""Heads only say where a claim begins to look: no job stays hidden below one."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from calls import claim, complete, enqueue, expire, fences, maintain, rows, value

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}


def head(conn: Connection) -> Any:
    return value(
        conn,
        "SELECT min(h.head_at) FROM howdah.lanes AS l, howdah.lane_head(l.number) AS h WHERE job_type = 'work'",
    )


def set_head(conn: Connection, expression: str) -> None:
    newest = "(SELECT max(id) FROM howdah.sweeps)"
    if not rows(conn, f"SELECT FROM howdah.sweeps WHERE id = {newest} FOR UPDATE SKIP LOCKED"):
        conn.execute("SELECT howdah.sweep_lanes()")  # none, or an open transaction is removing it
    conn.execute(
        f"UPDATE howdah.sweeps SET raised = array_fill({expression}, ARRAY[256]) WHERE id = {newest}".encode()
    )


def hide(connect: Connect, conn: Connection) -> Any:
    """A job whose transaction stayed open while the head moved on past its due time."""
    producer = connect(autocommit=False)
    (late,) = enqueue(producer, WORK)
    set_head(conn, "clock_timestamp()")
    producer.commit()
    assert claim(conn) == []
    return late


def test_a_job_below_the_head_is_found_after_the_sweep(connect: Connect, conn: Connection) -> None:
    enqueue(conn, WORK)
    complete(conn, *claim(conn))
    late = hide(connect, conn)
    maintain(conn, "sweep")
    assert [job.id for job in claim(conn)] == [late]


def test_a_job_below_the_head_is_found_at_once_by_a_claim_from_its_due_time(
    connect: Connect, conn: Connection
) -> None:
    enqueue(conn, WORK)
    complete(conn, *claim(conn))
    late = hide(connect, conn)
    due = value(conn, "SELECT run_at FROM howdah.live_jobs WHERE id = %s", late)
    assert claim(conn, due_from=(due + timedelta(microseconds=1)).isoformat()) == []
    assert [job.id for job in claim(conn, due_from=due.isoformat())] == [late]


def test_a_claim_ignores_a_head_that_lies_in_the_future(conn: Connection) -> None:
    enqueue(conn, WORK)
    set_head(conn, "clock_timestamp() + interval '1 hour'")  # the clock was an hour ahead
    enqueue(conn, WORK)
    assert len(claim(conn)) == 2


@pytest.mark.parametrize("ahead", ["1 hour", "2 seconds"])
def test_after_the_clock_was_ahead_the_sweep_searches_from_the_start(
    connect: Connect, conn: Connection, ahead: str
) -> None:
    first, second = enqueue(conn, WORK, WORK)
    maintain(conn, "sweep")
    conn.execute(
        "WITH t AS (SELECT clock_timestamp() + %s::interval AS h) "
        "UPDATE howdah.sweeps AS s SET heads = array_fill(h, ARRAY[cardinality(s.heads)]), "
        "raised = array_fill(h, ARRAY[256]) FROM t",
        (ahead,),
    )
    maintain(conn, "sweep")
    assert head(conn) <= value(conn, "SELECT clock_timestamp()")
    # Far below the head and below what the last sweeps saw, if the clock had been right.
    assert {job.id for job in claim(conn)} == {first, second}


def test_a_job_is_claimed_in_order_if_its_transaction_took_less_than_the_margin(
    connect: Connect, conn: Connection
) -> None:
    """The bound of P7: a head stays a quarter of a second behind the clock."""
    move_heads(conn)
    producer = connect(autocommit=False)
    (late,) = enqueue(producer, WORK)
    move_heads(conn)
    producer.commit()
    (after,) = enqueue(conn, WORK)
    within = value(
        conn,
        "SELECT clock_timestamp() - run_at < '250 milliseconds' FROM howdah.live_jobs WHERE id = %s",
        late,
    )
    assert within, "the machine is too slow for this test"
    assert [job.id for job in claim(conn)] == [late, after]


def test_a_job_whose_transaction_took_longer_is_claimed_after_the_next_sweep(
    connect: Connect, conn: Connection
) -> None:
    """Beyond that bound a claim may take a later job first; the next sweep restores the order."""
    move_heads(conn)
    producer = connect(autocommit=False)
    (late,) = enqueue(producer, WORK)
    conn.execute("SELECT pg_sleep(1.3)")
    move_heads(conn)
    producer.commit()
    after = enqueue(conn, WORK, WORK)
    assert [job.id for job in claim(conn, 1)] == after[:1]
    maintain(conn, "sweep")
    assert [job.id for job in claim(conn)] == [late, *after[1:]]


def move_heads(conn: Connection) -> None:
    """Finish the jobs of a lane and let a sweep raise its head as far as it may."""
    enqueue(conn, *([WORK] * 200))
    assert complete(conn, *claim(conn, 200))
    maintain(conn, "sweep")


def test_the_head_stays_behind_the_clock_for_enqueues_that_are_under_way(conn: Connection) -> None:
    move_heads(conn)
    began = value(conn, "SELECT clock_timestamp()")
    maintain(conn, "sweep")
    now = value(conn, "SELECT clock_timestamp()")
    margin = timedelta(milliseconds=250)
    assert began - margin <= head(conn) <= now - margin


def test_a_claim_moves_no_head(conn: Connection) -> None:
    """One that stays open would keep the head where it hides a job."""
    move_heads(conn)
    before = (
        rows(conn, "SELECT ctid, * FROM howdah.lanes"),
        rows(conn, "SELECT ctid FROM howdah.sweeps"),
    )
    enqueue(conn, *([WORK] * 2000))
    conn.execute("UPDATE howdah.live_jobs SET run_at = run_at + interval '1 minute'")
    conn.execute("UPDATE howdah.live_jobs SET run_at = run_at - interval '1 minute'")
    assert len(claim(conn, 1000)) == 1000
    assert before == (
        rows(conn, "SELECT ctid, * FROM howdah.lanes"),
        rows(conn, "SELECT ctid FROM howdah.sweeps"),
    )


def test_a_sweep_raises_heads_in_a_row_of_its_own(conn: Connection) -> None:
    move_heads(conn)
    before = rows(conn, "SELECT ctid, * FROM howdah.lanes")
    first = head(conn)
    move_heads(conn)
    assert head(conn) > first
    assert rows(conn, "SELECT ctid, * FROM howdah.lanes") == before


def test_a_sweep_of_an_idle_queue_writes_nothing(conn: Connection) -> None:
    move_heads(conn)
    for _ in range(4):  # until it has forgotten the load
        maintain(conn, "sweep")
    before = rows(conn, "SELECT ctid FROM howdah.sweeps")
    maintain(conn, "sweep")
    assert rows(conn, "SELECT ctid FROM howdah.sweeps") == before


def test_a_claim_never_lowers_the_head(connect: Connect, conn: Connection) -> None:
    enqueue(conn, WORK)
    complete(conn, *claim(conn))
    producer = connect(autocommit=False)
    enqueue(producer, *([WORK] * 1000))
    set_head(conn, "clock_timestamp()")
    producer.commit()
    before = head(conn)
    assert len(claim(conn, 1000, due_from="-infinity")) == 1000
    assert head(conn) == before


def test_what_becomes_pending_again_is_not_hidden_below_the_head(conn: Connection) -> None:
    enqueue(conn, *([WORK] * 3))
    released, failed, recovered = claim(conn)
    set_head(conn, "clock_timestamp()")
    conn.execute("SELECT howdah.release_jobs(%s, %s)", fences([released]))
    conn.execute("SELECT howdah.fail_jobs(%s, %s, '{no}')", fences([failed]))
    expire(conn, recovered)
    conn.execute("SELECT howdah.recover_stale_jobs()")
    assert {job.id for job in claim(conn, suspects_alone=False)} == {
        released.id,
        failed.id,
        recovered.id,
    }


def test_a_job_that_gets_its_key_is_not_hidden_below_the_head(conn: Connection) -> None:
    _, second = enqueue(conn, *([WORK | {"ordering_key": "key"}] * 2))
    (first,) = claim(conn)
    set_head(conn, "clock_timestamp()")
    complete(conn, first)
    assert [job.id for job in claim(conn)] == [second]


def test_a_reopened_job_is_not_hidden_below_the_head(conn: Connection) -> None:
    enqueue(conn, WORK)
    (job,) = claim(conn)
    complete(conn, job)
    set_head(conn, "clock_timestamp()")
    conn.execute("SELECT howdah.retry_jobs(%s)", ([job.id],))
    assert [again.id for again in claim(conn)] == [job.id]


def test_the_sweep_pulls_back_a_head_that_lies_in_the_future(conn: Connection) -> None:
    enqueue(conn, WORK | {"delay": 7200})
    set_head(conn, "clock_timestamp() + interval '1 hour'")
    maintain(conn, "sweep")
    assert head(conn) < value(conn, "SELECT clock_timestamp()")


def test_the_sweep_finds_a_job_that_a_long_transaction_requeued_far_below_the_head(
    connect: Connect, conn: Connection
) -> None:
    """A requeued job keeps its due time, so it may lie far below what the last sweeps saw."""
    ids = enqueue(conn, *([WORK] * 5))
    conn.execute("UPDATE howdah.live_jobs SET run_at = run_at - interval '1 hour'")
    jobs = claim(conn, 1, lease="1 hour")
    slow, other = connect(autocommit=False), connect(autocommit=False)
    slow.execute("SELECT howdah.release_jobs(%s, %s)", fences(jobs))
    enqueue(other, {"job_type": "other"})  # stays open to the end
    for _ in range(4):
        maintain(conn, "sweep")
        complete(conn, *claim(conn, 1, types=["work"]))
        set_head(conn, "clock_timestamp() - interval '1 second'")
        enqueue(conn, WORK)
    slow.commit()
    assert ids[0] not in {job.id for job in claim(conn)}
    maintain(conn, "sweep")
    assert [job.id for job in claim(conn)] == [ids[0]]


def test_the_sweep_adds_the_lane_of_a_job_that_has_none(conn: Connection) -> None:
    ids = enqueue(conn, WORK, WORK | {"priority": 7}, WORK | {"queue": "other"})
    conn.execute("DELETE FROM howdah.lanes")
    assert claim(conn) == []
    maintain(conn, "sweep")
    assert [job.id for job in claim(conn)] == ids[:2]
    assert value(conn, "SELECT count(*) FROM howdah.lanes") == 3


def test_the_sweep_adds_lanes_between_below_and_above_those_that_exist(conn: Connection) -> None:
    jobs = [
        {"queue": queue, "job_type": job_type, "priority": priority}
        for queue in "acei"
        for job_type in "acei"
        for priority in (-1000, 30, 100, 1000)
    ]
    enqueue(conn, *jobs)
    conn.execute(
        "DELETE FROM howdah.lanes WHERE NOT (queue = 'c' AND job_type = 'c' AND priority = 30)"
    )
    maintain(conn, "sweep")
    lanes = rows(conn, "SELECT queue, job_type, priority FROM howdah.lanes")
    assert sorted(map(tuple, lanes)) == sorted(tuple(job.values()) for job in jobs)


def test_the_next_due_time_is_that_of_the_first_job_to_come(conn: Connection) -> None:
    assert value(conn, "SELECT howdah.next_due_at()") is None
    enqueue(conn, *(WORK | {"delay": delay} for delay in (3600, 60, 90)))
    due_in = value(conn, "SELECT howdah.next_due_at() - clock_timestamp()")
    assert timedelta(seconds=50) < due_in <= timedelta(seconds=60)
    assert value(conn, "SELECT howdah.next_due_at('{other}')") is None


def test_a_job_that_came_due_since_the_last_claim_is_not_slept_past(conn: Connection) -> None:
    claimed_at = value(conn, "SELECT clock_timestamp()")
    enqueue(conn, WORK, WORK | {"delay": 60})
    now = value(conn, "SELECT clock_timestamp()")
    assert claimed_at < value(conn, "SELECT howdah.next_due_at(p_after => %s)", claimed_at) <= now
    assert value(conn, "SELECT howdah.next_due_at(p_after => %s)", now) > now


def test_a_poll_sees_a_due_job_below_a_head_that_lies_in_the_future(conn: Connection) -> None:
    value(conn, "SELECT howdah.enqueue_job('a')")
    set_head(conn, "clock_timestamp() + interval '1 hour'")
    poll = "SELECT due_at <= now FROM howdah.next_wake('worker', NULL, '{default}', true)"
    assert value(conn, poll) is True


# ── sweeps of open transactions ───────────────────────────────────────────────────────────────────


def overdue(conn: Connection) -> None:
    """The duties have been due for long. Those of a transaction that holds their rows run without them."""
    conn.execute(
        "UPDATE howdah.maintenance SET due_at = clock_timestamp() - interval '1 minute' "
        "WHERE ctid = ANY (ARRAY (SELECT ctid FROM howdah.maintenance FOR UPDATE SKIP LOCKED))"
    )


def test_a_transaction_that_ran_maintenance_and_stays_open_stops_no_sweep(
    connect: Connect, conn: Connection
) -> None:
    move_heads(conn)
    overdue(conn)
    idle, second = connect(autocommit=False), connect(autocommit=False)
    for each in (idle, second):
        assert {row.duty for row in rows(each, "SELECT duty FROM howdah.run_maintenance()")} >= {
            "sweep"
        }
    late = hide(connect, conn)
    errors = {row.duty: row.error for row in rows(conn, "SELECT * FROM howdah.run_maintenance()")}
    assert errors == dict.fromkeys(["recover", "keys", "sweep", "late", "clock"])
    assert [job.id for job in claim(conn)] == [late]


def test_a_sweep_that_commits_after_a_later_one_hides_nothing(
    connect: Connect, conn: Connection
) -> None:
    move_heads(conn)
    slow = connect(autocommit=False)
    slow.execute("SELECT howdah.sweep_lanes()")
    late = hide(connect, conn)
    for _ in range(3):
        maintain(conn, "sweep")
    slow.commit()
    assert [job.id for job in claim(conn)] == [late]
    ids = enqueue(conn, WORK)
    maintain(conn, "sweep")
    assert [job.id for job in claim(conn)] == ids


def test_sweeps_that_were_left_behind_are_removed(connect: Connect, conn: Connection) -> None:
    move_heads(conn)
    slow = connect(autocommit=False)
    slow.execute("SELECT howdah.sweep_lanes()")
    move_heads(conn)
    slow.commit()
    assert value(conn, "SELECT count(*) FROM howdah.sweeps") == 2
    conn.execute("SELECT setval('howdah.sweeps_id_seq', 127)")
    move_heads(conn)
    assert rows(conn, "SELECT id FROM howdah.sweeps") == [(128,)]


def test_a_sweep_that_fails_leaves_no_lock(connect: Connect, conn: Connection) -> None:
    enqueue(conn, WORK)
    conn.execute("ALTER TABLE howdah.sweeps ADD CONSTRAINT broken CHECK (false) NOT VALID")
    conn.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
    errors = {row.duty: row.error for row in rows(conn, "SELECT * FROM howdah.run_maintenance()")}
    assert "broken" in errors["sweep"]
    other = connect()
    own = (
        "(SELECT oid FROM pg_database WHERE datname = current_database())"  # the server has others
    )
    locks = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = {own}"
    assert value(other, locks) == 0


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_sweep_with_an_old_snapshot_says_that_it_did_nothing(
    connect: Connect, conn: Connection, level: str
) -> None:
    enqueue(conn, WORK)
    other = connect(autocommit=False)
    other.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
    other.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
    errors = {row.duty: row.error for row in rows(other, "SELECT * FROM howdah.run_maintenance()")}
    for duty in ("sweep", "late"):
        assert "READ COMMITTED" in errors[duty]


def test_read_uncommitted_is_read_committed(connect: Connect, conn: Connection) -> None:
    other = connect()
    other.execute("SET default_transaction_isolation = 'read uncommitted'")
    ids = enqueue(other, WORK | {"ordering_key": "key"})
    assert [job.id for job in claim(other)] == ids
    other.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
    ran = rows(other, "SELECT * FROM howdah.run_maintenance()")
    assert [row.error for row in ran if row.error] == []
    assert value(conn, "SELECT count(*) FROM howdah.sweeps") == 1


def test_a_prepared_transaction_counts_as_the_oldest_that_was_noted(conn: Connection) -> None:
    """Its name changes when it is prepared, and when the server is restarted."""
    noted = value(
        conn,
        "SELECT howdah.noted_writers(ARRAY['prepared -1/9', '3/4', '5/6'], "
        """'{"prepared 8/1": 7, "3/4": 9}', 12)""",
    )
    assert noted == {"prepared -1/9": 7, "3/4": 9, "5/6": 12}


def test_a_sweep_keeps_the_heads_of_sixteen_others_at_most(conn: Connection) -> None:
    noted = value(
        conn,
        "SELECT howdah.noted_writers(ARRAY (SELECT '3/' || n FROM generate_series(1, 40) AS n), "
        "(SELECT jsonb_object_agg('3/' || n, n) FROM generate_series(1, 40) AS n), 50)",
    )
    assert noted == {f"3/{n}": min(n, 16) for n in range(1, 41)}


def test_the_raised_heads_are_stored_by_the_numbers_of_their_lanes(conn: Connection) -> None:
    conn.execute("ALTER TABLE howdah.lanes ALTER COLUMN number RESTART WITH 700")
    move_heads(conn)
    assert value(conn, "SELECT array_dims(raised) FROM howdah.sweeps") == "[1:256]"
    assert value(
        conn,
        "SELECT ARRAY (SELECT n FROM unnest(raised) WITH ORDINALITY AS r (at, n) WHERE at IS NOT NULL) "
        "FROM howdah.sweeps",
    ) == [700 % 256 + 1]


# ── what clocks, servers and other sessions do to sweeps ──────────────────────────────────────────


def test_a_job_that_is_enqueued_while_the_clock_goes_back_is_found_after_its_commit(
    connect: Connect, conn: Connection
) -> None:
    """Sweeps run while the transaction is open, and the heads that they find were written by a clock that was ahead."""
    enqueue(conn, WORK)
    complete(conn, *claim(conn))
    maintain(conn, "sweep")
    producer = connect(autocommit=False)
    (late,) = enqueue(producer, WORK)
    conn.execute(
        "UPDATE howdah.sweeps SET heads = array_fill(clock_timestamp() + interval '5 seconds', "
        "ARRAY[cardinality(heads)]), raised = array_fill(clock_timestamp() + interval '5 seconds', ARRAY[256])"
    )
    maintain(conn, "sweep")
    conn.execute("SELECT pg_sleep(0.3)")  # the margin of a head
    for _ in range(2):
        enqueue(conn, WORK)
        complete(conn, *claim(conn))
        maintain(conn, "sweep")
    producer.commit()
    assert claim(conn) == []
    maintain(conn, "sweep")
    assert [job.id for job in claim(conn)] == [late]


def test_a_session_that_keeps_the_lock_of_sweeps_stops_them_for_seconds_only(
    connect: Connect, conn: Connection
) -> None:
    """A cancellation at the wrong moment leaves the lock with its session."""
    move_heads(conn)
    leaking = connect()
    leaking.execute(
        "SELECT pg_advisory_lock(hashtextextended(concat_ws(':', 'howdah', 'sweep', "
        "floor(extract(epoch FROM clock_timestamp()) / 3)), 0))"
    )
    late = hide(connect, conn)
    for _ in range(40):
        maintain(conn, "sweep")
        found = claim(conn)
        if found:
            break
        conn.execute("SELECT pg_sleep(0.1)")
    assert [job.id for job in found] == [late]


@pytest.mark.parametrize("table", ["job_events", "workers", "watchers"])
def test_a_retry_that_waited_for_another_table_is_not_hidden(
    connect: Connect, conn: Connection, table: str
) -> None:
    """The call locks its job, and waits before it writes it. Sweeps raise the head meanwhile."""
    failing = connect()
    for _ in range(8):  # its plans are cached
        enqueue(failing, WORK)
        failing.execute("SELECT howdah.fail_jobs(%s, %s, '{no}')", fences(claim(failing)))
        failing.execute("SELECT howdah.cancel_jobs(ARRAY (SELECT id FROM howdah.live_jobs))")
    (late,) = enqueue(conn, WORK)
    jobs = claim(conn)
    operator = connect(autocommit=False)
    operator.execute(f"LOCK TABLE howdah.{table} IN SHARE MODE".encode())
    failure = threading.Thread(
        target=lambda: failing.execute("SELECT howdah.fail_jobs(%s, %s, '{no}')", fences(jobs))
    )
    failure.start()
    for _ in range(8):
        conn.execute("SELECT pg_sleep(0.1)")
        enqueue(conn, WORK | {"job_type": "other"})
        complete(conn, *claim(conn, types=["other"]))
        conn.execute("SELECT howdah.sweep_lanes()")
    operator.rollback()
    failure.join()
    for _ in range(2):
        conn.execute("SELECT howdah.sweep_lanes()")
    assert [job.id for job in claim(conn)] == [late]


def test_a_writer_is_known_by_its_process_and_its_server_too(
    connect: Connect, conn: Connection
) -> None:
    """Virtual transaction ids start again when the server does."""
    other = connect(autocommit=False)
    enqueue(other, WORK)
    (name,) = value(conn, "SELECT howdah.writers_of_jobs()")
    started = value(conn, "SELECT extract(epoch FROM pg_postmaster_start_time())::text")
    assert name.split()[1:] == [str(other.info.backend_pid), started]


def test_lanes_that_share_a_number_get_their_own(conn: Connection) -> None:
    """As after logical replication, which does not replicate sequences."""
    types = [f"type {n}" for n in range(6)]
    ids = enqueue(conn, *({"job_type": name} for name in types))
    conn.execute("UPDATE howdah.lanes SET number = number % 2 + 1")
    conn.execute("SELECT setval('howdah.lanes_number_seq', 1)")
    for _ in range(4):
        maintain(conn, "sweep")
    assert value(conn, "SELECT count(DISTINCT number) FROM howdah.lanes") == 6
    assert value(conn, "SELECT cardinality(lanes) FROM howdah.sweeps") == 6
    assert {job.id for job in claim(conn)} == set(ids)


def test_lanes_are_added_although_open_transactions_hold_their_locks(
    connect: Connect, conn: Connection
) -> None:
    """One lock is that of every 32nd lane."""
    ids = enqueue(conn, *({"job_type": f"type {n}"} for n in range(40)))
    conn.execute("DELETE FROM howdah.lanes")
    for twin in ("f", "t"):
        connect(autocommit=False).execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(concat_ws(':', 'howdah', 'lanes', %s::boolean, n), 0)) "
            "FROM generate_series(0, 31) AS n",
            (twin,),
        )
    maintain(conn, "sweep")
    assert {job.id for job in claim(conn, 100)} == set(ids)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_enqueue_with_an_old_snapshot_does_not_fail_for_a_new_lane(
    connect: Connect, conn: Connection, level: str
) -> None:
    other = connect(autocommit=False)
    other.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
    other.execute("SELECT 1 FROM howdah.migrations")
    enqueue(conn, WORK)
    complete(conn, *claim(conn))
    ids = enqueue(other, WORK)
    other.commit()
    assert [job.id for job in claim(conn)] == ids


def test_no_claim_that_stays_open_keeps_a_job_hidden(connect: Connect, conn: Connection) -> None:
    move_heads(conn)
    enqueue(conn, *([WORK] * 300))
    producer, claimer = connect(autocommit=False), connect(autocommit=False)
    (late,) = enqueue(producer, WORK)
    claim(claimer, 200)
    conn.execute("SELECT pg_sleep(0.3)")
    complete(conn, *claim(conn, 200))
    maintain(conn, "sweep")
    producer.commit()
    maintain(conn, "sweep")
    assert [job.id for job in claim(conn)] == [late]
