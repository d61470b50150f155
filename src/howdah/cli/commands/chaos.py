"""`howdah chaos`: kills real workers on a user's database and checks whether every promise was kept. It
works in a temporary schema, and removes its schema, processes and files at the end, also after Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from howdah.chaos import report
from howdah.chaos.checker import PROMISES
from howdah.chaos.process_faults import (
    FaultPoints,
    KillWorkers,
    Mixed,
    PauseWorkers,
    RollingRestarts,
)
from howdah.chaos.run import Load, Verdict, perform
from howdah.chaos.scenario import Place
from howdah.cli.options import connect, database_option, json_option, resolve_url, unreachable
from howdah.cli.stopping import ignore_stops, stoppable
from howdah.database.connection import ConnectionFailed, DatabaseError, InsufficientPrivilege
from howdah.errors import HowdahError
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "howdah_chaos_"
DROP_TIMEOUT_SECONDS = 30.0
LEASE_SECONDS = 2.0


@click.command("chaos", short_help="Kill workers, and check that every promise is kept.")
@database_option
@click.option("--seconds", type=click.FloatRange(3, 3600), default=30.0, show_default=True,
              help="How long to enqueue jobs and kill workers.")  # fmt: skip
@click.option("--workers", type=click.IntRange(2, 32), default=3, show_default=True,
              help="How many worker processes to run.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(1, 10_000), default=100.0, show_default=True,
              help="How many jobs to enqueue per second.")  # fmt: skip
@click.option("--seed", type=int, help="Repeat the faults of the run with this seed.")
@json_option
def chaos_command(
    database: str | None,
    seconds: float,
    workers: int,
    rate: float,
    seed: int | None,
    as_json: bool,
) -> None:
    """Kill workers on your database, and check what happens to their jobs.

    Creates a temporary schema, runs worker processes in it, kills, pauses and restarts them, and then checks
    for each job whether every promise was kept. Everything is removed at the end. The exit code is 1 if a
    promise was broken.
    """
    url = resolve_url(database)
    seed = random.SystemRandom().randrange(1, 1_000_000) if seed is None else seed
    console = Console(highlight=False, quiet=as_json)
    load = Load(seconds=seconds, rate=rate, workers=workers, lease=LEASE_SECONDS, backlog=1000)
    with stoppable(), _schema(url) as schema, _directory() as directory:
        console.print(
            f"Killing workers in schema [bold]{schema}[/] for {seconds:g} s; seed {seed}."
        )
        verdict = _run(console, Place(url, url, schema), directory, seed, load)
    if as_json:
        click.echo(json.dumps(report.as_json(verdict)))
    else:
        _print(console, verdict)
    raise SystemExit(0 if verdict.passed else 1)


def _run(console: Console, place: Place, directory: Path, seed: int, load: Load) -> Verdict:
    scenario = Mixed([KillWorkers(), PauseWorkers(), FaultPoints(), RollingRestarts()], "chaos")
    screen = report.Screen(console, "chaos", load.seconds)
    try:
        with screen.shown():
            return perform(scenario, place, directory, seed, load, show=screen)
    except ConnectionFailed as error:
        raise unreachable(place.database, error) from error


def _print(console: Console, verdict: Verdict) -> None:
    ends = [f"{count:,} {status}" for status, count in sorted(verdict.statuses.items())]
    console.print(f"\n[bold]{verdict.acknowledged:,}[/] jobs acknowledged: {', '.join(ends)}\n")
    faults = Table("fault", "jobs hit", "reclaimed after", box=None, header_style="dim")
    for name, hits in sorted(verdict.hits.items()):
        times = verdict.recoveries.get(name)
        delay = f"{report.median(times):.1f} s, {times[-1]:.1f} s at most" if times else ""
        faults.add_row(name, f"{hits:,} ×", delay)
    promises = Table("promise", "", "broken", box=None, header_style="dim")
    broken = verdict.broken()
    for promise, what in PROMISES.items():
        count = f"[bold red]{broken[promise]:,} ×[/]" if promise in broken else "[green]never[/]"
        promises.add_row(promise, what, count)
    console.print(faults, "", promises, "", sep="\n")
    for each in verdict.missed:
        console.print(
            f"{each}; a longer run may.",
            style="yellow",
            soft_wrap=True,
        )
    for complaint in report.complaints(verdict):
        console.print(complaint, style="red", markup=False, soft_wrap=True)
    console.print(
        "[bold green]Every promise was kept.[/]" if verdict.passed
        else "[bold red]A promise was broken.[/] Run it again with the same --seed, and report it."
    )  # fmt: skip


@contextlib.contextmanager
def _schema(url: str) -> Iterator[str]:
    """A temporary schema, dropped at the end."""
    name = f"{PREFIX}{random.SystemRandom().randrange(16**8):08x}"
    with connect(url) as conn:
        try:
            conn.execute(f"CREATE SCHEMA {quote_schema(name)}".encode())
        except InsufficientPrivilege:
            role = conn.info.user
            raise HowdahError(
                f'role "{role}" may not create a schema in this database. Use a role that may, or '
                "another database, with --database."
            ) from None
    try:
        yield name
    finally:
        ignore_stops()
        _drop(url, name)


def _drop(url: str, name: str) -> None:
    """Drop the schema. Retries until the backends of killed workers release their locks."""
    deadline = time.monotonic() + DROP_TIMEOUT_SECONDS
    while True:
        try:
            with connect(url) as conn:
                conn.execute("SET lock_timeout = '2s'")
                conn.execute(f"DROP SCHEMA {quote_schema(name)} CASCADE".encode())
                return
        except (DatabaseError, HowdahError) as error:
            if time.monotonic() > deadline:
                raise HowdahError(
                    f'schema "{name}" could not be dropped. Run: DROP SCHEMA {name} CASCADE. '
                    f"({str(error).splitlines()[0]})"
                ) from error
        time.sleep(0.5)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="howdah-chaos-", ignore_cleanup_errors=True) as name:
        yield Path(name)
