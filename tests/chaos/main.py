"""`make chaos` and `make chaos-quick`.

python tests/chaos/main.py quick [--seed N]
python tests/chaos/main.py full [--seed N] [--seconds S] [--scenario NAME …] [--report FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from rich.console import Console

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "support"), str(HERE / "servers")]

from page import page  # noqa: E402
from server_faults import (  # noqa: E402
    SERVER_SCENARIOS,
    SETTINGS,
    BadNetwork,
    KillBackends,
    KillServer,
    TerminateBackends,
)

from howdah.chaos import fault_hits, report  # noqa: E402
from howdah.chaos.process_faults import (  # noqa: E402
    PROCESS_SCENARIOS,
    Calm,
    FaultPoints,
    KillProducers,
    KillWorkers,
    Mixed,
    PauseWorkers,
    RollingRestarts,
)
from howdah.chaos.processes.producer import HARMFUL_TASKS  # noqa: E402
from howdah.chaos.run import Load, Verdict, perform  # noqa: E402
from howdah.chaos.scenario import Place, Scenario  # noqa: E402
from howdah.embedded import EmbeddedServer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable

    from howdah.chaos.history import History

FULL_RUN_SECONDS = 1320.0
OVERHEAD_SECONDS = 12.0
"""What a run takes besides its load: starting workers, waiting for the last job, checking."""
MINIMUMS = {"jobs": 100_000, "worker kills": 200, "server kills": 20, "pauses": 100}
"""The jobs and hits of a full run."""
LEASE_SECONDS = 2.0


class HarmfulHandlers(Calm):
    """Handlers that harm their worker."""

    name = "misfits"
    about = "handlers that crash, kill their worker, stall, fork, exhaust memory or ignore cancellation; poison payloads"
    min_seconds = 15.0

    def missed(self, history: History, planned: Iterable[str], lease: float) -> list[str]:
        return super().missed(history, [*HARMFUL_TASKS, fault_hits.KILLED_BY_OWN_JOB], lease)


def with_interval(scenario: Scenario, every_seconds: float) -> Scenario:
    """The scenario with another time between faults."""
    scenario.every_seconds = every_seconds
    return scenario


def single_scenarios() -> list[Scenario]:
    """Every scenario, each in its own run."""
    scenarios = [each() for each in (*PROCESS_SCENARIOS, *SERVER_SCENARIOS)]
    for scenario in scenarios:
        if isinstance(scenario, KillWorkers):
            with_interval(scenario, 1.0)
        elif isinstance(scenario, FaultPoints):
            scenario.concurrent_kills = 4  # no other scenario uses the CPU
        elif isinstance(scenario, KillServer | KillBackends | BadNetwork):
            with_interval(scenario, 4.0)
    return [HarmfulHandlers(), *scenarios, *environment_scenarios()]


def environment_scenarios() -> list[Scenario]:
    """The scenarios with their own servers or extra programs, as far as these are installed."""
    return list(importlib.import_module("scenarios").SCENARIOS)


def missing_scenarios() -> dict[str, str]:
    """The scenarios that cannot run here, by name, and why."""
    return dict(importlib.import_module("scenarios").MISSING)


def mixed_scenarios() -> list[Scenario]:
    """Several scenarios at once."""
    return [
        Mixed(
            [with_interval(KillWorkers(), 1.5), with_interval(PauseWorkers(), 0.5), RollingRestarts(), KillProducers()],
            "workers, mixed",
        ),
        Mixed(
            [
                with_interval(KillServer(), 8.0), with_interval(KillWorkers(), 1.5), with_interval(PauseWorkers(), 0.5),
                with_interval(TerminateBackends(), 5.0), FaultPoints(),
            ],
            "everything, mixed",
        ),
    ]  # fmt: skip


def quick_scenario() -> Scenario:
    """The faults that fit into a minute."""
    parts = [
        with_interval(KillWorkers(), 4.0), with_interval(PauseWorkers(), 3.0), with_interval(FaultPoints(), 4.0),
        with_interval(RollingRestarts(), 6.0), with_interval(TerminateBackends(), 6.0), with_interval(KillServer(), 12.0),
    ]  # fmt: skip
    return Mixed(parts, "quick")


class Series:
    """A series of runs with a temporary directory and a common server."""

    def __init__(self, console: Console, seed: int) -> None:
        self._console = console
        self._seed = seed
        self.directory = Path(tempfile.mkdtemp(prefix="howdah-chaos-"))
        self.directory.chmod(
            0o755
        )  # as root, the server runs under another account, which must be able to enter
        self._server = EmbeddedServer(self.directory / "pg", settings=SETTINGS)
        self._count = 0

    def close(self, *, keep: bool) -> None:
        self._server.remove()
        if keep:
            self._console.print(f"The ledgers and logs are in {self.directory}.")
        else:
            shutil.rmtree(self.directory, ignore_errors=True)

    def perform(self, scenario: Scenario, load: Load) -> Verdict:
        """Run one scenario, with its progress on the console."""
        self._count += 1
        directory = self.directory / f"{self._count:02}-{scenario.name.replace(' ', '-')}"
        directory.mkdir(mode=0o755)
        own = isinstance(scenario, Mixed) and any(isinstance(p, KillServer) for p in scenario.parts)
        url = "" if own or isinstance(scenario, KillServer) else self._server.start()
        common = Place(url, url, f"chaos_{self._count}")
        screen = report.Screen(self._console, scenario.name, load.seconds)
        with screen.shown():
            verdict = perform(
                scenario, common, directory, self._seed, load, show=screen, log=self._log
            )
        for complaint in report.complaints(verdict):
            self._console.print(f"[red]{scenario.name}:[/] {complaint}", soft_wrap=True)
        for each in verdict.missed:
            self._console.print(f"[red]{scenario.name}:[/] {each}", soft_wrap=True)
        return verdict

    def _log(self, text: str) -> None:
        self._console.print(text, style="dim", soft_wrap=True, highlight=False)

    def version(self) -> str:
        with psycopg.connect(self._server.start()) as conn:
            (version,) = conn.execute("SHOW server_version").fetchone() or ("?",)
        return str(version)


def missed_minimums(verdicts: Iterable[Verdict], share: float) -> list[str]:
    """The minimums that were not reached, as sentences: too few hits prove too little."""
    counted = dict.fromkeys(MINIMUMS, 0)
    for verdict in verdicts:
        counted["jobs"] += verdict.acknowledged
        for name, count in verdict.hits.items():
            if name in ("kill worker", "kill at fault point", fault_hits.KILLED_BY_OWN_JOB):
                counted["worker kills"] += count
            elif name == "kill server":
                counted["server kills"] += count
            elif name == "pause worker":
                counted["pauses"] += count
    return [
        f"only {counted[name]:,} {name}; at least {minimum * share:,.0f} must hit"
        for name, minimum in MINIMUMS.items()
        if counted[name] < int(minimum * share)
    ]


def run_quick(console: Console, seed: int) -> bool:
    """About a minute, including setup."""
    series = Series(console, seed)
    passed = False
    try:
        load = Load(seconds=18, rate=100, workers=3, lease=LEASE_SECONDS, backlog=300)
        verdict = series.perform(quick_scenario(), load)
        console.print(report.table([verdict]))
        passed = verdict.passed and not verdict.missed
    finally:
        series.close(keep=not passed)
    return passed


def run_full(console: Console, options: argparse.Namespace) -> bool:
    """Every scenario by itself, then several at once."""
    began = time.monotonic()
    chosen = [(scenario, 1.0) for scenario in single_scenarios()]
    chosen += [(scenario, 5.0) for scenario in mixed_scenarios()]
    if options.scenario:
        chosen = [(each, 1.0) for each, _ in chosen if each.name in options.scenario]
        if len(chosen) < len(set(options.scenario)):
            names = ", ".join(each.name for each in (*single_scenarios(), *mixed_scenarios()))
            raise SystemExit(f"unknown scenario; known: {names}")
    for name, reason in missing_scenarios().items():
        console.print(f"[yellow]not run: {name}:[/] {reason}")
    unit = max(
        8.0,
        (options.seconds - OVERHEAD_SECONDS * len(chosen)) / sum(weight for _, weight in chosen),
    )
    series = Series(console, options.seed)
    done: list[tuple[Scenario, Verdict]] = []
    passed = False
    try:
        for scenario, weight in chosen:
            harmful = isinstance(scenario, HarmfulHandlers | Mixed)
            load = Load(
                seconds=unit * weight, rate=220, producers=3, lease=LEASE_SECONDS, backlog=1500,
                harmful=harmful, processes=harmful, drain_timeout=120,
                workers=5 if isinstance(scenario, Mixed) else None,
            )  # fmt: skip
            done.append((scenario, series.perform(scenario, load)))
            console.print(report.table([done[-1][1]]))
        verdicts = [verdict for _, verdict in done]
        seconds = time.monotonic() - began
        short = (
            []
            if options.scenario
            else missed_minimums(verdicts, min(1.0, options.seconds / FULL_RUN_SECONDS))
        )
        console.rule("verdict")
        console.print(report.table(verdicts))
        for each in short:
            console.print(f"[red]{each}[/]")
        if options.report is not None:
            options.report.write_text(
                page(
                    done,
                    seed=options.seed,
                    seconds=seconds,
                    postgresql=series.version(),
                    short=missed_minimums(verdicts, 1.0),
                    missing=missing_scenarios(),
                )
            )
        if options.json is not None:
            described = [report.as_json(verdict) for verdict in verdicts]
            options.json.write_text(json.dumps(described, indent=1))
        passed = all(each.passed and not each.missed for each in verdicts) and not short
    finally:
        series.close(keep=not passed)
    return passed


def main() -> None:
    """Run, and exit with 0 if every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["quick", "full"])
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "1")))
    parser.add_argument("--seconds", type=float, default=FULL_RUN_SECONDS)
    parser.add_argument("--scenario", action="append", default=[])
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # SystemExit runs every `finally`, so that no process is left.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    # In a file, wide enough for the whole table.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(f"chaos, {options.what}, seed {options.seed}")
    passed = (
        run_quick(console, options.seed) if options.what == "quick" else run_full(console, options)
    )
    console.print("[green]Every promise was kept.[/]" if passed else "[bold red]Chaos won.[/]")
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
