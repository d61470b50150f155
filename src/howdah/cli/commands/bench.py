"""`howdah bench`: measures how fast a database is, and says what would make it faster."""

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
from howdah.cli.output import STYLES, Output
from howdah.cli.stopping import ignore_stops, run, stoppable
from howdah.database.connection import DatabaseError
from howdah.database.driver_errors import is_connection_lost
from howdah.encoding import database_url
from howdah.encoding.visible_text import clean
from howdah.errors import HowdahError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from howdah.bench import Figures, Rate

NAME_WIDTH = 22
FIGURE_WIDTH = 16
MAX_BAR_WIDTH = 40


@click.command("bench", short_help="Measure how fast a database is.")
@database_option
@click.option("--seconds", type=click.FloatRange(1, 120), default=20, show_default=True,
              help="Approximate duration.")  # fmt: skip
@json_option
def bench_command(database: str | None, seconds: float, as_json: bool) -> None:
    """Measure how fast a database enqueues and runs jobs, and how soon a job starts.

    The measurement uses a temporary schema, which is removed at the end, also after Ctrl-C. It keeps the
    server busy: do not run it on a server that others need.
    """
    output = Output(as_json=as_json)
    url = resolve_url(database)
    began = time.monotonic()
    try:
        with stoppable():
            figures = _measure(url, seconds, output)
    except SystemExit:
        output.note("Stopped. The temporary schema was removed.")
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
                    _screen(output, database_url.redact(url), schema) as show,
                ):
                    return run(Bench(url, conn, schema, seconds, show).run())
            finally:
                ignore_stops()
    except DatabaseError as error:
        if is_connection_lost(error):
            raise unreachable(url, error) from error
        reason = (error.diag.message_primary or str(error)).strip()
        raise HowdahError(f"the database rejected the statement: {reason}.") from error


# ── progress ─────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _screen(output: Output, place: str, schema: str) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress if the output is a terminal."""
    if not output.is_terminal:
        yield lambda progress: None
        return
    steps: dict[str, Progress] = {}
    with Live(console=output.console, auto_refresh=False, transient=True) as live:

        def show(progress: Progress) -> None:
            steps[progress.step] = progress
            live.update(Group(*_frame(output, place, schema, steps)), refresh=True)

        yield show


def _frame(output: Output, place: str, schema: str, steps: dict[str, Progress]) -> Iterator[Text]:
    yield output.fit(Text.assemble("Measuring ", (clean(place), "bold")))
    yield output.fit(Text(f"in the temporary schema {schema}", "dim"))
    for name in STEPS:
        progress = steps.get(name)
        state = "pending" if progress is None else "ok" if progress.share >= 1 else "running"
        line = Text.assemble((f"{output.sign(state)} ", STYLES[state]), f"{name:<12}")
        if progress is not None:
            if state == "running":
                line.append(output.bar(int(progress.share * 100), 20), STYLES[state]).append("  ")
            line.append(progress.text)
        yield output.fit(line)


# ── results ───────────────────────────────────────────────────────────────────────────────────────


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
            room = min(MAX_BAR_WIDTH, output.width - NAME_WIDTH - FIGURE_WIDTH - 2)
            full = output.bar(100, max(1, round(room * rate.per_second / most)))
            line.append("  ").append(full, "green")
        output.line(line)
    output.line("")
    for sentence in advice(figures):
        output.line(sentence, lead=Text(f"{output.sign('event')} ", STYLES["event"]))
    output.note(f"Took {took:.1f} s. The temporary schema was removed.")


def _facts(figures: Figures, took: float) -> dict[str, Any]:
    facts = asdict(figures)
    for name in ("one_caller", "many_callers", "bulk", "worker"):
        facts[name]["per_second"] = getattr(figures, name).per_second
    return facts | {"advice": advice(figures), "seconds": took}
