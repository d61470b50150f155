"""Reading does not read the history: the newest jobs come from the ends of the indexes, and a job by its id from the
partition where it most likely is."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, enqueue, fail, rows, value
from plans import buffers, explained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from databases import Databases

    Connection = psycopg.Connection[Any]

HISTORY = 200_000
LIVE = 20_000
FILL = f"""
INSERT INTO howdah.finished_jobs (
    id, seq, run_at, created_at, claimed_at, started_at, completed_at, drop_on, lease_id, priority, attempts,
    max_attempts, claims, events_count, progress, cancel_requested, status, queue, job_type, data, worker_id)
SELECT (lpad(to_hex((extract(epoch FROM t) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1, 3) || '8'
        || substr(md5(n::text), 4, 15))::uuid,
       n, t, t, t, t, t, howdah.drop_day(status, NULL, t), gen_random_uuid(), 100, 1,
       3, 1, 0, 100, false, status, 'default', 'type ' || n % 10, '{{}}', 'worker'
FROM (SELECT n, clock_timestamp() - ({HISTORY} - n) * interval '6 days' / {HISTORY} AS t,
             CASE WHEN n % 50 = 0 THEN 'failed' ELSE 'completed' END AS status
      FROM generate_series(1, {HISTORY}) AS n) AS made;
SELECT count(*) FROM howdah.enqueue_jobs((
    SELECT jsonb_agg(jsonb_build_object('job_type', 'type ' || n % 10)) FROM generate_series(1, {LIVE}) AS n));
ANALYZE
"""


@pytest.fixture(scope="module")
def history(databases: Databases, template: str) -> Iterator[str]:
    name = databases.create(template)
    with psycopg.connect(databases.url(name), autocommit=True) as conn:
        for statement in FILL.split(";\n"):
            conn.execute(statement.encode())
    yield databases.url(name)
    databases.drop(name)


@pytest.fixture
def reader(history: str) -> Iterator[Connection]:
    with psycopg.connect(history, autocommit=True) as conn:
        yield conn


@pytest.mark.parametrize(
    "condition",
    [
        "true",
        "status = 'failed'",
        "status = 'completed'",
        "status = 'cancelled'",
        "status = 'pending'",
        "status = ANY ('{failed,cancelled}')",
        "job_type = 'type 3'",
        "job_type = 'type 3' AND status = 'failed' OR false",
        "status = 'failed' AND created_at < clock_timestamp() - interval '1 second'",
    ],
)
@pytest.mark.parametrize(
    "page", ["", " AND id < (SELECT id FROM howdah.finished_jobs WHERE seq = 100000)"]
)
def test_the_newest_jobs_are_read_from_the_ends_of_the_indexes(
    reader: Connection, condition: str, page: str
) -> None:
    if page:
        (row,) = rows(reader, "SELECT id FROM howdah.finished_jobs WHERE seq = 100000")
        page = f" AND id < '{row.id}'"
    query = f"SELECT * FROM howdah.jobs WHERE ({condition}){page} ORDER BY id DESC LIMIT 50"
    # 40 partitions, of which about ten have rows; the types are ten, and a fiftieth of the jobs failed.
    assert buffers(reader, query) < 1_500
    with explained(reader) as nodes:
        reader.execute(query.encode())
    assert [
        str(node)
        for node in nodes
        if node.kind in {"Seq Scan", "Sort"} and node.rows > HISTORY / 100
    ] == []


def test_the_newest_fifty_jobs_take_a_hundred_pages(reader: Connection) -> None:
    assert buffers(reader, "SELECT * FROM howdah.jobs ORDER BY id DESC LIMIT 50") < 150


def test_a_finished_job_is_read_by_its_id_from_few_partitions(reader: Connection) -> None:
    for seq in (50, 51, HISTORY // 2, HISTORY):
        (row,) = rows(reader, "SELECT id FROM howdah.finished_jobs WHERE seq = %s", seq)
        with explained(reader) as nodes:
            (job,) = rows(reader, "SELECT * FROM howdah.get_jobs(%s)", [row.id])
        assert job.seq == seq
        assert len([node for node in nodes if node.relation.startswith("finished_jobs")]) <= 3


KEEPS = (None, "1 hour", "1 day", "90 days")


@pytest.mark.parametrize("version", ["7", "4"])
def test_a_job_is_read_by_its_id_whatever_its_status_and_retention(
    conn: Connection, version: str
) -> None:
    new = [
        {"job_type": "work", "keep": keep, "request_id": "r"}
        | ({"ordering_key": f"k{n}"} if n < 12 else {})  # few enough to be assigned at the commit
        | ({"id": str(uuid.uuid4())} if version == "4" else {})
        for n, keep in enumerate(KEEPS * 6)
    ]
    ids = enqueue(conn, *new)
    jobs = claim(conn, 20)
    conn.execute(
        "SELECT howdah.start_jobs(%s, %s)",
        ([j.id for j in jobs[:4]], [j.lease_id for j in jobs[:4]]),
    )
    complete(conn, *jobs[4:8])
    fail(conn, *jobs[8:12], retry=False)
    fail(conn, *jobs[12:16])
    conn.execute("SELECT howdah.cancel_jobs(%s)", (ids[20:22],))
    expected = {row.id: row for row in rows(conn, "SELECT * FROM howdah.jobs")}
    assert {row.status for row in expected.values()} == {
        "pending", "claimed", "running", "completed", "failed", "cancelled",
    }  # fmt: skip
    assert set(expected) == set(ids)
    for job_id in ids:
        assert rows(conn, "SELECT * FROM howdah.get_jobs(%s)", [job_id]) == [expected[job_id]]
        of_view = rows(
            conn, "SELECT * FROM howdah.job_events WHERE job_id = %s ORDER BY event_id", job_id
        )
        assert rows(conn, "SELECT * FROM howdah.get_events(%s)", job_id) == of_view
    found = rows(conn, "SELECT * FROM howdah.get_jobs(%s)", [*ids, uuid.uuid4()])
    assert {row.id: row for row in found} == expected
    finished = {row.id for row in expected.values() if row.completed_at is not None}
    assert set(value(conn, "SELECT howdah.finished_ids(%s)", ids)) == finished


def test_no_job_is_read_by_an_unknown_id(conn: Connection) -> None:
    for job_id in (
        uuid.uuid4(),
        uuid.UUID(int=2**128 - 1),
        uuid.UUID(int=0),
        uuid.UUID(int=(2**48 - 1) << 80 | 7 << 76),
    ):
        assert rows(conn, "SELECT * FROM howdah.get_jobs(%s)", [job_id]) == []
        assert rows(conn, "SELECT * FROM howdah.get_events(%s)", job_id) == []


def test_a_job_that_moves_between_the_tables_is_always_found(
    connect: Callable[[], Connection], conn: Connection
) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work"})
    stop = threading.Event()
    writer = connect()

    def move() -> None:
        while not stop.is_set():
            complete(writer, *claim(writer))
            writer.execute("SELECT howdah.retry_jobs(%s)", ([job_id],))

    thread = threading.Thread(target=move)
    thread.start()
    try:
        for _ in range(300):
            assert len(rows(conn, "SELECT * FROM howdah.get_jobs(%s)", [job_id])) == 1
    finally:
        stop.set()
        thread.join()
