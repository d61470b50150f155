"""The `howdah` command. One module per group of commands; this one registers them.

Commands raise HowdahError and nothing handles it but the group: one sentence on stderr, and an exit
code for scripts (1, or 4 when the database does not answer; click's own is 2 for wrong usage).
"""

from __future__ import annotations

from typing import Any

import click

from howdah import __version__
from howdah.cli.db import db
from howdah.cli.demo import demo
from howdah.cli.migrate import migrate_command
from howdah.cli.worker import worker_command
from howdah.errors import DatabaseUnreachable, HowdahError


class Commands(click.Group):
    """A group whose commands may raise HowdahError."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HowdahError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(4 if isinstance(error, DatabaseUnreachable) else 1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="howdah")
def main() -> None:
    """Background jobs on the PostgreSQL you already have."""


for command in (db, demo, migrate_command, worker_command):
    main.add_command(command)
