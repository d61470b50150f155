"""Brings a schema up to date in one transaction under a lock: pending table steps, then every function, then
grants. The steps are a generator of SQL, so that the sync and the async client run the same text.

DDL waits at most two seconds for a lock and is then retried: while it waits, every later statement on that table
waits behind it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from howdah import sql
from howdah.database.sql_steps import Query, Script, Steps, drive, with_retries
from howdah.errors import HowdahError, SchemaMissing, SchemaOutdated, SchemaTooNew, sqlstate
from howdah.protocol.schema_name import quote_schema
from howdah.sql.catalog import Catalog, differences, is_comparable

if TYPE_CHECKING:
    from howdah.database.connection import Connection
    from howdah.sql import Release, TableStep
    from howdah.sql.catalog import Difference

LOCK_TIMEOUT = "2s"
_PINNED_PATH = "SET LOCAL search_path = pg_catalog, pg_temp"
# A role or database may have its own settings. A migration may take longer than statement_timeout. JIT would compile
# the query of the catalog for more than a second. The others change how PostgreSQL prints definitions.
_OWN_SETTINGS = (
    "SET LOCAL statement_timeout = 0; SET LOCAL jit = off; "
    "SET LOCAL TimeZone = 'UTC'; SET LOCAL DateStyle = 'ISO'; SET LOCAL IntervalStyle = 'postgres'; "
    "SET LOCAL quote_all_identifiers = off; SET LOCAL extra_float_digits = 1"
)
_INSUFFICIENT_PRIVILEGE = "42501"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The version of a schema; 0 if it has no tables."""

    version: int = 0
    oldest_code: int = 0
    functions_hash: str = ""

    def is_current(self, release: Release) -> bool:
        """Whether nothing of this release is missing. A newer schema contains all of it."""
        return self.version > release.version or (
            self.version == release.version and self.functions_hash == release.functions_hash
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a migration did."""

    steps: tuple[TableStep, ...] = ()
    functions: bool = False


def literal(text: str) -> str:
    """A text as a SQL literal, whatever the server's standard_conforming_strings."""
    quoted = "'" + text.replace("'", "''") + "'"
    return " E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


def read_installed(schema: str, *, as_owner: bool = False) -> Steps[Installed]:
    """The schema's version. Inside a transaction it can be read as the owner, so that no code of the owner runs with
    the privileges of this role."""
    # Not to_regclass: it may answer from this session's cache, which does not know of a migration that committed
    # after our transaction began.
    rows = yield Query(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_class AS c "
        "JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
        f"WHERE n.nspname = {literal(schema)} AND c.relname = 'migrations')"
    )
    if not rows[0][0]:
        return Installed()
    text = (
        "SELECT jsonb_build_array(version, oldest_code, to_jsonb(m) ->> 'functions_hash')::text "
        f"FROM {quote_schema(schema)}.migrations AS m ORDER BY version DESC LIMIT 1"
    )
    if as_owner:
        found = yield from read_as_owner(schema, text)
    else:
        rows = yield Query(text)
        found = rows[0][0] if rows else None
    if not found:
        return Installed()
    try:
        version, oldest_code, functions_hash = json.loads(found)
    except ValueError as error:
        raise HowdahError(
            f'the table "migrations" in schema "{schema}" is not Howdah\'s. Use another schema.'
        ) from error
    if functions_hash is None:
        raise HowdahError(
            f'schema "{schema}" was created by an early build of Howdah, before its first release, and cannot be '
            "migrated. Use another schema or database, or drop this one with its jobs: DROP SCHEMA … CASCADE."
        )
    return Installed(version=version, oldest_code=oldest_code, functions_hash=functions_hash)


def read_as_owner(schema: str, text: str) -> Steps[str | None]:
    """The one text that a query returns. Needs a transaction, in which it leaves no change."""
    yield Script("SAVEPOINT howdah_read")
    yield Script(run_as_owner(schema, text, returns="text", readers="any"))
    rows = yield Query("SELECT current_setting('howdah.result')")
    yield Script("ROLLBACK TO SAVEPOINT howdah_read")
    return rows[0][0] or None


def read_catalogs(schema: str) -> Steps[tuple[Catalog, Catalog]]:
    """What the schema contained after its last migration, and what it contains now. In a transaction."""
    found = yield from read_as_owner(
        schema,
        "SELECT jsonb_build_array((SELECT catalog FROM migrations ORDER BY version DESC LIMIT 1), "
        f"({sql.script('catalog')}))::text",
    )
    expected, present = json.loads(found or "[{}, {}]")
    return expected, present


def check(schema: str, *, create: bool = True) -> Steps[bool]:
    """Whether the schema must be migrated. Raises if it cannot be used and must not be migrated."""
    release = sql.release()
    found = yield from read_installed(schema)
    if found.oldest_code > release.version:
        raise SchemaTooNew(schema, found.version, release.version)
    if found.is_current(release):
        return False
    if create:
        return True
    if found.version == 0:
        raise SchemaMissing(schema)
    raise SchemaOutdated(schema, found.version, release.version)


def prepare(schema: str, *, create: bool) -> Steps[None]:
    """Check that this code can use the schema, and migrate it if it is behind and `create` is set. Every client
    does this before its first statement."""
    if not (yield from check(schema, create=create)):
        return
    try:
        yield from with_retries(lambda: steps(schema))
    except Exception as error:
        if sqlstate(error) == _INSUFFICIENT_PRIVILEGE:
            yield from refuse(schema)
        raise


def refuse(schema: str) -> Steps[None]:
    """Raise the error that says what is missing, after the database did not let this role migrate."""
    yield Script("ROLLBACK")
    found = yield from read_installed(schema)
    if found.version == 0:
        raise SchemaMissing(schema, permitted=False)
    raise SchemaOutdated(schema, found.version, sql.latest_version(), permitted=False)


def steps(schema: str, release: Release | None = None) -> Steps[Applied]:
    """Apply what is missing: the pending table steps, and the functions if a step is pending or if they are not
    those of this release."""
    release = release or sql.release()
    yield from begin(schema)
    found = yield from read_installed(schema, as_owner=True)
    if found.oldest_code > release.version:
        yield Script("ROLLBACK")
        raise SchemaTooNew(schema, found.version, release.version)
    pending = tuple(release.pending(found.version))
    needed = bool(pending)
    if found.version == release.version:
        needed = _needs_functions(found, release, *(yield from read_catalogs(schema)))
    if needed:
        yield Script(script(schema, release, found.version))
    yield Script("COMMIT" if needed else "ROLLBACK")
    return Applied(steps=pending, functions=needed)


def _needs_functions(
    found: Installed, release: Release, expected: Catalog, present: Catalog
) -> bool:
    """Whether a schema without pending steps needs its functions again: they come from another build of the same
    version, or one is missing or altered; or PostgreSQL had a major upgrade, and the definitions must be stored as
    the new server prints them."""
    return (
        not found.is_current(release)
        or not is_comparable(expected, present)
        or any(each.kind == "function" for each in differences(expected, present))
    )


def inspect(schema: str) -> Steps[tuple[Installed, bool, list[Difference]]]:
    """The version, whether `steps` would replace the functions although no table step is pending, and the objects
    that are not as the last migration left them. Only reads.

    A newer schema is not compared: its release may store its catalog in another format.
    """
    release = sql.release()
    yield Script("BEGIN ISOLATION LEVEL REPEATABLE READ")
    yield Script(_PINNED_PATH)
    yield Script(_OWN_SETTINGS)
    found = yield from read_installed(schema, as_owner=True)
    expected: Catalog = {}
    present: Catalog = {}
    if found.version == release.version:
        expected, present = yield from read_catalogs(schema)
    yield Script("ROLLBACK")
    if found.oldest_code > release.version:
        raise SchemaTooNew(schema, found.version, release.version)
    if found.version != release.version:
        return found, False, []
    needed = _needs_functions(found, release, expected, present)
    return found, needed, differences(expected, present)


def begin(schema: str) -> Steps[None]:
    """Begin a transaction that holds the schema's lock against other migrations."""
    while True:
        # Settings of the role or the database must not end a migration, and each statement must see what another
        # migration committed before it released the lock.
        yield Script("BEGIN ISOLATION LEVEL READ COMMITTED")
        yield Script(_PINNED_PATH)
        yield Script(f"SET LOCAL lock_timeout = {literal(LOCK_TIMEOUT)}; {_OWN_SETTINGS}")
        # A try-lock: waiting would end by lock_timeout while another migration takes longer.
        rows = yield Query(f"SELECT pg_try_advisory_xact_lock({_lock(schema)})")
        if rows[0][0]:
            return
        yield Script("ROLLBACK")
        yield Query("SELECT pg_sleep(0.05)")


def _lock(schema: str) -> str:
    return f"hashtextextended({literal(f'howdah:migrate:{schema}')}, 0)"


def find_owner(schema: str) -> str:
    """SQL that pins search_path and stores the schema and its owner in settings."""
    return (
        f"{_PINNED_PATH};\nSELECT set_config('howdah.schema', {literal(schema)}, true);\n"
        f"{sql.script('access/find_owner')}"
    )


def run_as_owner(schema: str, text: str, *, returns: str = "", readers: str = "owner") -> str:
    """SQL that runs other SQL as the schema's owner, confined to its privileges, with search_path set to the schema.
    One role must own all objects. A role that cannot act as the owner is refused, or reads as itself if `readers` is
    "any"."""
    tag = "$howdah_script$"
    return (
        f"{find_owner(schema)}"
        f"SELECT set_config('howdah.returns', {literal(returns)}, true), "
        f"set_config('howdah.readers', {literal(readers)}, true), set_config('howdah.script', "
        f"{tag}{text}{tag}, true);\n"
        f"{sql.script('access/check_others')}"
        f"{sql.script('access/run_as_owner')}"
    )


# Not CREATE SCHEMA IF NOT EXISTS: that requires the privilege to create a schema even if it exists.
_CREATE_SCHEMA = """
DO $create$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = current_setting('howdah.schema')) THEN
        EXECUTE format('CREATE SCHEMA %I', current_setting('howdah.schema'));
    END IF;
END $create$;
"""

# A script that was printed earlier, or for another database, must not run from another version.
_REFUSE_OTHER_VERSION = """
DO $check$
DECLARE
    v_version int := 0;
BEGIN
    IF to_regclass(format('%I.migrations', current_schema())) IS NOT NULL THEN
        SELECT max(version) INTO v_version FROM migrations;
    END IF;
    IF v_version <> {after} THEN
        RAISE EXCEPTION 'schema "%" is at version %, and this script starts at version {after}',
                        current_schema(), v_version USING ERRCODE = 'object_not_in_prerequisite_state',
                        HINT = 'Print it again with: howdah migrate --sql --from current';
    END IF;
END $check$;
"""

# Objects that are missing, altered or added by others before the migration, as {object: [expected, present]}. If it
# does not change them, what was expected stays expected: a dropped index must not be forgotten because an upgrade
# came later, and users may drop their own indexes at any time.
_READ_ALTERED = """
DO $altered$
BEGIN
    PERFORM set_config('howdah.altered', coalesce((
        SELECT jsonb_object_agg(k.key, jsonb_build_array(m.catalog -> k.key, c.catalog -> k.key))
        FROM ({expected}) AS m (catalog)
        CROSS JOIN ({catalog}) AS c (catalog)
        CROSS JOIN LATERAL jsonb_object_keys(m.catalog || c.catalog) AS k (key)
        WHERE k.key <> 'printed by' AND k.key NOT LIKE 'function %'
          AND CASE WHEN m.catalog ? k.key AND c.catalog ? k.key
                   THEN m.catalog -> 'printed by' = c.catalog -> 'printed by'
                        AND m.catalog -> k.key <> c.catalog -> k.key
                   ELSE true END), '{{}}')::text, true);
END $altered$;
"""
_STORE_CATALOG = """
UPDATE migrations
SET functions_hash = {functions_hash},
    catalog = (
        SELECT jsonb_object_agg(k.key, d.definition)
        FROM jsonb_object_keys(c.catalog || a.altered) AS k (key)
        CROSS JOIN LATERAL (
            SELECT nullif(
                CASE WHEN a.altered ? k.key
                          AND c.catalog -> k.key IS NOT DISTINCT FROM nullif(a.altered -> k.key -> 1, 'null')
                     THEN a.altered -> k.key -> 0
                     ELSE c.catalog -> k.key END, 'null')) AS d (definition)
        WHERE d.definition IS NOT NULL)
FROM ({catalog}) AS c (catalog), (SELECT current_setting('howdah.altered')::jsonb) AS a (altered)
WHERE version = {version};
"""


def script(schema: str, release: Release, after: int) -> str:
    """SQL that brings a schema from version `after` to this release, to run inside a transaction."""
    pending = release.pending(after)
    catalog = sql.script("catalog")
    create = f"SELECT set_config('howdah.schema', {literal(schema)}, true);{_CREATE_SCHEMA}"
    expected = (
        "SELECT catalog FROM migrations ORDER BY version DESC LIMIT 1"
        if after
        else "SELECT jsonb '{}'"
    )
    text = "".join(
        [
            "SET LOCAL client_min_messages = warning;\n",  # DROP ... IF EXISTS of what is not there
            _REFUSE_OTHER_VERSION.replace("{after}", str(after)),
            _READ_ALTERED.format(catalog=catalog, expected=expected),
            *(step.text for step in pending),
            *(f"DROP ROUTINE IF EXISTS {each};\n" for step in pending for each in step.drops),
            # Functions call each other, in any order.
            "SET LOCAL check_function_bodies = off;\n",
            release.functions,
            sql.script("leftovers"),
            *(step.text_after_functions for step in pending),
            *(
                "INSERT INTO migrations (version, name, oldest_code, functions_hash) VALUES "
                f"({step.version}, {literal(step.name)}, {step.oldest_code}, "
                f"{literal(release.functions_hash)});\n"
                for step in pending
            ),
            sql.script("access/grants"),
            _STORE_CATALOG.format(
                functions_hash=literal(release.functions_hash),
                catalog=catalog,
                version=release.version,
            ),
        ]
    )
    return ("" if after else create) + run_as_owner(schema, text)


def full_script(schema: str, after: int = 0) -> str:
    """The whole migration from version `after` as one transaction, for those who run SQL by other means."""
    return (
        f"BEGIN;\n{_PINNED_PATH};\nSELECT pg_advisory_xact_lock({_lock(schema)});\n"
        f"SET LOCAL lock_timeout = {literal(LOCK_TIMEOUT)}; {_OWN_SETTINGS};\n"
        f"{script(schema, sql.release(), after)}COMMIT;\n"
    )


def migrate(conn: Connection, schema: str, *, release: Release | None = None) -> Applied:
    """Bring the schema up to date on a psycopg connection in autocommit mode."""
    return drive(conn, with_retries(lambda: steps(schema, release)))
