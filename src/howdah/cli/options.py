"""The options that commands share, and the connection to the database that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from howdah.database import connection, driver_errors
from howdah.database.connection import Connection, ConnectionFailed, UnreadableUrl
from howdah.embedded import resolve_url
from howdah.encoding import database_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.errors import DatabaseUnreachable

CONNECT_TIMEOUT_SECONDS = 10

Command = Any  # click gives a function or a Command, depending on the order of the decorators

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
json_lines_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line."
)


database_option = click.option(
    "--database",
    metavar="URL",
    help="A PostgreSQL URL, or `embedded:` for the embedded server.  [default: HOWDAH_DATABASE_URL, "
    "DATABASE_URL, or an embedded server in this or a parent directory]",
)


def database_options(command: Command) -> Command:
    """`--database` and `--schema`, for every command that talks to the queue."""
    options: list[Callable[[Command], Command]] = [
        database_option,
        click.option(
            "--schema",
            metavar="NAME",
            default="howdah",
            show_default=True,
            help="The PostgreSQL schema that holds the queue.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def connect(url: str) -> Connection:
    """Connect in autocommit mode to a URL from `resolve_url`. One try only, because a person is waiting."""
    try:
        return connection.connect(url, timeout=CONNECT_TIMEOUT_SECONDS)
    except ConnectionFailed as error:
        raise unreachable(url, error) from error
    except UnreadableUrl:
        raise database_url.unreadable_url() from None


def unreachable(url: str, error: BaseException) -> DatabaseUnreachable:
    """A driver's error as a DatabaseUnreachable that names the database."""
    return driver_errors.unreachable(database_url.host_and_database(url), error)


__all__ = [
    "connect",
    "database_option",
    "database_options",
    "json_lines_option",
    "json_option",
    "resolve_url",
    "unreachable",
]
