"""The statements of a worker, `claim_runs` and `complete_runs`: what they share with those of the contract, and where they
differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from calls import claim, enqueue, expire, fences, get, rows, status, value

if TYPE_CHECKING:
    from collections.abc import Callable

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}
CLAIM = "SELECT * FROM howdah.claim_runs('worker', %s, %s, '30 s', '{default}', %s)"
COMPLETE = "SELECT howdah.complete_runs(%s, %s, %s::jsonb[])"


def complete(conn: Connection, jobs: list[Any], results: list[Any] | None = None) -> Any:
    sent = None if results is None else [json.dumps(result) for result in results]
    return value(conn, COMPLETE, *fences(jobs), sent)


def test_a_worker_claims_the_jobs_of_the_contract_in_its_order_and_with_a_lease(
    conn: Connection,
) -> None:
    enqueue(
        conn,
        WORK | {"data": {"n": 1}},
        WORK | {"priority": 150, "idempotency_key": "key", "request_id": "request"},
        WORK | {"delay": 3600},
        {"job_type": "other"},
        WORK | {"data": {"n": 2}},
    )
    jobs = rows(conn, CLAIM, ["work"], 10, None)
    assert [(job.job_type, job.data, job.attempts, job.claims) for job in jobs] == [
        ("work", "{}", 1, 1),
        ("work", '{"n": 1}', 1, 1),
        ("work", '{"n": 2}', 1, 1),
    ]
    assert (jobs[0].idempotency_key, jobs[0].request_id, jobs[0].queue) == (
        "key", "request", "default",
    )  # fmt: skip
    assert all(0 <= job.waited < 60 for job in jobs)
    for job in jobs:
        row = get(conn, job.id)
        assert (row.status, row.lease_id, row.worker_id) == ("claimed", job.lease_id, "worker")
        assert (row.lease_expires_at - row.claimed_at).total_seconds() == 30


def test_a_worker_claims_no_job_without_an_attempt_left(conn: Connection) -> None:
    (job_id,) = enqueue(conn, WORK)
    conn.execute("UPDATE howdah.live_jobs SET attempts = max_attempts, claims = max_attempts")
    assert rows(conn, CLAIM, None, 10, None) == []
    assert status(conn, job_id) == "pending"


def test_all_completed_is_answered_in_one_word(conn: Connection) -> None:
    enqueue(conn, *[WORK] * 3)
    jobs = claim(conn)
    assert complete(conn, jobs, [1, None, "three"]) is None
    assert [get(conn, job.id).result for job in jobs] == [1, None, "three"]
    assert {status(conn, job.id) for job in jobs} == {"completed"}


def test_a_stale_fence_is_left_out_and_its_neighbours_are_completed(conn: Connection) -> None:
    enqueue(conn, *[WORK] * 3)
    first, stale, last = claim(conn)
    wrong = stale._replace(lease_id=uuid4())
    assert sorted(complete(conn, [first, wrong, last])) == sorted([first.id, last.id])
    assert status(conn, stale.id) == "claimed"
    assert complete(conn, [wrong]) == []


def test_a_job_that_was_claimed_again_is_completed_by_its_own_run_alone(conn: Connection) -> None:
    enqueue(conn, WORK)
    (old,) = claim(conn)
    expire(conn, old)
    conn.execute("SELECT howdah.recover_stale_jobs()")
    (new,) = rows(conn, CLAIM, None, 1, None)
    assert complete(conn, [old]) == []
    assert complete(conn, [new]) is None


def test_a_locked_job_refuses_the_batch_within_a_moment_and_changes_nothing(
    conn: Connection, connect: Connect
) -> None:
    enqueue(conn, *[WORK] * 2)
    jobs = claim(conn)
    operator = connect(autocommit=False)
    operator.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (jobs[0].id,))
    conn.execute("SET statement_timeout = '5s'")  # far more than the ten milliseconds
    with pytest.raises(psycopg.errors.LockNotAvailable):
        complete(conn, jobs)
    assert {status(conn, job.id) for job in jobs} == {"claimed"}
    operator.rollback()
    assert complete(conn, jobs) is None


def test_the_next_job_of_an_ordering_key_becomes_due(conn: Connection) -> None:
    _, second = enqueue(conn, *[WORK | {"ordering_key": "key"}] * 2)
    (first,) = rows(conn, CLAIM, None, 10, None)
    assert complete(conn, [first]) is None
    assert [job.id for job in rows(conn, CLAIM, None, 10, None)] == [second]
