"""What an operator calls does not wait without a limit for another's transaction, and says what it waited for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import Waits, claim, complete, enqueue, fail, rows, status, value

from howdah import JobLocked, JobQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

LIMIT_SECONDS = 5
# A call that waits without a limit is ended by this, with another error.
STATEMENT_TIMEOUT = "60s"

HOLDERS = {
    "retries it": "SELECT howdah.retry_jobs(%(ids)s)",
    "removes it": "SELECT howdah.remove_jobs(%(ids)s)",
    "clears": "SELECT howdah.clear_finished()",
    "has locked its row": "SELECT FROM howdah.finished_jobs WHERE id = ANY (%(ids)s) FOR UPDATE",
    "adds a late event": "SELECT howdah.add_late_events(%(ids)s, %(lease_ids)s, '{note}', NULL)",
}
OPERATORS = {"retry_jobs": "retried", "remove_jobs": "removed"}


def operate(conn: Connection, name: str, ids: list[UUID]) -> tuple[float, psycopg.Error | None]:
    """Seconds that the call took, and its error."""
    conn.execute(f"SET statement_timeout = '{STATEMENT_TIMEOUT}'".encode())
    started = time.monotonic()
    try:
        conn.execute(f"SELECT * FROM howdah.{name}(%s)".encode(), (ids,))
    except psycopg.Error as error:
        return time.monotonic() - started, error
    return time.monotonic() - started, None


def expect_refusal(found: tuple[float, psycopg.Error | None], what: str) -> None:
    seconds, error = found
    assert isinstance(error, psycopg.errors.LockNotAvailable), error
    assert f"no jobs were {what}: another transaction has locked one of them" in str(error)
    # A loaded machine adds to it, but not another limit.
    assert LIMIT_SECONDS - 0.5 < seconds < 3 * LIMIT_SECONDS


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_operator_waits_five_seconds_for_a_transaction_that(
    connect: Connect, conn: Connection, holder: str
) -> None:
    first, second = enqueue(conn, {"job_type": "work"}, {"job_type": "work"})
    jobs = {job.id: job for job in claim(conn)}
    complete(conn, jobs[first])
    stranger = connect(autocommit=False)
    stranger.execute(
        HOLDERS[holder].encode(), {"ids": [first], "lease_ids": [jobs[first].lease_id]}
    )
    complete(conn, jobs[second])
    with ThreadPoolExecutor(len(OPERATORS)) as threads:
        calls = {
            name: threads.submit(operate, connect(), name, [first, second]) for name in OPERATORS
        }
        for name, call in calls.items():
            expect_refusal(call.result(), OPERATORS[name])

    # Clearing leaves the locked job and waits for nobody.
    waits = Waits(conn)
    assert value(conn, "SELECT howdah.clear_finished()") == 1
    assert waits.count == 0
    assert status(conn, second) is None
    stranger.rollback()
    assert value(conn, "SELECT howdah.clear_finished()") == 1
    assert status(conn, first) is None


def test_an_operator_waits_five_seconds_for_a_live_job_that_its_handler_completes(
    connect: Connect, conn: Connection
) -> None:
    enqueue(conn, {"job_type": "work"})
    (job,) = claim(conn)
    handler = connect(autocommit=False)
    complete(handler, job)
    operators = {"cancel_jobs": "cancelled", "takeover_jobs": "taken over"}
    with ThreadPoolExecutor(len(operators)) as threads:
        calls = {name: threads.submit(operate, connect(), name, [job.id]) for name in operators}
        for name, call in calls.items():
            expect_refusal(call.result(), operators[name])
    handler.commit()
    assert status(conn, job.id) == "completed"


@pytest.mark.parametrize("name", ["cancel_jobs", "takeover_jobs"])
def test_a_locked_job_does_not_keep_the_others_of_a_list(
    connect: Connect, conn: Connection, name: str
) -> None:
    held, free = enqueue(conn, {"job_type": "work"}, {"job_type": "work"})
    jobs = {job.id: job for job in claim(conn)}
    handler, operator = connect(autocommit=False), connect(autocommit=False)
    notices: list[str | None] = []
    operator.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    complete(handler, jobs[held])
    answer = rows(operator, f"SELECT * FROM howdah.{name}(%s)", [held, free])
    operator.commit()  # its transaction goes on
    if name == "cancel_jobs":
        assert {row.id: row.status for row in answer} == {free: "cancelling", held: "locked"}
    else:
        assert [row[0] for row in answer] == [free]
        assert [str(held) in str(notice) for notice in notices] == [True]
        assert status(conn, free) == "pending"
    handler.commit()
    assert status(conn, held) == "completed"


def test_a_queue_names_the_job_that_another_transaction_has_locked(
    connect: Connect, conn: Connection, database: str
) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work"})
    handler = connect(autocommit=False)
    complete(handler, *claim(conn))
    queue = JobQueue(database)
    with pytest.raises(JobLocked, match="has locked one of them") as e:
        queue.cancel(job_id)
    queue.close()
    assert e.value.ids == (job_id,)
    assert str(job_id) in str(e.value)


def test_a_retry_leaves_out_a_job_whose_id_is_live_again(conn: Connection) -> None:
    twice, once = enqueue(conn, {"job_type": "work"}, {"job_type": "work"})
    complete(conn, *claim(conn))
    conn.execute("INSERT INTO howdah.live_jobs (id, job_type) VALUES (%s, 'other')", (twice,))
    assert rows(conn, "SELECT howdah.retry_jobs(%s)", [twice, once]) == [(once,)]


def test_a_retry_waits_five_seconds_for_an_open_enqueue_with_its_idempotency_key(
    connect: Connect, conn: Connection
) -> None:
    keyed = {"job_type": "work", "idempotency_key": "key"}
    (failed,) = enqueue(conn, keyed)
    fail(conn, *claim(conn), retry=False)
    producer = connect(autocommit=False)
    enqueue(producer, keyed)
    expect_refusal(operate(connect(), "retry_jobs", [failed]), "retried")
    assert status(conn, failed) == "failed"
    producer.rollback()
    assert operate(connect(), "retry_jobs", [failed])[1] is None
    assert status(conn, failed) == "pending"


@pytest.mark.parametrize("call", ["clear_finished()", "remove_jobs(%s)"])
def test_removing_a_job_does_not_wait_for_an_enqueue_that_replaces_its_expired_key(
    connect: Connect, conn: Connection, call: str
) -> None:
    keyed = {"job_type": "work", "idempotency_key": "key"}
    (job,) = enqueue(conn, keyed)
    complete(conn, *claim(conn))
    conn.execute("UPDATE howdah.idempotency_keys SET expires_at = clock_timestamp()")
    producer = connect(autocommit=False)
    (new,) = enqueue(producer, keyed)
    waits = Waits(conn)
    conn.execute(f"SELECT howdah.{call}".encode(), ([job],) if "%" in call else None)
    assert waits.count == 0
    assert status(conn, job) is None
    producer.commit()
    assert rows(conn, "SELECT job_id FROM howdah.idempotency_keys") == [(new,)]


def test_two_clears_at_once_do_not_wait_and_each_counts_its_own(
    connect: Connect, conn: Connection
) -> None:
    enqueue(conn, *({"job_type": "work"} for _ in range(6)))
    jobs = claim(conn)
    complete(conn, *jobs[:4])
    first, second = connect(autocommit=False), connect()
    assert value(first, "SELECT howdah.clear_finished()") == 4
    complete(conn, *jobs[4:])
    waits = Waits(second)
    assert value(second, "SELECT howdah.clear_finished()") == 2
    assert waits.count == 0
    first.commit()
    assert rows(conn, "SELECT * FROM howdah.finished_jobs") == []
