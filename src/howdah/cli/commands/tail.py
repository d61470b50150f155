"""`howdah tail`: prints what happens to jobs, live."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import click
from rich.text import Text

from howdah.cli.output import STYLES, compact, one_line
from howdah.cli.session import queue_command
from howdah.cli.values import Duration, Name
from howdah.database.connection import DatabaseError
from howdah.errors import DatabaseUnreachable, counted
from howdah.insight.activity import LIMIT, Tail
from howdah.insight.durations import format_duration
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from uuid import UUID

    from howdah.cli.output import Output
    from howdah.cli.session import Session
    from howdah.insight.activity import Occurrence

POLL_SECONDS = 0.5
BURST_SECONDS = 0.05
FULL_WIDTH = 80  # columns; a narrower terminal shows only the time, the sign, the id and the type


@click.command("tail", short_help="Print what happens to jobs, live.")
@click.option("--follow/--no-follow", default=True, show_default=True,
              help="Run until Ctrl-C, or print the past and exit.")  # fmt: skip
@click.option("--lines", type=click.IntRange(0, 1000), default=10, show_default=True,
              help="How many past lines to print first.")  # fmt: skip
@click.option("--since", type=Duration(), default="1h", show_default=True, metavar="DURATION",
              help="Maximum age of these lines.")  # fmt: skip
@click.option("--type", "types", type=Name(), multiple=True, metavar="NAME",
              help="Only jobs of this type. May be repeated.")  # fmt: skip
@click.option("--queue", "queues", type=Name(), multiple=True, metavar="NAME",
              help="Only jobs of this queue. May be repeated.")  # fmt: skip
@queue_command
def tail_command(
    session: Session,
    output: Output,
    follow: bool,
    lines: int,
    since: timedelta,
    types: Sequence[str],
    queues: Sequence[str],
) -> None:
    """Print what happens to jobs, live.

    Each line is one of: enqueued, claimed, completed, failed, cancelled, error (an attempt failed), event.
    """
    tail = Tail(session, session.schema, since)

    def wanted(found: Sequence[Occurrence]) -> list[Occurrence]:
        return [
            each
            for each in found
            if (not types or each.job_type in types) and (not queues or each.queue in queues)
        ]

    with contextlib.suppress(KeyboardInterrupt):
        past = wanted(tail.poll())
        printer = Printer(output)
        printer.print(past[-lines:] if lines else [])
        if not follow:
            if not past:
                output.note(f"Nothing happened in the last {format_duration(since)}.")
            return
        for found in _polls(session, output, tail):
            printer.print(wanted(found))


def _polls(session: Session, output: Output, tail: Tail) -> Iterator[list[Occurrence]]:
    listening: object = None
    unreachable = False
    while True:
        try:
            if listening is not session.conn:
                # Enqueues notify only while a worker is idle; at other times polling finds them.
                session.conn.execute(f'LISTEN {quote_schema(session.schema)[:-1]}:wake"'.encode())
                listening = session.conn
            for _ in session.conn.notifies(timeout=POLL_SECONDS, stop_after=1):
                time.sleep(BURST_SECONDS)  # one poll then covers what directly follows
        except DatabaseError:
            time.sleep(POLL_SECONDS)
        try:
            found = tail.poll()
        except DatabaseUnreachable as error:
            if not unreachable:
                output.note(f"Database unreachable, retrying: {one_line(error.reason)}")
            unreachable = True
            continue
        unreachable = False
        yield found


class Printer:
    """Prints one line for each occurrence."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._type_width = 12
        self._errors: dict[UUID, str | None] = {}

    def print(self, found: Sequence[Occurrence]) -> None:
        """Print occurrences."""
        for each in found:
            if self._output.as_json:
                facts = asdict(each)
                del facts["key"]
                self._output.json(
                    {name: value for name, value in facts.items() if value is not None}
                )
            else:
                self._output.console.print(self._output.fit(self._line(each)), soft_wrap=True)

    def _line(self, each: Occurrence) -> Text:
        if each.what == "error":
            self._errors[each.job_id] = each.error
            while len(self._errors) > LIMIT:
                del self._errors[next(iter(self._errors))]
        elif each.what == "failed" and self._errors.pop(each.job_id, None) == each.error:
            each = replace(each, error=None)  # printed just before, with the attempt
        at = f"{each.at.astimezone():%H:%M:%S}"
        name = one_line(each.job_type or "")
        sign = self._output.sign(each.what)
        style = STYLES[each.what]
        if self._output.width < FULL_WIDTH:
            return Text.assemble((at, "dim"), (f" {sign} ", style), f"{each.job_id} {name}")
        self._type_width = min(max(self._type_width, len(name)), 30)
        return Text.assemble(
            (at, "dim"),
            (f"  {sign} {each.what:<9}", style),
            f"  {each.job_id}  {name:<{self._type_width}}",
            (f"  {_detail(each)}".rstrip(), "dim"),
        )


def _detail(each: Occurrence) -> str:
    match each.what:
        case "claimed":
            again = f", attempt {each.attempt}" if (each.attempt or 0) > 1 else ""
            return f"by {one_line(each.worker_id or '?')}{again}"
        case "completed":
            return (
                "" if each.took is None else f"in {format_duration(timedelta(seconds=each.took))}"
            )
        case "failed":
            tries = f"after {counted(each.attempt or 0, 'attempt')}"
            return f"{tries}: {one_line(each.error)}" if each.error else tries
        case "error":
            return f"attempt {each.attempt}: {one_line(each.error or '')}"
        case "event":
            data = "" if each.data in ({}, None) else f" {compact(each.data)}"
            return f"{one_line(each.event or '')}{data}"
        case _:
            return one_line(each.error or "")
