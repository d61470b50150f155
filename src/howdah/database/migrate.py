"""Brings a schema up to date, one numbered step at a time, each in a transaction of its own under one
lock. The steps are a generator of SQL, so the sync and the async client drive the same text.

DDL waits for a lock two seconds at the most and then tries again: while it waits, everybody else waits
behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import psycopg
from psycopg.rows import tuple_row

from howdah import sql
from howdah.errors import SchemaMissing, SchemaOutdated, SchemaTooNew
from howdah.protocol.schema_name import quote_schema
from howdah.sql import Migration

if TYPE_CHECKING:
    from howdah.protocol.statements import Rows

T = TypeVar("T")

LOCK_TIMEOUT = "2s"
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Query:
    """One statement whose rows are wanted."""

    text: str


@dataclass(frozen=True, slots=True)
class Script:
    """Any number of statements, for their effect."""

    text: str


Steps: TypeAlias = Generator[Query | Script, Any, list[Migration]]


def literal(text: str) -> str:
    """A text as a SQL literal, whatever the server's standard_conforming_strings."""
    quoted = "'" + text.replace("'", "''") + "'"
    return " E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


def current_version(schema: str) -> Generator[Query | Script, Any, tuple[int, int]]:
    """The schema's version, and the oldest code that works with it; (0, 0) where there is none."""
    name = quote_schema(schema)
    rows = yield Query(f"SELECT to_regclass({literal(name + '.migrations')}) IS NOT NULL")
    if not rows[0][0]:
        return 0, 0
    rows = yield Query(
        f"SELECT version, oldest_code FROM {name}.migrations ORDER BY version DESC LIMIT 1"
    )
    return (rows[0][0], rows[0][1]) if rows else (0, 0)


def check(schema: str, *, create: bool = True) -> Generator[Query | Script, Any, bool]:
    """Whether the schema is behind this code. Raises if it cannot be used and may not be migrated."""
    found, oldest_code = yield from current_version(schema)
    latest = sql.latest_version()
    if oldest_code > latest:
        raise SchemaTooNew(schema, found, latest)
    if found >= latest:
        return False
    if create:
        return True
    if found == 0:
        raise SchemaMissing(schema)
    raise SchemaOutdated(schema, found, latest)


def refuse(schema: str) -> Generator[Query | Script, Any, None]:
    """Say what is missing, after the database did not let this role migrate."""
    yield Script("ROLLBACK")
    found, _ = yield from current_version(schema)
    if found == 0:
        raise SchemaMissing(schema, permitted=False)
    raise SchemaOutdated(schema, found, sql.latest_version(), permitted=False)


def steps(schema: str, *, target: int | None = None) -> Steps:
    """Apply what is missing, up to `target`. Gives the migrations that were applied."""
    applied: list[Migration] = []
    while True:
        yield from begin(schema)
        found, _ = yield from current_version(schema)
        pending = [m for m in sql.migrations() if found < m.version <= (target or m.version)]
        if not pending:
            yield Script("ROLLBACK")
            return applied
        yield Script(script(schema, pending[0]))
        yield Script("COMMIT")
        applied.append(pending[0])


def begin(schema: str) -> Generator[Query | Script, Any, None]:
    """Begin a transaction that holds the schema's lock against other migrations."""
    lock = literal(f"howdah:migrate:{schema}")
    while True:
        yield Script("BEGIN")
        yield Script(f"SET LOCAL lock_timeout = {literal(LOCK_TIMEOUT)}")
        # Try, not wait: a waiter would be cut off by lock_timeout behind a long migration.
        rows = yield Query(f"SELECT pg_try_advisory_xact_lock(hashtextextended({lock}, 0))")
        if rows[0][0]:
            return
        yield Script("ROLLBACK")
        yield Query("SELECT pg_sleep(0.05)")


def as_owner(schema: str) -> str:
    """SQL that goes on as the schema's owner, if this role may: whoever migrates, all belongs to one role."""
    return (
        "SELECT set_config('role', o.rolname, true) FROM pg_namespace AS n "
        "JOIN pg_roles AS o ON o.oid = n.nspowner "
        f"WHERE n.nspname = {literal(schema)} AND o.rolname <> current_user "
        "AND o.rolname !~ '^pg_' AND pg_has_role(o.oid, CASE "
        "WHEN current_setting('server_version_num')::int >= 160000 THEN 'SET' ELSE 'MEMBER' END);\n"
    )


# Not IF NOT EXISTS: that asks for the right to create one also where there is one.
_CREATE_SCHEMA = """
DO $create$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = current_setting('howdah.schema')) THEN
        EXECUTE format('CREATE SCHEMA %I', current_setting('howdah.schema'));
    END IF;
END $create$;
"""

# The functions run with their owner's rights, and look names up in this schema.
_NOT_FOR_EVERYBODY = """
DO $check$
BEGIN
    IF EXISTS (
        SELECT FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
        WHERE n.nspname = current_schema() AND a.grantee = 0 AND a.privilege_type = 'CREATE')
    THEN
        RAISE EXCEPTION 'everybody may create objects in schema "%"; give Howdah one of its own',
                        current_schema() USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
END $check$;
"""


def script(schema: str, migration: Migration) -> str:
    """One migration as SQL that is ready to run inside a transaction."""
    name = quote_schema(schema)
    if migration.version == 1:
        first = (
            f"SELECT set_config('howdah.schema', {literal(schema)}, true);{_CREATE_SCHEMA}"
            f"{as_owner(schema)}"
            f"SET LOCAL search_path = {name}, pg_temp;{_NOT_FOR_EVERYBODY}"
            f"CREATE TABLE {name}.migrations (version int PRIMARY KEY, name text NOT NULL, "
            "oldest_code int NOT NULL, applied_at timestamptz NOT NULL DEFAULT clock_timestamp());\n"
        )
    else:
        first = as_owner(schema)
    return (
        f"{first}SET LOCAL search_path = {name}, pg_temp;\n{migration.text}\n"
        f"INSERT INTO {name}.migrations (version, name, oldest_code) "
        f"VALUES ({migration.version}, {literal(migration.name)}, {migration.oldest_code});\n"
        f"{sql.script('grants')}"
    )


def full_script(schema: str, after: int = 0) -> str:
    """Every migration behind version `after`, for those who apply SQL by other means."""
    return "\n".join(
        f"BEGIN;\n{script(schema, m)}COMMIT;\n" for m in sql.migrations() if m.version > after
    )


def drive(conn: psycopg.Connection[Any], work: Generator[Query | Script, Any, T]) -> T:
    """Run a generator of SQL on a psycopg connection in autocommit mode, and give its result."""
    answer: Rows | None = None
    while True:
        try:
            step = work.send(answer)
        except StopIteration as stop:
            value: T = stop.value
            return value
        with conn.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(step.text.encode())
            answer = cursor.fetchall() if isinstance(step, Query) else None


def migrate(
    conn: psycopg.Connection[Any], schema: str, *, target: int | None = None
) -> list[Migration]:
    """Bring the schema up to date on a psycopg connection in autocommit mode."""
    return drive_patiently(conn, lambda: steps(schema, target=target))


def drive_patiently(
    conn: psycopg.Connection[Any], work: Callable[[], Generator[Query | Script, Any, T]]
) -> T:
    """`drive`, from the start again while somebody else's transaction is in the way."""
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            return drive(conn, work())
        except psycopg.errors.LockNotAvailable:
            conn.execute("ROLLBACK")
            if time.monotonic() > give_up:
                raise
