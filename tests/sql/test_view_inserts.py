"""INSERT INTO jobs enqueues what it was given, or refuses it in words, and RETURNING tells the truth."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from calls import claim, complete, enqueue, fail, rows, value

if TYPE_CHECKING:
    Connection = psycopg.Connection[Any]

SOME_TIME = datetime(2031, 2, 3, tzinfo=UTC)
SOME_ID = UUID("00000000-0000-7000-8000-000000000001")

HONOURED: dict[str, Any] = {
    "id": SOME_ID,
    "job_type": "other",
    "data": {"n": 1},
    "queue": "mail",
    "priority": 7,
    "run_at": SOME_TIME,
    "max_attempts": 9,
    "idempotency_key": "i",
    "ordering_key": "o",
    "request_id": "r",
    "traceparent": "t",
    "keep": timedelta(days=3),
}
# For each column, a value that a new job has, or None, and one that it cannot have.
REFUSED: dict[str, tuple[Any, Any]] = {
    "seq": (None, 5),
    "status": ("pending", "completed"),
    "progress": (0, 50),
    "current_stage": (None, "half"),
    "events_count": (0, 2),
    "worker_id": (None, "worker"),
    "lease_id": (None, SOME_ID),
    "lease_expires_at": (None, SOME_TIME),
    "claims": (0, 1),
    "claimed_at": (None, SOME_TIME),
    "created_at": (None, SOME_TIME),
    "started_at": (None, SOME_TIME),
    "completed_at": (None, SOME_TIME),
    "attempts": (0, 1),
    "last_error": (None, "it broke"),
    "holds_key": (False, True),
    "blockers": (0, 1),
    "cancel_requested": (False, True),
    "result": (None, {"n": 2}),
}


def insert(conn: Connection, **columns: Any) -> Any:
    """Insert one job with these columns; the row that RETURNING shows."""
    columns = {"job_type": "work"} | columns
    given = [json.dumps(v) if isinstance(v, dict) else v for v in columns.values()]
    (row,) = rows(
        conn,
        f"INSERT INTO howdah.jobs ({', '.join(columns)}) "
        f"VALUES ({', '.join(['%s'] * len(columns))}) RETURNING *",
        *given,
    )
    return row


def stored(conn: Connection) -> list[Any]:
    return rows(conn, "SELECT * FROM howdah.jobs")


def test_every_column_of_the_view_is_tried_below(conn: Connection) -> None:
    columns = rows(
        conn, "SELECT attname FROM pg_attribute WHERE attrelid = 'howdah.jobs'::regclass"
    )
    assert {row.attname for row in columns if not row.attname.startswith("ctid")} == (
        HONOURED.keys() | REFUSED.keys()
    )


@pytest.mark.parametrize("column", HONOURED)
def test_a_value_that_a_new_job_may_have_is_stored_and_returned(
    conn: Connection, column: str
) -> None:
    returned = insert(conn, **{column: HONOURED[column]})
    assert getattr(returned, column) == HONOURED[column]
    (job,) = stored(conn)
    assert job._replace(blockers=0, holds_key=False) == returned._replace(
        blockers=0, holds_key=False
    )


@pytest.mark.parametrize("column", [c for c in HONOURED if c != "job_type"])
def test_a_null_means_the_default(conn: Connection, column: str) -> None:
    assert getattr(insert(conn, **{column: None}), column) == getattr(insert(conn), column) or (
        column in {"id", "run_at"}
    )


def test_a_job_without_a_type_is_refused(conn: Connection) -> None:
    with pytest.raises(psycopg.errors.NotNullViolation):
        insert(conn, job_type=None)


@pytest.mark.parametrize("column", REFUSED)
def test_a_value_that_no_new_job_has_is_refused_in_words(conn: Connection, column: str) -> None:
    with pytest.raises(psycopg.errors.FeatureNotSupported) as caught:
        insert(conn, **{column: REFUSED[column][1]})
    sentence = caught.value.diag.message_primary or ""
    assert sentence.startswith('INSERT INTO "jobs" enqueues a new job, which cannot have ' + column)
    assert "Do not insert finished jobs" in (caught.value.diag.message_hint or "")
    assert stored(conn) == []


@pytest.mark.parametrize("column", REFUSED)
def test_the_value_that_a_new_job_has_anyway_is_accepted(conn: Connection, column: str) -> None:
    returned = insert(conn, **{column: REFUSED[column][0]})
    assert stored(conn) == [returned]
    assert len(claim(conn)) == 1


@pytest.mark.parametrize("status", ["bogus", "claimed", "running", "failed", "cancelled", ""])
def test_no_other_status_is_accepted(conn: Connection, status: str) -> None:
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="which cannot have status"):
        insert(conn, status=status)


def test_all_refused_values_are_named_at_once(conn: Connection) -> None:
    with pytest.raises(psycopg.errors.FeatureNotSupported) as caught:
        insert(conn, status="failed", attempts=3, last_error="no", result={"n": 1})
    for name in ("attempts", "last_error", "status", "result"):
        assert f"{name} = " in (caught.value.diag.message_primary or "")


def test_returning_shows_the_first_job_if_the_insert_repeats_it(conn: Connection) -> None:
    first = insert(conn, data={"n": 1}, priority=3, idempotency_key="i")
    assert insert(conn, data={"n": 1}, priority=9, idempotency_key="i") == first
    assert insert(conn, id=first.id, data={"n": 2}, queue="mail") == first
    (job,) = claim(conn)
    complete(conn, job)
    again = insert(conn, id=first.id)
    assert (again.id, again.status, again.data) == (first.id, "completed", {"n": 1})
    assert len(stored(conn)) == 1


OTHER_QUEUES = {
    "a copy of every job": "SELECT * FROM jobs_elsewhere",
    "finished jobs alone": "SELECT * FROM jobs_elsewhere WHERE status = 'completed'",
    "failed jobs alone": "SELECT * FROM jobs_elsewhere WHERE status = 'failed'",
    "claimed jobs alone": "SELECT * FROM jobs_elsewhere WHERE status = 'claimed'",
    "pending jobs with their history": "SELECT * FROM jobs_elsewhere WHERE status = 'pending'",
}


@pytest.mark.parametrize("what", OTHER_QUEUES)
def test_the_table_of_another_queue_is_not_copied_over_as_pending_jobs(
    conn: Connection, what: str
) -> None:
    enqueue(conn, *({"job_type": "work"} for _ in range(4)))
    jobs = claim(conn, 3)
    complete(conn, jobs[0])
    fail(conn, jobs[1], retry=False)
    conn.execute("CREATE TEMPORARY TABLE jobs_elsewhere AS SELECT * FROM howdah.jobs")
    conn.execute("TRUNCATE howdah.live_jobs, howdah.finished_jobs")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="enqueues a new job"):
        conn.execute(f"INSERT INTO howdah.jobs {OTHER_QUEUES[what]}".encode())
    assert stored(conn) == []


def test_the_pending_jobs_of_another_queue_are_copied_with_the_columns_that_count(
    conn: Connection,
) -> None:
    conn.execute("CREATE TEMPORARY TABLE elsewhere (id uuid, kind text, args jsonb, state text)")
    conn.execute(
        "INSERT INTO elsewhere SELECT gen_random_uuid(), 'send', to_jsonb(n), "
        "CASE WHEN n <= 3 THEN 'pending' ELSE 'done' END FROM generate_series(1, 5) AS n"
    )
    conn.execute(
        "INSERT INTO howdah.jobs (id, job_type, data, status) "
        "SELECT id, kind, args, state FROM elsewhere WHERE state = 'pending'"
    )
    assert sorted(job.data for job in claim(conn)) == [1, 2, 3]
    assert value(conn, "SELECT howdah.pending_count()") == 0


def test_a_session_in_the_replica_role_loses_no_job(conn: Connection) -> None:
    conn.execute("SET session_replication_role = replica")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="does nothing while session_repl"):
        conn.execute("INSERT INTO howdah.jobs (job_type) VALUES ('work')")
    enqueue(conn, {"job_type": "work", "ordering_key": "k"})
    (job,) = claim(conn)
    assert job.ordering_key == "k"
