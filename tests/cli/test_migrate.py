"""`howdah migrate`, as a person and as a deploy script use it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import psycopg
import pytest
from click.testing import CliRunner, Result

from howdah import sql
from howdah.cli import main

LABELS = [f"{each.version:04}_{each.name}" for each in sql.migrations()]
LATEST = sql.latest_version()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["migrate", *arguments])


@pytest.fixture
def role(empty_database: str) -> str:
    """The URL of `empty_database` for a role that may do nothing there."""
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute("DROP ROLE IF EXISTS nobody_special")
        conn.execute("CREATE ROLE nobody_special LOGIN")
    return empty_database.replace("//howdah@", "//nobody_special@")


def test_it_says_what_it_applied_and_may_be_repeated(empty_database: str) -> None:
    first = run("--database", empty_database)
    assert first.exit_code == 0
    *applied, sentence = first.stdout.splitlines()
    assert applied == [f"applied {label}" for label in LABELS]
    assert sentence.startswith('Schema "howdah" of database "test_')
    assert sentence.endswith(f" is at version {LATEST}, up to date.")
    assert run("--database", empty_database).stdout == sentence + "\n"


def test_it_can_stop_at_a_version_and_go_on_later(empty_database: str) -> None:
    assert run("--database", empty_database, "--to", "1").stdout.splitlines()[:1] == [
        f"applied {LABELS[0]}"
    ]
    rest = run("--database", empty_database).stdout.splitlines()[:-1]
    assert rest == [f"applied {label}" for label in LABELS[1:]]


def test_a_version_that_does_not_exist_is_refused(empty_database: str) -> None:
    result = run("--database", empty_database, "--to", "9999")
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: --to is 9999; this Howdah knows versions 1 to {LATEST}.\n",
    )


def test_check_exits_1_and_says_what_is_missing(empty_database: str) -> None:
    result = run("--database", empty_database, "--check")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[:-2] == [f"missing {label}" for label in LABELS]
    assert lines[-2].endswith(f" does not exist yet; version {LATEST} is the newest.")
    assert lines[-1] == "Run `howdah migrate`."
    assert run("--database", empty_database, "--check").exit_code == 1  # it created nothing


def test_check_of_a_schema_that_is_behind(empty_database: str) -> None:
    run("--database", empty_database, "--to", "1")
    result = run("--database", empty_database, "--check")
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("missing")] == [
        f"missing {label}" for label in LABELS[1:]
    ]


def test_check_exits_0_when_all_is_well(database: str) -> None:
    result = run("--database", database, "--check")
    assert result.exit_code == 0
    assert result.stdout.endswith(f" is at version {LATEST}, up to date.\n")


def test_json_is_one_object_for_programs(empty_database: str) -> None:
    behind = run("--database", empty_database, "--check", "--json")
    assert behind.exit_code == 1
    assert json.loads(behind.stdout) == {
        "schema": "howdah",
        "version": 0,
        "latest": LATEST,
        "up_to_date": False,
        "pending": LABELS,
    }
    assert json.loads(run("--database", empty_database, "--json").stdout) == {
        "schema": "howdah",
        "version": LATEST,
        "latest": LATEST,
        "up_to_date": True,
        "pending": [],
        "applied": LABELS,
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


def test_the_sql_from_a_version_on(empty_database: str) -> None:
    run("--database", empty_database, "--to", "1")
    script = run("--sql", "--from", "1").stdout
    assert script == run("--sql", "--from", "current", "--database", empty_database).stdout
    assert script.count("BEGIN;") >= LATEST - 1
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(script.encode())
    assert run("--database", empty_database, "--check").exit_code == 0
    assert run("--sql", "--from", "current", "--database", empty_database).stdout == (
        f'-- Schema "howdah" is up to date at version {LATEST}.\n'
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
            "INSERT INTO howdah.migrations (version, name, oldest_code) VALUES (900, 'far', 900)"
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
            "INSERT INTO howdah.migrations (version, name, oldest_code) VALUES (900, 'near', 1)"
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
