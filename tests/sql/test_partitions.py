"""Retention: the partition of a finished job, how partitions are created and dropped, and that no completion waits
for that. To let days pass, a test moves every partition and its rows into the past."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from calls import Waits, claim, complete, enqueue, fail, get, maintain, rows, status, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import date
    from uuid import UUID

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

LET_DAYS_PASS = """
DO $$
DECLARE
    v_partition record;
BEGIN
    FOR v_partition IN
        SELECT c.relname AS name, to_date(right(c.relname, 8), 'YYYYMMDD') - {days} AS day
        FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'howdah.finished_jobs'::regclass AND c.relname ~ '[0-9]{{8}}$'
        ORDER BY 1
    LOOP
        EXECUTE format('ALTER TABLE howdah.finished_jobs DETACH PARTITION howdah.%I', v_partition.name);
        EXECUTE format('UPDATE howdah.%I SET drop_on = drop_on - {days}, '
                       'completed_at = completed_at - interval ''{days} days''', v_partition.name);
        EXECUTE format('ALTER TABLE howdah.%I RENAME TO %I', v_partition.name, howdah.partition_name(v_partition.day));
        EXECUTE format('ALTER TABLE howdah.finished_jobs ATTACH PARTITION howdah.%I '
                       'FOR VALUES FROM (%L) TO (%L)',
                       howdah.partition_name(v_partition.day), v_partition.day, v_partition.day + 1);
    END LOOP;
    UPDATE howdah.finished_jobs_default
    SET drop_on = drop_on - {days}, completed_at = completed_at - interval '{days} days';
END $$
"""


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


def today() -> date:
    return datetime.now(UTC).date()


def let_pass(conn: Connection, *, days: int) -> None:
    conn.execute(LET_DAYS_PASS.format(days=days).encode())


def partitions(conn: Connection) -> list[str]:
    found = rows(
        conn,
        "SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'howdah.finished_jobs'::regclass ORDER BY c.relname",
    )
    return [row.relname for row in found]


def partition(day: date) -> str:
    return f"finished_jobs_{day:%Y%m%d}"


def where(conn: Connection, job_id: UUID) -> str:
    """The partition that contains a finished job."""
    name: str = value(
        conn, "SELECT tableoid::regclass::text FROM howdah.finished_jobs WHERE id = %s", job_id
    )
    return name.removeprefix("howdah.")


def finish(conn: Connection, *, keep: str | None = None, count: int = 1) -> list[UUID]:
    ids = enqueue(conn, *({"job_type": "work", "keep": keep} for _ in range(count)))
    assert complete(conn, *claim(conn, count)) == ids
    return ids


def expired_partition(conn: Connection) -> UUID:
    """A finished job whose partition can be dropped today."""
    (old,) = finish(conn, keep="1 day")
    let_pass(conn, days=2)
    return old


# ── which day ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("keep", "days"), [(None, 7), ("3 days", 3), ("40 days", 40), ("90 days", 90)]
)
def test_a_completed_job_may_go_the_day_after_its_retention(
    conn: Connection, keep: str | None, days: int
) -> None:
    (job_id,) = finish(conn, keep=keep)
    (row,) = rows(conn, "SELECT * FROM howdah.finished_jobs WHERE id = %s", job_id)
    assert row.drop_on == row.completed_at.astimezone(UTC).date() + timedelta(days=days + 1)


def test_a_failed_job_is_kept_for_30_days(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work"})
    fail(conn, *claim(conn), retry=False)
    (row,) = rows(conn, "SELECT * FROM howdah.finished_jobs WHERE id = %s", job_id)
    assert row.drop_on == row.completed_at.astimezone(UTC).date() + timedelta(days=31)


def test_a_job_without_retention_is_removed_when_it_completes(conn: Connection) -> None:
    (job_id,) = finish(conn, keep="0")
    assert get(conn, job_id) is None


def test_a_job_without_retention_is_kept_when_it_fails(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work", "keep": "0"})
    fail(conn, *claim(conn), retry=False)
    assert status(conn, job_id) == "failed"


# ── partitions are created and dropped ────────────────────────────────────────────────────────────


def test_partitions_are_created_forty_days_ahead(conn: Connection) -> None:
    assert partitions(conn) == [
        *(partition(today() + timedelta(days=n)) for n in range(1, 41)), "finished_jobs_default",
    ]  # fmt: skip


def test_a_tick_with_nothing_to_do_locks_nothing_for_long(
    connect: Connect, conn: Connection
) -> None:
    maintain(conn, "partitions")
    tick = connect(autocommit=False)
    tick.execute("SELECT howdah.maintain_partitions()")
    strong = rows(
        conn,
        "SELECT relation::regclass FROM pg_locks WHERE pid = %s AND mode ~ 'Exclusive' "
        "AND mode <> 'RowExclusiveLock' AND locktype = 'relation'",
        tick.info.backend_pid,
    )
    assert strong == []


def test_rows_in_the_default_partition_move_when_their_partition_is_created(
    conn: Connection,
) -> None:
    day = today() + timedelta(days=8)
    conn.execute(f"DROP TABLE howdah.{partition(day)}".encode())
    (job_id,) = finish(conn)
    assert where(conn, job_id) == "finished_jobs_default"
    maintain(conn, "partitions")
    assert where(conn, job_id) == partition(day)
    assert status(conn, job_id) == "completed"


def test_a_retention_beyond_the_partitions_created_ahead_gets_its_own_partition(
    conn: Connection,
) -> None:
    (job_id,) = finish(conn, keep="90 days")
    assert where(conn, job_id) == "finished_jobs_default"
    maintain(conn, "partitions")
    assert where(conn, job_id) == partition(today() + timedelta(days=91))
    (job_id,) = finish(conn, keep="90 days")
    assert where(conn, job_id) == partition(today() + timedelta(days=91))


def test_a_very_long_retention_stays_in_the_default_partition_until_it_ends(
    conn: Connection,
) -> None:
    (job_id,) = finish(conn, keep="800 days")
    maintain(conn, "partitions")
    assert where(conn, job_id) == "finished_jobs_default"
    conn.execute(
        "UPDATE howdah.finished_jobs_default SET drop_on = %s", (today() - timedelta(days=1),)
    )
    maintain(conn, "partitions")
    assert get(conn, job_id) is None


def test_a_partition_is_dropped_on_its_day_and_no_other_is(conn: Connection) -> None:
    old = expired_partition(conn)
    (young,) = finish(conn, keep="1 day")
    assert status(conn, old) == "completed"
    maintain(conn, "partitions")
    maintain(conn, "partitions")
    assert get(conn, old) is None
    assert status(conn, young) == "completed"
    assert partitions(conn)[0] == partition(today() + timedelta(days=1))


def test_five_days_without_maintenance_lose_nothing_and_are_caught_up(conn: Connection) -> None:
    finished: list[tuple[UUID, timedelta, int]] = []
    for day in range(5):
        for days in (1, 2, 3, 7, 40, 60):
            (job_id,) = finish(conn, keep=f"{days} days")
            finished.append((job_id, timedelta(days=days), 5 - day))
        let_pass(conn, days=1)
    assert [status(conn, job_id) for job_id, _, _ in finished] == ["completed"] * 30
    for _ in range(2):
        maintain(conn, "partitions")
    for job_id, keep, ago in finished:
        left = keep + timedelta(days=1) - timedelta(days=ago)
        if left > timedelta():
            assert where(conn, job_id) == partition(today() + left)
        else:
            assert get(conn, job_id) is None
    ahead = [partition(today() + timedelta(days=n)) for n in range(1, 41)]
    assert partitions(conn)[:40] == ahead
    assert value(conn, "SELECT count(*) FROM howdah.finished_jobs_default") == 0


# ── no completion waits ───────────────────────────────────────────────────────────────────────────


@contextmanager
def completions(connect: Connect, **job: Any) -> Iterator[None]:
    """Completes jobs continuously, one by one. The locks that maintenance takes on partitions are held by a
    statement with a lock_timeout of a tenth of a second; so each completion waits at most once."""
    conn, stop, waited = connect(), threading.Event(), list[int]()
    enqueue(conn, *({"job_type": "busy", **job} for _ in range(5_000)))
    jobs = claim(conn, 5_000, types=["busy"], lease="1 hour")
    conn.execute("SET statement_timeout = '60s'")
    waits = Waits(conn)

    def go() -> None:
        for each in jobs:
            if stop.is_set():
                return
            before = waits.count
            assert complete(conn, each) == [each.id]
            waited.append(waits.count - before)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert waited
    assert max(waited) <= 1


def test_a_reader_of_all_jobs_only_postpones_the_partitions(
    connect: Connect, conn: Connection
) -> None:
    old = expired_partition(conn)
    reader = connect(autocommit=False)
    reader.execute("SELECT * FROM howdah.jobs").fetchall()
    with completions(connect):
        for _ in range(3):
            maintain(conn, "partitions")
    assert status(conn, old) == "completed"
    reader.rollback()
    maintain(conn, "partitions")
    maintain(conn, "partitions")
    assert get(conn, old) is None
    assert partitions(conn)[0] == partition(today() + timedelta(days=1))


def test_a_partition_is_emptied_although_an_open_completion_prevents_the_drop(
    connect: Connect, conn: Connection
) -> None:
    old = expired_partition(conn)
    enqueue(conn, {"job_type": "work"})
    (job,) = claim(conn)
    handler = connect(autocommit=False)
    complete(handler, job)
    with completions(connect):
        for _ in range(3):
            maintain(conn, "partitions")
    assert get(conn, old) is None
    assert partitions(conn)[0] <= partition(today())
    handler.commit()
    maintain(conn, "partitions")
    maintain(conn, "partitions")
    assert partitions(conn)[0] == partition(today() + timedelta(days=1))
    assert status(conn, job.id) == "completed"


def test_completions_wait_once_although_many_partitions_are_being_read(
    connect: Connect, conn: Connection
) -> None:
    let_pass(conn, days=10)
    maintain(conn, "partitions")  # creates what is missing; the next tick drops what is old
    old = [name for name in partitions(conn) if name <= partition(today())]
    assert len(old) == 10
    reader = connect(autocommit=False)
    for name in old[1:]:
        reader.execute(f"SELECT * FROM howdah.{name}".encode())
    with completions(connect):
        for _ in range(2):
            maintain(conn, "partitions")
    assert old[0] not in partitions(conn)
    assert set(old[1:]) <= set(partitions(conn))


def test_completions_into_the_default_partition_do_not_wait_while_many_of_its_rows_move(
    connect: Connect, conn: Connection
) -> None:
    for _ in range(3):
        finish(conn, keep="90 days", count=5_000)
    with completions(connect, keep="95 days"):
        maintain(conn, "partitions")
    moved = value(conn, f"SELECT count(*) FROM howdah.{partition(today() + timedelta(days=91))}")
    assert moved == 15_000
    maintain(conn, "partitions")
    assert value(conn, "SELECT count(*) FROM howdah.finished_jobs") == value(
        conn, "SELECT count(*) FROM howdah.jobs WHERE status = 'completed'"
    )


def test_a_row_that_is_being_reopened_does_not_stop_the_partitions(
    connect: Connect, conn: Connection
) -> None:
    (job_id,) = finish(conn, keep="800 days")
    conn.execute(
        "UPDATE howdah.finished_jobs_default SET drop_on = %s", (today() - timedelta(days=1),)
    )
    day = today() + timedelta(days=8)
    conn.execute(f"DROP TABLE howdah.{partition(day)}".encode())
    operator = connect(autocommit=False)
    operator.execute("SELECT howdah.retry_jobs(%s)", ([job_id],))
    maintain(conn, "partitions")
    operator.rollback()
    maintain(conn, "partitions")
    assert partition(day) in partitions(conn)
    assert get(conn, job_id) is None
