"""`python -m bench.compare_settings`: compares settings of peers, in alternating rounds like the benchmarks. Prints
medians and spreads; for rates also the CPU time per job in client and server, which depends less on other load. The
headers of the adapters record the conclusions."""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections import defaultdict

from bench import peers, plan, workloads
from bench.adapter_process import HOME, AdapterError
from bench.auto_tuning import format_settings, in_environment
from bench.services import Postgres, Redis

# By peer: the settings, as variables that its adapter reads, and the workloads to try them on.
POOLS = (
    {"BENCH_POOL": "prefork"},
    {"BENCH_POOL": "threads"},
    {"BENCH_POOL": "threads", "BENCH_THREADS": "10"},
    {"BENCH_POOL": "solo"},
)
CANDIDATES: dict[str, tuple[tuple[dict[str, str], ...], tuple[str, ...]]] = {
    "pgqueuer": (
        (
            *({"BENCH_BATCH": size} for size in ("10", "100", "500", "1000")),
            {"BENCH_BATCH": "500", "BENCH_TASKS": "1000"},
        ),
        ("drain-async", "drain-io", "pickup-idle"),
    ),
    "graphile": (
        (
            {},
            {"BENCH_CONCURRENCY": "100"},
            {"BENCH_LOCAL": "100"},
            {"BENCH_LOCAL": "1000"},
            {"BENCH_DELAY": "5"},
            {"BENCH_DELAY": "25"},
        ),
        ("drain-async", "drain-io", "pickup-idle"),
    ),
    "oban": (
        (
            *({"BENCH_LIMIT": limit} for limit in ("10", "100", "500")),
            {"BENCH_LIMIT": "500", "BENCH_DEBOUNCE": "0.001"},
        ),
        ("drain-async", "drain-io", "pickup-idle"),
    ),
    "procrastinate": (
        (
            *({"BENCH_CONCURRENCY": number} for number in ("10", "20", "50")),
            {"BENCH_POLLING": "5"},
        ),
        ("drain-async", "drain-io", "pickup-idle"),
    ),
    "saq": (
        (
            *({"BENCH_CONCURRENCY": number} for number in ("10", "20", "50", "100")),
            {"BENCH_CONCURRENCY": "50", "BENCH_OPERATIONS": "50"},
        ),
        ("drain-async", "drain-io", "pickup-idle"),
    ),
    "celery": (POOLS, ("drain-async", "drain-io", "drain-thread", "pickup-idle")),
}


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    HOME.mkdir(exist_ok=True)
    known = {workload.name: workload for workload in plan.WORKLOADS}
    with Postgres() as postgres, Redis() as redis:
        testbed = workloads.Testbed(postgres, redis)
        for peer in peers.find(options.peers.split(",") if options.peers else list(CANDIDATES)):
            peer.install()
            testbed.setup(peer)
            variants, names = CANDIDATES[peer.name]
            for name in (n for n in names if n.startswith(options.only)):
                run = plan.Run(testbed, None, options.scale, 0)  # type: ignore[arg-type]
                _compare(run, peer, known[name], variants, options.rounds)
    return 0


def _compare(
    run: plan.Run,
    peer: peers.Peer,
    workload: plan.Workload,
    variants: tuple[dict[str, str], ...],
    rounds: int,
) -> None:
    measured: dict[str, list[float]] = defaultdict(list)
    cpu_times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for variant in variants:
            label = format_settings(variant) or "adapter's settings"
            try:
                with in_environment(variant):
                    figures = workload.measure(run, peer)[workload.name]
                measured[label].append(figures.get("jobs_per_second") or figures["call_p50_ms"])
                cpu_times[label].append(
                    figures.get("client_cpu_us", 0) + figures.get("server_cpu_us", 0)
                )
            except (AdapterError, AssertionError) as error:
                print(f"{peer.name} {label}: {str(error).splitlines()[0]}", flush=True)
    for label, values in measured.items():
        spread = f"[{min(values):,.2f} … {max(values):,.2f}]"
        cpu = statistics.median(cpu_times[label])
        line = (
            f"{peer.name:<14} {workload.name:<13} {label:<40} {statistics.median(values):>10,.2f}"
        )
        print(f"{line}  {spread:<24}" + (f" {cpu:,.0f} µs of CPU" if cpu else ""), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.compare_settings", description=__doc__)
    parser.add_argument("--peers", help="comma-separated names")
    parser.add_argument("--only", default="", help="workloads whose names start with this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.3, help="factor on the numbers of jobs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
