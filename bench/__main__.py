"""`python -m bench`: measures the peers, records every round, and writes the report."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path

from bench import peers, plan, report
from bench.adapter_process import HOME, AdapterError
from bench.machine import describe
from bench.results import RESULTS, Results
from bench.services import Postgres, Redis
from bench.workloads import Testbed


def main() -> int:
    options = _options()
    # SystemExit runs the cleanup: servers are stopped and their data is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    HOME.mkdir(exist_ok=True)
    quick = HOME / "quick.json"
    if options.quick:
        quick.unlink(missing_ok=True)
    results = Results(quick if options.quick else options.results)
    started = time.monotonic()
    names = (
        options.peers.split(",")
        if options.peers
        else list(plan.QUICK_PEERS)
        if options.quick
        else None
    )
    taking_part, skipped, versions = _install(peers.find(names))
    for name, why in skipped.items():
        print(f"{name} is skipped: {why}")
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(Postgres())
        redis = None
        if any(peer.service == "redis" for peer in taking_part):
            redis = stack.enter_context(Redis())
        results.describe(
            machine=describe(),
            versions=results.content.get("versions", {}) | versions,
            skipped=skipped,
            postgres=postgres.facts(),
            redis=redis.facts() if redis else {},
        )
        testbed = Testbed(postgres, redis)
        for peer in list(taking_part):
            try:
                testbed.setup(peer)
            except Exception as error:  # any failure of one peer must not stop the others
                print(f"{peer.name} is skipped: {error}", flush=True)
                results.leave_out(peer.name, f"its schema could not be created: {error}")
                taking_part.remove(peer)
        is_complete = plan.run(testbed, taking_part, results, options)
    results.describe(minutes=round((time.monotonic() - started) / 60, 1))
    results.save()
    if options.results == RESULTS and not options.quick:
        report.write(results)
    print(plan.overview(results))
    return 0 if is_complete else 1


def _install(wanted: list[peers.Peer]) -> tuple[list[peers.Peer], dict[str, str], dict[str, str]]:
    """Create the environment of each peer. Returns the peers, the reasons for skipped ones, and the versions."""
    taking_part, skipped, versions = [], {}, {}
    for peer in wanted:
        try:
            if peer.service == "redis" and not Redis.is_installed():
                raise peers.NotInstalled("redis-server is not installed")
            versions[peer.name] = peer.install()
            taking_part.append(peer)
        except peers.NotInstalled as why:
            skipped[peer.name] = str(why)
    return taking_part, skipped, versions


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only Howdah, PgQueuer and the ceilings, with fewer jobs",
    )
    parser.add_argument("--peers", help="comma-separated names")
    parser.add_argument("--only", help="comma-separated prefixes of workload names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--minutes",
        type=float,
        help="time limit; later workloads get one round only; default 90, or 2 with --quick",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the numbers of jobs")
    parser.add_argument("--steady", type=float, default=60.0, help="seconds of the steady workload")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.minutes is None:
        options.minutes = 2.0 if options.quick else 90.0
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AdapterError as error:
        sys.exit(str(error))
