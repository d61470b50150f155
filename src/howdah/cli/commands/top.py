"""`howdah top`: queues, job types and workers on a screen that refreshes."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from howdah.cli.commands.queues import LANE_COLUMNS, WORKER_COLUMNS, lane_row, rate, worker_row
from howdah.cli.output import one_line
from howdah.cli.session import queue_command
from howdah.cli.values import Duration
from howdah.encoding import database_url
from howdah.errors import DatabaseUnreachable

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from howdah.cli.output import Output
    from howdah.cli.session import Session
    from howdah.insight.statistics import Lane, WorkerInfo

BUCKETS = 30
QUERY_SHARE = 10  # reading a frame takes at most 1 / QUERY_SHARE of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Everything that `top` shows at one time."""

    at: datetime
    lanes: list[Lane]
    workers: list[WorkerInfo]
    rates: list[tuple[int, int]]
    lane_rates: dict[tuple[str, str], list[int]]

    @classmethod
    def of(cls, session: Session) -> Frame:
        statistics = session.statistics
        return cls(
            at=statistics.now(),
            lanes=sorted(
                statistics.lanes(), key=lambda lane: (-lane.due - lane.running, lane.job_type)
            ),
            workers=statistics.workers(),
            rates=statistics.rates(BUCKETS),
            lane_rates=statistics.lane_rates(BUCKETS),
        )

    def facts(self) -> dict[str, Any]:
        """The frame for `--json`."""
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
        self, output: Output, place: str, height: int | None, problem: str = ""
    ) -> list[Text]:
        """The frame as lines, no more than fit on the screen."""
        head = [
            Text.assemble((f"{self.at.astimezone():%H:%M:%S}  ", "dim"), (place, "bold")),
            Text(problem, "bold red") if problem else self._summary(),
        ]
        completed = [each for each, _ in self.rates]
        failed = [each for _, each in self.rates]
        for name, counts, style in (("completed", completed, "green"), ("failing", failed, "red")):
            if any(counts):
                total = f" {sum(counts):,} in 5 min"
                spark = output.sparkline(counts)
                head.append(Text.assemble((f"{name:<10}", "dim"), (spark, style), (total, "dim")))
        head = [output.fit(line) for line in head]
        workers = [worker_row(worker, self.at) for worker in self.workers]
        worker_lines = (
            output.table(WORKER_COLUMNS, workers) if workers else [Text("no workers", "dim")]
        )
        rows = [
            lane_row(output, lane, self.at, self.lane_rates.get((lane.queue, lane.job_type), ()))
            for lane in self.lanes
        ]
        lane_lines = output.table(LANE_COLUMNS, rows) if rows else [Text("no jobs", "dim")]
        if height is not None:
            room = max(6, height - len(head) - 3)
            worker_lines = _shorten(worker_lines, max(3, min(len(worker_lines), room // 3)), output)
            lane_lines = _shorten(lane_lines, max(3, room - len(worker_lines)), output)
        return [*head, Text(""), *lane_lines, Text(""), *worker_lines]

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


def _shorten(lines: list[Text], most: int, output: Output) -> list[Text]:
    if len(lines) <= most:
        return lines
    hidden = len(lines) - most + 1
    return [*lines[: most - 1], Text(f"{output.sign('more')} and {hidden} more", "dim")]


@click.command("top", short_help="Show queues, job types and workers, live.")
@click.option("--interval", type=Duration(), default="1s", show_default=True, metavar="DURATION",
              help="Time between refreshes.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print one frame and exit. Piped output does the same.")
@queue_command
def top_command(session: Session, output: Output, interval: timedelta, once: bool) -> None:
    """Show queues, job types and workers, live. Press q or Ctrl-C to quit."""
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
    problem = ""
    took = 0.0
    with (
        Keys() as keys,
        Live(console=output.console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            lines = frame.lines(output, place, output.console.height, problem)
            live.update(Group(*lines), refresh=True)
            if keys.pressed(max(interval, took * QUERY_SHARE)) in ("q", "Q", "\x1b", "\x04"):
                return
            began = time.monotonic()
            try:
                frame, problem = Frame.of(session), ""
            except DatabaseUnreachable as error:
                problem = f"database unreachable, retrying: {one_line(error.reason)}"
            took = time.monotonic() - began


class Keys:
    """Reads single keys if standard input is a terminal."""

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
        """Wait for a key; None if no key was pressed in time."""
        if self._old is None:
            time.sleep(seconds)
            return None
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else None
