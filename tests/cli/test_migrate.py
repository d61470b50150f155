"""`howdah migrate`, as people and deploy scripts use it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from howdah import HowdahError, JobQueue, sql
from howdah.cli import main
from next_release import LABEL, VERSION, next_release

if TYPE_CHECKING:
    from pathlib import Path

LABELS = [each.label for each in sql.release().steps]
LATEST = sql.latest_version()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["migrate", *arguments])


@pytest.fixture
def role(empty_database: str) -> str:
    """The URL of `empty_database` for a role without privileges."""
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute("DROP ROLE IF EXISTS nobody_special")
        conn.execute("CREATE ROLE nobody_special LOGIN")
    return empty_database.replace("//howdah@", "//nobody_special@")


def test_it_names_what_it_applied_and_can_be_repeated(empty_database: str) -> None:
    first = run("--database", empty_database)
    assert first.exit_code == 0
    *applied, sentence = first.stdout.splitlines()
    assert applied == [f"applied {label}" for label in LABELS]
    assert sentence.startswith('Schema "howdah" of database "test_')
    assert sentence.endswith(f" is at version {LATEST}, up to date.")
    assert run("--database", empty_database).stdout == sentence + "\n"


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the next release."""
    release = next_release(tmp_path)
    monkeypatch.setattr(sql, "release", lambda: release)


def test_it_can_be_told_the_version_it_migrates_to(empty_database: str) -> None:
    assert run("--database", empty_database, "--to", str(LATEST)).stdout.splitlines()[:-1] == [
        f"applied {label}" for label in LABELS
    ]


@pytest.mark.usefixtures("newer")
def test_a_version_before_the_newest_cannot_be_made(empty_database: str) -> None:
    result = run("--database", empty_database, "--to", "1")
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: --to is 1; this Howdah can only migrate to version {VERSION}, which its functions need. "
        "Run `howdah migrate` of the release whose newest version is 1.\n",
    )


def test_a_schema_that_has_reached_the_version_is_left_as_it_is(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = next_release(tmp_path)
    monkeypatch.setattr(sql, "release", lambda: release)
    result = run("--database", database, "--to", str(LATEST))
    assert result.exit_code == 0
    assert "applied" not in result.stdout
    assert f" is at version {LATEST}; version {VERSION} is the newest." in result.stdout


def test_a_version_that_does_not_exist_is_refused(empty_database: str) -> None:
    result = run("--database", empty_database, "--to", "9999")
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: --to is 9999; this Howdah knows versions 1 to {LATEST}.\n",
    )


def test_check_exits_1_and_names_what_is_missing(empty_database: str) -> None:
    result = run("--database", empty_database, "--check")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[:-2] == [f"missing {label}" for label in LABELS]
    assert lines[-2].endswith(f" does not exist yet; version {LATEST} is the newest.")
    assert lines[-1] == "Run `howdah migrate`."
    assert run("--database", empty_database, "--check").exit_code == 1  # it created nothing


@pytest.mark.usefixtures("newer")
def test_check_of_an_older_schema_names_the_missing_steps(database: str) -> None:
    result = run("--database", database, "--check")
    assert result.exit_code == 1
    first, sentence, advice = result.stdout.splitlines()
    assert first == f"missing {LABEL}"
    assert sentence.endswith(f" is at version {LATEST}; version {VERSION} is the newest.")
    assert advice == "Run `howdah migrate`."


def test_check_exits_0_if_nothing_is_missing(database: str) -> None:
    result = run("--database", database, "--check")
    assert result.exit_code == 0
    assert result.stdout.endswith(f" is at version {LATEST}, up to date.\n")


# ── altered schemas ───────────────────────────────────────────────────────────────────────────────

CLAIM_INDEX = (
    "CREATE INDEX live_jobs_pending ON howdah.live_jobs USING btree (queue, job_type, priority DESC, "
    "run_at, id) WHERE ((status = 'pending'::text) AND (blockers = 0))"
)


def change(database: str, *statements: str) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        for each in statements:
            conn.execute(each.encode())


def differences(database: str) -> list[dict[str, Any]]:
    result = run("--database", database, "--check", "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == (1 if facts["differences"] else 0)
    assert facts["up_to_date"] is not bool(facts["differences"])
    found: list[dict[str, Any]] = facts["differences"]
    return found


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("DROP INDEX howdah.live_jobs_pending", "missing index live_jobs_pending"),
        (
            "DROP INDEX howdah.leases_expired; "
            "CREATE INDEX leases_expired ON howdah.leases (claimed_at)",
            "altered index leases_expired",
        ),
        (
            "UPDATE pg_index SET indisvalid = false "
            "WHERE indexrelid = 'howdah.live_jobs_ordered'::regclass",
            "altered index live_jobs_ordered",
        ),
        ("ALTER TABLE howdah.workers DROP COLUMN host", "missing column workers.host"),
        (
            "ALTER TABLE howdah.watchers ALTER until TYPE timestamp",
            "altered column watchers.until",
        ),
        (
            "ALTER TABLE howdah.live_jobs ALTER max_attempts SET DEFAULT 7",
            "altered column live_jobs.max_attempts",
        ),
        ("ALTER TABLE howdah.lanes ADD mine int", "unexpected column lanes.mine"),
        (
            "ALTER TABLE howdah.live_jobs DROP CONSTRAINT live_status",
            "missing constraint live_jobs.live_status",
        ),
        ("ALTER TABLE howdah.lanes DROP CONSTRAINT lanes_pkey", "missing constraint lanes.lanes_pkey"),
        (
            "DROP TRIGGER live_jobs_assign_key ON howdah.live_jobs",
            "missing trigger live_jobs.live_jobs_assign_key",
        ),
        (
            "ALTER TABLE howdah.live_jobs DISABLE TRIGGER live_jobs_assign_key",
            "altered trigger live_jobs.live_jobs_assign_key",
        ),
        (
            "CREATE TRIGGER mine AFTER INSERT ON howdah.live_jobs "
            "EXECUTE FUNCTION suppress_redundant_updates_trigger()",
            "unexpected trigger live_jobs.mine",
        ),
        ("DROP FUNCTION howdah.cancel_jobs", "missing function cancel_jobs(uuid[])"),
        (
            "ALTER FUNCTION howdah.cancel_jobs SET lock_timeout = '1h'",
            "altered function cancel_jobs(uuid[])",
        ),
        (
            "CREATE FUNCTION howdah.cancel_jobs(uuid) RETURNS void LANGUAGE sql AS ''",
            "unexpected function cancel_jobs(uuid)",
        ),
        (
            "ALTER DOMAIN howdah.job_data DROP CONSTRAINT data_within_limit",
            "altered domain job_data",
        ),
        (
            "ALTER TABLE howdah.finished_jobs DETACH PARTITION howdah.finished_jobs_default",
            "altered table finished_jobs_default",
        ),
        ("ALTER TABLE howdah.watchers SET UNLOGGED", "altered table watchers"),
    ],
)  # fmt: skip
def test_check_finds_what_is_missing_or_altered(database: str, statement: str, found: str) -> None:
    assert differences(database) == []
    change(database, statement)
    assert found in [f"{e['problem']} {e['kind']} {e['name']}" for e in differences(database)]
    result = run("--database", database, "--check")
    assert result.exit_code == 1
    assert found in [line.partition(": ")[0] for line in result.stdout.splitlines()]
    assert f" is at version {LATEST}, and was altered since." in result.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE INDEX mine ON howdah.live_jobs ((data ->> 'customer'))",
        "CREATE TABLE howdah.mine (x int PRIMARY KEY)",
        "CREATE VIEW howdah.mine AS SELECT 1 AS x",
        "ALTER TABLE howdah.live_jobs SET (fillfactor = 60)",
        "SELECT howdah.maintain_partitions(60)",
        "REINDEX TABLE CONCURRENTLY howdah.live_jobs",
        "GRANT SELECT ON howdah.lanes TO PUBLIC",
    ],
)
def test_check_allows_what_users_and_maintenance_may_do(database: str, statement: str) -> None:
    change(database, statement)
    assert differences(database) == []


def test_check_prints_the_statements_that_repair_a_schema(database: str) -> None:
    change(
        database,
        "DROP INDEX howdah.live_jobs_pending, howdah.finished_jobs_unsuccessful",
        "DROP TRIGGER live_jobs_assign_key ON howdah.live_jobs",
        "ALTER TABLE howdah.live_jobs DISABLE TRIGGER ALL",
        "ALTER TABLE howdah.lanes DROP CONSTRAINT lanes_pkey",
        "ALTER TABLE howdah.job_events DROP CONSTRAINT kind_length, "
        "ADD CONSTRAINT kind_length CHECK (length(kind) < 50)",
    )
    lines = run("--database", database, "--check").stdout.splitlines()
    start = lines.index("`howdah migrate` repairs functions only. Run this for the rest:")
    assert CLAIM_INDEX + ";" in lines[start:]
    change(database, *lines[start + 1 :])
    assert differences(database) == []


def test_check_names_what_it_has_no_statement_for(database: str) -> None:
    change(
        database,
        "ALTER TABLE howdah.workers DROP COLUMN host",
        "CREATE FUNCTION howdah.cancel_jobs(uuid) RETURNS void LANGUAGE sql AS ''",
    )
    assert run("--database", database, "--check").stdout.splitlines()[-2:] == [
        "Remove or move what was added: function cancel_jobs(uuid).",
        "Repair by hand or from a backup, as data may be lost: column workers.host.",
    ]


def test_migrating_repairs_functions_and_names_the_rest(database: str) -> None:
    change(
        database,
        "DROP FUNCTION howdah.cancel_jobs",
        "ALTER FUNCTION howdah.enqueue_job RESET ALL",
        "DROP INDEX howdah.live_jobs_pending",
    )
    advice = run("--database", database, "--check").stdout.splitlines()
    assert "Run `howdah migrate`." in advice
    result = run("--database", database)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:2] == ["replaced the functions", "missing index live_jobs_pending"]
    assert lines[-1] == CLAIM_INDEX + ";"
    (left,) = differences(database)
    assert left == {
        "problem": "missing",
        "kind": "index",
        "name": "live_jobs_pending",
        "expected": CLAIM_INDEX,
        "found": None,
        "repair": [CLAIM_INDEX],
    }


def test_the_sql_from_the_current_version_repairs_functions(database: str) -> None:
    change(database, "DROP FUNCTION howdah.cancel_jobs")
    change(database, run("--sql", "--from", "current", "--database", database).stdout)
    assert differences(database) == []


def test_check_writes_nothing(database: str) -> None:
    read_only = f"{database}&options=-c%20default_transaction_read_only%3Don"
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        change(read_only, "DELETE FROM howdah.lanes")
    assert run("--database", read_only, "--check").exit_code == 0


def test_functions_of_another_build_are_named_and_replaced(database: str) -> None:
    change(database, "UPDATE howdah.migrations SET functions_hash = 'other'")
    result = run("--database", database, "--check")
    assert result.exit_code == 1
    sentence, advice = result.stdout.splitlines()
    assert sentence.endswith(f" is at version {LATEST}, with the functions of another build.")
    assert advice == "Run `howdah migrate`."
    assert (
        json.loads(run("--database", database, "--check", "--json").stdout)["up_to_date"] is False
    )
    assert run("--database", database).stdout.startswith("replaced the functions\n")
    assert run("--database", database, "--check").exit_code == 0


def test_a_function_of_another_version_or_of_the_user_is_one_sentence(empty_database: str) -> None:
    change(
        empty_database,
        "CREATE SCHEMA howdah",
        "CREATE FUNCTION howdah.mine() RETURNS int LANGUAGE sql RETURN 1",
    )
    result = run("--database", empty_database)
    assert (result.exit_code, result.stderr) == (
        1,
        'Error: the database refused to migrate schema "howdah": schema "howdah" contains functions that '
        "this version of Howdah does not have: mine(). Nothing was changed. Move a function of yours to "
        "another schema (ALTER ROUTINE ... SET SCHEMA ...), drop any other (DROP ROUTINE ...), and migrate "
        "again.\n",
    )


# ── for programs ──────────────────────────────────────────────────────────────────────────────────


def test_json_is_one_object_for_programs(empty_database: str) -> None:
    behind = run("--database", empty_database, "--check", "--json")
    assert behind.exit_code == 1
    assert json.loads(behind.stdout) == {
        "schema": "howdah",
        "version": 0,
        "latest": LATEST,
        "up_to_date": False,
        "pending": LABELS,
        "differences": [],
    }
    assert json.loads(run("--database", empty_database, "--json").stdout) == {
        "schema": "howdah",
        "version": LATEST,
        "latest": LATEST,
        "up_to_date": True,
        "pending": [],
        "differences": [],
        "applied": LABELS,
        "functions_replaced": True,
    }


def test_several_queues_fit_one_database(empty_database: str) -> None:
    for schema in ("howdah", 'an odd "name"'):
        assert run("--database", empty_database, "--schema", schema).exit_code == 0
    odd = '"an odd ""name"""'
    with psycopg.connect(empty_database) as conn:
        conn.execute(f"SELECT {odd}.enqueue_job('work')".encode())
        query = f"SELECT howdah.pending_count(), {odd}.pending_count()"
        counts = conn.execute(query.encode()).fetchone()
    assert counts == (0, 1)


def test_the_sql_needs_no_database_and_does_the_same(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://nowhere.invalid/none")
    script = run("--sql", "--schema", "queue").stdout
    assert script.startswith("BEGIN;\n")
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(script.encode())
    check = run("--check", "--schema", "queue", "--database", empty_database)
    assert check.exit_code == 0


@pytest.mark.usefixtures("newer")
def test_the_sql_from_a_version_on(database: str) -> None:
    script = run("--sql", "--from", str(LATEST)).stdout
    assert script == run("--sql", "--from", "current", "--database", database).stdout
    assert re.findall(r"^(?:BEGIN|COMMIT);$", script, re.MULTILINE) == ["BEGIN;", "COMMIT;"]
    assert "CREATE TABLE live_jobs" not in script
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(script.encode())
    assert run("--database", database, "--check").exit_code == 0
    assert run("--sql", "--from", "current", "--database", database).stdout == (
        f'-- Schema "howdah" is up to date at version {VERSION}.\n'
    )


def test_a_start_that_is_no_version_is_refused() -> None:
    result = run("--sql", "--from", "yesterday")
    assert (result.exit_code, result.stderr) == (
        1,
        'Error: --from is "yesterday"; it must be a version number or `current`.\n',
    )


@pytest.mark.parametrize(
    "options",
    [("--check", "--sql"), ("--from", "1"), ("--to", "1", "--sql"), ("--to", "1", "--check")],
)
def test_options_that_contradict_each_other_are_wrong_usage(options: tuple[str, ...]) -> None:
    assert run(*options).exit_code == 2


def test_no_database_names_both_ways_out(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    for name in ("HOWDAH_DATABASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    result = run()
    assert result.exit_code == 1
    assert "Set HOWDAH_DATABASE_URL" in result.stderr
    assert "howdah db start" in result.stderr


def test_an_unreachable_database_is_code_4_and_shows_no_password() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        port = unused.getsockname()[1]
        result = run("--database", f"postgresql://ada:s3cret@127.0.0.1:{port}/shop")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith('Error: cannot reach database "shop" at 127.0.0.1:')
    assert "s3cret" not in result.stderr


@pytest.mark.parametrize("rest", ["%zz/shop", "[::1/shop", "127.0.0.1:1/shop?foo=bar"])
def test_a_url_that_cannot_be_read_shows_no_password(rest: str) -> None:
    result = run("--database", f"postgresql://ada:s3cret@{rest}")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: the database URL cannot be read; write it as ")
    assert "s3cret" not in result.stderr


def test_too_new_a_schema_is_refused(database: str) -> None:
    with psycopg.connect(database) as conn:
        conn.execute(
            "INSERT INTO howdah.migrations (version, name, oldest_code, functions_hash) "
            "VALUES (900, 'far', 900, '')"
        )
    for options in ((), ("--check",)):
        result = run("--database", database, *options)
        assert (result.exit_code, result.stderr) == (
            1,
            'Error: schema "howdah" is at version 900, and this Howdah supports versions up to '
            f"{LATEST}. Upgrade the howdah package in this environment.\n",
        )


def test_a_newer_schema_that_still_takes_this_code_is_fine(database: str) -> None:
    with psycopg.connect(database) as conn:
        conn.execute(
            "INSERT INTO howdah.migrations (version, name, oldest_code, functions_hash) "
            "VALUES (900, 'near', 1, '')"
        )
    result = run("--database", database, "--check")
    assert result.exit_code == 0
    assert result.stdout.endswith(
        f"at version 900; this Howdah knows {LATEST}, and works with it.\n"
    )


@pytest.mark.parametrize("schema", ["", "pg_mine", "x" * 60])
def test_a_bad_schema_name_is_one_sentence(schema: str) -> None:
    result = run("--database", "postgresql://nowhere.invalid/none", "--schema", schema)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "schema name" in result.stderr


def test_missing_rights_are_one_sentence(role: str) -> None:
    result = run("--database", role)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(
        'Error: the database refused to migrate schema "howdah": permission denied'
    )
    assert "Traceback" not in result.stderr


def test_several_at_once_apply_each_step_once(empty_database: str) -> None:
    command = [sys.executable, "-m", "howdah", "migrate", "--database", empty_database, "--json"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [json.loads(each.communicate(timeout=60)[0]) for each in running]
    assert [each.returncode for each in running] == [0] * 4
    assert sorted(label for answer in answers for label in answer["applied"]) == LABELS
    assert all(answer["up_to_date"] for answer in answers)


def test_a_dropped_view_is_named_once_and_its_repair_is_printed(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("DROP VIEW howdah.jobs CASCADE")
        result = run("--database", database, "--check")
        assert result.exit_code == 1
        assert "missing view jobs" in result.stdout
        assert "missing column jobs." not in result.stdout
        statements = re.findall(r"^(?:SET|CREATE) .*?;$", result.stdout, re.MULTILINE | re.DOTALL)
        assert statements[1].startswith("CREATE OR REPLACE VIEW jobs AS")
        views = [each for each in statements if "TRIGGER" not in each]
        conn.execute("; ".join(each.rstrip(";") for each in views).encode())
        assert run("--database", database).exit_code == 0
        triggers = [each for each in statements if "TRIGGER" in each]
        conn.execute("; ".join(each.rstrip(";") for each in triggers).encode())
    assert run("--database", database, "--check").exit_code == 0


def test_a_schema_of_an_early_build_is_refused(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("ALTER TABLE howdah.migrations DROP COLUMN functions_hash")
    for arguments in ([], ["--check"]):
        result = run("--database", database, *arguments)
        assert result.exit_code == 1
        assert result.stderr == (
            'Error: schema "howdah" was created by an early build of Howdah, before its first release, and '
            "cannot be migrated. Use another schema or database, or drop this one with its jobs: "
            "DROP SCHEMA … CASCADE.\n"
        )


def test_a_client_explains_that_a_function_of_the_users_prevents_the_migration(
    database: str,
) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("CREATE FUNCTION howdah.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        conn.execute("UPDATE howdah.migrations SET functions_hash = 'another build'")
    with pytest.raises(HowdahError) as caught:
        JobQueue(database).pending()
    assert str(caught.value).startswith(
        'schema "howdah" contains functions that this version of Howdah does not have: mine(). Move'
    )
