"""Which workloads are run for whom, in which order: round by round, peer by peer, so that whatever else
happens on the machine meets everybody alike."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench import workloads
from bench.launch import AdapterError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from bench.peers import Peer
    from bench.results import Results
    from bench.workloads import Figures, Stage

QUICK_PEERS = ("howdah", "pgqueuer", "bare", "pipelined")


@dataclass(frozen=True)
class Run:
    """The circumstances of a round: the scale of the whole run and what was measured before."""

    stage: Stage
    results: Results
    scale: float
    steady: float

    def jobs(self, jobs: int) -> int:
        return max(200, int(jobs * self.scale))


Outcome = dict[str, "Figures"]  # workload → figures


@dataclass(frozen=True)
class Workload:
    """A kind of work. One function may measure two kinds at once, as filling and draining."""

    name: str
    measure: Callable[[Run, Peer], Outcome]
    optional: bool = False
    """Only for peers that say they take part."""
    ceilings: bool = False
    quick: bool = False


def _drain(run: Run, peer: Peer) -> Outcome:
    told = workloads.drain(run.stage, peer, run.jobs(peer.drain))
    outcome = {"drain-async": told["drain"]}
    if not peer.is_ceiling:
        outcome["enqueue-bulk"] = told["fill"]
    return outcome


def _pickup_idle(run: Run, peer: Peer) -> Outcome:
    return {"pickup-idle": workloads.pickup(run.stage, peer, run.jobs(2000))}


def _pickup_commit(run: Run, peer: Peer) -> Outcome:
    figures = workloads.pickup(run.stage, peer, run.jobs(2000), how="transaction")
    return {"pickup-commit": figures}


def _enqueue_1(run: Run, peer: Peer) -> Outcome:
    run.stage.prepare(peer)
    figures = workloads.enqueue(run.stage, peer, run.jobs(peer.single), "single", callers=1)
    return {"enqueue-1": figures}


def _enqueue_64(run: Run, peer: Peer) -> Outcome:
    run.stage.prepare(peer)
    jobs = run.jobs(peer.single * 4)
    return {"enqueue-64": workloads.enqueue(run.stage, peer, jobs, "single", callers=64)}


WORKLOADS = [
    Workload("drain-async", _drain, ceilings=True, quick=True),
    Workload("pickup-idle", _pickup_idle, quick=True),
    Workload("pickup-commit", _pickup_commit, optional=True, quick=True),
    Workload("enqueue-1", _enqueue_1, quick=True),
    Workload("enqueue-64", _enqueue_64, quick=True),
]


def run(stage: Stage, peers: list[Peer], results: Results, options: argparse.Namespace) -> None:
    """Run everything that was asked for."""
    scale = options.scale * (0.25 if options.quick else 1.0)
    chosen = tuple(options.only.split(",")) if options.only else ("",)
    run = Run(stage, results, scale, options.steady)
    for workload in WORKLOADS:
        if not workload.name.startswith(chosen) or (options.quick and not workload.quick):
            continue
        results.forget(workload.name)
        taking_part = [peer for peer in peers if _takes_part(peer, workload)]
        for number in range(1, options.rounds + 1):
            for peer in list(taking_part):
                if not _measure(run, workload, peer, number):
                    taking_part.remove(peer)


def _takes_part(peer: Peer, workload: Workload) -> bool:
    if peer.is_ceiling:
        return workload.ceilings
    return not workload.optional or workload.name in peer.takes


def _measure(run: Run, workload: Workload, peer: Peer, number: int) -> bool:
    """One round of one peer. One that breaks is left out of this workload, and said so."""
    label = f"{workload.name:<20} {peer.name:<14} round {number}"
    run.stage.show = lambda text: _line(f"{label}  {text}")
    _line(label)
    started = time.monotonic()
    try:
        outcome = workload.measure(run, peer)
    except (AdapterError, AssertionError) as error:
        print(f"\r{label}  failed: {error}")
        if peer.name == "howdah" or isinstance(error, AssertionError):
            raise
        run.results.content.setdefault("skipped", {})[f"{peer.name}: {workload.name}"] = str(error)
        return False
    for name, figures in outcome.items():
        run.results.record(name, peer.name, number, figures)
    told = "  ".join(_figure(*item) for figures in outcome.values() for item in figures.items())
    _line("")
    print(f"\r{label}  {told}  ({time.monotonic() - started:.0f} s)", flush=True)
    return True


def _figure(name: str, value: float) -> str:
    return f"{name} {value:,.0f}" if value >= 100 else f"{name} {value:.2f}"


def _line(text: str) -> None:
    """Live progress, for people who watch."""
    if sys.stdout.isatty():
        print(f"\r{text:<100}", end="", flush=True)


def overview(results: Results) -> str:
    """The ratios, for the terminal."""
    lines = ["", "Medians, and Howdah's figure over each peer's in the same round:"]
    for workload, figure in HEADLINES.items():
        for peer in results.peers(workload):
            found = results.summary(workload, peer, figure)
            ratio = results.ratios(workload, "howdah", peer, figure)
            if found is not None:
                over = f"{ratio.median:7.2f} ×" if ratio and peer != "howdah" else ""
                spread = f"[{found.low:,.2f} … {found.high:,.2f}]"
                lines.append(
                    f"  {workload:<20} {figure:<16} {peer:<14} {found.median:>12,.2f} {spread:<28} {over}"
                )
    return "\n".join(lines)


HEADLINES = {
    "drain-async": "jobs_per_second",
    "enqueue-bulk": "jobs_per_second",
    "enqueue-1": "jobs_per_second",
    "enqueue-64": "jobs_per_second",
    "pickup-idle": "call_p50_ms",
    "pickup-commit": "commit_p50_ms",
}
