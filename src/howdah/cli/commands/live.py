"""`howdah top` and `howdah tail`: what goes on, as it goes on."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from howdah.cli.commands.look import LANE_COLUMNS, WORKER_COLUMNS, lane_row, rate, worker_row
from howdah.cli.output import STYLES, compact, one_line
from howdah.cli.session import queue_command
from howdah.cli.values import Duration, Name
from howdah.database.connection import DatabaseError
from howdah.encoding import database_url
from howdah.errors import DatabaseUnreachable, counted
from howdah.insight.activity import LIMIT, Tail
from howdah.insight.explain import describe
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from howdah.cli.output import Output
    from howdah.cli.session import Session
    from howdah.insight.activity import Occurrence
    from howdah.insight.explain import Lane, WorkerInfo

BUCKETS = 30
SHARE = 10  # looking takes at most one part in so many of the time
POLL = 0.5
WIDE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Everything that `top` shows at one moment."""

    at: datetime
    lanes: list[Lane]
    workers: list[WorkerInfo]
    rates: list[tuple[int, int]]
    lane_rates: dict[tuple[str, str], list[int]]

    @classmethod
    def of(cls, session: Session) -> Frame:
        insight = session.insight
        return cls(
            at=insight.now(),
            lanes=sorted(
                insight.lanes(), key=lambda lane: (-lane.due - lane.running, lane.job_type)
            ),
            workers=insight.workers(),
            rates=insight.rates(BUCKETS),
            lane_rates=insight.lane_rates(BUCKETS),
        )

    def facts(self) -> dict[str, Any]:
        """For programs."""
        return {
            "at": self.at,
            "due": sum(lane.due for lane in self.lanes),
            "scheduled": sum(lane.scheduled for lane in self.lanes),
            "blocked": sum(lane.blocked for lane in self.lanes),
            "running": sum(lane.running for lane in self.lanes),
            "per_second": sum(lane.per_second for lane in self.lanes),
            "lanes": [
                asdict(lane) | {"ended": self.lane_rates.get((lane.queue, lane.job_type), [])}
                for lane in self.lanes
            ],
            "workers": [asdict(worker) | {"alive": worker.is_alive} for worker in self.workers],
            "completed": [completed for completed, _ in self.rates],
            "failed": [failed for _, failed in self.rates],
        }

    def lines(
        self, output: Output, place: str, height: int | None, trouble: str = ""
    ) -> list[Text]:
        """For people, no higher than the screen."""
        head = [
            Text.assemble((f"{self.at.astimezone():%H:%M:%S}  ", "dim"), (place, "bold")),
            Text(trouble, "bold red") if trouble else self._summary(),
        ]
        completed = [each for each, _ in self.rates]
        failed = [each for _, each in self.rates]
        for name, counts, style in (("completed", completed, "green"), ("failing", failed, "red")):
            if any(counts):
                total = f" {sum(counts):,} in 5 min"
                spark = output.sparkline(counts)
                head.append(Text.assemble((f"{name:<10}", "dim"), (spark, style), (total, "dim")))
        head = [_cut(line, output) for line in head]
        workers = [worker_row(worker, self.at) for worker in self.workers]
        below = output.table(WORKER_COLUMNS, workers) if workers else [Text("no workers", "dim")]
        rows = [
            lane_row(output, lane, self.at, self.lane_rates.get((lane.queue, lane.job_type), ()))
            for lane in self.lanes
        ]
        above = output.table(LANE_COLUMNS, rows) if rows else [Text("no jobs", "dim")]
        if height is not None:
            room = max(6, height - len(head) - 3)
            below = _shorten(below, max(3, min(len(below), room // 3)), output)
            above = _shorten(above, max(3, room - len(below)), output)
        return [*head, Text(""), *above, Text(""), *below]

    def _summary(self) -> Text:
        facts = self.facts()
        parts = [
            (f"{facts['due']:,}", " due", "yellow"),
            (f"{facts['running']:,}", " running", "cyan"),
            (rate(facts["per_second"]), " jobs/s", "green"),
        ]
        parts += [
            (f"{facts[name]:,}", f" {name}", "bold")
            for name in ("scheduled", "blocked")
            if facts[name]
        ]
        text = Text()
        for number, name, style in parts:
            text.append(number, style).append(name, "dim").append("  ")
        return text


def _cut(line: Text, output: Output) -> Text:
    line.truncate(output.width, overflow="ellipsis" if output.has_unicode else "crop")
    return line


def _shorten(lines: list[Text], most: int, output: Output) -> list[Text]:
    if len(lines) <= most:
        return lines
    hidden = len(lines) - most + 1
    return [*lines[: most - 1], Text(f"{output.sign('more')} and {hidden} more", "dim")]


@click.command("top", short_help="Queues, job types and workers, live.")
@click.option("--interval", type=Duration(), default="1s", show_default=True, metavar="DURATION",
              help="How often to look.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print one frame and leave; so does a pipe.")
@queue_command
def top_command(session: Session, output: Output, interval: timedelta, once: bool) -> None:
    """Show queues, job types and workers, live. q or Ctrl-C leaves."""
    if output.as_json:
        return output.json(Frame.of(session).facts())
    place = database_url.redact(session.url)
    if once or not output.is_terminal:
        for line in Frame.of(session).lines(output, place, None):
            output.console.print(line, soft_wrap=True)
        return None
    with contextlib.suppress(KeyboardInterrupt):
        _run_top(session, output, place, interval.total_seconds())
    return None


def _run_top(session: Session, output: Output, place: str, interval: float) -> None:
    frame = Frame.of(session)
    trouble = ""
    took = 0.0
    with (
        Keys() as keys,
        Live(console=output.console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            lines = frame.lines(output, place, output.console.height, trouble)
            live.update(Group(*lines), refresh=True)
            if keys.pressed(max(interval, took * SHARE)) in ("q", "Q", "\x1b", "\x04"):
                return
            began = time.monotonic()
            try:
                frame, trouble = Frame.of(session), ""
            except DatabaseUnreachable as error:
                trouble = f"no answer, trying again: {one_line(error.reason)}"
            took = time.monotonic() - began


class Keys:
    """The keyboard, key by key, where there is one."""

    def __enter__(self) -> Keys:
        self._old: list[Any] | None = None
        if sys.stdin.isatty():
            self._old = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *error: object) -> None:
        if self._old is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._old)

    def pressed(self, seconds: float) -> str | None:
        """The key that was pressed within that time, or None."""
        if self._old is None:
            time.sleep(seconds)
            return None
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else None


@click.command("tail", short_help="What happens to jobs, as it happens.")
@click.option("--follow/--no-follow", default=True, show_default=True,
              help="Go on until Ctrl-C, or only say what happened lately.")  # fmt: skip
@click.option("--lines", type=click.IntRange(0, 1000), default=10, show_default=True,
              help="How many happenings of the past to begin with.")  # fmt: skip
@click.option("--since", type=Duration(), default="1h", show_default=True, metavar="DURATION",
              help="How far back these may lie.")  # fmt: skip
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
    """Show what happens to jobs, and their events, as it happens.

    enqueued, claimed, completed, failed, cancelled, error (an attempt failed), and event.
    """
    tail = Tail(session, session.schema, since)

    def wanted(found: Sequence[Occurrence]) -> list[Occurrence]:
        return [
            each
            for each in found
            if (not types or each.job_type in types) and (not queues or each.queue in queues)
        ]

    with contextlib.suppress(KeyboardInterrupt):
        past = wanted(tail.look())
        printer = Printer(output)
        printer.print(past[-lines:] if lines else [])
        if not follow:
            if not past:
                output.note(f"Nothing happened in the last {describe(since)}.")
            return
        for found in _looks(session, output, tail):
            printer.print(wanted(found))


def _looks(session: Session, output: Output, tail: Tail) -> Iterator[list[Occurrence]]:
    heard: object = None
    lost = False
    while True:
        try:
            if heard is not session.conn:
                # Wakes are only heard where some worker is idle; otherwise the clock has to do.
                session.conn.execute(f'LISTEN {quote_schema(session.schema)[:-1]}:wake"'.encode())
                heard = session.conn
            for _ in session.conn.notifies(timeout=POLL, stop_after=1):
                time.sleep(0.05)  # for what follows at once
        except DatabaseError:
            time.sleep(POLL)
        try:
            found = tail.look()
        except DatabaseUnreachable as error:
            if not lost:
                output.note(f"No answer, trying again: {one_line(error.reason)}")
            lost = True
            continue
        lost = False
        yield found


class Printer:
    """Prints what happened, a line each."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._type_width = 12
        self._errors: dict[UUID, str | None] = {}

    def print(self, found: Sequence[Occurrence]) -> None:
        """Print each."""
        for each in found:
            if self._output.as_json:
                facts = asdict(each)
                del facts["key"]
                self._output.json(
                    {name: value for name, value in facts.items() if value is not None}
                )
            else:
                self._output.console.print(_cut(self._line(each), self._output), soft_wrap=True)

    def _line(self, each: Occurrence) -> Text:
        if each.what == "error":
            self._errors[each.job_id] = each.error
            while len(self._errors) > LIMIT:
                del self._errors[next(iter(self._errors))]
        elif each.what == "failed" and self._errors.pop(each.job_id, None) == each.error:
            each = replace(each, error=None)  # it was just said
        at = f"{each.at.astimezone():%H:%M:%S}"
        name = one_line(each.job_type or "")
        sign = self._output.sign(each.what)
        style = STYLES[each.what]
        if self._output.width < WIDE:
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
            return "" if each.took is None else f"in {describe(timedelta(seconds=each.took))}"
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
