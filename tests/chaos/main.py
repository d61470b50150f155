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
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE / "servers")]

from page import page  # noqa: E402
from server_faults import (  # noqa: E402
    SERVER,
    SETTINGS,
    BadNetwork,
    KillBackends,
    KillServer,
    TerminateBackends,
)

from howdah.chaos import fault_hits, report  # noqa: E402
from howdah.chaos.process_faults import (  # noqa: E402
    WORKERS,
    Calm,
    FaultPoints,
    KillProducers,
    KillWorkers,
    Mixed,
    PauseWorkers,
    RollingRestarts,
)
from howdah.chaos.processes.producer import MISFITS  # noqa: E402
from howdah.chaos.run import Load, Verdict, perform  # noqa: E402
from howdah.chaos.scenario import Place, Scenario  # noqa: E402
from howdah.embedded import EmbeddedServer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable

    from howdah.chaos.history import History

FULL = 1200.0
OVERHEAD = 12.0
"""Seconds that a run takes besides its load: starting workers, waiting for the last job, checking."""
BARS = {"jobs": 100_000, "worker kills": 200, "server kills": 20, "pauses": 100}
LEASE = 2.0


class Misfits(Calm):
    """Handlers that should never have been written."""

    name = "misfits"
    about = "handlers that crash, kill their worker, stall, fork, exhaust memory or ignore cancellation; poison payloads"
    least = 15.0

    def missed(self, history: History, planned: Iterable[str], lease: float) -> list[str]:
        return super().missed(history, [*MISFITS, fault_hits.OWN], lease)


def often(scenario: Scenario, every: float) -> Scenario:
    """The same, with another pause between faults."""
    scenario.every = every
    return scenario


def alone() -> list[Scenario]:
    """Every scenario by itself."""
    mine = [each() for each in (*WORKERS, *SERVER)]
    for scenario in mine:
        if isinstance(scenario, KillWorkers):
            often(scenario, 1.0)
        elif isinstance(scenario, FaultPoints):
            scenario.at_once = 4  # no other fault has the machine
        elif isinstance(scenario, KillServer | KillBackends | BadNetwork):
            often(scenario, 4.0)
    return [Misfits(), *mine, *servers()]


def servers() -> list[Scenario]:
    """Those that need servers of their own, where they are there."""
    if not (HERE / "servers" / "scenarios.py").exists():
        return []
    return list(importlib.import_module("scenarios").SCENARIOS)


def mixed() -> list[Scenario]:
    """Several at once."""
    return [
        Mixed(
            [often(KillWorkers(), 1.5), often(PauseWorkers(), 0.5), RollingRestarts(), KillProducers()],
            "workers, mixed",
        ),
        Mixed(
            [
                often(KillServer(), 8.0), often(KillWorkers(), 1.5), often(PauseWorkers(), 0.5),
                often(TerminateBackends(), 5.0), FaultPoints(),
            ],
            "everything, mixed",
        ),
    ]  # fmt: skip


def quick() -> list[Scenario]:
    """What a minute is enough for."""
    parts = [
        often(KillWorkers(), 4.0), often(PauseWorkers(), 3.0), often(FaultPoints(), 4.0),
        often(RollingRestarts(), 6.0), often(TerminateBackends(), 6.0), often(KillServer(), 12.0),
    ]  # fmt: skip
    return [Mixed(parts, "quick")]


class Hall:
    """A directory and a common server for a series of runs, gone afterwards."""

    def __init__(self, console: Console, seed: int) -> None:
        self._console = console
        self._seed = seed
        self.directory = Path(tempfile.mkdtemp(prefix="howdah-chaos-"))
        self.directory.chmod(0o755)  # root's server runs as another account, which must get in
        self._server = EmbeddedServer(self.directory / "pg", settings=SETTINGS)
        self._count = 0

    def close(self, *, keep: bool) -> None:
        self._server.remove()
        if keep:
            self._console.print(f"The ledgers and logs are in {self.directory}.")
        else:
            shutil.rmtree(self.directory, ignore_errors=True)

    def perform(self, scenario: Scenario, load: Load) -> Verdict:
        """One run, shown."""
        self._count += 1
        directory = self.directory / f"{self._count:02}-{scenario.name.replace(' ', '-')}"
        directory.mkdir(mode=0o755)
        own = isinstance(scenario, Mixed) and any(isinstance(p, KillServer) for p in scenario.parts)
        url = "" if own or isinstance(scenario, KillServer) else self._server.start()
        common = Place(url, url, f"chaos_{self._count}")
        screen = report.Screen(self._console, scenario.name, load.seconds)
        with screen.shown():
            verdict = perform(
                scenario, common, directory, self._seed, load, show=screen, tell=self._tell
            )
        for complaint in report.complaints(verdict):
            self._console.print(f"[red]{scenario.name}:[/] {complaint}", soft_wrap=True)
        for each in verdict.missed:
            self._console.print(f"[red]{scenario.name}:[/] {each}", soft_wrap=True)
        return verdict

    def _tell(self, text: str) -> None:
        self._console.print(text, style="dim", soft_wrap=True, highlight=False)

    def version(self) -> str:
        with psycopg.connect(self._server.start()) as conn:
            (version,) = conn.execute("SHOW server_version").fetchone() or ("?",)
        return str(version)


def missing(verdicts: Iterable[Verdict], share: float) -> list[str]:
    """Which bars were missed: a run that hit too little has shown too little."""
    counted = dict.fromkeys(BARS, 0)
    for verdict in verdicts:
        counted["jobs"] += verdict.acknowledged
        for name, count in verdict.hits.items():
            if name in ("kill worker", "kill at fault point", "killed by its own job"):
                counted["worker kills"] += count
            elif name == "kill server":
                counted["server kills"] += count
            elif name == "pause worker":
                counted["pauses"] += count
    return [
        f"only {counted[name]:,} {name}; at least {bar * share:,.0f} must hit"
        for name, bar in BARS.items()
        if counted[name] < int(bar * share)
    ]


def run_quick(console: Console, seed: int) -> bool:
    """About a minute, set-up and all."""
    hall = Hall(console, seed)
    (scenario,) = quick()
    passed = False
    try:
        verdict = hall.perform(
            scenario, Load(seconds=18, rate=100, workers=3, lease=LEASE, backlog=300)
        )
        console.print(report.table([verdict]))
        passed = verdict.passed and not verdict.missed
    finally:
        hall.close(keep=not passed)
    return passed


def run_full(console: Console, options: argparse.Namespace) -> bool:
    """Everything, one after the other and at once."""
    began = time.monotonic()
    chosen = [(scenario, 1.0) for scenario in alone()] + [(each, 5.0) for each in mixed()]
    if options.scenario:
        chosen = [(each, 1.0) for each, _ in chosen if each.name in options.scenario]
        if len(chosen) < len(set(options.scenario)):
            names = ", ".join(each.name for each in (*alone(), *mixed()))
            raise SystemExit(f"no such scenario; there are: {names}")
    unit = max(
        8.0, (options.seconds - OVERHEAD * len(chosen)) / sum(weight for _, weight in chosen)
    )
    hall = Hall(console, options.seed)
    done: list[tuple[Scenario, Verdict]] = []
    passed = False
    try:
        for scenario, weight in chosen:
            harsh = isinstance(scenario, Misfits | Mixed)
            load = Load(
                seconds=unit * weight, rate=220, producers=3, lease=LEASE, backlog=1500,
                misfits=harsh, processes=harsh, patience=120,
                workers=5 if isinstance(scenario, Mixed) else None,
            )  # fmt: skip
            done.append((scenario, hall.perform(scenario, load)))
            console.print(report.table([done[-1][1]]))
        verdicts = [verdict for _, verdict in done]
        seconds = time.monotonic() - began
        short = [] if options.scenario else missing(verdicts, min(1.0, options.seconds / FULL))
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
                    postgresql=hall.version(),
                    short=missing(verdicts, 1.0),
                )
            )
        if options.json is not None:
            described = [report.as_json(verdict) for verdict in verdicts]
            options.json.write_text(json.dumps(described, indent=1))
        passed = all(each.passed and not each.missed for each in verdicts) and not short
    finally:
        hall.close(keep=not passed)
    return passed


def main() -> None:
    """Run and leave with 0 if every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["quick", "full"])
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "1")))
    parser.add_argument("--seconds", type=float, default=FULL)
    parser.add_argument("--scenario", action="append", default=[])
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Through every `finally`, so that no process is left.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    # A file has room for the whole table.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(f"chaos, {options.what}, seed {options.seed}")
    passed = (
        run_quick(console, options.seed) if options.what == "quick" else run_full(console, options)
    )
    console.print("[green]Every promise was kept.[/]" if passed else "[bold red]Chaos won.[/]")
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
