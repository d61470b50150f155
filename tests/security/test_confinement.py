"""Code in a schema runs with the privileges of its owner at most, for every role that migrates: when it replaces the
objects of the migration meanwhile, when the schema belongs to pg_database_owner, when the caller changed its role, and
when other roles attached it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from howdah.database import grants, migrate
from howdah.database.sql_steps import drive
from howdah.errors import HowdahError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Connection = psycopg.Connection[Any]

ROLES = ("mallory", "friend")

# Takes every way to the caller's privileges, and then makes a role a superuser.
EVIL = """
CREATE SCHEMA trap AUTHORIZATION mallory;
GRANT USAGE ON SCHEMA trap TO PUBLIC;
SET ROLE mallory;
CREATE FUNCTION trap.evil() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    BEGIN EXECUTE 'RESET ROLE'; EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE 'SET ROLE NONE'; EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE 'RESET SESSION AUTHORIZATION'; EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE 'ALTER ROLE mallory SUPERUSER'; EXCEPTION WHEN OTHERS THEN NULL; END;
    -- What depends on the objects of the migration would undo it.
    BEGIN
        EXECUTE 'DROP MATERIALIZED VIEW IF EXISTS howdah.former, trap.howdah_migration';
    EXCEPTION WHEN OTHERS THEN NULL;
    END;
    RETURN true;
END $$;
CREATE FUNCTION trap.fixed(int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN PERFORM trap.evil(); RETURN 1; END';
CREATE FUNCTION trap.fire() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM trap.evil(); RETURN coalesce(NEW, OLD); END';
CREATE TYPE trap.pair AS (x text);
CREATE FUNCTION trap.as_text(trap.pair) RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM trap.evil(); RETURN '[]'; END $$;
CREATE CAST (trap.pair AS text) WITH FUNCTION trap.as_text(trap.pair) AS ASSIGNMENT;
RESET ROLE;
"""

RENAME = "ALTER MATERIALIZED VIEW howdah.howdah_migration RENAME TO former"
SWAPS = {
    "a view with a cast": f"{RENAME};"
    "CREATE MATERIALIZED VIEW howdah.howdah_migration AS SELECT ROW('x')::trap.pair AS result",
    "a plain view": f"{RENAME};"
    "CREATE VIEW howdah.howdah_migration AS SELECT '[]'::text AS result WHERE trap.evil()",
    "a view in another schema": "ALTER MATERIALIZED VIEW howdah.howdah_migration SET SCHEMA trap;"
    "CREATE MATERIALIZED VIEW howdah.howdah_migration AS SELECT ROW('x')::trap.pair AS result",
    "a table with a policy": f"{RENAME}; CREATE TABLE howdah.howdah_migration (result text);"
    "INSERT INTO howdah.howdah_migration VALUES ('[]');"
    "ALTER TABLE howdah.howdah_migration ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;"
    "CREATE POLICY p ON howdah.howdah_migration USING (trap.evil())",
    "an index": "CREATE INDEX ON howdah.howdah_migration ((trap.fixed(1))) WHERE trap.fixed(1) = 1",
    "a view that was dropped": "DROP MATERIALIZED VIEW howdah.howdah_migration",
    "a view that was dropped and created": "DROP MATERIALIZED VIEW howdah.howdah_migration;"
    "CREATE MATERIALIZED VIEW howdah.howdah_migration AS SELECT ROW('x')::trap.pair AS result",
    "another function": "DROP FUNCTION howdah.howdah_migration() CASCADE;"
    "CREATE FUNCTION howdah.howdah_migration() RETURNS text LANGUAGE sql AS $$ SELECT trap.evil()::text $$",
    "a function with a better name": f"{RENAME};"
    "CREATE FUNCTION howdah.howdah_migration(VARIADIC text[]) RETURNS text LANGUAGE sql AS $$ SELECT trap.evil()::text $$",
    "another owner of the view": "ALTER MATERIALIZED VIEW howdah.howdah_migration OWNER TO friend",
    "another owner of the schema": "ALTER SCHEMA howdah OWNER TO friend",
    "another owner of everything": "REASSIGN OWNED BY mallory TO friend",
    "nothing left": "DROP OWNED BY mallory CASCADE",
    "another schema": "ALTER SCHEMA howdah RENAME TO former; CREATE SCHEMA howdah;"
    "CREATE MATERIALIZED VIEW howdah.howdah_migration AS SELECT ROW('x')::trap.pair AS result",
    "a result of its own": """RAISE EXCEPTION USING ERRCODE = 'HW000', MESSAGE = '[["worker", "mallory"]]'""",
    "a migration within": "REFRESH MATERIALIZED VIEW howdah.howdah_migration",
    "other settings": "PERFORM set_config('howdah.schema', 'trap', false);"
    "PERFORM set_config('howdah.owner', 'howdah', false); PERFORM set_config('howdah.script', 'SELECT trap.evil()', false)",
}  # fmt: skip


@pytest.fixture
def conn(fresh_database: str) -> Iterator[Connection]:
    """A superuser's connection, the schema `trap` of mallory, and a friend whose member mallory is."""
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        drop_roles(conn)
        conn.execute("CREATE ROLE mallory LOGIN; CREATE ROLE friend; GRANT friend TO mallory")
        (name,) = conn.execute("SELECT quote_ident(current_database())").fetchone() or ("",)
        conn.execute(f"GRANT CREATE ON DATABASE {name} TO mallory, friend".encode())
        conn.execute(EVIL.encode())
        yield conn
        conn.execute("ROLLBACK")
        conn.execute("RESET SESSION AUTHORIZATION; RESET ROLE; DROP SCHEMA howdah, trap CASCADE")
        drop_roles(conn)


def drop_roles(conn: Connection) -> None:
    for role in ROLES:
        if conn.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone():
            conn.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}".encode())


def give_to_mallory(conn: Connection) -> None:
    drive(conn, grants.steps("howdah", {"administrator": ["mallory"]}))


def as_mallory(conn: Connection, text: str) -> None:
    conn.execute("SET ROLE mallory")
    conn.execute(text.encode())
    conn.execute("RESET ROLE")


def ask_for_functions(conn: Connection) -> None:
    """The next migration has something to do."""
    conn.execute("UPDATE howdah.migrations SET functions_hash = 'of another build'")


def superusers(conn: Connection) -> list[Any]:
    return conn.execute(
        "SELECT rolname FROM pg_roles WHERE rolsuper AND rolname = ANY (%s)", (list(ROLES),)
    ).fetchall()


ACTIONS: dict[str, Callable[[Connection], object]] = {
    "check": lambda conn: drive(conn, migrate.inspect("howdah")),
    "migrate": lambda conn: migrate.migrate(conn, "howdah"),
    "grants": lambda conn: drive(conn, grants.steps("howdah", None)),
    "other grants": lambda conn: drive(conn, grants.steps("howdah", {"worker": ["mallory"]})),
}


def try_everything(conn: Connection) -> None:
    for name, action in ACTIONS.items():
        with contextlib.suppress(
            psycopg.Error, HowdahError
        ):  # a schema that was altered may be refused
            action(conn)
        conn.execute("ROLLBACK")
        assert superusers(conn) == [], name


# ── objects of the migration that are replaced while it runs ─────────────────────────────────────


@pytest.mark.parametrize(
    "mode", ["errors are caught", "errors are raised", "only while it is read"]
)
@pytest.mark.parametrize("swap", SWAPS)
def test_code_that_replaces_the_objects_of_a_migration_stays_confined(
    conn: Connection, swap: str, mode: str
) -> None:
    give_to_mallory(conn)
    ask_for_functions(conn)
    statements = SWAPS[swap]
    body = statements
    if mode == "errors are caught":
        body = f"BEGIN {statements}; EXCEPTION WHEN OTHERS THEN NULL; END"
    condition = "current_setting('howdah.returns') = 'text'" if "read" in mode else "true"
    as_mallory(
        conn,
        f"""
        CREATE FUNCTION trap.swap() RETURNS boolean LANGUAGE plpgsql AS $swap$
        BEGIN
            IF to_regclass('howdah.howdah_migration') IS NOT NULL AND to_regclass('howdah.former') IS NULL
               AND {condition}
            THEN
                {body};
            END IF;
            RETURN true;
        END $swap$;
        DROP TRIGGER grants_restore ON howdah.grants;
        ALTER TABLE howdah.grants RENAME TO real_grants;
        CREATE VIEW howdah.grants AS SELECT * FROM howdah.real_grants WHERE trap.swap();
        ALTER TABLE howdah.migrations RENAME TO real_migrations;
        CREATE VIEW howdah.migrations AS SELECT * FROM howdah.real_migrations WHERE trap.swap()""",
    )
    try_everything(conn)


def test_nothing_that_code_of_the_owner_did_while_it_was_read_stays(conn: Connection) -> None:
    give_to_mallory(conn)
    as_mallory(
        conn,
        """
        CREATE FUNCTION trap.leave() RETURNS boolean LANGUAGE plpgsql AS $$
        BEGIN CREATE TABLE trap.left_behind (); RETURN true; END $$;
        ALTER TABLE howdah.migrations RENAME TO real_migrations;
        CREATE VIEW howdah.migrations AS SELECT * FROM howdah.real_migrations WHERE trap.leave()""",
    )
    text = "SELECT max(version)::text FROM howdah.migrations"
    conn.execute("BEGIN")
    conn.execute(migrate.run_as_owner("howdah", text, returns="text").encode())
    assert conn.execute("SELECT current_setting('howdah.result')").fetchone() != ("",)
    conn.execute("COMMIT")
    found = conn.execute("SELECT to_regclass('trap.left_behind')").fetchone()
    assert found == (None,)
    assert conn.execute("SELECT to_regclass('howdah.howdah_migration')").fetchone() == (None,)


# ── roles that are not what they seem ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("change", ["SET ROLE mallory", "SET SESSION AUTHORIZATION mallory"])
def test_code_of_the_owner_does_not_undo_a_change_to_its_role(
    conn: Connection, change: str
) -> None:
    give_to_mallory(conn)
    ask_for_functions(conn)
    as_mallory(
        conn,
        "CREATE TRIGGER t BEFORE UPDATE ON howdah.migrations FOR EACH ROW EXECUTE FUNCTION trap.fire()",
    )
    conn.execute(change.encode())
    assert migrate.migrate(conn, "howdah").functions
    conn.execute("RESET SESSION AUTHORIZATION; RESET ROLE")
    assert superusers(conn) == []


@pytest.fixture
def owned(conn: Connection) -> Connection:
    """The schema belongs to pg_database_owner and its objects to mallory, who owns the database."""
    give_to_mallory(conn)
    (name,) = conn.execute("SELECT quote_ident(current_database())").fetchone() or ("",)
    conn.execute(f"ALTER DATABASE {name} OWNER TO mallory".encode())
    conn.execute("ALTER SCHEMA howdah OWNER TO pg_database_owner")
    return conn


def test_a_schema_of_pg_database_owner_is_migrated_as_the_owner_of_the_database(
    owned: Connection,
) -> None:
    ask_for_functions(owned)
    as_mallory(
        owned,
        "CREATE TRIGGER t BEFORE UPDATE ON howdah.migrations FOR EACH ROW EXECUTE FUNCTION trap.fire();"
        "DROP FUNCTION howdah.pending_count",
    )
    assert migrate.migrate(owned, "howdah").functions
    assert superusers(owned) == []
    assert owners(owned) == [("mallory",)]
    owned.execute(f"ALTER DATABASE {owned.info.dbname} OWNER TO howdah".encode())


def owners(conn: Connection) -> list[Any]:
    return conn.execute(
        "SELECT pg_get_userbyid(proowner) FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace "
        "UNION SELECT pg_get_userbyid(relowner) FROM pg_class WHERE relnamespace = 'howdah'::regnamespace "
        "UNION SELECT pg_get_userbyid(typowner) FROM pg_type WHERE typnamespace = 'howdah'::regnamespace"
    ).fetchall()


def test_a_schema_of_pg_database_owner_can_be_given_to_an_administrator(owned: Connection) -> None:
    known = drive(owned, grants.steps("howdah", {"administrator": ["friend"]}))
    assert known["administrator"] == ["friend"]
    assert owners(owned) == [("friend",)]
    owned.execute(f"ALTER DATABASE {owned.info.dbname} OWNER TO howdah".encode())


def test_nothing_belongs_to_a_previous_owner_who_lost_the_membership(conn: Connection) -> None:
    give_to_mallory(conn)
    drive(conn, grants.steps("howdah", {"administrator": ["friend"]}))
    conn.execute("REVOKE friend FROM mallory")
    ask_for_functions(conn)
    assert migrate.migrate(conn, "howdah").functions
    assert owners(conn) == [("friend",)]


@pytest.mark.parametrize(
    ("role", "sentence"),
    [
        ("howdah", 'role "howdah" is a superuser and cannot be the administrator of a schema of'),
        ("pg_database_owner", 'role "pg_database_owner" is reserved'),
    ],
)
def test_a_role_that_would_lend_its_privileges_cannot_be_the_administrator(
    conn: Connection, role: str, sentence: str
) -> None:
    give_to_mallory(conn)
    with pytest.raises(psycopg.Error, match=sentence):
        drive(conn, grants.steps("howdah", {"administrator": [role]}))
    conn.execute("ROLLBACK")
    member = conn.execute("SELECT pg_has_role('mallory', 'howdah', 'MEMBER')").fetchone()
    assert member == (False,)


def test_a_role_that_cannot_act_as_the_owner_is_refused_before_code_of_the_owner_runs(
    conn: Connection,
) -> None:
    give_to_mallory(conn)
    as_mallory(
        conn,
        """
        CREATE FUNCTION trap.tell() RETURNS boolean LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'this ran as %', current_user; END $$;
        ALTER TABLE howdah.grants RENAME TO real_grants;
        CREATE VIEW howdah.grants AS SELECT * FROM howdah.real_grants WHERE trap.tell();
        GRANT SELECT ON ALL TABLES IN SCHEMA howdah TO friend; GRANT USAGE ON SCHEMA howdah TO friend""",
    )
    conn.execute("SET SESSION AUTHORIZATION friend")
    with pytest.raises(
        psycopg.errors.InsufficientPrivilege, match='must be able to act as role "mallory"'
    ):
        drive(conn, grants.steps("howdah", None))  # fmt: skip
    conn.execute("ROLLBACK")


# ── code that other roles attached to a schema of a superuser ─────────────────────────────────────

ATTACHED = {
    "a trigger": (
        "GRANT ALL ON ALL TABLES IN SCHEMA howdah TO mallory",
        "CREATE TRIGGER t BEFORE UPDATE ON howdah.migrations FOR EACH ROW EXECUTE FUNCTION trap.fire();"
        "CREATE TRIGGER t BEFORE INSERT OR DELETE ON howdah.grants FOR EACH ROW EXECUTE FUNCTION trap.fire()",
        'the function of trigger t on howdah.grants belongs to role "mallory"',
    ),
    "a foreign key": (
        "INSERT INTO howdah.grants VALUES ('worker', 'mallory');"
        "GRANT ALL ON ALL TABLES IN SCHEMA howdah TO mallory",
        "CREATE TABLE trap.child (kind text, role text, "
        "FOREIGN KEY (kind, role) REFERENCES howdah.grants (kind, role) ON DELETE CASCADE);"
        "INSERT INTO trap.child VALUES ('worker', 'mallory');"
        "CREATE TRIGGER t BEFORE DELETE ON trap.child FOR EACH ROW EXECUTE FUNCTION trap.fire();"
        "CREATE TRIGGER u AFTER DELETE ON trap.child FOR EACH ROW EXECUTE FUNCTION trap.fire()",
        'table trap.child, which refers to howdah.grants, belongs to role "mallory"',
    ),
    "a function": (
        "GRANT CREATE ON SCHEMA howdah TO mallory",
        "CREATE FUNCTION howdah.jsonb_build_array(int, int, text) RETURNS jsonb LANGUAGE plpgsql "
        """AS $$ BEGIN PERFORM trap.evil(); RETURN '[1, 1, "x"]'; END $$""",
        "role mallory may create objects in schema",
    ),
    "a function of a privilege that was revoked": (
        "GRANT CREATE ON SCHEMA howdah TO mallory",
        "CREATE FUNCTION howdah.jsonb_build_array(int, int, text) RETURNS jsonb LANGUAGE plpgsql "
        """AS $$ BEGIN PERFORM trap.evil(); RETURN '[1, 1, "x"]'; END $$;"""
        "RESET ROLE; REVOKE CREATE ON SCHEMA howdah FROM mallory",
        r'function howdah.jsonb_build_array\(integer,integer,text\) belongs to role "mallory"',
    ),
    "a function of everyone": (
        "GRANT CREATE ON SCHEMA howdah TO PUBLIC",
        "CREATE FUNCTION howdah.jsonb_build_array(int, int, text) RETURNS jsonb LANGUAGE plpgsql "
        """AS $$ BEGIN PERFORM trap.evil(); RETURN '[1, 1, "x"]'; END $$""",
        "every role may create objects in schema",
    ),
}  # fmt: skip


@pytest.mark.parametrize("attached", ATTACHED)
def test_code_that_another_role_attached_is_refused(conn: Connection, attached: str) -> None:
    privilege, code, sentence = ATTACHED[attached]
    ask_for_functions(conn)
    conn.execute(privilege.encode())
    conn.execute("GRANT USAGE ON SCHEMA howdah TO mallory")
    as_mallory(conn, code)
    try_everything(conn)
    for name, action in ACTIONS.items():
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=sentence):
            action(conn)
        conn.execute("ROLLBACK")
        assert superusers(conn) == [], name


@pytest.mark.parametrize("table", ["grants", "migrations"])
def test_no_trigger_is_attached_between_the_check_and_the_migration(
    conn: Connection, fresh_database: str, table: str
) -> None:
    conn.execute(f"GRANT TRIGGER ON howdah.{table} TO mallory".encode())
    conn.execute("GRANT USAGE ON SCHEMA howdah TO mallory")
    conn.execute("BEGIN")
    conn.execute(migrate.run_as_owner("howdah", "SELECT 1").encode())
    with psycopg.connect(fresh_database, autocommit=True) as other:
        other.execute("SET ROLE mallory; SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute(
                f"CREATE TRIGGER t BEFORE UPDATE ON howdah.{table} FOR EACH ROW "
                "EXECUTE FUNCTION trap.fire()".encode()
            )
    conn.execute("ROLLBACK")
