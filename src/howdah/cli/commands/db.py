"""`howdah db`: manages the embedded server of a directory.

It ignores DATABASE_URL: `howdah db rm` never deletes another database.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from howdah.cli.options import json_option
from howdah.embedded import EmbeddedServer
from howdah.embedded.binaries import find_binaries
from howdah.errors import EmbeddedServerError

directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="The server's directory.  [default: .howdah/pg18, in this or a parent directory]",
)


@click.group(short_help="Manage the embedded PostgreSQL server.")
def db() -> None:
    """Manage the embedded PostgreSQL server. Each directory has its own."""


@db.command()
@directory_option
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait.")
@json_option
def start(directory: Path | None, timeout: float, as_json: bool) -> None:
    """Start the server. The first start creates it."""
    server = EmbeddedServer(directory)
    server.start(timeout)
    if as_json:
        return click.echo(json.dumps(_facts(server)))
    click.echo(f"PostgreSQL is running in {server.directory} (pid {server.pid()}).")
    return click.echo(server.url)


@db.command()
@directory_option
@json_option
def url(directory: Path | None, as_json: bool) -> None:
    """Print the server's URL. The server need not be running."""
    server = _existing(directory)
    click.echo(json.dumps({"url": server.url}) if as_json else server.url)


@db.command()
@directory_option
@json_option
def status(directory: Path | None, as_json: bool) -> None:
    """Print whether the server is running, its directory and its URL."""
    server = EmbeddedServer(directory)
    facts = _facts(server)
    if as_json:
        return click.echo(json.dumps(facts))
    if not facts["exists"]:
        return click.echo(f"There is no embedded PostgreSQL in {server.directory}.")
    state = click.style("stopped", fg="yellow")
    if facts["running"]:
        state = f"{click.style('running', fg='green')}, pid {facts['pid']}"
    for name, value in (("server", state), *facts.items()):
        if name in ("server", "directory", "url", "log"):
            click.echo(f"{name:<10} {value}")
    return None


@db.command(context_settings={"ignore_unknown_options": True})
@directory_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def psql(directory: Path | None, arguments: tuple[str, ...]) -> None:
    """Open psql on the database. Arguments after `--` are passed to psql."""
    program = find_binaries().directory / "psql"
    if not os.access(program, os.X_OK):
        raise EmbeddedServerError(
            f"there is no psql in {program.parent}. Use another psql with the URL that `howdah db url` "
            "prints."
        )
    server_url = _existing(directory).start()
    os.execv(program, ["psql", "--dbname", server_url, *arguments])  # noqa: S606


@db.command()
@directory_option
@click.option("--timeout", default=30.0, show_default=True, help="Seconds to wait.")
@click.option(
    "--immediate",
    is_flag=True,
    help="Skip the shutdown checkpoint; the next start runs crash recovery.",
)
@json_option
def stop(directory: Path | None, timeout: float, immediate: bool, as_json: bool) -> None:
    """Stop the server. Its data are kept."""
    server = EmbeddedServer(directory)
    stopped = server.stop("immediate" if immediate else "fast", timeout)
    if as_json:
        return click.echo(json.dumps({"stopped": stopped, "directory": str(server.directory)}))
    return click.echo(
        f"PostgreSQL in {server.directory} {'stopped' if stopped else 'was not running'}."
    )


@db.command()
@directory_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def rm(directory: Path | None, yes: bool, as_json: bool) -> None:
    """Stop the server and delete all its data."""
    server = _existing(directory)
    if not yes:
        click.confirm(f"Delete the server in {server.directory} and all its data?", abort=True)
    server.remove()
    if as_json:
        return click.echo(json.dumps({"removed": True, "directory": str(server.directory)}))
    return click.echo(f"Removed {server.directory}.")


def _existing(directory: Path | None) -> EmbeddedServer:
    server = EmbeddedServer(directory)
    if not server.exists():
        raise EmbeddedServerError(
            f"there is no embedded PostgreSQL in {server.directory}. Run `howdah db start` to create one."
        )
    return server


def _facts(server: EmbeddedServer) -> dict[str, object]:
    return {
        "exists": server.exists(),
        "running": server.is_running(),
        "pid": server.pid(),
        "directory": str(server.directory),
        "url": server.url,
        "log": str(server.log_file),
    }
