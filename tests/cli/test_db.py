from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import howdah
from howdah.cli import main
from howdah.embedded import EmbeddedServer
from howdah.errors import DatabaseUnreachable, HowdahError


@pytest.fixture(scope="module")
def project():
    """A directory for an embedded server, which the tests leave running."""
    with tempfile.TemporaryDirectory(prefix="howdah-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
        EmbeddedServer(Path(name) / ".howdah/pg18").remove()


@pytest.fixture
def run(project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/production")
    return lambda *arguments, **options: CliRunner().invoke(main, arguments, **options)


@pytest.fixture
def server(project, run):
    assert run("db", "start").exit_code == 0
    return EmbeddedServer(project / ".howdah/pg18")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


def test_start_prints_the_server_and_may_be_repeated(run, server):
    again = run("db", "start")
    assert again.stdout.splitlines() == [
        f"PostgreSQL is running in {server.directory} (pid {server.pid()}).",
        server.url,
    ]
    assert json.loads(run("db", "start", "--json").stdout)["url"] == server.url


def test_url_prints_only_the_url(run, server):
    assert run("db", "url").stdout == f"{server.url}\n"
    assert json.loads(run("db", "url", "--json").stdout) == {"url": server.url}


def test_status_as_json_is_one_object(run, server):
    lines = run("db", "status", "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "exists": True,
            "running": True,
            "pid": server.pid(),
            "directory": str(server.directory),
            "url": server.url,
            "log": str(server.log_file),
        }
    ]


def test_status_is_one_line_per_fact(run, server):
    assert run("db", "status").stdout.splitlines() == [
        f"server     running, pid {server.pid()}",
        f"directory  {server.directory}",
        f"url        {server.url}",
        f"log        {server.log_file}",
    ]


def test_stop_and_status_of_a_stopped_server(run, server):
    assert run("db", "stop").stdout == f"PostgreSQL in {server.directory} stopped.\n"
    assert run("db", "stop").stdout == f"PostgreSQL in {server.directory} was not running.\n"
    assert run("db", "status").stdout.splitlines()[0] == "server     stopped"


def test_stop_and_rm_as_json(run, server):
    directory = str(server.directory)
    assert json.loads(run("db", "stop", "--json").stdout) == {
        "stopped": True,
        "directory": directory,
    }
    removed = json.loads(run("db", "rm", "--yes", "--json").stdout)
    assert removed == {"removed": True, "directory": directory}


def test_psql_receives_its_arguments_and_starts_the_server(project, server):
    server.stop("immediate")
    done = subprocess.run(
        [sys.executable, "-m", "howdah", "db", "psql", "--", "-Atc", "SELECT current_database()"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "howdah\n", "")
    assert server.is_running()


def test_dir_names_the_server(run, server, elsewhere):
    result = run("db", "url", "--dir", str(server.directory))
    assert result.stdout == f"{server.url}\n"


def test_rm_asks_first(run, server):
    result = run("db", "rm", input="n\n")
    assert result.exit_code == 1
    assert f"Delete the server in {server.directory} and all its data?" in result.stdout
    assert server.is_running()


def test_rm_deletes_everything(run, server):
    assert run("db", "rm", "--yes").stdout == f"Removed {server.directory}.\n"
    assert not server.directory.exists()


@pytest.mark.parametrize("command", [("url",), ("psql",), ("rm", "--yes")])
def test_a_missing_server_is_one_sentence_and_code_1(elsewhere, command):
    result = CliRunner().invoke(main, ["db", *command])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"Error: there is no embedded PostgreSQL in {elsewhere}/.howdah/pg18. "
        "Run `howdah db start` to create one.\n"
    )
    assert not os.listdir(elsewhere)


def test_status_of_a_missing_server(elsewhere):
    result = CliRunner().invoke(main, ["db", "status"])
    assert (result.exit_code, result.stdout) == (
        0,
        f"There is no embedded PostgreSQL in {elsewhere}/.howdah/pg18.\n",
    )


def test_a_failed_start_is_one_sentence_and_no_traceback(elsewhere):
    (elsewhere / "file").touch()
    command = [sys.executable, "-m", "howdah", "db", "start", "--dir", "file/pg18"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"Error: the embedded PostgreSQL in {elsewhere}/file/pg18 could not be started: "
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(HowdahError("it broke."), 1), (DatabaseUnreachable("h", "d", "timed out"), 4)],
)
def test_every_howdah_error_has_an_exit_code(monkeypatch, error, code):
    @click.command()
    def breaks() -> None:
        raise error

    monkeypatch.setitem(main.commands, "breaks", breaks)
    result = CliRunner().invoke(main, ["breaks"])
    assert (result.exit_code, result.stderr) == (code, f"Error: {error}\n")


def test_wrong_usage_is_code_2():
    assert CliRunner().invoke(main, ["db", "start", "--nonsense"]).exit_code == 2


def test_version_is_printed():
    result = CliRunner().invoke(main, ["--version"])
    assert result.stdout == f"howdah, version {howdah.__version__}\n"
