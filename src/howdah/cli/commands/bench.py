"""`howdah bench`: how fast is my database, and what would make it faster?"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from howdah.bench import STEPS, Bench, Progress, advice, temporary_schema
from howdah.bench.figures import CALLERS, milliseconds
from howdah.cli.options import connect, database_option, json_option, resolve_url, unreachable
from howdah.cli.output import STYLES, Output, clean
from howdah.cli.stopping import ignore_stops, run, stoppable
from howdah.database.connection import DatabaseError
from howdah.database.driver_errors import is_connection_lost
from howdah.encoding import database_url
from howdah.errors import HowdahError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from howdah.bench import Figures, Rate

NAME_WIDTH = 22
FIGURE_WIDTH = 16
LONGEST_BAR = 40


@click.command("bench", short_help="How fast is this database, and why?")
@database_option
@click.option("--seconds", type=click.FloatRange(1, 120), default=20, show_default=True,
              help="About how long to take.")  # fmt: skip
@json_option
def bench_command(database: str | None, seconds: float, as_json: bool) -> None:
    """Measure a database: enqueueing, working, and the time from one to the other.

    Works in a schema of its own, which is removed at the end, also after Ctrl-C. The server is kept busy
    meanwhile: think before you point it at one that others need.
    """
    output = Output(as_json=as_json)
    url = resolve_url(database)
    began = time.monotonic()
    try:
        with stoppable():
            figures = _measure(url, seconds, output)
    except SystemExit:
        output.note("Stopped. Nothing is left in the database.")
        raise
    took = time.monotonic() - began
    if as_json:
        return output.json(_facts(figures, took))
    return _print(output, database_url.redact(url), figures, took)


def _measure(url: str, seconds: float, output: Output) -> Figures:
    try:
        with temporary_schema(lambda: connect(url)) as schema:
            try:
                with (
                    connect(url) as conn,
                    _screen(output, database_url.redact(url), schema) as tell,
                ):
                    return run(Bench(url, conn, schema, seconds, tell).run())
            finally:
                ignore_stops()
    except DatabaseError as error:
        if is_connection_lost(error):
            raise unreachable(url, error) from error
        reason = (error.diag.message_primary or str(error)).strip()
        raise HowdahError(f"the database refused: {reason}.") from error


# ── while it runs ─────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _screen(output: Output, place: str, schema: str) -> Iterator[Callable[[Progress], None]]:
    """Where progress is shown: on a terminal, and nowhere else."""
    if not output.is_terminal:
        yield lambda progress: None
        return
    steps: dict[str, Progress] = {}
    with Live(console=output.console, auto_refresh=False, transient=True) as live:

        def tell(progress: Progress) -> None:
            steps[progress.step] = progress
            live.update(Group(*_frame(output, place, schema, steps)), refresh=True)

        yield tell


def _frame(output: Output, place: str, schema: str, steps: dict[str, Progress]) -> Iterator[Text]:
    yield _cut(output, Text.assemble("Measuring ", (clean(place), "bold")))
    yield _cut(output, Text(f"in schema {schema}, removed at the end", "dim"))
    for name in STEPS:
        progress = steps.get(name)
        state = "pending" if progress is None else "ok" if progress.share >= 1 else "running"
        line = Text.assemble((f"{output.sign(state)} ", STYLES[state]), f"{name:<12}")
        if progress is not None:
            if state == "running":
                line.append(output.bar(int(progress.share * 100), 20), STYLES[state]).append("  ")
            line.append(progress.text)
        yield _cut(output, line)


def _cut(output: Output, line: Text) -> Text:
    line.truncate(output.width, overflow="ellipsis" if output.has_unicode else "crop")
    return line


# ── what came of it ───────────────────────────────────────────────────────────────────────────────


def _rates(figures: Figures) -> list[tuple[str, Rate]]:
    return [
        ("enqueue, one caller", figures.one_caller),
        (f"enqueue, {CALLERS} callers", figures.many_callers),
        ("enqueue in bulk", figures.bulk),
        ("one worker process", figures.worker),
    ]


def _print(output: Output, place: str, figures: Figures, took: float) -> None:
    server, pick_up = figures.server, figures.pick_up
    output.line((f"PostgreSQL {server.version}", "bold"), f", {clean(place)}")
    settings = "fsync", "full_page_writes", "synchronous_commit"
    output.line((", ".join(f"{name} {getattr(server, name)}" for name in settings), "dim"))
    output.line("")
    latency = f"p50 {milliseconds(pick_up.p50)}, p99 {milliseconds(pick_up.p99)}"
    for name, text in [
        ("round trip", milliseconds(server.round_trip)),
        ("durable commit", milliseconds(server.commit)),
        ("pick-up, idle worker", latency),
    ]:
        output.line((f"{name:<{NAME_WIDTH}}", "dim"), text)
    output.line("")
    rates = _rates(figures)
    most = max(rate.per_second for _, rate in rates)
    for name, rate in rates:
        line = Text(f"{name:<{NAME_WIDTH}}", "dim")
        line.append(f"{rate.per_second:>{FIGURE_WIDTH - 7},.0f} jobs/s", "bold green")
        if output.is_terminal and most:
            room = min(LONGEST_BAR, output.width - NAME_WIDTH - FIGURE_WIDTH - 2)
            full = output.bar(100, max(1, round(room * rate.per_second / most)))
            line.append("  ").append(full, "green")
        output.line(line)
    output.line("")
    for sentence in advice(figures):
        output.line(sentence, lead=Text(f"{output.sign('event')} ", STYLES["event"]))
    output.note(f"Took {took:.1f} s. Nothing is left in the database.")


def _facts(figures: Figures, took: float) -> dict[str, Any]:
    facts = asdict(figures)
    for name in ("one_caller", "many_callers", "bulk", "worker"):
        facts[name]["per_second"] = getattr(figures, name).per_second
    return facts | {"advice": advice(figures), "seconds": took}
