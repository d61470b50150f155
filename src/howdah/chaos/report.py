"""The output of a run: a live line in the terminal, a table, and JSON."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from howdah.chaos.checker import PROMISES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from howdah.chaos.run import Verdict

SAY_EVERY = 5.0
SHOWN = 20


class Screen:
    """Shows the state of a run: one live line in a terminal, a line every `SAY_EVERY` seconds elsewhere."""

    def __init__(self, console: Console, title: str, seconds: float) -> None:
        self._console = console
        self._title = title
        self._seconds = seconds
        self._began = time.monotonic()
        self._said = 0.0
        self._fault = ""
        self._faults = 0
        self._live: Live | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def shown(self) -> Iterator[Screen]:
        """Show the line for the duration of the run."""
        if not self._console.is_terminal:
            yield self
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield self

    def __call__(self, what: str, facts: dict[str, Any]) -> None:
        """Receive the state of the run, or a fault."""
        with self._lock:
            if what == "fault":
                self._fault = facts["fault"].strip()
                self._faults += 1
                return
            now = time.monotonic()
            line = Text.assemble(
                (f"{self._title}  ", "bold"),
                f"{now - self._began:4.0f}/{self._seconds:.0f} s  {facts['finished']:>7,} finished  "
                f"{facts['pending']:>5,} pending  {facts['claimed']:>4,} claimed  ",
                (f"{self._faults} faults  ", "red"),
                (self._fault, "dim"),
            )
            if self._live is not None:
                self._live.update(line, refresh=True)
            elif now - self._said > SAY_EVERY:
                self._said = now
                self._console.print(line, soft_wrap=True)


def table(verdicts: Sequence[Verdict]) -> Table:
    """One row per run: its counts, and the violations of each promise."""
    made = Table(box=None, padding=(0, 1), header_style="bold")
    made.add_column("scenario")
    for name in ("jobs", "runs", "hits"):
        made.add_column(name, justify="right")
    for promise in PROMISES:
        made.add_column(promise, justify="right")
    made.add_column("recovery p50, max", justify="right")
    made.add_column("")
    for verdict in verdicts:
        broken = verdict.broken()
        cells = [
            Text(f"{broken[p]}", style="bold red") if p in broken else Text("0", style="green")
            for p in PROMISES
        ]
        times = sorted(s for seconds in verdict.recoveries.values() for s in seconds)
        back = f"{median(times):.1f} s, {times[-1]:.1f} s" if times else ""
        made.add_row(
            verdict.scenario,
            f"{verdict.acknowledged:,}",
            f"{verdict.executions:,}",
            f"{sum(verdict.hits.values()):,}",
            *cells,
            back,
            Text("kept", style="green") if verdict.passed else Text("BROKEN", style="bold red"),
        )
    return made


def complaints(verdict: Verdict) -> list[str]:
    """The notes and findings as sentences, at most `SHOWN` findings."""
    found = [str(finding) for finding in verdict.findings]
    more = len(found) - SHOWN
    return list(verdict.notes) + found[:SHOWN] + ([f"… and {more} more"] if more > 0 else [])


def as_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict for programs."""
    return {
        "scenario": verdict.scenario,
        "seed": verdict.seed,
        "seconds": verdict.seconds,
        "passed": verdict.passed,
        "acknowledged": verdict.acknowledged,
        "statuses": verdict.statuses,
        "executions": verdict.executions,
        "planned": verdict.planned,
        "hits": verdict.hits,
        "promises": {promise: verdict.broken().get(promise, 0) for promise in PROMISES},
        "recovery": {
            name: {"count": len(times), "p50": round(median(times), 3), "max": round(times[-1], 3)}
            for name, times in verdict.recoveries.items()
        },
        "findings": [
            {"promise": f.promise, "job": f.job, "what": f.what, "lines": list(f.lines)}
            for f in verdict.findings
        ],
        "notes": verdict.notes,
        "missed": verdict.missed,
    }


def median(times: Sequence[float]) -> float:
    """The median of sorted times."""
    return times[len(times) // 2]
