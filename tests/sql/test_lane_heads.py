"""Heads only say where a claim begins to look: no job stays hidden below one."""

from __future__ import annotations

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
    return value(conn, "SELECT min(head_at) FROM howdah.lanes WHERE job_type = 'work'")


def set_head(conn: Connection, expression: str) -> None:
    conn.execute(f"UPDATE howdah.lanes SET head_at = {expression}".encode())


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


def test_a_job_below_the_head_is_found_at_once_by_a_claim_that_ignores_heads(
    connect: Connect, conn: Connection
) -> None:
    enqueue(conn, WORK)
    complete(conn, *claim(conn))
    late = hide(connect, conn)
    assert [job.id for job in claim(conn, ignore_heads=True)] == [late]


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
    conn.execute(
        "UPDATE howdah.lanes SET head_at = h, swept_at = h, swept_before_at = h, swept_lasting_at = h "
        "FROM (SELECT clock_timestamp() + %s::interval AS h) AS t",
        (ahead,),
    )
    maintain(conn, "sweep")
    assert head(conn) <= value(conn, "SELECT clock_timestamp()")
    # Far below the head and below what the last sweeps saw, if the clock had been right.
    assert {job.id for job in claim(conn)} == {first, second}


def test_a_job_is_claimed_in_order_if_its_transaction_took_less_than_the_margin(
    connect: Connect, conn: Connection
) -> None:
    """The bound of P7: a head stays a second behind the clock."""
    move_heads(conn)
    producer = connect(autocommit=False)
    (late,) = enqueue(producer, WORK)
    move_heads(conn)
    producer.commit()
    (after,) = enqueue(conn, WORK)
    within = value(
        conn,
        "SELECT clock_timestamp() - run_at < '1 second' FROM howdah.live_jobs WHERE id = %s",
        late,
    )
    assert within, "the machine is too slow for this test"
    assert [job.id for job in claim(conn)] == [late, after]


def test_a_job_whose_transaction_took_longer_is_claimed_after_the_next_sweep(
    connect: Connect, conn: Connection
) -> None:
    """Beyond that bound a claim may take a later job first; the sweep, every five seconds, restores the order."""
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
    """Claim so many jobs that the head moves as far as it may."""
    enqueue(conn, *([WORK] * 200))
    assert complete(conn, *claim(conn, 200))


def test_a_full_batch_moves_the_head_up_to_what_it_saw(conn: Connection) -> None:
    enqueue(conn, *([WORK] * 2000))
    conn.execute("UPDATE howdah.live_jobs SET run_at = run_at - interval '1 minute'")
    jobs = claim(conn, 200)  # two hundred in two hundred: certain
    assert len(jobs) == 200
    assert head(conn) == jobs[0].run_at


def test_the_head_stays_behind_the_clock_for_enqueues_that_are_under_way(conn: Connection) -> None:
    enqueue(conn, *([WORK] * 2000))
    jobs = claim(conn, 1000)
    assert jobs[0].claimed_at is not None
    assert head(conn) == jobs[0].claimed_at - timedelta(seconds=1) < jobs[0].run_at


def test_a_head_moves_no_more_often_than_four_times_a_second(conn: Connection) -> None:
    """Every move leaves a version of the lane's row, which claims read while a transaction stays open."""
    moves = set()
    began = value(conn, "SELECT clock_timestamp()")
    for _ in range(20):
        enqueue(conn, *([WORK] * 200))
        complete(conn, *claim(conn, 200))
        moves.add(head(conn))
    took = value(conn, "SELECT clock_timestamp()") - began
    assert 1 <= len(moves) <= 2 + took / timedelta(milliseconds=250)


def test_a_claim_never_lowers_the_head(connect: Connect, conn: Connection) -> None:
    enqueue(conn, WORK)
    complete(conn, *claim(conn))
    producer = connect(autocommit=False)
    enqueue(producer, *([WORK] * 1000))
    set_head(conn, "clock_timestamp()")
    producer.commit()
    before = head(conn)
    assert len(claim(conn, 1000, ignore_heads=True)) == 1000
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
    conn.execute("UPDATE howdah.lanes SET head_at = clock_timestamp() + interval '1 hour'")
    poll = "SELECT due_at <= now FROM howdah.next_wake('worker', NULL, '{default}', true)"
    assert value(conn, poll) is True
