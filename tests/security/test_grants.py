"""`howdah migrate --grants`: to which roles, repeated, by which role, and with later migrations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from secured import GRANTS, Secured, run, succeed

from howdah import AsyncJobQueue, JobQueue, NotPermitted, SchemaMissing, SchemaOutdated, sql
from howdah.database import grants, migrate, sql_steps
from howdah.errors import InvalidOption
from howdah.sql import latest_version
from next_release import STEP, VERSION, next_release

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from howdah.sql import Release

    Connection = psycopg.Connection[Any]
    NewRole = Callable[..., str]


def rights(conn: Connection, schema: str = "howdah") -> list[Any]:
    """The owner and the privileges of every object."""
    return conn.execute(
        "SELECT relname::text, relowner::regrole::text, relacl::text FROM pg_class "
        "WHERE relnamespace = quote_ident(%(s)s)::regnamespace AND relkind IN ('r', 'p', 'v', 'S') "
        "UNION ALL SELECT oid::regprocedure::text, proowner::regrole::text, proacl::text FROM pg_proc "
        "WHERE pronamespace = quote_ident(%(s)s)::regnamespace "
        "UNION ALL SELECT nspname, nspowner::regrole::text, nspacl::text FROM pg_namespace "
        "WHERE nspname = %(s)s ORDER BY 1",
        {"s": schema},
    ).fetchall()


def owners(conn: Connection, schema: str = "howdah") -> set[str]:
    return {owner for _, owner, _ in rights(conn, schema)}


def enqueue_as(url: str, schema: str = "howdah") -> None:
    queue = JobQueue(url, schema=schema)
    queue.enqueue("mail")
    queue.close()


# ── to which roles ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("", None),
        ("none", {}),
        ("producer=web", {"producer": ["web"]}),
        (
            "producer=web,producer=api, worker = jobs",
            {"producer": ["web", "api"], "worker": ["jobs"]},
        ),
        ('observer="; DROP', {"observer": ['"; DROP']}),
    ],
)
def test_roles_are_named_by_their_kind(text: str, roles: Any) -> None:
    assert grants.parse(text) == roles


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("producr=web", 'unknown kind of role "producr"; did you mean "producer"?'),
        ("web", 'unknown kind of role "web"; there are producer, worker, observer, administrator.'),
        ("producer=", '"producer=" names no role; write it as in producer=app_producer.'),
        ("administrator=a,administrator=b", "only one role can be the administrator"),
    ],
)
def test_a_text_that_names_no_role_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(InvalidOption) as refusal:
        grants.parse(text)
    assert sentence in str(refusal.value)


def test_without_names_four_groups_are_created_and_their_members_have_the_privileges(
    empty_database: str, new_role: NewRole
) -> None:
    schema = "till"
    there = ("--database", empty_database, "--schema", schema)
    try:
        answer = json.loads(succeed("migrate", "--grants", "--json", *there))
        kinds = ("producer", "worker", "observer", "administrator")
        assert answer["roles"] == {kind: [f"till_{kind}"] for kind in kinds}
        printed = succeed("migrate", "--grants", *there)
        assert "administrator  till_administrator" in printed
        member = new_role("till_member", "LOGIN IN ROLE till_producer")
        enqueue_as(empty_database.replace("://howdah@", f"://{member}@"), schema)
        with psycopg.connect(empty_database, autocommit=True) as conn:
            assert owners(conn, schema) == {"till_administrator"}
            logins = conn.execute(
                "SELECT count(*) FROM pg_roles WHERE rolname LIKE 'till\\_%r' AND rolcanlogin "
                "AND rolname <> 'till_member'"
            ).fetchone()
            assert logins == (0,)
    finally:
        with psycopg.connect(empty_database, autocommit=True) as conn:
            conn.execute("DROP SCHEMA IF EXISTS till CASCADE")
            for kind in ("producer", "worker", "observer", "administrator"):
                conn.execute(f"DROP ROLE IF EXISTS till_{kind}".encode())


def test_a_role_that_does_not_exist_is_named_and_nothing_is_granted(secured: Secured) -> None:
    with secured.connect() as conn:
        before = rights(conn)
        result = run("migrate", "--grants", "producer=app_wbe", "--database", secured.url)
        assert result.exit_code == 1
        assert 'role "app_wbe" does not exist; nothing was granted.' in result.stderr
        assert rights(conn) == before


@pytest.mark.parametrize(
    "hostile", ['a"b', "Web Front", "x'; DROP SCHEMA howdah; --", "ünï$$cødé", "\\'"]
)
def test_names_of_roles_and_schemas_are_only_names(
    empty_database: str, new_role: NewRole, hostile: str
) -> None:
    role = new_role(hostile)
    there = ("--database", empty_database, "--schema", hostile)
    succeed("migrate", "--grants", f"producer={role},administrator={role}", *there)
    with psycopg.connect(empty_database, autocommit=True) as conn:
        (name,) = conn.execute("SELECT quote_ident(%s)", (role,)).fetchone() or ("",)
        assert owners(conn, hostile) == {name}
        conn.execute(SQL("SET ROLE {}").format(Identifier(role)))
        conn.execute(SQL("SELECT {}.enqueue_job('x')").format(Identifier(hostile)))


# ── repeated and changed ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("again", [("--grants",), ("--grants", GRANTS)])
def test_granting_again_changes_nothing(secured: Secured, again: tuple[str, ...]) -> None:
    with secured.connect() as conn:
        before = rights(conn)
        for kind in (None, "administrator"):
            url = secured.url if kind is None else secured.as_kind(kind)
            succeed("migrate", *again, "--database", url)
            assert rights(conn) == before


def test_the_printed_sql_grants_the_same(empty_database: str, secured: Secured) -> None:
    script = succeed("migrate", "--sql", "--grants", GRANTS)
    with psycopg.connect(empty_database, autocommit=True) as conn:
        for _ in range(2):
            conn.execute(script.encode())
            script = succeed("migrate", "--sql", "--from", str(latest_version()), "--grants")
        # the script does not depend on the database that printed it
        with secured.connect() as other:
            assert rights(conn) == rights(other)


def test_a_role_that_is_no_longer_named_loses_its_privileges(
    secured: Secured, new_role: NewRole
) -> None:
    other = new_role("other_web")
    succeed("migrate", "--grants", f"producer={other}", "--database", secured.url)
    enqueue_as(secured.url.replace("://howdah@", f"://{other}@"))
    for kind in ("producer", "worker", "observer"):
        with pytest.raises(NotPermitted, match="permission denied for schema howdah"):
            enqueue_as(secured.as_kind(kind))
    enqueue_as(secured.as_kind("administrator"))
    answer = json.loads(succeed("migrate", "--grants", "none", "--json", "--database", secured.url))
    assert answer["roles"] == {
        "producer": [], "worker": [], "observer": [], "administrator": ["ops"],
    }  # fmt: skip
    with pytest.raises(NotPermitted, match="permission denied for schema howdah"):
        enqueue_as(secured.url.replace("://howdah@", f"://{other}@"))


# ── later migrations ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def newer(tmp_path: Path) -> Release:
    """The next release: it drops and creates claim_job_batch, and adds a table."""
    return next_release(tmp_path, step=STEP + "CREATE TABLE next_release (id int);")


def test_a_later_migration_grants_what_it_adds(secured: Secured, newer: Release) -> None:
    with secured.connect("administrator") as conn:
        before = set(rights(conn))
        migrate.migrate(conn, "howdah", release=newer)
        changed = set(rights(conn)) ^ before
    assert {name.partition("(")[0] for name, _, _ in changed} == {
        "howdah.claim_job_batch",
        "next_release",
    }
    for name, owner, granted in changed:
        assert owner == "ops"
        assert ("app_worker=X/ops" in (granted or "")) == name.startswith("howdah.claim_job_batch")
        assert "{=X" not in (granted or "")
    queue = JobQueue(secured.as_kind("worker"))
    queue.enqueue("mail")
    assert len(queue.claim()) == 1
    queue.close()


def test_a_member_of_the_administrators_migrates_and_the_owner_stays_the_same(
    empty_database: str,
    secured_template: str,
    new_role: NewRole,
    newer: Release,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alice = new_role("alice", "LOGIN IN ROLE ops")
    with psycopg.connect(empty_database, autocommit=True) as conn:
        migrate.migrate(conn, "howdah")
        sql_steps.drive(conn, grants.steps("howdah", {"administrator": ["ops"]}))
        monkeypatch.setattr(sql, "release", lambda: newer)
        enqueue_as(empty_database.replace("://howdah@", f"://{alice}@"))  # the first use migrates
        assert conn.execute("SELECT count(*) FROM howdah.next_release").fetchone() == (0,)
        assert owners(conn) == {"ops"}


def test_a_role_that_was_dropped_stops_no_migration(empty_database: str, newer: Release) -> None:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute("CREATE ROLE short_lived")
        migrate.migrate(conn, "howdah")
        sql_steps.drive(conn, grants.steps("howdah", {"producer": ["short_lived"]}))
        conn.execute("DROP OWNED BY short_lived")
        conn.execute("DROP ROLE short_lived")
        migrate.migrate(conn, "howdah", release=newer)
        sql_steps.drive(conn, grants.steps("howdah", None))


def test_partitions_that_a_worker_creates_belong_to_the_administrator(secured: Secured) -> None:
    with secured.connect() as conn:
        conn.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
        (partition,) = conn.execute(
            "SELECT max(relname) FROM pg_class WHERE relname ~ '^finished_jobs_2[0-9]{7}$'"
        ).fetchone() or ("",)
        conn.execute(f"DROP TABLE howdah.{partition}".encode())
    with secured.connect("worker") as conn:
        done = conn.execute("SELECT duty, error FROM howdah.run_maintenance()").fetchall()
    assert {duty: error for duty, error in done if error} == {}
    assert {duty for duty, _ in done} == {
        "recover", "keys", "sweep", "late", "clock", "prune", "partitions",
    }  # fmt: skip
    with secured.connect() as conn:
        made = conn.execute("SELECT tableowner FROM pg_tables WHERE tablename = %s", (partition,))
        assert made.fetchall() == [("ops",)]


# ── by which role ─────────────────────────────────────────────────────────────────────────────────


def test_the_previous_owner_can_still_enqueue(empty_database: str, new_role: NewRole) -> None:
    shop, boss = new_role("old_owner"), new_role("new_boss")
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(f"CREATE SCHEMA howdah AUTHORIZATION {shop}".encode())
        mine = empty_database.replace("://howdah@", f"://{shop}@")
        succeed("migrate", "--database", mine)
        succeed("migrate", "--grants", f"administrator={boss}", "--database", empty_database)
        assert owners(conn) == {boss}
    enqueue_as(mine)


def test_a_role_with_createrole_that_is_no_superuser_can_grant(
    empty_database: str, new_role: NewRole
) -> None:
    # As on managed servers: the most powerful role may create roles and databases, and nothing else.
    master = new_role("master", "LOGIN CREATEROLE")
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(f"GRANT CREATE ON DATABASE {conn.info.dbname} TO {master}".encode())
        try:
            url = empty_database.replace("://howdah@", f"://{master}@")
            succeed("migrate", "--grants", "--schema", "managed", "--database", url)
            assert owners(conn, "managed") == {"managed_administrator"}
            succeed("migrate", "--grants", "--schema", "managed", "--database", url)
        finally:
            conn.execute("DROP SCHEMA IF EXISTS managed CASCADE")
            for kind in ("producer", "worker", "observer", "administrator"):
                conn.execute(f"DROP ROLE IF EXISTS managed_{kind}".encode())


def test_the_error_for_a_role_that_may_not_create_roles_says_what_to_do(
    empty_database: str, new_role: NewRole
) -> None:
    # Roles belong to the whole server: a schema with its own name needs roles that no other test made.
    shop = new_role("plain_owner")
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(f"CREATE SCHEMA plain AUTHORIZATION {shop}".encode())
    url = empty_database.replace("://howdah@", f"://{shop}@")
    result = run("migrate", "--grants", "--schema", "plain", "--database", url)
    assert result.exit_code == 1
    assert 'role "plain_owner" may not grant privileges on schema "plain"' in result.stderr
    assert "permission denied to create role; nothing was granted." in result.stderr
    assert "--grants producer=app_web,worker=app_worker" in result.stderr


@pytest.mark.parametrize("other", [("--check",), ("--to", "1")])
def test_grants_cannot_be_combined_with_check_or_to(other: tuple[str, ...]) -> None:
    result = run("migrate", "--grants", *other)
    assert result.exit_code == 2
    assert "--grants goes with neither --check nor --to." in result.stderr


# ── first use ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_role_that_may_not_create_can_use_a_schema_that_is_up_to_date(
    secured: Secured,
) -> None:
    enqueue_as(secured.as_kind("producer"))
    queue = AsyncJobQueue(secured.as_kind("producer"))
    await queue.enqueue("mail")
    await queue.close()


async def test_a_role_that_may_not_create_gets_an_error_if_the_tables_are_missing(
    empty_database: str, new_role: NewRole
) -> None:
    url = empty_database.replace("://howdah@", f"://{new_role('newcomer')}@")
    sentence = 'schema "howdah" has no Howdah tables, and this role may not create them.'
    with pytest.raises(SchemaMissing, match=sentence):
        enqueue_as(url)
    queue = AsyncJobQueue(url)
    with pytest.raises(SchemaMissing, match=sentence):
        await queue.enqueue("mail")
    await queue.close()


async def test_a_role_that_may_not_migrate_gets_an_error_if_the_schema_is_outdated(
    empty_database: str, new_role: NewRole, newer: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = new_role("late_producer")
    with psycopg.connect(empty_database, autocommit=True) as conn:
        migrate.migrate(conn, "howdah")
        sql_steps.drive(conn, grants.steps("howdah", {"producer": [role]}))
    monkeypatch.setattr(sql, "release", lambda: newer)
    url = empty_database.replace("://howdah@", f"://{role}@")
    sentence = f"version 1 and this Howdah needs {VERSION}. Run `howdah migrate` as its admin"
    with pytest.raises(SchemaOutdated, match=sentence):
        enqueue_as(url)
    queue = AsyncJobQueue(url)
    with pytest.raises(SchemaOutdated, match=sentence):
        await queue.enqueue("mail")
    await queue.close()


def test_a_schema_in_which_every_role_may_create_is_refused(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute("CREATE SCHEMA howdah")
        conn.execute("GRANT CREATE ON SCHEMA howdah TO PUBLIC")
        result = run("migrate", "--database", empty_database)
        assert result.exit_code == 1
        assert 'every role may create objects in schema "howdah"; use a separate' in result.stderr
        assert owners(conn) == {"howdah"}
        assert len(rights(conn)) == 1


def test_the_doctor_reports_roles_that_could_redirect_functions(secured: Secured) -> None:
    def access() -> dict[str, Any]:
        lines = run("doctor", "--json", "--database", secured.url).stdout.splitlines()
        return next(each for each in map(json.loads, lines) if each["check"] == "access")

    assert access()["level"] == "ok"
    assert access()["text"] == 'owned by "ops", used by 3 other roles'
    with secured.connect() as conn:
        conn.execute("GRANT CREATE ON SCHEMA howdah TO app_web")
        assert access()["level"] == "problem"
        conn.execute("REVOKE CREATE ON SCHEMA howdah FROM app_web")
        conn.execute("ALTER SCHEMA howdah OWNER TO howdah")
        assert access()["level"] == "warning"
