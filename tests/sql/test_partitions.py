"""Retention: the partition of a finished job, how partitions are created and dropped, and that no completion waits
for that. To let days pass, a test moves every partition and its rows into the past."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from calls import Waits, claim, complete, enqueue, fail, get, maintain, rows, status, value
from plans import explained

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
        EXECUTE format('ALTER TABLE howdah.%I RENAME TO %I', v_partition.name, howdah.partition_name('finished_jobs', v_partition.day));
        EXECUTE format('ALTER TABLE howdah.finished_jobs ATTACH PARTITION howdah.%I '
                       'FOR VALUES FROM (%L) TO (%L)',
                       howdah.partition_name('finished_jobs', v_partition.day), v_partition.day, v_partition.day + 1);
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


def tick(conn: Connection, times: int = 1) -> None:
    """Run the duty, eleven minutes after its last run. A tick empties at most one partition, and drops none if it
    has to create some."""
    for _ in range(times):
        conn.execute(
            "UPDATE howdah.maintenance SET observed = observed - interval '11 minutes' "
            "WHERE duty = 'partitions'"
        )
        maintain(conn, "partitions")


def partitions(conn: Connection) -> list[str]:
    found = rows(
        conn,
        "SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'howdah.finished_jobs'::regclass AND c.relname <> 'finished_jobs_short' "
        "ORDER BY c.relname",
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


# ── a caller's open transaction ──────────────────────────────────────────────────────────────────

CALLS = {
    "run_maintenance": ["SELECT * FROM howdah.run_maintenance()"],
    "run_due_duty": ["SELECT * FROM howdah.run_due_duty()"],
    "immediate": [
        "SELECT * FROM howdah.run_maintenance()",
        "SET CONSTRAINTS ALL IMMEDIATE",
    ],
    "in a block": [
        "DO $$ BEGIN PERFORM howdah.run_maintenance(); SET CONSTRAINTS ALL IMMEDIATE; END $$"
    ],
}


def missing_partition(conn: Connection) -> str:
    """A partition that the duty, which is now due, has to create, while it has another to drop."""
    expired_partition(conn)
    conn.execute(
        "UPDATE howdah.maintenance SET due_at = CASE duty WHEN 'partitions' THEN clock_timestamp() "
        "ELSE 'infinity' END, observed = observed - interval '11 minutes'"
    )
    return partition(today() + timedelta(days=40))


@pytest.mark.parametrize("call", CALLS)
def test_completions_go_on_while_a_transaction_that_ran_the_duty_stays_open(
    conn: Connection, connect: Connect, call: str
) -> None:
    missing = missing_partition(conn)
    assert missing not in partitions(conn)
    enqueue(conn, *[{"job_type": "work"}] * 2)
    jobs = claim(conn)
    caller = connect(autocommit=False)
    for command in CALLS[call]:
        caller.execute(command.encode())
    worker = connect()
    waits = Waits(worker)
    worker.execute("SET lock_timeout = '5s'")
    assert complete(worker, jobs[0]) == [jobs[0].id]
    assert fail(worker, jobs[1], retry=False) == [jobs[1].id]
    assert status(worker, jobs[0].id) == "completed"
    assert waits.count == 0
    caller.commit()
    if call in ("immediate", "in a block"):  # not at the commit: the duty is due again
        assert missing not in partitions(conn)
        conn.execute("SELECT * FROM howdah.run_maintenance()")
    assert missing in partitions(conn)
    due = value(conn, "SELECT due_at - now() FROM howdah.maintenance WHERE duty = 'partitions'")
    assert due > timedelta(minutes=50)


def test_the_duty_of_a_transaction_that_is_rolled_back_is_due_again(
    conn: Connection, connect: Connect
) -> None:
    missing = missing_partition(conn)
    caller = connect(autocommit=False)
    caller.execute("SELECT * FROM howdah.run_maintenance()")
    caller.rollback()
    assert missing not in partitions(conn)
    conn.execute("SELECT * FROM howdah.run_maintenance()")
    assert missing in partitions(conn)


def test_a_failure_of_the_duty_does_not_undo_the_transaction_of_its_caller(
    conn: Connection, connect: Connect
) -> None:
    missing_partition(conn)
    conn.execute("ALTER FUNCTION howdah.create_partitions RENAME TO broken")
    caller = connect(autocommit=False)
    (job_id,) = enqueue(caller, {"job_type": "work"})
    caller.execute("SELECT * FROM howdah.run_maintenance()")
    caller.commit()
    assert status(conn, job_id) == "pending"
    failed = rows(
        conn, "SELECT last_error, due_at - now() AS wait FROM howdah.maintenance "
        "WHERE duty = 'partitions'"
    )[0]  # fmt: skip
    assert "create_partitions" in failed.last_error
    assert timedelta() < failed.wait <= timedelta(minutes=1)


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
    tick(conn)
    running = connect(autocommit=False)
    running.execute("SELECT howdah.maintain_partitions()")
    strong = rows(
        conn,
        "SELECT relation::regclass FROM pg_locks WHERE pid = %s AND mode ~ 'Exclusive' "
        "AND mode <> 'RowExclusiveLock' AND locktype = 'relation'",
        running.info.backend_pid,
    )
    assert strong == []


def test_rows_in_the_default_partition_move_when_their_partition_is_created(
    conn: Connection,
) -> None:
    day = today() + timedelta(days=8)
    conn.execute(f"DROP TABLE howdah.{partition(day)}".encode())
    (job_id,) = finish(conn)
    assert where(conn, job_id) == "finished_jobs_default"
    tick(conn)
    assert where(conn, job_id) == partition(day)
    assert status(conn, job_id) == "completed"


def test_a_retention_beyond_the_partitions_created_ahead_gets_its_own_partition(
    conn: Connection,
) -> None:
    (job_id,) = finish(conn, keep="90 days")
    assert where(conn, job_id) == "finished_jobs_default"
    tick(conn)
    assert where(conn, job_id) == partition(today() + timedelta(days=91))
    (job_id,) = finish(conn, keep="90 days")
    assert where(conn, job_id) == partition(today() + timedelta(days=91))


def test_a_very_long_retention_stays_in_the_default_partition_until_it_ends(
    conn: Connection,
) -> None:
    (job_id,) = finish(conn, keep="800 days")
    tick(conn)
    assert where(conn, job_id) == "finished_jobs_default"
    conn.execute(
        "UPDATE howdah.finished_jobs_default SET drop_on = %s", (today() - timedelta(days=1),)
    )
    tick(conn)
    assert get(conn, job_id) is None


def test_a_partition_is_dropped_on_its_day_and_no_other_is(conn: Connection) -> None:
    old = expired_partition(conn)
    (young,) = finish(conn, keep="1 day")
    assert status(conn, old) == "completed"
    tick(conn, 4)
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
    tick(conn, 6)
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
        tick(conn, 3)
    assert status(conn, old) == "completed"
    reader.rollback()
    tick(conn, 4)
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
        tick(conn, 3)
    assert get(conn, old) is None
    assert partitions(conn)[0] <= partition(today())
    handler.commit()
    tick(conn, 4)
    assert partitions(conn)[0] == partition(today() + timedelta(days=1))
    assert status(conn, job.id) == "completed"


def test_completions_wait_once_although_many_partitions_are_being_read(
    connect: Connect, conn: Connection
) -> None:
    let_pass(conn, days=10)
    tick(conn)  # creates what is missing; later ticks drop what is old
    old = [name for name in partitions(conn) if name <= partition(today())]
    assert len(old) == 10
    reader = connect(autocommit=False)
    for name in old[1:]:
        reader.execute(f"SELECT * FROM howdah.{name}".encode())
    with completions(connect):
        tick(conn, 2)
    assert old[0] not in partitions(conn)
    assert set(old[1:]) <= set(partitions(conn))


def test_completions_into_the_default_partition_do_not_wait_while_many_of_its_rows_move(
    connect: Connect, conn: Connection
) -> None:
    for _ in range(3):
        finish(conn, keep="90 days", count=5_000)
    with completions(connect, keep="95 days"):
        tick(conn)
    moved = value(conn, f"SELECT count(*) FROM howdah.{partition(today() + timedelta(days=91))}")
    assert moved == 15_000
    tick(conn)
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
    tick(conn)
    operator.rollback()
    tick(conn)
    assert partition(day) in partitions(conn)
    assert get(conn, job_id) is None


# ── one reading of the clock is not enough ────────────────────────────────────────────────────────


AHEAD = """
CREATE FUNCTION howdah.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
AS $$ SELECT pg_catalog.clock_timestamp() + coalesce(nullif(current_setting('test.ahead', true), '')::interval, '0') $$;
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT oid FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace AND prosrc ~ 'clock_timestamp\\(\\)' LOOP
        EXECUTE 'ALTER FUNCTION ' || f || ' SET search_path = howdah, pg_catalog, pg_temp';
    END LOOP;
END $$
"""


@contextmanager
def clock_ahead(conn: Connection, by: str) -> Iterator[None]:
    """The server's clock, as the functions of the schema see it, is ahead during the block."""
    if value(conn, "SELECT to_regprocedure('howdah.clock_timestamp()')") is None:
        conn.execute(AHEAD.encode())
    conn.execute("SELECT set_config('test.ahead', %s, false)", (by,))
    yield
    conn.execute("SELECT set_config('test.ahead', '', false)")


def run(conn: Connection, *duties: str) -> None:
    for duty in duties:
        conn.execute("SELECT howdah.run_step(%s)", (duty,))
        failed = "SELECT last_error FROM howdah.maintenance WHERE duty = %s"
        assert value(conn, failed, duty) is None


def test_a_clock_that_is_weeks_ahead_for_a_moment_drops_nothing(conn: Connection) -> None:
    kept = [*finish(conn), *finish(conn, keep="1 hour"), *finish(conn, keep="800 days")]
    run(conn, "partitions", "prune")
    conn.execute("UPDATE howdah.maintenance SET observed = observed - interval '1 hour'")
    before = partitions(conn)
    with clock_ahead(conn, "3 years"):
        for _ in range(5):
            run(conn, "partitions", "prune")
    assert [status(conn, job_id) for job_id in kept] == ["completed"] * 3
    assert set(before) <= set(partitions(conn))
    for _ in range(3):  # the clock is right again
        conn.execute(
            "UPDATE howdah.maintenance SET observed = least(observed, clock_timestamp()) - interval '1 hour'"
        )
        run(conn, "partitions", "prune")
    assert [status(conn, job_id) for job_id in kept] == ["completed"] * 3


def test_a_clock_that_stays_ahead_costs_a_day_of_history_in_a_run(conn: Connection) -> None:
    days = {n: finish(conn, keep=f"{n} days")[0] for n in range(1, 10)}
    run(conn, "partitions")
    with clock_ahead(conn, "21 days"):
        run(conn, "partitions")
        conn.execute("UPDATE howdah.maintenance SET observed = observed - interval '1 hour'")
        run(conn, "partitions")
    assert [n for n, job_id in days.items() if get(conn, job_id) is None] == [1]


# ── less than a day ───────────────────────────────────────────────────────────────────────────────


def let_expire(conn: Connection, by: str) -> None:
    """Let the time pass for jobs that are kept for less than a day, and for the duty that removes them."""
    conn.execute(
        "UPDATE howdah.finished_jobs_short SET completed_at = completed_at - %s::interval", (by,)
    )
    conn.execute(
        "UPDATE howdah.maintenance SET state = jsonb_set(state, '{from}', to_jsonb("
        "(state ->> 'from')::timestamptz - %s::interval)) WHERE duty = 'prune' AND state ? 'from'",
        (by,),
    )
    for _ in range(2):
        conn.execute("UPDATE howdah.maintenance SET observed = observed - interval '1 minute'")
        maintain(conn, "prune")


def test_a_job_that_is_kept_for_a_minute_is_removed_within_minutes(conn: Connection) -> None:
    enqueue(
        conn, {"job_type": "work", "keep": "00:01:00"}, {"job_type": "work", "keep": "20:00:00"}
    )
    first, second = claim(conn)
    fences_of = ([first.id], [first.lease_id])
    conn.execute("SELECT howdah.add_events(%s, %s, '{note}', NULL)", fences_of)
    assert complete(conn, first, second) == [first.id, second.id]
    assert where(conn, first.id) == where(conn, second.id) == "finished_jobs_short"
    let_expire(conn, "30 seconds")
    assert status(conn, first.id) == "completed"
    let_expire(conn, "3 minutes")
    assert get(conn, first.id) is None
    assert value(conn, "SELECT count(*) FROM howdah.job_events") == 0
    assert status(conn, second.id) == "completed"
    let_expire(conn, "20 hours")
    assert get(conn, second.id) is None


def test_a_failed_job_that_is_kept_for_a_minute_is_removed_with_its_events(
    conn: Connection,
) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work", "keep": "00:01:00"})
    fail(conn, *claim(conn), retry=False)
    assert value(conn, "SELECT count(*) FROM howdah.job_events") == 1
    let_expire(conn, "4 minutes")
    assert get(conn, job_id) is None
    assert value(conn, "SELECT count(*) FROM howdah.job_events") == 0


def test_a_job_whose_completion_commits_after_it_expired_is_removed_within_the_hour(
    conn: Connection,
) -> None:
    finish(conn, keep="00:01:00", count=1)
    let_expire(conn, "4 minutes")
    assert value(conn, "SELECT count(*) FROM howdah.finished_jobs_short") == 0
    finish(conn, keep="00:01:00", count=1)
    conn.execute(
        "UPDATE howdah.finished_jobs_short SET completed_at = completed_at - interval '10 minutes'"
    )
    maintain(conn, "prune")
    assert value(conn, "SELECT count(*) FROM howdah.finished_jobs_short") == 1
    conn.execute(
        "UPDATE howdah.maintenance SET state = jsonb_set(state, '{whole_at}', to_jsonb("
        "now() - interval '61 minutes')) WHERE duty = 'prune'"
    )
    maintain(conn, "prune")
    assert value(conn, "SELECT count(*) FROM howdah.finished_jobs_short") == 0


def test_expired_jobs_are_removed_in_batches_found_by_an_index(conn: Connection) -> None:
    for _ in range(3):
        finish(conn, keep="00:01:00", count=4_000)
    conn.execute(
        "UPDATE howdah.finished_jobs_short SET completed_at = completed_at - interval '1 hour'"
    )
    finish(conn, keep="23:00:00", count=4_000)
    remove = "SELECT howdah.prune_table('finished_jobs_short', '-infinity', now() - interval '30 minutes', %s)"
    with explained(conn) as nodes:
        assert value(conn, remove, 5_000) == 5_000
    assert [
        str(node) for node in nodes if node.relation == "finished_jobs_short" and node.rows > 5_001
    ] == []
    assert value(conn, remove, 10_000) == 7_000
    assert value(conn, remove, 10_000) == 0
    assert value(conn, "SELECT count(*) FROM howdah.finished_jobs") == 4_000


def test_a_completed_job_without_retention_leaves_no_events_of_its_failed_attempts(
    conn: Connection,
) -> None:
    enqueue(conn, {"job_type": "work", "keep": "0"}, {"job_type": "work"})
    fail(conn, *claim(conn))
    assert value(conn, "SELECT count(*) FROM howdah.job_events") == 2
    jobs = claim(conn)
    complete(conn, *jobs)
    assert [row.job_id for row in rows(conn, "SELECT job_id FROM howdah.job_events")] == [
        jobs[1].id
    ]


# ── events ────────────────────────────────────────────────────────────────────────────────────────


def events(conn: Connection, job_id: UUID) -> dict[str, int]:
    """The number of a job's events by partition."""
    found = rows(
        conn,
        "SELECT tableoid::regclass::text AS name, count(*) FROM howdah.job_events WHERE job_id = %s GROUP BY 1",
        job_id,
    )
    return {row.name.removeprefix("howdah."): row.count for row in found}


def events_partition(day: date) -> str:
    return f"job_events_{day:%Y%m%d}"


def note(conn: Connection, *jobs: Any) -> None:
    conn.execute(
        "SELECT howdah.add_events(%s, %s, %s, NULL)",
        ([job.id for job in jobs], [job.lease_id for job in jobs], ["note"] * len(jobs)),
    )


def age(conn: Connection, job_id: UUID, days: int) -> None:
    """A live job is so many days older, and so are its events."""
    conn.execute(
        "UPDATE howdah.live_jobs SET created_at = created_at - %s * interval '1 day' WHERE id = %s",
        (days, job_id),
    )
    conn.execute(
        "UPDATE howdah.job_events SET drop_on = drop_on - %s WHERE job_id = %s", (days, job_id)
    )


@pytest.mark.parametrize(
    ("keep", "days"), [(None, 38), ("1 day", 38), ("1 hour", 38), ("90 days", 98)]
)
def test_the_events_of_a_job_are_in_the_partition_of_one_day(
    conn: Connection, keep: str | None, days: int
) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work", "keep": keep})
    fail(conn, *claim(conn))
    (job,) = claim(conn)
    note(conn, job)
    tick(conn)
    complete(conn, job)
    conn.execute(
        "SELECT howdah.add_late_events(%s, %s, '{late}', NULL)", ([job.id], [job.lease_id])
    )
    assert events(conn, job_id) == {events_partition(today() + timedelta(days=days)): 3}


def test_events_of_a_job_that_finishes_late_stay_for_as_long_as_its_row(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work"})
    fail(conn, *claim(conn))
    age(conn, job_id, 36)
    (job,) = claim(conn)
    note(conn, job)
    conn.execute("SELECT howdah.fail_jobs(%s, %s, '{no}', '{NULL}')", ([job.id], [job.lease_id]))
    (row,) = rows(conn, "SELECT * FROM howdah.finished_jobs WHERE id = %s", job_id)
    tick(conn)
    assert events(conn, job_id) == {events_partition(row.drop_on): 3}


def test_events_of_a_live_job_survive_their_day_and_get_a_new_one_when_it_finishes(
    conn: Connection,
) -> None:
    (job_id, other) = enqueue(conn, {"job_type": "work"}, {"job_type": "work"})
    fail(conn, *claim(conn))
    for each in (job_id, other):
        age(conn, each, 37)  # their day is tomorrow
    tick(conn)
    assert events(conn, job_id) == {events_partition(today() + timedelta(days=1)): 1}
    kept, gone = claim(conn)
    note(conn, kept)
    assert set(events(conn, job_id)) == {
        events_partition(today() + timedelta(days=1)), "job_events_default",
    }  # fmt: skip
    conn.execute("DELETE FROM howdah.live_jobs WHERE id = %s", (gone.id,))
    conn.execute(
        "SELECT howdah.maintain_partitions_of('job_events', %s, %s, 37, 40)",
        (today() + timedelta(days=1), today()),
    )
    assert events(conn, gone.id) == {}
    assert events(conn, kept.id) == {"job_events_default": 2}
    complete(conn, kept)
    tick(conn)
    (row,) = rows(conn, "SELECT * FROM howdah.finished_jobs WHERE id = %s", kept.id)
    assert events(conn, kept.id) == {"job_events_default": 2} or events(conn, kept.id) == {
        events_partition(row.drop_on): 2
    }
    days = rows(conn, "SELECT DISTINCT drop_on FROM howdah.job_events WHERE job_id = %s", kept.id)
    assert [day.drop_on for day in days] == [row.drop_on]


def test_events_of_a_retried_job_stay_with_it(conn: Connection) -> None:
    (job_id,) = enqueue(conn, {"job_type": "work"})
    age(conn, job_id, 60)
    fail(conn, *claim(conn), retry=False)
    conn.execute("SELECT howdah.retry_jobs(%s)", ([job_id],))
    days = rows(conn, "SELECT DISTINCT drop_on FROM howdah.job_events WHERE job_id = %s", job_id)
    assert [day.drop_on.year for day in days] == [9999]
    complete(conn, *claim(conn))
    (row,) = rows(conn, "SELECT * FROM howdah.finished_jobs WHERE id = %s", job_id)
    days = rows(conn, "SELECT DISTINCT drop_on FROM howdah.job_events WHERE job_id = %s", job_id)
    assert [day.drop_on for day in days] == [row.drop_on]


def test_removed_jobs_leave_no_events(conn: Connection) -> None:
    ids = enqueue(conn, {"job_type": "work"}, {"job_type": "work"})
    fail(conn, *claim(conn), retry=False)
    conn.execute("SELECT howdah.remove_jobs(%s)", (ids[:1],))
    assert events(conn, ids[0]) == {}
    assert len(events(conn, ids[1])) == 1
    conn.execute("SELECT howdah.clear_finished()")
    assert events(conn, ids[1]) == {}


def test_an_old_lease_adds_no_late_event_beside_the_lease_that_completed_the_job(
    conn: Connection,
) -> None:
    enqueue(conn, {"job_type": "work"})
    (first,) = claim(conn)
    fail(conn, first)
    (second,) = claim(conn)
    complete(conn, second)
    accepted = rows(
        conn,
        "SELECT * FROM howdah.add_late_events(%s, %s, '{old,new}', NULL)",
        [first.id, first.id],
        [first.lease_id, second.lease_id],
    )
    assert [row[0] for row in accepted] == [first.id]
    kinds = rows(conn, "SELECT kind FROM howdah.job_events ORDER BY event_id")
    assert [row.kind for row in kinds] == ["error", "new"]
    assert get(conn, first.id).events_count == 2
