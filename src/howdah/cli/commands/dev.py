"""`howdah dev`: an embedded server, and a worker that restarts when the code changes."""

from __future__ import annotations

import json
import logging
import os
import sys

import click

from howdah.cli.load import load_app
from howdah.cli.options import connect, json_lines_option
from howdah.cli.supervisor import Supervisor
from howdah.cli.values import Misuse
from howdah.database.migrate import migrate
from howdah.embedded import EmbeddedServer
from howdah.encoding.database_url import VARIABLES
from howdah.errors import InvalidOption
from howdah.worker.logs import set_up_logging

GRACE_SECONDS = 5.0


@click.command("dev", short_help="Run an app on an embedded server, with reload.")
@click.argument("app_name", metavar="MODULE:APP")
@click.option("--concurrency", type=click.IntRange(1, 10_000), help="How many jobs run at once.")
@click.option(
    "--rm", "remove", is_flag=True, help="Delete the database and all its data at the end."
)
@json_lines_option
def dev_command(app_name: str, concurrency: int | None, remove: bool, as_json: bool) -> None:
    """Run an app on an embedded PostgreSQL, and restart the worker when the code changes.

    The server is in .howdah, in this or a parent directory. It keeps running after Ctrl-C; `howdah db stop`
    stops it.
    """
    color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    set_up_logging("info", as_json=as_json, color=color)
    try:
        app = load_app(app_name)
    except InvalidOption as error:
        raise Misuse(str(error)) from None
    if app.database is not None:
        raise Misuse(
            f"{app_name} has its own database, so `howdah dev` would not use it; run "
            f"`howdah worker {app_name} --reload` instead."
        )
    server = EmbeddedServer()
    url = server.start()
    with connect(url) as conn:
        migrate(conn, app.schema)
    if as_json:
        click.echo(json.dumps({"url": url, "directory": str(server.directory)}))
    else:
        click.echo(f"PostgreSQL is running in {server.directory}.\n{url}\nCtrl-C stops the worker.")
    os.environ[VARIABLES[0]] = url
    arguments = ["worker", app_name, "--grace", str(GRACE_SECONDS)]
    arguments += ["--concurrency", str(concurrency)] if concurrency else []
    arguments += ["--log-json"] if as_json else []
    try:
        code = Supervisor([arguments], reload=True, grace=GRACE_SECONDS).run()
    finally:
        if remove:
            server.remove()
        if as_json:
            click.echo(json.dumps({"removed": remove, "directory": str(server.directory)}))
        elif remove:
            click.echo(f"Removed {server.directory}.")
        else:
            click.echo("The database is still running; `howdah db stop` stops it.")
        logging.shutdown()
    click.get_current_context().exit(code)
