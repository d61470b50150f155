"""Migrating: concurrently, with jobs in the tables, against locks, with functions of other builds, forwards only."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, enqueue, expire, fail, maintain, rows, value, wait_until
from processes import at_once
from psycopg import sql as pgsql

from howdah import AsyncJobQueue, JobQueue, sql
from howdah.database import migrate, sql_steps
from howdah.errors import InvalidOption, SchemaMissing, SchemaOutdated, SchemaTooNew
from howdah.sql import latest_version, release
from next_release import DROPS, LABEL, STEP, VERSION, next_release

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from howdah.sql import Release

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


ALL = [step.version for step in release().steps]


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
    assert versions(conn) == ALL
    assert len(claim(conn, 100)) == 10


def test_a_migration_that_commits_between_two_attempts_to_lock_is_seen(
    empty_database: str, conn: Connection
) -> None:
    """A session that caches that there is no schema must read the catalog after it got the lock."""
    sql_steps.drive(conn, migrate.check("howdah"))
    with psycopg.connect(empty_database) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('howdah:migrate:howdah', 0))")
        attempts = 0

        def interrupted() -> sql_steps.Steps[migrate.Applied]:
            nonlocal attempts
            work = migrate.steps("howdah")
            answer = None
            while True:
                try:
                    step = work.send(answer)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                attempts += "pg_try_advisory_xact_lock" in step.text
                if attempts == 3 and not other.closed:
                    # A small migration: a whole one would make the server invalidate all caches.
                    other.execute(
                        "CREATE SCHEMA howdah; CREATE TABLE howdah.migrations AS "
                        "SELECT 999 AS version, 1 AS oldest_code, '' AS functions_hash"
                    )
                    other.commit()
                    other.close()
                answer = yield step

        assert sql_steps.drive(conn, interrupted()) == migrate.Applied()
        assert attempts == 3


def test_settings_of_the_role_neither_end_a_migration_nor_hide_what_another_one_committed(
    conn: Connection,
) -> None:
    for setting in ("statement_timeout = '1s'", "default_transaction_isolation = 'serializable'"):
        conn.execute(f"SET {setting}".encode())
    sql_steps.drive(conn, migrate.begin("howdah"))
    assert rows(conn, "SHOW statement_timeout") == [("0",)]
    assert rows(conn, "SHOW transaction_isolation") == [("read committed",)]
    conn.execute("ROLLBACK")
    assert rows(conn, "SHOW statement_timeout") == [("1s",)]


def test_migrating_twice_does_nothing_the_second_time(conn: Connection) -> None:
    first = migrate.migrate(conn, "howdah")
    assert ([step.version for step in first.steps], first.functions) == (ALL, True)
    before = rows(conn, "SELECT xmin, * FROM howdah.migrations")
    assert migrate.migrate(conn, "howdah") == migrate.Applied()
    assert rows(conn, "SELECT xmin, * FROM howdah.migrations") == before


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


# ── the files ─────────────────────────────────────────────────────────────────────────────────────


def test_every_function_stands_in_the_function_files_once_and_nowhere_else(
    conn: Connection,
) -> None:
    migrate.migrate(conn, "howdah")
    installed = [
        row.proname
        for row in rows(
            conn, "SELECT proname FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace"
        )
    ]
    written = re.findall(r"^CREATE OR REPLACE FUNCTION (\w+)\(", release().functions, re.MULTILINE)
    assert sorted(written) == sorted(installed)
    statements = re.findall(r"^(?:CREATE|ALTER|DROP|INSERT|UPDATE|DELETE|SELECT|DO|GRANT)\b.*",
                            release().functions, re.MULTILINE)  # fmt: skip
    assert len(statements) == len(written), "a function file contains functions only"
    assert not re.search(r"\bFUNCTION \w+\(.*\bRETURNS\b", "".join(s.text for s in release().steps))


def test_every_function_body_is_valid(conn: Connection) -> None:
    """Migrations do not check bodies, because the functions of a file may call those of a later one."""
    migrate.migrate(conn, "howdah")
    with conn.transaction():
        conn.execute("SET LOCAL search_path = howdah, pg_temp")
        conn.execute("SET LOCAL check_function_bodies = on")
        conn.execute(release().functions.encode())


def test_comments_between_functions_do_not_change_the_hash_and_bodies_do() -> None:
    def changed(old: str, new: str) -> str:
        assert old in release().functions
        text = release().functions.replace(old, new)
        return sql.Release(steps=release().steps, functions=text).functions_hash

    assert changed("\n-- ", "\n-- changed ") == release().functions_hash
    assert changed("interval '1 second'", "interval '3 seconds'") != release().functions_hash


def assert_released_functions_are_unchanged(found: Release, released: dict[int, str]) -> None:
    """What was released under a version has one set of functions: clients compare versions, and only in builds
    that were never released the hash too."""
    frozen = released.get(found.version, found.functions_hash)
    assert found.functions_hash == frozen, (
        f"the functions of version {found.version} were changed after its release: add a table step "
        f"{found.version + 1:04}_name.sql, even an empty one"
    )


def test_functions_do_not_change_after_their_release() -> None:
    assert_released_functions_are_unchanged(release(), sql.RELEASED)
    assert all(version <= latest_version() for version in sql.RELEASED)


def test_a_change_after_the_release_would_be_found() -> None:
    before = sql.Release(steps=release().steps, functions="SELECT 1;")
    with pytest.raises(AssertionError, match="add a table step 0002_name"):
        assert_released_functions_are_unchanged(release(), {1: before.functions_hash})
    assert_released_functions_are_unchanged(release(), {1: release().functions_hash})


@pytest.mark.parametrize("edit", ["-- oldest code: ", "-- oldest code: one"])
def test_a_step_must_name_the_oldest_code(tmp_path: Path, edit: str) -> None:
    (tmp_path / "functions").mkdir()
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "0001_queue.sql").write_text(f"{edit}\nSELECT 1;\n")
    with pytest.raises(ValueError, match=r'0001_queue\.sql has no line "-- oldest code: VERSION"'):
        sql.read_release(tmp_path)


# ── the script ────────────────────────────────────────────────────────────────────────────────────


def test_the_script_makes_the_same_schema(
    conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute(migrate.full_script("howdah").encode())
    assert versions(conn) == ALL
    assert migrate.migrate(conn, "howdah") == migrate.Applied()
    newer = next_release(tmp_path)
    monkeypatch.setattr(sql, "release", lambda: newer)
    conn.execute(migrate.full_script("howdah", after=VERSION - 1).encode())
    assert versions(conn) == [*ALL, VERSION]
    assert migrate.migrate(conn, "howdah") == migrate.Applied()


def test_the_script_refuses_a_schema_of_another_version(conn: Connection) -> None:
    script = migrate.full_script("howdah").encode()
    conn.execute(script)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        conn.execute(script)
    assert caught.value.diag.message_primary == (
        'schema "howdah" is at version 1, and this script starts at version 0'
    )


def test_the_script_runs_in_a_client_that_sets_a_savepoint_for_every_statement(
    conn: Connection,
) -> None:
    """psql does so with ON_ERROR_ROLLBACK. Functions then belong to subtransactions."""
    begin, run = re.split(r"^(?=DO \$run\$)", migrate.full_script("howdah"), flags=re.MULTILINE)
    conn.execute(begin.encode())
    conn.execute(("SAVEPOINT s; " + run.removesuffix("COMMIT;\n") + "; RELEASE s").encode())
    conn.execute("COMMIT")
    assert versions(conn) == ALL


# ── to the next release ───────────────────────────────────────────────────────────────────────────


def claim_as_before(conn: Connection, size: int, lease: str = "30 seconds") -> list[Any]:
    claim = "SELECT * FROM howdah.claim_job_batch('worker', NULL, %s, %s)"
    return rows(conn, claim, size, lease)


def fill(conn: Connection) -> None:
    """Jobs in every state."""
    plain = {"job_type": "work", "data": {"n": 1}}
    enqueue(conn, *([plain] * 6))
    completed, failed, retried, running, claimed, doomed = claim_as_before(conn, 6)
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
def newer(tmp_path: Path) -> Release:
    return next_release(tmp_path)


@pytest.fixture
def filled(conn: Connection) -> Connection:
    migrate.migrate(conn, "howdah")
    fill(conn)
    return conn


def test_an_upgrade_runs_the_step_and_replaces_the_functions(
    filled: Connection, newer: Release
) -> None:
    applied = migrate.migrate(filled, "howdah", release=newer)
    assert ([step.label for step in applied.steps], applied.functions) == ([LABEL], True)
    assert versions(filled) == [*ALL, VERSION]
    assert set(rows(filled, "SELECT next_release FROM howdah.lanes")) == {("yes",)}
    assert value(filled, "SELECT howdah.head_margin() = interval '2 seconds'")
    assert value(filled, "SELECT count(*) FROM howdah.claim_job_batch('w', p_next_release => 'x')")


def test_an_upgrade_of_a_filled_database_changes_no_job(filled: Connection, newer: Release) -> None:
    before = everything(filled)
    assert {job.status for job in before} == {
        "pending", "claimed", "running", "completed", "failed", "cancelled",
    }  # fmt: skip
    migrate.migrate(filled, "howdah", release=newer)
    assert everything(filled) == before


def test_after_an_upgrade_of_a_filled_database_every_waiting_job_runs(
    filled: Connection, newer: Release
) -> None:
    migrate.migrate(filled, "howdah", release=newer)
    filled.execute("SELECT howdah.recover_stale_jobs(interval '0')")
    live = "SELECT id FROM howdah.live_jobs WHERE run_at <= clock_timestamp()"
    due = {row.id for row in rows(filled, live)}
    done: list[Any] = []
    while True:
        maintain(filled)
        jobs = rows(
            filled, "SELECT * FROM howdah.claim_job_batch('w', p_queues => '{default,other}')"
        )
        if not jobs:
            break
        done += complete(filled, *jobs)
    assert set(done) == due
    assert len(done) == len(due) == 8
    assert [job.status for job in everything(filled)].count("pending") == 1  # the scheduled one


def test_a_lease_and_an_idempotency_key_survive_an_upgrade(
    filled: Connection, newer: Release
) -> None:
    (running,) = rows(filled, "SELECT * FROM howdah.jobs WHERE status = 'running'")
    (once,) = rows(filled, "SELECT * FROM howdah.jobs WHERE idempotency_key = 'once'")
    migrate.migrate(filled, "howdah", release=newer)
    assert complete(filled, running) == [running.id]
    assert enqueue(filled, {"job_type": "work", "data": once.data, "idempotency_key": "once"}) == [
        once.id
    ]


def test_code_that_calls_with_the_old_parameters_works_after_an_upgrade(
    filled: Connection, newer: Release
) -> None:
    migrate.migrate(filled, "howdah", release=newer)
    assert len(claim_as_before(filled, 1)) == 1


def test_an_old_client_works_on_the_upgraded_schema_and_changes_nothing_in_it(
    empty_database: str, filled: Connection, newer: Release
) -> None:
    migrate.migrate(filled, "howdah", release=newer)
    before = rows(filled, "SELECT xmin, * FROM howdah.migrations")
    queue = JobQueue(empty_database)
    (job,) = queue.claim(batch_size=1)
    queue.complete(job)
    queue.close()
    assert migrate.migrate(filled, "howdah") == migrate.Applied()
    assert rows(filled, "SELECT xmin, * FROM howdah.migrations") == before
    assert value(filled, "SELECT howdah.head_margin() = interval '2 seconds'")


def test_an_overload_that_a_step_forgets_to_drop_is_an_error_that_names_it(
    filled: Connection, tmp_path: Path
) -> None:
    forgetful = next_release(tmp_path, step=STEP.replace(f"-- drops: {DROPS}\n", ""))
    with pytest.raises(psycopg.errors.DuplicateFunction) as caught:
        migrate.migrate(filled, "howdah", release=forgetful)
    assert caught.value.diag.message_primary == (
        'schema "howdah" contains functions that this version of Howdah does not have: '
        "claim_job_batch(text,text[],integer,interval,text[],boolean,timestamp with time zone,boolean)"
    )
    filled.execute("ROLLBACK")
    assert versions(filled) == ALL
    assert len(claim_as_before(filled, 1)) == 1


def test_a_step_that_fails_leaves_the_schema_as_it_was(filled: Connection, tmp_path: Path) -> None:
    before = catalog(filled)
    broken = next_release(tmp_path, step=f"{STEP}-- after functions\nSELECT 1 / 0;\n")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate.migrate(filled, "howdah", release=broken)
    filled.execute("ROLLBACK")
    assert catalog(filled) == before
    assert versions(filled) == ALL


# ── other functions ───────────────────────────────────────────────────────────────────────────────


def catalog(conn: Connection) -> Any:
    """What the schema contains."""
    with conn.transaction():
        conn.execute("SET LOCAL search_path = howdah, pg_temp")
        row = conn.execute(sql.script("catalog").encode()).fetchone()
    assert row is not None
    return row[0]


def stored_catalog(conn: Connection) -> Any:
    return value(conn, "SELECT catalog FROM howdah.migrations ORDER BY version DESC LIMIT 1")


def test_a_function_of_the_user_in_the_schema_is_an_error_that_names_it(conn: Connection) -> None:
    conn.execute("CREATE SCHEMA howdah")
    conn.execute("CREATE FUNCTION howdah.mine(int) RETURNS int LANGUAGE sql RETURN 1")
    with pytest.raises(psycopg.errors.DuplicateFunction) as caught:
        migrate.migrate(conn, "howdah")
    assert str(caught.value.diag.message_primary).endswith("does not have: mine(integer)")
    assert caught.value.diag.message_hint == (
        "Move a function of yours to another schema (ALTER ROUTINE ... SET SCHEMA ...), drop any other "
        "(DROP ROUTINE ...), and migrate again."
    )
    conn.execute("ROLLBACK")
    conn.execute("ALTER ROUTINE howdah.mine(int) SET SCHEMA public")
    assert migrate.migrate(conn, "howdah").functions


@pytest.fixture
def other_build(tmp_path: Path) -> Release:
    """A build that was never released, of the same version, whose functions differ."""
    copy = next_release(tmp_path)
    return sql.Release(steps=release().steps, functions=copy.functions.replace(
        ",\n    p_next_release text DEFAULT NULL", ""))  # fmt: skip


def test_functions_of_another_build_of_the_same_version_are_replaced(
    empty_database: str, filled: Connection, other_build: Release
) -> None:
    before = everything(filled)
    applied = migrate.migrate(filled, "howdah", release=other_build)
    assert applied == migrate.Applied(steps=(), functions=True)
    assert value(filled, "SELECT howdah.head_margin() = interval '2 seconds'")
    assert versions(filled) == ALL
    queue = JobQueue(empty_database)  # the first use by this build
    queue.pending()
    queue.close()
    assert value(filled, "SELECT howdah.head_margin() = interval '250 milliseconds'")
    assert everything(filled) == before


async def test_the_async_client_replaces_functions_of_another_build_too(
    empty_database: str, filled: Connection, other_build: Release
) -> None:
    migrate.migrate(filled, "howdah", release=other_build)
    queue = AsyncJobQueue(empty_database)
    await queue.pending()
    await queue.close()
    assert value(filled, "SELECT howdah.head_margin() = interval '250 milliseconds'")


def test_without_permission_to_create_functions_of_another_build_are_an_error(
    empty_database: str, filled: Connection, other_build: Release
) -> None:
    migrate.migrate(filled, "howdah", release=other_build)
    with pytest.raises(SchemaOutdated) as caught:
        JobQueue(empty_database, create=False).pending()
    assert str(caught.value) == (
        'schema "howdah" has the functions of another build of version 1. Run `howdah migrate`.'
    )


@pytest.mark.parametrize(
    "change",
    [
        "DROP FUNCTION howdah.remove_jobs",
        "CREATE OR REPLACE FUNCTION howdah.head_margin() RETURNS interval LANGUAGE sql IMMUTABLE "
        "PARALLEL SAFE RETURN interval '9 seconds'",
        "ALTER FUNCTION howdah.enqueue_jobs RESET ALL",
        "ALTER FUNCTION howdah.enqueue_jobs SECURITY INVOKER",
    ],
)
def test_migrating_again_repairs_functions(filled: Connection, change: str) -> None:
    before = catalog(filled)
    filled.execute(change.encode())
    assert catalog(filled) != before
    assert migrate.migrate(filled, "howdah") == migrate.Applied(steps=(), functions=True)
    assert catalog(filled) == before == stored_catalog(filled)


def test_what_was_dropped_stays_expected_after_an_upgrade(
    filled: Connection, newer: Release
) -> None:
    definition = stored_catalog(filled)["index live_jobs_pending"]
    filled.execute("DROP INDEX howdah.live_jobs_pending")
    filled.execute("ALTER TABLE howdah.lanes ALTER closing DROP NOT NULL")
    filled.execute("DROP FUNCTION howdah.remove_jobs")
    migrate.migrate(filled, "howdah", release=newer)
    stored, present = stored_catalog(filled), catalog(filled)
    assert stored["index live_jobs_pending"] == definition
    assert "NOT NULL" in stored["column lanes.closing"]
    assert {key for key in stored if stored[key] != present.get(key)} == {
        "index live_jobs_pending",
        "column lanes.closing",
    }
    assert "column lanes.next_release" in stored


def test_what_users_added_may_be_dropped_after_an_upgrade(
    empty_database: str, conn: Connection, newer: Release
) -> None:
    conn.execute("CREATE SCHEMA howdah; CREATE TABLE howdah.mine (id int PRIMARY KEY)")
    migrate.migrate(conn, "howdah")
    conn.execute("CREATE INDEX mine_too ON howdah.live_jobs ((data ->> 'customer'))")
    conn.execute("CREATE TRIGGER mine AFTER INSERT ON howdah.live_jobs "
                 "EXECUTE FUNCTION suppress_redundant_updates_trigger()")  # fmt: skip
    migrate.migrate(conn, "howdah", release=newer)
    assert [key for key in stored_catalog(conn) if "mine" in key] == []
    assert "column lanes.next_release" in stored_catalog(conn)


def test_after_an_upgrade_of_postgresql_definitions_are_stored_as_it_prints_them(
    filled: Connection,
) -> None:
    stored = stored_catalog(filled)
    filled.execute(
        "UPDATE howdah.migrations SET catalog = catalog || jsonb_build_object("
        "'printed by', 'format 1, PostgreSQL 9', 'view jobs', 'SELECT in another style')"
    )
    filled.execute("DROP INDEX howdah.leases_expired")
    assert migrate.migrate(filled, "howdah").functions
    assert stored_catalog(filled) == stored  # the index is still expected
    assert migrate.migrate(filled, "howdah") == migrate.Applied()


# ── schemas that cannot be used ───────────────────────────────────────────────────────────────────


def add_future_version(conn: Connection, oldest_code: int) -> None:
    migrate.migrate(conn, "howdah")
    conn.execute(
        "INSERT INTO howdah.migrations (version, name, oldest_code, functions_hash) "
        "VALUES (999, 'future', %s, 'other')",
        (oldest_code,),
    )


def test_a_schema_that_is_too_new_is_refused(empty_database: str, conn: Connection) -> None:
    add_future_version(conn, oldest_code=999)
    sentence = (
        'schema "howdah" is at version 999, and this Howdah supports versions up to '
        f"{latest_version()}. Upgrade the howdah package in this environment."
    )
    before = catalog(conn)
    with pytest.raises(SchemaTooNew) as caught:
        JobQueue(empty_database).pending()
    assert str(caught.value) == sentence
    with pytest.raises(SchemaTooNew) as caught:
        migrate.migrate(conn, "howdah")
    assert str(caught.value) == sentence
    assert catalog(conn) == before


async def test_a_schema_that_becomes_too_new_under_a_queue_is_named_as_the_cause(
    empty_database: str, conn: Connection
) -> None:
    queue, aqueue = JobQueue(empty_database), AsyncJobQueue(empty_database)
    queue.pending()
    await aqueue.pending()
    add_future_version(conn, oldest_code=999)
    conn.execute("ALTER FUNCTION howdah.pending_count RENAME TO pending_count_next")
    with pytest.raises(SchemaTooNew, match="Upgrade the howdah package"):
        queue.pending()
    with pytest.raises(SchemaTooNew, match="Upgrade the howdah package"):
        await aqueue.pending()
    queue.close()
    await aqueue.close()


def test_a_newer_schema_that_allows_this_code_is_used(
    empty_database: str, conn: Connection
) -> None:
    add_future_version(conn, oldest_code=1)
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
    empty_database: str, conn: Connection, newer: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate.migrate(conn, "howdah")
    monkeypatch.setattr(sql, "release", lambda: newer)
    with pytest.raises(SchemaOutdated) as caught:
        JobQueue(empty_database, create=False).pending()
    assert str(caught.value) == (
        f'schema "howdah" is at version {VERSION - 1} and this Howdah needs {VERSION}. '
        "Run `howdah migrate`."
    )
    assert versions(conn) == ALL


# ── against locks ─────────────────────────────────────────────────────────────────────────────────


def test_a_migration_that_meets_a_lock_lets_others_pass_and_is_retried(
    empty_database: str, filled: Connection, newer: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "LOCK_TIMEOUT", "300ms")
    with (
        psycopg.connect(empty_database) as holder,
        psycopg.connect(empty_database, autocommit=True) as migrating,
        ThreadPoolExecutor(1) as pool,
    ):
        holder.execute("SELECT * FROM howdah.lanes")
        answer = pool.submit(migrate.migrate, migrating, "howdah", release=newer)
        waiting = (
            "SELECT xact_start FROM pg_stat_activity "
            "WHERE pid = %s AND wait_event_type = 'Lock' AND xact_start IS NOT NULL"
        )
        pid = migrating.info.backend_pid
        (first,) = wait_until(lambda: rows(filled, waiting, pid), "the migration waits")[0]
        # The holder keeps its lock: a statement behind a migration that waits for it would never end.
        assert len(claim_as_before(filled, 1)) == 1
        wait_until(
            lambda: [row for row in rows(filled, waiting, pid) if row.xact_start > first],
            "the migration is retried",
        )
        holder.rollback()
        assert [step.version for step in answer.result().steps] == [VERSION]
    assert versions(filled) == [*ALL, VERSION]


def test_jobs_run_while_a_database_is_migrated(
    empty_database: str, filled: Connection, newer: Release
) -> None:
    enqueue(filled, *([{"job_type": "work"}] * 2000))
    stop, done = threading.Event(), list[Any]()

    def work() -> None:
        with psycopg.connect(empty_database, autocommit=True) as conn:
            while not stop.is_set():
                done.extend(complete(conn, *claim_as_before(conn, 5)))

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work) for _ in range(2)]
        try:
            wait_until(lambda: len(done) > 20, "the workers work")
            with psycopg.connect(empty_database, autocommit=True) as migrating:
                migrate.migrate(migrating, "howdah", release=newer)
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
