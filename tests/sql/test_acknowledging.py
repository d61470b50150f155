"""What a worker may say about a job it claimed, and what becomes of one it stops talking about."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from calls import claim, complete, enqueue, expire, fail, fences, get, maintain, rows, status, value

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]


@pytest.fixture
def job(conn: Connection) -> Any:
    """A claimed job."""
    enqueue(conn, {"job_type": "work", "request_id": "request 1"})
    (job,) = claim(conn)
    return job


def recover(conn: Connection) -> int:
    found: int = value(conn, "SELECT howdah.recover_stale_jobs()")
    return found


def stale(job: Any) -> Any:
    """The same job under a fence that is not its own."""
    return job._replace(lease_id=uuid4())


def report(conn: Connection, job: Any, percent: int | None, stage: str | None = None) -> Any:
    (answer,) = rows(
        conn,
        "SELECT * FROM howdah.report_progress(%s, %s, %s::int[], %s::text[])",
        *fences([job]),
        [percent],
        [stage],
    )
    return answer


# ── fences ────────────────────────────────────────────────────────────────────────────────────────


def test_a_stale_fence_changes_nothing(conn: Connection, job: Any) -> None:
    before = get(conn, job.id)
    wrong = stale(job)
    assert complete(conn, wrong) == []
    assert fail(conn, wrong) == []
    assert rows(conn, "SELECT * FROM howdah.release_jobs(%s, %s)", *fences([wrong])) == []
    assert rows(conn, "SELECT * FROM howdah.start_jobs(%s, %s)", *fences([wrong])) == []
    event = "SELECT * FROM howdah.add_events(%s, %s, '{note}', NULL)"
    assert rows(conn, event, *fences([wrong])) == []
    (extended,) = rows(conn, "SELECT * FROM howdah.extend_jobs(%s, %s)", *fences([wrong]))
    assert (extended.extended, extended.mine) == (False, False)
    assert get(conn, job.id) == before


def test_a_fenced_off_job_does_not_harm_its_neighbours(conn: Connection) -> None:
    ids = enqueue(conn, *({"job_type": "work"} for _ in range(5)))
    jobs = claim(conn)
    jobs[2] = stale(jobs[2])
    results = [json.dumps(n) for n in range(5)]
    accepted = rows(
        conn,
        "SELECT * FROM howdah.complete_jobs(%s, %s, %s::text[]::jsonb[])",
        *fences(jobs),
        results,
    )
    assert [row[0] for row in accepted] == [ids[0], ids[1], ids[3], ids[4]]
    assert [get(conn, id_).result for id_ in ids] == [0, 1, None, 3, 4]


def test_reporting_on_a_fenced_off_job_says_that_it_is_lost(conn: Connection, job: Any) -> None:
    answer = report(conn, stale(job), 50)
    assert (answer.reported, answer.mine) == (False, False)
    assert get(conn, job.id).progress == 0


def test_a_job_that_was_recovered_cannot_be_completed_by_the_first_worker(
    conn: Connection, job: Any
) -> None:
    expire(conn, job)
    recover(conn)
    assert complete(conn, job) == []
    (again,) = claim(conn)
    assert complete(conn, job) == []
    assert complete(conn, again) == [job.id]


def test_a_lease_that_ran_out_is_extended_if_nobody_recovered_the_job(
    conn: Connection, job: Any
) -> None:
    expire(conn, job)
    (answer,) = rows(conn, "SELECT * FROM howdah.extend_jobs(%s, %s)", *fences([job]))
    assert (answer.extended, answer.mine) == (True, True)
    assert recover(conn) == 0


def test_a_completion_that_is_repeated_is_accepted_again_only_for_its_own_lease(
    conn: Connection, job: Any
) -> None:
    again = "SELECT * FROM howdah.complete_jobs(%s, %s, p_again => true)"
    assert complete(conn, job) == [job.id]
    assert [row[0] for row in rows(conn, again, *fences([job]))] == [job.id]
    assert rows(conn, again, *fences([stale(job)])) == []


# ── completing ────────────────────────────────────────────────────────────────────────────────────


def test_completing_sets_progress_to_100(conn: Connection, job: Any) -> None:
    report(conn, job, 40)
    complete(conn, job)
    assert get(conn, job.id).progress == 100


def test_a_result_is_kept_with_the_job(conn: Connection, job: Any) -> None:
    conn.execute("SELECT howdah.complete_jobs(%s, %s, ARRAY['{\"n\": 1}'::jsonb])", fences([job]))
    assert get(conn, job.id).result == {"n": 1}


def test_a_completed_job_says_when_it_started(conn: Connection, job: Any) -> None:
    conn.execute("SELECT howdah.complete_jobs(%s, %s, p_elapsed => '{0.000001}')", fences([job]))
    done = get(conn, job.id)
    assert job.claimed_at <= done.started_at <= done.completed_at
    assert done.worker_id == "worker"


# ── failing ───────────────────────────────────────────────────────────────────────────────────────


def test_failing_enforces_max_attempts(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work", "max_attempts": 2})
    assert fail(conn, *claim(conn)) == [job_id]
    assert status(conn, job_id) == "pending"
    assert fail(conn, *claim(conn)) == [job_id]
    failed = get(conn, job_id)
    assert (failed.status, failed.attempts) == ("failed", 2)


def test_failing_clears_worker_and_claim(conn: Connection, job: Any) -> None:
    fail(conn, job)
    waiting = get(conn, job.id)
    assert (waiting.worker_id, waiting.lease_id, waiting.claimed_at, waiting.started_at) == (
        (None,) * 4
    )
    assert waiting.last_error == "it broke"


def test_a_failed_job_is_due_when_its_retry_is(conn: Connection, job: Any) -> None:
    conn.execute(
        "SELECT howdah.fail_jobs(%s, %s, '{no}', NULL, ARRAY[interval '1 hour'])", fences([job])
    )
    assert claim(conn) == []
    due_in = get(conn, job.id).run_at - value(conn, "SELECT clock_timestamp()")
    assert timedelta(minutes=59) < due_in <= timedelta(hours=1)


def test_every_failure_leaves_an_event_of_its_attempt(conn: Connection, job: Any) -> None:
    fail(conn, job)
    fail(conn, *claim(conn), retry=False)
    events = rows(
        conn, "SELECT * FROM howdah.job_events WHERE job_id = %s ORDER BY event_id", job.id
    )
    assert [(event.kind, event.attempt, event.data["error"]) for event in events] == [
        ("error", 1, "it broke"),
        ("error", 2, "it broke"),
    ]
    assert get(conn, job.id).events_count == 2


# ── releasing ─────────────────────────────────────────────────────────────────────────────────────


def test_releasing_burns_no_attempt(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work", "max_attempts": 1})
    for _ in range(15):
        (job,) = claim(conn, started=True)
        conn.execute("SELECT howdah.release_jobs(%s, %s)", fences([job]))
    assert get(conn, job_id).attempts == 0


def test_a_released_job_keeps_its_place(conn: Connection) -> None:
    ids = enqueue(conn, *({"job_type": "work"} for _ in range(3)))
    conn.execute("SELECT howdah.release_jobs(%s, %s)", fences(claim(conn, 1)))
    assert [job.id for job in claim(conn)] == ids


# ── recovering ────────────────────────────────────────────────────────────────────────────────────


def test_recovery_refunds_a_job_that_never_started(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work", "max_attempts": 1})
    expire(conn, *claim(conn))
    assert recover(conn) == 1
    waiting = get(conn, job_id)
    assert (waiting.status, waiting.attempts, waiting.claims) == ("pending", 0, 1)


def test_recovery_refunds_ten_times_at_the_most(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work", "max_attempts": 1})
    for _ in range(11):
        expire(conn, *claim(conn, suspects_alone=False))
        assert recover(conn) == 1
    failed = get(conn, job_id)
    assert (failed.status, failed.attempts, failed.claims) == ("failed", 1, 11)


def test_recovery_fails_a_started_job_without_an_attempt_left(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work", "max_attempts": 1})
    expire(conn, *claim(conn, started=True))
    assert recover(conn) == 1
    failed = get(conn, job_id)
    assert (failed.status, failed.attempts) == ("failed", 1)
    assert failed.last_error == "the lease expired; the worker stopped or lost its connection"


def test_recovery_leaves_a_live_lease_alone(conn: Connection, job: Any) -> None:
    assert recover(conn) == 0
    maintain(conn, "recover", "late")
    assert complete(conn, job) == [job.id]


def test_recovery_by_age_takes_live_leases_too(conn: Connection, job: Any) -> None:
    assert value(conn, "SELECT howdah.recover_stale_jobs(interval '1 hour')") == 0
    assert value(conn, "SELECT howdah.recover_stale_jobs(interval '0')") == 1
    assert status(conn, job.id) == "pending"


def test_recovery_takes_no_more_than_it_was_asked_for(conn: Connection) -> None:
    enqueue(conn, *({"job_type": f"type {n % 3}"} for n in range(9)))
    expire(conn, *claim(conn))
    assert [value(conn, "SELECT howdah.recover_stale_jobs(NULL, 4)") for _ in range(4)] == [
        4, 4, 1, 0,
    ]  # fmt: skip


def test_the_recover_duty_finds_leases_that_ran_out_after_its_last_tick(conn: Connection) -> None:
    for _ in range(3):
        enqueue(conn, {"job_type": "work"})
        (job,) = claim(conn)
        expire(conn, job)
        maintain(conn, "recover")
        assert status(conn, job.id) == "pending"
        complete(conn, *claim(conn))


def test_the_request_id_survives_retry_and_recovery(conn: Connection, job: Any) -> None:
    fail(conn, job)
    (again,) = claim(conn)
    expire(conn, again)
    recover(conn)
    (last,) = claim(conn)
    fail(conn, last, retry=False)
    conn.execute("SELECT howdah.retry_jobs(%s)", ([job.id],))
    (reopened,) = claim(conn)
    assert {each.request_id for each in (again, last, reopened)} == {"request 1"}


# ── progress and events ───────────────────────────────────────────────────────────────────────────


def test_progress_never_goes_back_within_an_attempt(conn: Connection, job: Any) -> None:
    for percent in (30, 20, 60, 50):
        report(conn, job, percent)
    assert get(conn, job.id).progress == 60


def test_progress_starts_again_with_the_next_attempt(conn: Connection, job: Any) -> None:
    report(conn, job, 60, "halfway")
    fail(conn, job)
    (again,) = claim(conn)
    assert (again.progress, again.current_stage) == (0, None)
    report(conn, again, 10)
    assert get(conn, job.id).progress == 10


@pytest.mark.parametrize(("given", "kept"), [(-5, 0), (0, 0), (100, 100), (1000, 100)])
def test_progress_stays_between_0_and_100(
    conn: Connection, job: Any, given: int, kept: int
) -> None:
    assert report(conn, job, given).reported
    assert get(conn, job.id).progress == kept


def test_reporting_a_stage_alone_leaves_the_percentage_as_it_was(
    conn: Connection, job: Any
) -> None:
    report(conn, job, 40, "first")
    report(conn, job, None, "second")
    report(conn, job, 45, None)
    now = get(conn, job.id)
    assert (now.progress, now.current_stage) == (45, "second")
    report(conn, job, None, "third")
    assert get(conn, job.id).progress == 45


def test_a_long_stage_is_truncated(conn: Connection, job: Any) -> None:
    report(conn, job, 1, "x" * 300)
    assert get(conn, job.id).current_stage == "x" * 100


def test_reporting_progress_says_that_a_job_was_started(conn: Connection, job: Any) -> None:
    report(conn, job, 1)
    assert status(conn, job.id) == "running"


def test_events_are_kept_in_order_and_counted(conn: Connection, job: Any) -> None:
    conn.execute(
        "SELECT howdah.add_events(%s, %s, '{one,two}', '{1,2}')",
        ([job.id] * 2, [job.lease_id] * 2),
    )
    events = rows(
        conn, "SELECT * FROM howdah.job_events WHERE job_id = %s ORDER BY event_id", job.id
    )
    assert [(event.kind, event.data) for event in events] == [("one", 1), ("two", 2)]
    assert get(conn, job.id).events_count == 2


# ── cancelling, reopening, clearing ───────────────────────────────────────────────────────────────


def cancel(conn: Connection, *ids: UUID) -> dict[UUID, str]:
    found = conn.execute("SELECT id, status FROM howdah.cancel_jobs(%s)", (list(ids),)).fetchall()
    return dict(found)


def test_a_pending_job_is_cancelled_at_once(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work"})
    assert cancel(conn, job_id) == {job_id: "cancelled"}
    assert status(conn, job_id) == "cancelled"
    assert claim(conn) == []


def test_a_claimed_job_is_asked_to_stop_and_its_heartbeat_says_so(
    conn: Connection, job: Any
) -> None:
    assert cancel(conn, job.id) == {job.id: "cancelling"}
    assert status(conn, job.id) == "claimed"
    (answer,) = rows(conn, "SELECT * FROM howdah.extend_jobs(%s, %s)", *fences([job]))
    assert (answer.mine, answer.cancel_requested) == (True, True)
    assert report(conn, job, 5).cancel_requested


@pytest.mark.parametrize("way", ["fail", "release", "recover"])
def test_a_job_that_was_asked_to_stop_ends_as_cancelled(
    conn: Connection, job: Any, way: str
) -> None:
    cancel(conn, job.id)
    match way:
        case "fail":
            fail(conn, job)
        case "release":
            conn.execute("SELECT howdah.release_jobs(%s, %s)", fences([job]))
        case "recover":
            expire(conn, job)
            recover(conn)
    assert status(conn, job.id) == "cancelled"


def test_a_job_that_was_asked_to_stop_may_still_complete(conn: Connection, job: Any) -> None:
    cancel(conn, job.id)
    complete(conn, job)
    assert status(conn, job.id) == "completed"


def test_cancelling_a_finished_job_does_nothing(conn: Connection, job: Any) -> None:
    complete(conn, job)
    assert cancel(conn, job.id, uuid4()) == {}
    assert status(conn, job.id) == "completed"


@pytest.mark.parametrize("final", ["completed", "failed", "cancelled"])
def test_a_finished_job_is_reopened_under_its_own_id(
    conn: Connection, job: Any, final: str
) -> None:
    match final:
        case "completed":
            complete(conn, job)
        case "failed":
            fail(conn, job, retry=False)
        case "cancelled":
            cancel(conn, job.id)
            fail(conn, job)
    assert status(conn, job.id) == final
    assert [row[0] for row in rows(conn, "SELECT * FROM howdah.retry_jobs(%s)", [job.id])] == [
        job.id
    ]
    waiting = get(conn, job.id)
    assert (waiting.status, waiting.attempts, waiting.claims) == ("pending", 0, 0)
    assert (waiting.cancel_requested, waiting.progress, waiting.result) == (False, 0, None)
    assert rows(conn, "SELECT FROM howdah.finished_jobs WHERE id = %s", job.id) == []
    complete(conn, *claim(conn))
    assert status(conn, job.id) == "completed"


def test_a_live_job_is_not_reopened(conn: Connection, job: Any) -> None:
    assert rows(conn, "SELECT * FROM howdah.retry_jobs(%s)", [job.id]) == []
    assert complete(conn, job) == [job.id]


def test_clearing_removes_finished_jobs_with_their_events_and_nothing_else(
    conn: Connection,
) -> None:
    ids = enqueue(conn, *({"job_type": "work"} for _ in range(4)))
    jobs = claim(conn, 3)
    fail(conn, jobs[0], retry=False)
    complete(conn, jobs[1])
    assert value(conn, "SELECT howdah.clear_finished(interval '1 hour')") == 0
    assert value(conn, "SELECT howdah.clear_finished('0', '{completed}')") == 1
    assert [status(conn, id_) for id_ in ids] == ["failed", None, "claimed", "pending"]
    assert value(conn, "SELECT howdah.clear_finished()") == 1
    assert [status(conn, id_) for id_ in ids] == [None, None, "claimed", "pending"]
    assert value(conn, "SELECT count(*) FROM howdah.job_events") == 0


@pytest.mark.parametrize("late", [False, True])
def test_an_event_with_a_number_is_written_once_in_whatever_order_its_statements_arrive(
    conn: Connection, job: Any, late: bool
) -> None:
    function = "add_late_events" if late else "add_events"
    if late:
        complete(conn, job)

    def send(run: int, *numbers: int) -> None:
        call = f"SELECT * FROM howdah.{function}(%s, %s, %s, NULL, %s)"
        kinds, numbered = map(str, numbers), [(run << 32) + number for number in numbers]
        accepted = rows(conn, call, *fences([job] * len(numbers)), list(kinds), numbered)
        assert [id for (id,) in accepted] == [job.id]

    send(7, 1, 2)
    send(7, 1, 2, 3)  # with a newer event
    send(7, 1, 2)  # the first one, which took long to arrive
    send(5, 1)  # another run
    kinds = rows(conn, "SELECT kind FROM howdah.job_events ORDER BY event_id")
    assert [kind for (kind,) in kinds] == ["1", "2", "3", "1"]
    assert get(conn, job.id).events_count == 4


def test_the_wait_for_locked_jobs_is_bounded_for_all_of_them_together(
    conn: Connection, connect: Connect
) -> None:
    """Each is locked for less than the time that a call waits for, one after the other."""
    enqueue(conn, *([{"job_type": "work"}] * 10))
    jobs = claim(conn)
    free, held = jobs[:4], sorted(jobs[4:], key=lambda job: job.id)
    holder = connect(autocommit=False)
    holder.execute("SELECT FROM howdah.live_jobs WHERE id = ANY (%s) FOR UPDATE", ([held[0].id],))
    others = connect(autocommit=False)
    others.execute(
        "SELECT FROM howdah.live_jobs WHERE id = ANY (%s) FOR UPDATE",
        ([job.id for job in held[1:]],),
    )
    threading.Timer(0.2, holder.rollback).start()
    conn.execute("SET statement_timeout = '2 s'")
    assert set(complete(conn, *jobs)) == {job.id for job in (*free, held[0])}
    others.rollback()
    assert set(complete(conn, *held[1:])) == {job.id for job in held[1:]}
