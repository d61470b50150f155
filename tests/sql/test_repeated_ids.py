"""An id that is enqueued again is the same job, finished or not, on every way in."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, fail, rows, status, value, wait_until
from psycopg import IsolationLevel

from howdah.model import new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

ID = "01900000-0000-7000-8000-000000000001"
JOB = json.dumps({"id": ID, "job_type": "work"})
PAIR = json.dumps([{"id": ID, "job_type": "work"}, {"id": ID, "job_type": "work"}])
WAYS = {
    "enqueue_job": f"SELECT howdah.enqueue_job('work', p_id => '{ID}')",
    "enqueue_jobs with one": f"SELECT id FROM howdah.enqueue_jobs('[{JOB}]')",
    "enqueue_jobs twice in a batch": f"SELECT DISTINCT id FROM howdah.enqueue_jobs('{PAIR}')",
    "enqueue_jobs with p_again": f"SELECT id FROM howdah.enqueue_jobs('[{JOB}]', true)",
    "enqueue_jobs with a key": "SELECT id FROM howdah.enqueue_jobs("
    f"'[{json.dumps(json.loads(JOB) | {'idempotency_key': 'k'})}]')",
    "INSERT INTO jobs": f"INSERT INTO howdah.jobs (id, job_type) VALUES ('{ID}', 'work') RETURNING id",
    "enqueue_and_claim": f"SELECT id FROM howdah.enqueue_and_claim('{JOB}', 'other')",
}


def finish(conn: Connection, how: str) -> None:
    (job,) = claim(conn)
    if how == "completed":
        complete(conn, job)
    else:
        fail(conn, job, retry=False)


@pytest.mark.parametrize("how", ["completed", "failed"])
@pytest.mark.parametrize("way", WAYS)
def test_an_id_that_has_finished_is_not_enqueued_again(
    conn: Connection, way: str, how: str
) -> None:
    value(conn, WAYS["enqueue_job"])
    finish(conn, how)
    assert str(value(conn, WAYS[way])) == ID
    assert claim(conn) == []
    assert rows(conn, "SELECT status FROM howdah.jobs") == [(how,)]
    assert value(conn, "SELECT count(*) FROM howdah.live_jobs") == 0


@pytest.mark.parametrize("way", WAYS)
def test_an_id_that_is_live_is_not_enqueued_again(conn: Connection, way: str) -> None:
    value(conn, WAYS["enqueue_job"])
    assert str(value(conn, WAYS[way])) == ID
    assert len(claim(conn)) == 1
    assert str(value(conn, WAYS[way])) == ID
    assert value(conn, "SELECT count(*) FROM howdah.jobs") == 1


@pytest.mark.parametrize("way", WAYS)
def test_an_id_whose_job_is_being_finished_is_the_same_job_at_once(
    connect: Connect, conn: Connection, way: str
) -> None:
    value(conn, WAYS["enqueue_job"])
    handler = connect(autocommit=False)
    jobs = claim(conn)
    complete(handler, *jobs)
    conn.execute("SET lock_timeout = '200ms'")
    assert str(value(conn, WAYS[way])) == ID
    handler.commit()
    assert value(conn, "SELECT count(*) FROM howdah.jobs") == 1


def test_an_id_that_is_enqueued_and_finished_while_its_second_enqueue_waits_is_the_same_job(
    connect: Connect, conn: Connection
) -> None:
    """The second enqueue waits for the first. The first transaction also runs the job to its end."""
    first, second = connect(autocommit=False), connect()
    value(first, WAYS["enqueue_job"])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(rows, second, f"SELECT * FROM howdah.enqueue_jobs('[{JOB}]')")
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: value(conn, waits, second.info.backend_pid), "the second waits")
        complete(first, *claim(first))
        first.commit()
        ((job_id, is_new),) = answer.result(60)
    assert (str(job_id), is_new) == (ID, False)
    assert rows(conn, "SELECT status FROM howdah.jobs") == [("completed",)]


def test_the_second_of_two_equal_ids_in_a_batch_is_not_new(conn: Connection) -> None:
    answer = rows(conn, f"SELECT is_new FROM howdah.enqueue_jobs('{PAIR}')")
    assert answer == [(True,), (False,)]


def test_new_ids_are_not_looked_up_among_finished_jobs(conn: Connection) -> None:
    conn.execute("ALTER TABLE howdah.finished_jobs RENAME TO hidden")
    try:
        ids = [{"id": str(new_id()), "job_type": "a"} for _ in range(2)]
        for jobs in (ids[:1], ids):
            rows(
                conn, "SELECT * FROM howdah.enqueue_jobs(%s, p_fresh_ids => true)", json.dumps(jobs)
            )
        rows(
            conn, """SELECT * FROM howdah.enqueue_jobs('[{"job_type": "a"}, {"job_type": "b"}]')"""
        )
    finally:
        conn.execute("ALTER TABLE howdah.hidden RENAME TO finished_jobs")


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_an_id_of_the_callers_own_is_refused_in_a_transaction_with_an_old_snapshot(
    connect: Connect, conn: Connection, level: IsolationLevel
) -> None:
    strict = connect(autocommit=False)
    strict.isolation_level = level
    strict.execute("SELECT 1 FROM howdah.jobs LIMIT 1")
    value(conn, WAYS["enqueue_job"])
    finish(conn, "completed")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="its snapshot may not show"):
        value(strict, WAYS["enqueue_job"])
    strict.rollback()
    assert str(value(strict, WAYS["enqueue_job"])) == ID  # this snapshot shows it
    strict.commit()
    assert status(conn, ID) == "completed"  # type: ignore[arg-type]
