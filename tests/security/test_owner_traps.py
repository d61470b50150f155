"""The owner of a schema attaches code to its objects, and a superuser migrates the schema, grants privileges on it or
checks it: the code does not run with the superuser's privileges."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner

from howdah.cli import main
from howdah.database import grants, migrate
from howdah.database.sql_steps import drive
from howdah.sql import release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Connection = psycopg.Connection[Any]

# Takes every way back to the session's role, and then makes the owner a superuser.
EVIL = """
CREATE SCHEMA trap AUTHORIZATION trapper;
SET ROLE trapper;
CREATE FUNCTION trap.evil() RETURNS int LANGUAGE plpgsql AS $$
BEGIN
    BEGIN EXECUTE 'RESET ROLE'; EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE 'RESET SESSION AUTHORIZATION'; EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE pg_catalog.format('SET ROLE %I', session_user); EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE 'ALTER ROLE trapper SUPERUSER'; EXCEPTION WHEN OTHERS THEN NULL; END;
    RETURN 1;
END $$;
CREATE FUNCTION trap.fixed(int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN trap.evil(); END';
CREATE FUNCTION trap.fire() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM trap.evil(); RETURN coalesce(NEW, OLD); END';
CREATE FUNCTION trap.later() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE 'DECLARE c CURSOR WITH HOLD FOR SELECT trap.evil()';
    RETURN coalesce(NEW, OLD);
END $$;
CREATE FUNCTION trap.settings() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('search_path', 'trap, pg_catalog', false);
    PERFORM set_config('howdah.script', 'SELECT trap.evil()', false);
    PERFORM set_config('howdah.result', '[["worker", "trapper"]]', false);
    RETURN coalesce(NEW, OLD);
END $$;
CREATE FUNCTION trap.current_setting(text) RETURNS text LANGUAGE sql AS $$ SELECT trap.evil()::text $$;
CREATE FUNCTION trap.temporary() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE 'CREATE TEMP TABLE pg_class AS SELECT trap.evil()';
    RETURN coalesce(NEW, OLD);
END $$;
"""
ON = {"grants": "INSERT OR DELETE", "migrations": "UPDATE"}
TABLES = tuple(ON)


def triggers(function: str, kind: str = "TRIGGER", when: str = "BEFORE") -> str:
    return ";".join(
        f"CREATE {kind} t {when} {events} ON howdah.{table} FOR EACH ROW EXECUTE FUNCTION trap.{function}()"
        if kind == "TRIGGER"
        else f"CREATE {kind} t {when} {events} ON howdah.{table} DEFERRABLE INITIALLY DEFERRED "
        f"FOR EACH ROW EXECUTE FUNCTION trap.{function}()"
        for table, events in ON.items()
    )


def each_table(text: str) -> str:
    return ";".join(text.format(table=table) for table in TABLES)


TRAPS = {
    "a trigger": triggers("fire"),
    "a deferred trigger": triggers("fire", "CONSTRAINT TRIGGER", "AFTER"),
    "a trigger that leaves a cursor for the commit": triggers("later"),
    "a trigger that changes settings": triggers("settings"),
    "a trigger that creates temporary tables": triggers("temporary"),
    "a trigger for statements": each_table(
        "CREATE TRIGGER s AFTER INSERT OR UPDATE OR DELETE ON howdah.{table} EXECUTE FUNCTION trap.fire()"
    ),
    "a rule": each_table(
        "CREATE RULE i AS ON INSERT TO howdah.{table} DO ALSO SELECT trap.evil();"
        "CREATE RULE u AS ON UPDATE TO howdah.{table} DO ALSO SELECT trap.evil();"
        "CREATE RULE d AS ON DELETE TO howdah.{table} DO ALSO SELECT trap.evil()"
    ),
    "an index expression": each_table("CREATE INDEX ON howdah.{table} ((trap.fixed(1)))"),
    "an index predicate": each_table(
        "CREATE INDEX ON howdah.{table} (({table}.*)) WHERE trap.fixed(1) = 1"
    ).replace("((grants.*))", "(role)").replace("((migrations.*))", "(version)"),
    "a statistics expression": each_table(
        "CREATE STATISTICS howdah.s_{table} ON (trap.fixed(1)), ({table}_key(1)) FROM howdah.{table}"
    ).replace("grants_key(1)", "length(role)").replace("migrations_key(1)", "version + 1"),
    "a policy": each_table(
        "ALTER TABLE howdah.{table} ENABLE ROW LEVEL SECURITY;"
        "ALTER TABLE howdah.{table} FORCE ROW LEVEL SECURITY;"
        "CREATE POLICY p ON howdah.{table} USING (trap.evil() = 1)"
    ),
    "a view instead of a table": each_table(
        "ALTER TABLE howdah.{table} RENAME TO real_{table};"
        "CREATE VIEW howdah.{table} AS SELECT * FROM howdah.real_{table} WHERE trap.evil() = 1"
    ),
    "a cast to JSON": "CREATE TYPE trap.c AS (x int);"
    "CREATE FUNCTION trap.to_json(trap.c) RETURNS json LANGUAGE sql AS 'SELECT to_json(trap.evil())';"
    "CREATE CAST (trap.c AS json) WITH FUNCTION trap.to_json(trap.c);"
    + each_table("ALTER TABLE howdah.{table} ADD x trap.c DEFAULT ROW(1)"),
    "an operator": "CREATE FUNCTION trap.differs(name, text) RETURNS boolean LANGUAGE sql AS 'SELECT trap.evil() = 1';"
    "CREATE OPERATOR howdah.<> (LEFTARG = name, RIGHTARG = text, FUNCTION = trap.differs);"
    "CREATE OPERATOR howdah.= (LEFTARG = name, RIGHTARG = text, FUNCTION = trap.differs)",
    "a function of the schema": "CREATE OR REPLACE FUNCTION howdah.skip_existing_row() RETURNS trigger "
    "LANGUAGE plpgsql AS 'BEGIN PERFORM trap.evil(); RETURN NEW; END'",
    "a column default": each_table(
        "ALTER TABLE howdah.{table} ADD x int; ALTER TABLE howdah.{table} ALTER x SET DEFAULT trap.evil()"
    ),
    "a generated column": each_table(
        "ALTER TABLE howdah.{table} ADD x int GENERATED ALWAYS AS (trap.fixed(0)) STORED"
    ),
    "a check constraint": each_table(
        "ALTER TABLE howdah.{table} ADD CONSTRAINT c CHECK (trap.evil() = 1) NOT VALID"
    ),
    "a domain": "CREATE DOMAIN trap.word AS text;"
    "CREATE DOMAIN trap.number AS int;"
    "ALTER TABLE howdah.grants ALTER role TYPE trap.word;"
    "ALTER TABLE howdah.migrations ALTER oldest_code TYPE trap.number;"
    "ALTER TABLE howdah.migrations ALTER functions_hash TYPE trap.word;"
    "ALTER DOMAIN trap.word ADD CHECK (trap.evil() = 1) NOT VALID;"
    "ALTER DOMAIN trap.number ADD CHECK (trap.evil() = 1) NOT VALID",
    "functions that match better": "".join(
        f"CREATE FUNCTION howdah.{name}({parameters}) RETURNS {returns} LANGUAGE plpgsql "
        f"AS 'BEGIN PERFORM trap.evil(); RETURN {value}; END';"
        for name, parameters, returns, value in (
            ("to_jsonb", "howdah.migrations", "jsonb", "NULL"),
            ("jsonb_build_array", "int, int, text", "jsonb", "NULL"),
            ("jsonb_build_array", "jsonb, jsonb", "jsonb", "NULL"),
            ("current_setting", "text", "text", "NULL"),
        )
    ),
    "the objects of a migration": "CREATE FUNCTION howdah.howdah_migration() RETURNS text LANGUAGE plpgsql "
    "AS 'BEGIN RETURN trap.evil(); END';"
    "CREATE MATERIALIZED VIEW howdah.howdah_migration AS SELECT trap.evil() WITH NO DATA",
}  # fmt: skip


@pytest.fixture
def conn(fresh_database: str) -> Iterator[Connection]:
    """A superuser's connection to a schema that belongs to another role."""
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        conn.execute("DROP ROLE IF EXISTS trapper")
        conn.execute("CREATE ROLE trapper LOGIN")
        drive(conn, grants.steps("howdah", {"administrator": ["trapper"]}))
        for statement in (EVIL, "RESET ROLE"):
            conn.execute(statement.encode())
        yield conn
        conn.execute("RESET ROLE; DROP SCHEMA howdah, trap CASCADE; DROP OWNED BY trapper CASCADE")
        conn.execute("DROP ROLE trapper")


def is_superuser(conn: Connection) -> bool:
    row = conn.execute("SELECT rolsuper FROM pg_roles WHERE rolname = 'trapper'").fetchone()
    assert row is not None
    return bool(row[0])


def set_trap(conn: Connection, trap: str) -> None:
    """As the owner in its own session: some statements evaluate the expression that they attach."""
    with psycopg.connect(conn.info.dsn, user="trapper", autocommit=True) as owner:
        owner.execute(TRAPS[trap].encode())
    assert not is_superuser(conn)


def run_script(conn: Connection, text: str) -> None:
    conn.execute(f"BEGIN; {text}; COMMIT".encode())


ACTIONS: dict[str, Callable[[Connection], object]] = {
    "check": lambda conn: drive(conn, migrate.inspect("howdah")),
    "migrate": lambda conn: migrate.migrate(conn, "howdah"),
    "script": lambda conn: run_script(conn, migrate.script("howdah", release(), release().version)),
    "grants": lambda conn: drive(conn, grants.steps("howdah", None)),
    "other grants": lambda conn: drive(conn, grants.steps("howdah", {"worker": ["trapper"]})),
    "printed grants": lambda conn: run_script(
        conn, grants.script("howdah", {"observer": ["trapper"]})
    ),
}


# What the actions do, without any confinement.
UNCONFINED = (
    "INSERT INTO howdah.grants (kind, role) VALUES ('worker', 'trapper')",
    "UPDATE howdah.migrations SET functions_hash = 'x', oldest_code = oldest_code",
    "INSERT INTO howdah.migrations (version, name, oldest_code, functions_hash) VALUES (9, 'x', 1, 'x')",
    "SELECT jsonb_build_array(version, oldest_code, to_jsonb(m) ->> 'functions_hash')::text FROM howdah.migrations AS m",
    "SELECT quote_ident(current_schema()), current_setting('search_path') FROM howdah.grants WHERE kind = 'x'::text",
    "SELECT FROM pg_class AS c WHERE c.relname = 'migrations'::name OR c.relname <> 'grants'::text",
    "SELECT howdah.howdah_migration()",
    "ANALYZE howdah.grants, howdah.migrations",
    "DELETE FROM howdah.grants",
    "BEGIN; INSERT INTO howdah.grants (kind, role) VALUES ('worker', 'trapper'); "
    "SELECT current_setting('x'), * FROM pg_class; COMMIT",
)


@pytest.mark.parametrize("trap", TRAPS)
def test_code_of_the_owner_does_not_run_as_the_superuser_who_migrates(
    conn: Connection, trap: str
) -> None:
    conn.execute("UPDATE howdah.migrations SET functions_hash = 'of another build'")
    set_trap(conn, trap)
    for name, action in ACTIONS.items():
        # A schema that was altered may be refused.
        with contextlib.suppress(psycopg.Error):
            action(conn)
        conn.execute("ROLLBACK")
        conn.execute("CLOSE ALL")
        assert not is_superuser(conn), name


# A superuser bypasses policies, and the cast is applied to a row only.
@pytest.mark.parametrize("trap", sorted(TRAPS.keys() - {"a policy", "a cast to JSON"}))
def test_the_traps_are_set(conn: Connection, trap: str) -> None:
    """Each trap springs when a superuser runs such statements without confinement."""
    conn.execute("UPDATE howdah.migrations SET functions_hash = 'of another build'")
    set_trap(conn, trap)
    conn.execute("SET search_path = howdah, pg_catalog")
    for text in UNCONFINED:
        with contextlib.suppress(psycopg.Error):
            conn.execute(text.encode())
        conn.execute("ROLLBACK")
    assert is_superuser(conn)
    conn.execute("ALTER ROLE trapper NOSUPERUSER")


def test_the_code_would_run_as_the_superuser_with_set_role_alone(conn: Connection) -> None:
    conn.execute("SET ROLE trapper")
    conn.execute(TRAPS["a trigger"].encode())
    conn.execute("INSERT INTO howdah.grants VALUES ('worker', 'trapper')")
    assert is_superuser(conn)


def test_a_superuser_migrates_and_grants_for_the_owner(conn: Connection) -> None:
    conn.execute("UPDATE howdah.migrations SET functions_hash = 'of another build'")
    conn.execute("DROP FUNCTION howdah.cancel_jobs")
    assert migrate.migrate(conn, "howdah").functions
    _, needed, differences = drive(conn, migrate.inspect("howdah"))
    assert (needed, differences) == (False, [])
    known = drive(conn, grants.steps("howdah", {"worker": ["trapper"]}))
    assert (known["worker"], known["administrator"]) == (["trapper"], ["trapper"])
    owners = conn.execute(
        "SELECT DISTINCT pg_get_userbyid(proowner) FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace "
        "UNION SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class WHERE relnamespace = 'howdah'::regnamespace"
    ).fetchall()
    assert owners == [("trapper",)]


def test_a_superuser_who_cannot_check_on_a_read_only_server_is_told_why(
    conn: Connection, fresh_database: str
) -> None:
    conn.execute(
        f"ALTER DATABASE {conn.info.dbname} SET default_transaction_read_only = on".encode()
    )
    for user, code in (("howdah", 1), ("trapper", 0)):
        url = fresh_database.replace("://howdah@", f"://{user}@")
        result = CliRunner().invoke(main, ["migrate", "--check", "--database", url])
        assert result.exit_code == code, result.output
        assert ("by a role that is not its owner" in result.output) is (code == 1)
    conn.execute("SET default_transaction_read_only = off")
