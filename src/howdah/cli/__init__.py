"""The `howdah` command. This module registers the commands of `howdah.cli.commands`.

Commands raise HowdahError. The group prints it as one sentence on stderr and sets the exit code: 1 error,
2 wrong usage, 3 no such job, 4 database unreachable, 5 the awaited job failed or was cancelled.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import click

from howdah import __version__
from howdah.cli.commands.bench import bench_command
from howdah.cli.commands.chaos import chaos_command
from howdah.cli.commands.db import db
from howdah.cli.commands.demo import demo
from howdah.cli.commands.dev import dev_command
from howdah.cli.commands.doctor import doctor_command
from howdah.cli.commands.enqueue import enqueue_command
from howdah.cli.commands.explain import explain_command
from howdah.cli.commands.jobs import jobs_command, show_command
from howdah.cli.commands.migrate import migrate_command
from howdah.cli.commands.operate import (
    cancel_command,
    clear_command,
    recover_command,
    retry_command,
    rm_command,
)
from howdah.cli.commands.queues import queues_command, workers_command
from howdah.cli.commands.skill import skill
from howdah.cli.commands.tail import tail_command
from howdah.cli.commands.top import top_command
from howdah.cli.commands.watch import wait_command, watch_command
from howdah.cli.commands.worker import worker_command
from howdah.encoding.visible_text import clean
from howdah.errors import DatabaseUnreachable, HowdahError, JobCancelled, JobFailed, JobNotFound
from howdah.insight.find import AmbiguousId, NoSuchJob

SECTIONS = {
    "Run": (worker_command, dev_command, demo, chaos_command, enqueue_command),
    "Inspect": (
        top_command,
        tail_command,
        jobs_command,
        show_command,
        explain_command,
        queues_command,
        workers_command,
        doctor_command,
    ),
    "Follow": (watch_command, wait_command),
    "Operate": (retry_command, cancel_command, rm_command, recover_command, clear_command),
    "Database": (db, migrate_command, bench_command),
    "Agents": (skill,),
}


class Commands(click.Group):
    """A group that turns HowdahError into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HowdahError as error:
            click.echo(f"Error: {clean(str(error))}", err=True)
            ctx.exit(exit_code(error))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section; commands without a section come last."""
        sections = {title: [each.name or "" for each in group] for title, group in SECTIONS.items()}
        known = {name for names in sections.values() for name in names}
        sections["More"] = [name for name in self.list_commands(ctx) if name not in known]
        for title, names in sections.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, each.get_short_help_str(60)) for name, each in found if each is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def exit_code(error: HowdahError) -> int:
    """The exit code for an error."""
    match error:
        case AmbiguousId():
            return 2
        case JobNotFound() | NoSuchJob():
            return 3
        case DatabaseUnreachable():
            return 4
        case JobFailed() | JobCancelled():
            return 5
        case _:
            return 1


def _open_standard_streams() -> None:
    """Open /dev/null where the parent closed a standard stream. A socket would get its number, and libuv
    aborts the process when it closes one of these."""
    with contextlib.suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # it was closed when Python started
                setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the whole process


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="howdah")
def main() -> None:
    """Background jobs on the PostgreSQL you already have."""
    _open_standard_streams()


for group in SECTIONS.values():
    for command in group:
        main.add_command(command)
