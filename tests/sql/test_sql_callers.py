"""The queue used from SQL alone: the view, the functions, and what they refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, enqueue, get, maintain, rows, status, value

if TYPE_CHECKING:
    from collections.abc import Callable

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]


def test_a_job_goes_its_way_in_plain_sql(conn: Connection) -> None:
    job_id = value(conn, "SELECT howdah.enqueue_job('send', '{\"to\": \"alice\"}')")
    (job,) = rows(conn, "SELECT * FROM howdah.claim_job_batch('psql')")
    assert (job.id, job.data, job.status, job.worker_id) == (
        job_id, {"to": "alice"}, "claimed", "psql",
    )  # fmt: skip
    accepted = value(
        conn, "SELECT howdah.complete_jobs(ARRAY[%s::uuid], ARRAY[%s::uuid])", job.id, job.lease_id
    )
    assert accepted == job_id
    (done,) = rows(conn, "SELECT * FROM howdah.jobs WHERE status = 'completed'")
    assert done.id == job_id


def test_inserting_into_the_view_enqueues_and_returns_the_id(conn: Connection) -> None:
    inserted = rows(
        conn,
        "INSERT INTO howdah.jobs (job_type, data, priority) "
        "SELECT 'send', to_jsonb(n), 150 FROM generate_series(1, 3) AS n RETURNING id",
    )
    jobs = claim(conn)
    assert [job.id for job in jobs] == [row.id for row in inserted]
    assert [(job.data, job.priority, job.max_attempts) for job in jobs] == [
        (1, 150, 3), (2, 150, 3), (3, 150, 3),
    ]  # fmt: skip


def test_an_insert_with_a_taken_idempotency_key_returns_the_first_id(conn: Connection) -> None:
    insert = "INSERT INTO howdah.jobs (job_type, idempotency_key) VALUES ('send', 'k') RETURNING id"
    assert value(conn, insert) == value(conn, insert)
    assert len(claim(conn)) == 1


@pytest.mark.parametrize(
    "statement",
    ["UPDATE howdah.jobs SET priority = 1", "DELETE FROM howdah.jobs"],
)
def test_writing_to_the_view_is_refused_and_names_the_functions(
    conn: Connection, statement: str
) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work"})
    with pytest.raises(psycopg.errors.FeatureNotSupported) as caught:
        conn.execute(statement.encode())
    verb = statement.split()[0]
    assert caught.value.diag.message_primary == (
        f'{verb} on the view "jobs" is not allowed: jobs change through functions only'
    )
    assert caught.value.diag.message_hint == (
        "Call howdah.cancel_jobs, howdah.retry_jobs, howdah.fail_jobs, howdah.complete_jobs "
        "or howdah.clear_finished."
    )
    assert status(conn, job_id) == "pending"


def nested(depth: int) -> Any:
    data: Any = 1
    for _ in range(depth):
        data = [data]
    return data


REFUSED = {
    "an empty job type": ({"job_type": ""}, "job_type_length"),
    "an overlong job type": ({"job_type": "x" * 201}, "job_type_length"),
    "an empty queue": ({"queue": ""}, "queue_length"),
    "an overlong queue": ({"queue": "x" * 201}, "queue_length"),
    "a priority above 1000": ({"priority": 1001}, "priority_range"),
    "a priority below -1000": ({"priority": -1001}, "priority_range"),
    "no attempt at all": ({"max_attempts": 0}, "max_attempts_range"),
    "a payload over 64 KiB": ({"data": "x" * 65_535}, "data_within_limit"),
    "a payload that is nested too deeply": ({"data": nested(101)}, "data_not_too_deep"),
    "a due time that never comes": ({"run_at": "infinity"}, "run_at_is_finite"),
    "a due time that no client can read": ({"run_at": "20000-01-01"}, "run_at_is_finite"),
    "an empty idempotency key": ({"idempotency_key": ""}, "key_length"),
    "an overlong idempotency key": ({"idempotency_key": "x" * 501}, "key_length"),
    "an empty ordering key": ({"ordering_key": ""}, "ordering_key_length"),
    "an overlong ordering key": ({"ordering_key": "x" * 501}, "ordering_key_length"),
    "an overlong request id": ({"request_id": "x" * 201}, "request_id_length"),
    "a negative retention": ({"keep": "-1 second"}, "keep_is_positive"),
    "a retention beyond the calendar": ({"keep": "290000 years"}, "keep_is_positive"),
}


@pytest.mark.parametrize("company", [0, 1])
@pytest.mark.parametrize("what", REFUSED)
def test_enqueueing_refuses(conn: Connection, what: str, company: int) -> None:
    fields, constraint = REFUSED[what]
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        enqueue(conn, {"job_type": "work", **fields}, *[{"job_type": "work"}] * company)
    assert caught.value.diag.constraint_name == constraint
    assert value(conn, "SELECT count(*) FROM howdah.live_jobs") == 0


def test_a_job_without_a_type_is_refused(conn: Connection) -> None:
    with pytest.raises(psycopg.errors.NotNullViolation):
        conn.execute("SELECT howdah.enqueue_job(NULL)")


ACCEPTED = {
    "the longest names": {"job_type": "x" * 200, "queue": "default"},
    "the highest priority": {"priority": 1000},
    "the lowest priority": {"priority": -1000},
    "one attempt": {"max_attempts": 1},
    "64 KiB of data": {"data": "x" * 65_534},
    "many small values": {"data": list(range(10_000))},
    "data nested 100 deep": {"data": nested(100)},
    "a due time in the past": {"run_at": "-infinity"},
    "the longest keys": {"idempotency_key": "x" * 500, "ordering_key": "y" * 500},
    "a retention of a thousand years": {"keep": "1000 years"},
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_a_job_at_the_limit_goes_its_way(conn: Connection, what: str) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work", **ACCEPTED[what]})
    jobs = claim(conn)
    assert complete(conn, *jobs) == [job_id]
    assert get(conn, job_id).data == ACCEPTED[what].get("data", {})


ALIKE: dict[str, dict[str, Any]] = {
    "nothing but its type": {},
    "everything": {
        "data": {"to": ["alice", None]}, "queue": "mail", "priority": 150, "max_attempts": 7,
        "ordering_key": "k", "request_id": "r", "traceparent": "t", "keep": "2 days",
    },
    "nulls": dict.fromkeys((
        "id", "data", "queue", "priority", "run_at", "delay", "max_attempts", "idempotency_key",
        "ordering_key", "request_id", "traceparent", "keep")),
    "a due time": {"run_at": "2100-01-01 00:00+00"},
    "a delay": {"delay": 86_400.5},
    "numbers as text": {"priority": "30", "max_attempts": "2"},
    "data that are no object": {"data": [1, "two", False]},
}  # fmt: skip


@pytest.mark.parametrize("what", ALIKE)
def test_a_job_is_the_same_alone_and_in_company(conn: Connection, what: str) -> None:
    job = {"job_type": "work", **ALIKE[what]}
    answers = (
        "SELECT to_jsonb(j) - '{id,seq,run_at,created_at}'::text[] AS fields,"
        " greatest(run_at, created_at + '1 hour') - created_at AS delay FROM howdah.live_jobs AS j"
        " WHERE id = %s"
    )
    with conn.transaction(force_rollback=True):
        (first,) = rows(conn, answers, enqueue(conn, job)[0])
    with conn.transaction(force_rollback=True):
        (second,) = rows(conn, answers, enqueue(conn, job, {"job_type": "other"})[0])
    assert first.fields == second.fields
    assert first.fields["job_type"] == "work"
    assert abs(first.delay - second.delay).total_seconds() < 60


@pytest.mark.parametrize("jobs", [[5], [None], {"job_type": "work"}, ["work"]])
def test_what_is_no_array_of_jobs_is_refused(conn: Connection, jobs: Any) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        conn.execute("SELECT howdah.enqueue_jobs(%s)", (json.dumps(jobs),))


@pytest.mark.parametrize("number", [1, 2])
def test_an_id_that_is_taken_is_not_new(conn: Connection, number: int) -> None:
    jobs = [
        {"job_type": "work", "id": f"00000000-0000-7000-8000-00000000000{n}"} for n in range(number)
    ]
    ask = "SELECT is_new FROM howdah.enqueue_jobs(%s)"
    assert [row.is_new for row in rows(conn, ask, json.dumps(jobs))] == [True] * number
    assert [row.is_new for row in rows(conn, ask, json.dumps(jobs))] == [False] * number
    assert len(claim(conn)) == number


def test_one_bad_job_refuses_the_whole_batch(conn: Connection) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        enqueue(conn, {"job_type": "work"}, {"job_type": "work", "priority": 9999})
    assert claim(conn) == []


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("claim_job_batch('')", "p_worker_id is empty: name the worker that claims"),
        ("claim_job_batch(NULL)", "p_worker_id is empty: name the worker that claims"),
        ("claim_job_batch('w', NULL, 0)", "p_batch_size is 0: it must be between 1 and 10000"),
        (
            "claim_job_batch('w', NULL, 1, '-1 second')",
            "p_lease is -00:00:01: it must be positive and at most 30 days",
        ),
    ],
)
def test_a_claim_that_makes_no_sense_says_why(conn: Connection, call: str, sentence: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        conn.execute(f"SELECT * FROM howdah.{call}".encode())
    assert caught.value.diag.message_primary == sentence


def test_a_long_worker_name_is_cut(conn: Connection) -> None:
    enqueue(conn, {"job_type": "work"})
    (job,) = claim(conn, worker="w" * 300)
    assert job.worker_id == "w" * 100


def test_the_functions_do_not_look_at_the_callers_search_path(conn: Connection) -> None:
    conn.execute("CREATE TEMP TABLE live_jobs (id uuid)")
    conn.execute("CREATE TEMP TABLE lanes (queue text)")
    conn.execute("SET search_path = pg_temp")
    (job_id,) = enqueue(conn, {"job_type": "work", "ordering_key": "k"})
    assert complete(conn, *claim(conn)) == [job_id]
    maintain(conn)


def test_a_rolled_back_enqueue_never_runs(connect: Connect, conn: Connection) -> None:
    producer = connect(autocommit=False)
    enqueue(producer, {"job_type": "work"})
    producer.rollback()
    maintain(conn)
    assert claim(conn) == []


def test_an_enqueue_that_is_repeated_is_the_same_job(conn: Connection) -> None:
    jobs = json.dumps([{"id": "01900000-0000-7000-8000-000000000001", "job_type": "work"}])
    again = "SELECT * FROM howdah.enqueue_jobs(%s, p_again => true)"
    assert [row.is_new for row in rows(conn, again, jobs)] == [True]
    assert [row.is_new for row in rows(conn, again, jobs)] == [True]
    complete(conn, *claim(conn))
    assert [row.is_new for row in rows(conn, again, jobs)] == [True]
    assert claim(conn) == []


def test_an_enqueue_that_is_repeated_while_its_job_ends_is_the_same_job(
    connect: Connect, conn: Connection
) -> None:
    jobs = json.dumps(
        [
            {
                "id": f"01900000-0000-7000-8000-00000000000{n}",
                "job_type": "work",
                "ordering_key": key,
            }
            for n, key in enumerate([None, "k", "k"])
        ]
    )
    rows(conn, "SELECT * FROM howdah.enqueue_jobs(%s)", jobs)
    worker = connect(autocommit=False)
    plain, ordered = claim(worker)
    worker.commit()
    complete(worker, plain, ordered)
    again = connect()
    again.execute(
        "SET lock_timeout = '200ms'"
    )  # it does not wait for the transaction that ends them
    repeated = rows(again, "SELECT * FROM howdah.enqueue_jobs(%s, p_again => true)", jobs)
    assert [row.is_new for row in repeated] == [True, True, True]
    worker.commit()
    repeated = rows(again, "SELECT * FROM howdah.enqueue_jobs(%s)", jobs)
    assert [row.is_new for row in repeated] == [False, False, False]
    (last,) = claim(conn)
    assert last.ordering_key == "k"
    complete(conn, last)
    assert claim(conn) == []
    ended = rows(conn, "SELECT id, status FROM howdah.jobs")
    assert sorted(ended) == sorted((job.id, "completed") for job in (plain, ordered, last))


def test_pending_jobs_are_counted_by_queue_and_type(conn: Connection) -> None:
    enqueue(
        conn,
        {"job_type": "a"},
        {"job_type": "a", "delay": 3600},
        {"job_type": "b", "queue": "other"},
        {"job_type": "b", "ordering_key": "k"},
        {"job_type": "b", "ordering_key": "k"},
    )
    count = "SELECT howdah.pending_count(%s, %s)"
    assert value(conn, count, None, None) == 5
    assert value(conn, count, "default", None) == 4
    assert value(conn, count, "default", "a") == 2
    assert value(conn, count, None, "b") == 3
