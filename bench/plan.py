"""Which peers run which workloads, in which order: round by round, peer by peer, so that other load on the machine
affects all peers alike."""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench import pgbench, workloads
from bench.adapter_process import AdapterError
from bench.auto_tuning import AutoTuning, in_environment

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from bench.peers import Peer
    from bench.results import Results
    from bench.workloads import Figures, Testbed

QUICK_PEERS = ("howdah", "pgqueuer", "bare", "pipelined", "pgbench")


@dataclass(frozen=True)
class Run:
    """The context of a round: the testbed, the scale of the run, and earlier results."""

    testbed: Testbed
    results: Results
    scale: float
    steady: float

    def jobs(self, jobs: int) -> int:
        return max(200, int(jobs * self.scale))


Outcome = dict[str, "Figures"]  # workload → figures


@dataclass(frozen=True)
class Workload:
    """A workload. One function may measure two at once, such as filling and draining."""

    name: str
    measure: Callable[[Run, Peer], Outcome]
    optional: bool = False
    """Only for peers that list it."""
    ceilings: bool = False
    quick: bool = False
    also: tuple[str, ...] = ()
    """Other workloads that it records."""


def _drain(run: Run, peer: Peer) -> Outcome:
    if peer.name == "pgbench":
        return {"drain-async": pgbench.drain(run.testbed, peer, run.jobs(peer.drain))}
    figures = workloads.drain(run.testbed, peer, run.jobs(peer.drain))
    outcome = {"drain-async": figures["drain"]}
    if not peer.is_ceiling:
        outcome["enqueue-bulk"] = figures["fill"]
    return outcome


def _drain_as(handler: str, share: float) -> Callable[[Run, Peer], Outcome]:
    def measure(run: Run, peer: Peer) -> Outcome:
        jobs = run.jobs(int(peer.drain * share))
        return {f"drain-{handler}": workloads.drain(run.testbed, peer, jobs, handler)["drain"]}

    return measure


def _payload(size: int) -> Callable[[Run, Peer], Outcome]:
    def measure(run: Run, peer: Peer) -> Outcome:
        figures = workloads.drain(run.testbed, peer, run.jobs(peer.drain // 3), payload=size)
        fill = {"enqueue_" + name: value for name, value in figures["fill"].items()}
        return {f"payload-{size}": figures["drain"] | fill}

    return measure


def _pickup_idle(run: Run, peer: Peer) -> Outcome:
    return {"pickup-idle": workloads.pickup(run.testbed, peer, run.jobs(SAMPLES))}


def _pickup_commit(run: Run, peer: Peer) -> Outcome:
    figures = workloads.pickup(run.testbed, peer, run.jobs(SAMPLES), how="transaction")
    return {"pickup-commit": figures}


def _pickup_loaded(name: str, how: str) -> Callable[[Run, Peer], Outcome]:
    """Under half of the load that this peer sustained in the steady workload of this run."""

    def measure(run: Run, peer: Peer) -> Outcome:
        steady = run.results.summary("steady", peer.name, "jobs_per_second")
        if steady is None:
            raise AdapterError("the steady workload has no figure for this peer")
        load = steady.median / 2
        figures = workloads.pickup(run.testbed, peer, run.jobs(SAMPLES), how, load)
        return {name: figures | {"load_jobs_per_second": load}}

    return measure


def _enqueue(name: str, factor: float, how: str, **options: int) -> Workload:
    def measure(run: Run, peer: Peer) -> Outcome:
        jobs = run.jobs(int(peer.single * factor))
        return {name: workloads.enqueue_only(run.testbed, peer, jobs, how, **options)}

    return Workload(name, measure, optional=name in OPTIONAL, quick=name not in OPTIONAL)


def _steady(run: Run, peer: Peer) -> Outcome:
    return {"steady": workloads.steady(run.testbed, peer, run.steady)}


def _progress(run: Run, peer: Peer) -> Outcome:
    jobs = run.jobs(1000)
    figures = workloads.drain(run.testbed, peer, jobs, "progress")["drain"]
    reports = figures.pop("jobs_per_second") * workloads.PROGRESS_REPORTS
    return {"progress": figures | {"reports_per_second": reports}}


SAMPLES = 2000
OPTIONAL = {"enqueue-transaction", "enqueue-16p"}
WORKLOADS = [
    Workload("drain-async", _drain, ceilings=True, quick=True, also=("enqueue-bulk",)),
    Workload("pickup-idle", _pickup_idle, quick=True),
    Workload("pickup-commit", _pickup_commit, optional=True, quick=True),
    _enqueue("enqueue-1", 1, "single", callers=1),
    _enqueue("enqueue-64", 4, "single", callers=64),
    _enqueue("enqueue-16p", 4, "single", callers=1, processes=16),
    _enqueue("enqueue-transaction", 1, "transaction", callers=1),
    Workload("drain-io", _drain_as("io", 0.5), optional=True),
    Workload("drain-thread", _drain_as("thread", 0.5), optional=True),
    Workload("drain-process", _drain_as("process", 0.1), optional=True),
    Workload("steady", _steady, optional=True),
    *(
        Workload(name, _pickup_loaded(name, how), optional=True)
        for name, how in (("pickup-loaded", "single"), ("pickup-loaded-commit", "transaction"))
    ),
    *(Workload(f"payload-{size}", _payload(size), optional=True) for size in (100, 1000, 5000)),
    Workload("progress", _progress, optional=True),
]


def run(testbed: Testbed, peers: list[Peer], results: Results, options: argparse.Namespace) -> bool:
    """Run everything requested. Returns whether all of Howdah's rounds succeeded."""
    started = time.monotonic()
    scale = options.scale * (0.25 if options.quick else 1.0)
    chosen = tuple(options.only.split(",")) if options.only else ("",)
    run = Run(testbed, results, scale, options.steady)
    rounds = []
    for workload in WORKLOADS:
        if not workload.name.startswith(chosen) or (options.quick and not workload.quick):
            continue
        for name in (workload.name, *workload.also):
            results.forget(name)
        taking_part = [peer for peer in peers if _takes_part(peer, workload)]
        for number in range(1, options.rounds + 1):
            rounds += [(workload, peer, number) for peer in taking_part]
    failed: set[tuple[str, str]] = set()
    tuning = AutoTuning()
    for done, (workload, peer, number) in enumerate(rounds):
        if (peer.name, workload.name) in failed:
            continue
        passed = time.monotonic() - started
        if number > 1 and passed > 60 * options.minutes:
            results.leave_out(
                f"{workload.name}, round {number}", "the time limit of the run was reached"
            )
            continue
        progress = f"{_clock(passed)} {100 * done // len(rounds):>3} %"
        _tune(run, workload, peer, tuning, progress)
        with in_environment(tuning.settings(peer, workload.name)):
            facts = tuning.facts(peer, workload.name)
            if not _measure(run, workload, peer, number, progress, facts):
                failed.add((peer.name, workload.name))
    return not any(peer.startswith("howdah") for peer, _ in failed)


def _tune(run: Run, workload: Workload, peer: Peer, tuning: AutoTuning, progress: str) -> None:
    """Choose a peer's settings before its first round."""
    small = replace(run, scale=run.scale * 0.3)
    label = f"{progress}  {workload.name:<20} {peer.name:<14} tuning its settings"
    run.testbed.show = lambda text: _show_line(f"{label}  {text}")
    tuning.tune(peer, workload.name, lambda: workload.measure(small, peer)[workload.name])


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:>2}:{int(seconds) % 60:02}"


def _takes_part(peer: Peer, workload: Workload) -> bool:
    if peer.is_ceiling:
        return workload.ceilings
    name = "payload" if workload.name.startswith("payload") else workload.name
    return not workload.optional or name in peer.takes


def _measure(
    run: Run, workload: Workload, peer: Peer, number: int, progress: str, facts: dict[str, object]
) -> bool:
    """One round of one peer. A peer that fails is reported and left out of the rest of this workload."""
    label = f"{progress}  {workload.name:<20} {peer.name:<14} round {number}"
    run.testbed.checked = {}
    run.testbed.show = lambda text: _show_line(f"{label}  {text}")
    _show_line(label)
    started = time.monotonic()
    try:
        outcome = workload.measure(run, peer)
    except Exception as error:  # any failure of one peer must not stop the others
        _show_line("")
        print(f"{_BACK}{label}  failed: {error}", flush=True)
        if not isinstance(error, AdapterError | AssertionError):
            traceback.print_exc()
        run.results.leave_out(f"{peer.name}: {workload.name}", f"round {number}: {error}")
        run.results.save()
        return False
    for name, figures in outcome.items():
        run.results.record(name, peer.name, number, figures, run.testbed.checked | facts)
    text = "  ".join(_figure(*item) for figures in outcome.values() for item in figures.items())
    _show_line("")
    print(f"{_BACK}{label}  {text}  ({time.monotonic() - started:.0f} s)", flush=True)
    return True


def _figure(name: str, value: float) -> str:
    return f"{name} {value:,.0f}" if value >= 100 else f"{name} {value:.2f}"


_BACK = "\r" if sys.stdout.isatty() else ""


def _show_line(text: str) -> None:
    """Show live progress on a terminal."""
    if _BACK:
        print(f"{_BACK}{text:<100}", end="", flush=True)


def overview(results: Results) -> str:
    """The medians and ratios, for the terminal."""
    lines = ["", "Medians, and Howdah's figure divided by each peer's in the same round:"]
    for workload, figure in HEADLINES:
        for peer in results.peers(workload):
            found = results.summary(workload, peer, figure)
            ratio = results.ratios(workload, "howdah", peer, figure)
            if found is not None:
                over = f"{ratio.median:7.2f} ×" if ratio and peer != "howdah" else ""
                spread = f"[{found.low:,.2f} … {found.high:,.2f}]"
                lines.append(
                    f"  {workload:<14} {figure:<16} {peer:<14} {found.median:>10,.2f} {spread:<26} {over}"
                )
    for what, why in results.content.get("skipped", {}).items():
        lines.append(f"  not measured: {what}: {why}")
    return "\n".join(lines)


HEADLINES = (
    ("drain-async", "jobs_per_second"),
    ("drain-async", "client_cpu_us"),
    ("drain-async", "server_cpu_us"),
    ("enqueue-bulk", "jobs_per_second"),
    ("enqueue-bulk", "client_cpu_us"),
    ("enqueue-bulk", "server_cpu_us"),
    ("enqueue-1", "jobs_per_second"),
    ("enqueue-64", "jobs_per_second"),
    ("pickup-idle", "call_p50_ms"),
    ("pickup-commit", "commit_p50_ms"),
)
