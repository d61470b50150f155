"""Migrating: many at once, with jobs in the tables, against locks, forwards only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, enqueue, expire, fail, maintain, rows, value, wait_until
from processes import at_once
from psycopg import sql as pgsql

from howdah import AsyncJobQueue, JobQueue
from howdah.database import migrate
from howdah.errors import InvalidOption, SchemaMissing, SchemaOutdated, SchemaTooNew
from howdah.sql import latest_version, migrations

if TYPE_CHECKING:
    from collections.abc import Iterator

    Connection = psycopg.Connection[Any]


@pytest.fixture
def conn(empty_database: str) -> Iterator[Connection]:
    """A connection to a database with nothing in it."""
    with psycopg.connect(empty_database, autocommit=True) as conn:
        yield conn


def versions(conn: Connection) -> list[int]:
    return [
        row.version for row in rows(conn, "SELECT version FROM howdah.migrations ORDER BY version")
    ]


def test_ten_processes_migrate_an_empty_database_at_once(
    empty_database: str, conn: Connection
) -> None:
    code = """
from howdah import JobQueue
queue = JobQueue(sys.argv[1])
start()
queue.enqueue("work")
print("done")
"""
    assert at_once(10, code, empty_database) == ["done"] * 10
    assert versions(conn) == [migration.version for migration in migrations()]
    assert len(claim(conn, 100)) == 10


def test_migrating_twice_does_nothing_the_second_time(conn: Connection) -> None:
    assert [m.version for m in migrate.migrate(conn, "howdah")] == [m.version for m in migrations()]
    assert migrate.migrate(conn, "howdah") == []


def test_no_index_depends_on_how_the_operating_system_sorts_text(conn: Connection) -> None:
    migrate.migrate(conn, "howdah")
    found = rows(
        conn,
        """
        SELECT i.indexrelid::regclass::text AS index
        FROM pg_index AS i
        JOIN pg_class AS c ON c.oid = i.indexrelid
        WHERE c.relnamespace = 'howdah'::regnamespace AND EXISTS (
            SELECT FROM unnest(i.indcollation) AS used (oid)
            WHERE used.oid NOT IN (0, '"C"'::regcollation))
        """,
    )
    assert found == []


def test_the_script_for_those_who_migrate_by_other_means_makes_the_same_schema(
    conn: Connection,
) -> None:
    migrate.migrate(conn, "howdah", target=1)
    conn.execute(migrate.full_script("howdah", after=1).encode())
    assert versions(conn) == [migration.version for migration in migrations()]
    assert migrate.migrate(conn, "howdah") == []


# ── from version 1 ────────────────────────────────────────────────────────────────────────────────


def claim_as_version_1(conn: Connection, size: int, lease: str = "30 seconds") -> list[Any]:
    claim = "SELECT * FROM howdah.claim_job_batch('worker', NULL, %s, %s)"
    return rows(conn, claim, size, lease)


def fill(conn: Connection) -> None:
    """Jobs in every state, made by the functions of version 1."""
    plain = {"job_type": "work", "data": {"n": 1}}
    enqueue(conn, *([plain] * 6))
    completed, failed, retried, running, claimed, doomed = claim_as_version_1(conn, 6)
    complete(conn, completed)
    fail(conn, failed, retry=False)
    fail(conn, retried)
    conn.execute("SELECT howdah.start_jobs(%s, %s)", ([running.id], [running.lease_id]))
    expire(conn, claimed)
    conn.execute("SELECT howdah.cancel_jobs(%s)", ([doomed.id],))
    enqueue(conn, *([plain | {"ordering_key": "key"}] * 3), plain | {"delay": 3600})
    enqueue(conn, plain | {"priority": 7, "queue": "other"}, plain | {"idempotency_key": "once"})
    (cancelled,) = enqueue(conn, plain)
    conn.execute("SELECT howdah.cancel_jobs(%s)", ([cancelled],))


def everything(conn: Connection) -> list[Any]:
    return rows(conn, "SELECT * FROM howdah.jobs ORDER BY seq")


@pytest.fixture
def version_1(conn: Connection) -> Connection:
    assert [m.version for m in migrate.migrate(conn, "howdah", target=1)] == [1]
    fill(conn)
    return conn


def test_migrating_a_filled_database_changes_no_job(version_1: Connection) -> None:
    before = everything(version_1)
    assert {job.status for job in before} == {
        "pending", "claimed", "running", "completed", "failed", "cancelled",
    }  # fmt: skip
    migrate.migrate(version_1, "howdah")
    assert everything(version_1) == before


def test_after_migrating_a_filled_database_every_waiting_job_runs(version_1: Connection) -> None:
    migrate.migrate(version_1, "howdah")
    version_1.execute("SELECT howdah.recover_stale_jobs(interval '0')")
    live = "SELECT id FROM howdah.live_jobs WHERE run_at <= clock_timestamp()"
    due = {row.id for row in rows(version_1, live)}
    done: list[Any] = []
    while True:
        maintain(version_1)
        jobs = rows(
            version_1, "SELECT * FROM howdah.claim_job_batch('w', p_queues => '{default,other}')"
        )
        if not jobs:
            break
        done += complete(version_1, *jobs)
    assert set(done) == due
    assert len(done) == len(due) == 8
    assert [job.status for job in everything(version_1)].count("pending") == 1  # the scheduled one


def test_a_lease_and_an_idempotency_key_outlive_a_migration(version_1: Connection) -> None:
    (running,) = rows(version_1, "SELECT * FROM howdah.jobs WHERE status = 'running'")
    (once,) = rows(version_1, "SELECT * FROM howdah.jobs WHERE idempotency_key = 'once'")
    migrate.migrate(version_1, "howdah")
    assert complete(version_1, running) == [running.id]
    assert enqueue(version_1, {"job_type": "work", "idempotency_key": "once"}) == [once.id]


def test_code_that_calls_by_the_parameters_of_version_1_still_works(version_1: Connection) -> None:
    migrate.migrate(version_1, "howdah")
    assert len(claim_as_version_1(version_1, 1)) == 1


# ── who may not ───────────────────────────────────────────────────────────────────────────────────


def from_the_future(conn: Connection, oldest_code: int) -> None:
    migrate.migrate(conn, "howdah")
    conn.execute(
        "INSERT INTO howdah.migrations (version, name, oldest_code) VALUES (999, 'future', %s)",
        (oldest_code,),
    )


def test_a_schema_that_is_too_new_is_refused(empty_database: str, conn: Connection) -> None:
    from_the_future(conn, oldest_code=999)
    with pytest.raises(SchemaTooNew) as caught:
        JobQueue(empty_database).pending()
    assert str(caught.value) == (
        'schema "howdah" is at version 999, and this Howdah supports versions up to '
        f"{latest_version()}. Upgrade the howdah package in this environment."
    )


async def test_a_schema_that_becomes_too_new_under_a_queue_is_named_as_the_cause(
    empty_database: str, conn: Connection
) -> None:
    queue, aqueue = JobQueue(empty_database), AsyncJobQueue(empty_database)
    queue.pending()
    await aqueue.pending()
    from_the_future(conn, oldest_code=999)
    conn.execute("ALTER FUNCTION howdah.pending_count RENAME TO pending_count_anew")
    with pytest.raises(SchemaTooNew, match="Upgrade the howdah package"):
        queue.pending()
    with pytest.raises(SchemaTooNew, match="Upgrade the howdah package"):
        await aqueue.pending()
    queue.close()
    await aqueue.close()


def test_a_newer_schema_that_still_knows_this_code_is_used(
    empty_database: str, conn: Connection
) -> None:
    from_the_future(conn, oldest_code=1)
    queue = JobQueue(empty_database)
    queue.enqueue("work")
    assert queue.pending() == 1
    queue.close()


def test_without_permission_to_create_a_missing_schema_is_an_error(
    empty_database: str, conn: Connection
) -> None:
    with pytest.raises(SchemaMissing) as caught:
        JobQueue(empty_database, create=False).pending()
    assert str(caught.value) == (
        'schema "howdah" has no Howdah tables. Run `howdah migrate`, '
        "or omit create=False to create them on first use."
    )
    assert value(conn, "SELECT to_regnamespace('howdah')") is None


def test_without_permission_to_create_an_old_schema_is_an_error(
    empty_database: str, conn: Connection
) -> None:
    migrate.migrate(conn, "howdah", target=1)
    with pytest.raises(SchemaOutdated) as caught:
        JobQueue(empty_database, create=False).pending()
    assert str(caught.value) == (
        f'schema "howdah" is at version 1 and this Howdah needs {latest_version()}. '
        "Run `howdah migrate`."
    )
    assert versions(conn) == [1]


# ── against locks ─────────────────────────────────────────────────────────────────────────────────


def test_a_migration_that_meets_a_lock_lets_others_pass_and_tries_again(
    empty_database: str, version_1: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "LOCK_TIMEOUT", "300ms")
    with (
        psycopg.connect(empty_database) as holder,
        psycopg.connect(empty_database, autocommit=True) as migrating,
        ThreadPoolExecutor(1) as pool,
    ):
        holder.execute("SELECT * FROM howdah.lanes")
        answer = pool.submit(migrate.migrate, migrating, "howdah")
        waiting = (
            "SELECT xact_start FROM pg_stat_activity "
            "WHERE pid = %s AND wait_event_type = 'Lock' AND xact_start IS NOT NULL"
        )
        pid = migrating.info.backend_pid
        (first,) = wait_until(lambda: rows(version_1, waiting, pid), "the migration waits")[0]
        # The holder stays: who queued up behind a migration that waits for it would wait for ever.
        assert len(claim_as_version_1(version_1, 1)) == 1
        wait_until(
            lambda: [row for row in rows(version_1, waiting, pid) if row.xact_start > first],
            "the migration tries again",
        )
        holder.rollback()
        assert [m.version for m in answer.result()] == [m.version for m in migrations()][1:]
    assert versions(version_1) == [migration.version for migration in migrations()]


def test_jobs_go_on_while_a_database_is_migrated(
    empty_database: str, version_1: Connection
) -> None:
    enqueue(version_1, *([{"job_type": "work"}] * 2000))
    stop, done = threading.Event(), list[Any]()

    def work() -> None:
        with psycopg.connect(empty_database, autocommit=True) as conn:
            while not stop.is_set():
                done.extend(complete(conn, *claim_as_version_1(conn, 5)))

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work) for _ in range(2)]
        try:
            wait_until(lambda: len(done) > 20, "the workers work")
            with psycopg.connect(empty_database, autocommit=True) as migrating:
                migrate.migrate(migrating, "howdah")
            so_far = len(done)
            wait_until(lambda: len(done) > so_far + 20, "the workers go on working")
        finally:
            stop.set()
        for worker in workers:
            worker.result()
    assert len(done) == len(set(done))


# ── names ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schema", ['we"ird Name', "it's 50% {off}", "Größe 队列", "x" * 48])
def test_a_schema_may_have_any_name(empty_database: str, schema: str) -> None:
    queue = JobQueue(empty_database, schema=schema)
    queue.enqueue("work", {"n": 1}, ordering_key="key", idempotency_key="once")
    (job,) = queue.claim()
    queue.complete(job)
    assert queue.get(job).status == "completed"
    with psycopg.connect(empty_database, autocommit=True) as conn:
        name = pgsql.Identifier(schema)
        conn.execute(pgsql.SQL("UPDATE {}.maintenance SET due_at = clock_timestamp()").format(name))
        ran = conn.execute(pgsql.SQL("SELECT error FROM {}.run_maintenance()").format(name))
        assert {row[0] for row in ran.fetchall()} == {None}
    queue.close()


@pytest.mark.parametrize("schema", ["", "pg_jobs", "x" * 49, "ü" * 25, "nul\x00", None, 7])
def test_a_name_that_cannot_be_a_schema_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidOption):
        JobQueue("postgresql://nowhere/", schema=schema)


def test_two_schemas_in_one_database_do_not_see_each_other(empty_database: str) -> None:
    one, other = (JobQueue(empty_database, schema=name) for name in ("one", "other"))
    one.enqueue("work", idempotency_key="key", ordering_key="key")
    other.enqueue("work", idempotency_key="key", ordering_key="key")
    assert (one.pending(), other.pending()) == (1, 1)
    one.complete(one.claim())
    assert (one.pending(), other.pending()) == (0, 1)
    assert len(other.claim()) == 1
    for queue in (one, other):
        queue.close()
