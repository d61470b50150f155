"""`python -m bench`: measure, record every round, and write the report."""

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
from bench.workloads import Stage


def main() -> int:
    options = _options()
    # Servers are stopped and their data removed however a run ends.
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
        stage = Stage(postgres, redis)
        for peer in list(taking_part):
            try:
                stage.setup(peer)
            except Exception as error:  # whatever a peer breaks by, the others are measured
                print(f"{peer.name} is skipped: {error}", flush=True)
                results.leave_out(peer.name, f"its schema could not be made: {error}")
                taking_part.remove(peer)
        is_whole = plan.run(stage, taking_part, results, options)
    results.describe(minutes=round((time.monotonic() - started) / 60, 1))
    results.save()
    if options.results == RESULTS and not options.quick:
        report.write(results)
    print(plan.overview(results))
    return 0 if is_whole else 1


def _install(wanted: list[peers.Peer]) -> tuple[list[peers.Peer], dict[str, str], dict[str, str]]:
    """Make everybody's environment; whoever cannot be had is left out, and why."""
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
        "--quick", action="store_true", help="Howdah, PgQueuer and the ceilings, small"
    )
    parser.add_argument("--peers", help="names, separated by commas")
    parser.add_argument("--only", help="workloads whose names begin so, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--minutes",
        type=float,
        help="after which each workload has but one round more; 90, or 2 if quick",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of jobs")
    parser.add_argument("--steady", type=float, default=60.0, help="seconds of it")
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
