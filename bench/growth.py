"""`python -m bench.growth`: how a queue performs as it grows. Millions of pending, scheduled, blocked or finished
jobs; a thousand job types; a transaction that stays open; more workers, busy and idle.

Each state to compare has its own database on one server; the rounds alternate between the states."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench import growth_data, growth_measurements, peers
from bench.adapter_process import HOME, AdapterError
from bench.growth_data import Filler
from bench.machine import describe
from bench.results import RESULTS, Results
from bench.services import Postgres
from bench.workloads import Testbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.peers import Peer
    from bench.workloads import Figures

HOWDAH = peers.Peer("howdah_growth", "Howdah", "postgres")
OTHER_PEERS = ("pgqueuer", "graphile")
PENDING = (10_000, 100_000, 1_000_000, 5_000_000)
SCHEDULED = BLOCKED = 1_000_000
FINISHED = 10_000_000
TYPES = (1, 20, 200, 1000)
JOBS_OF_ALL_TYPES = 100_000
DEAD = (0, 100_000, 300_000, 1_000_000)
PROCESSES = (1, 2, 4)
IDLE, IDLE_PROCESSES = 100, 10
JOBS = 20_000  # per round of a worker
CLAIMS = 300
SETTINGS = {"max_connections": "1000"}


@dataclass
class State:
    """A queue in its own database. Every round starts with `pending` jobs."""

    name: str
    database: str
    pending: int
    types: int = 1
    next_number: int = 0
    """The number of the next job."""

    @property
    def job_type(self) -> str:
        return "async" if self.types == 1 else "type"

    @property
    def job_types(self) -> list[str]:
        return ["async"] if self.types == 1 else [f"type{n}" for n in range(self.types)]

    @property
    def handler(self) -> str:
        return "async" if self.types == 1 else f"types:{self.types}"


@dataclass
class Growth:
    """One run of all parts, or of some."""

    testbed: Testbed
    results: Results
    scale: float
    rounds: int
    seconds: float = 20.0
    other_peers: list[Peer] = field(default_factory=list)

    def scaled(self, number: int) -> int:
        return max(1000, int(number * self.scale))

    def run(self, only: str | None) -> None:
        """Measure all parts, or the named ones."""
        parts: dict[str, Callable[[], None]] = {
            "pending": self._pending,
            "types": self._types,
            "held": self._held,
            "processes": self._processes,
            "idle": self._idle,
        }
        self.testbed.setup(HOWDAH)
        self._check_filling()
        for name in only.split(",") if only else parts:
            self.results.forget(f"growth-{name}")
            began = time.monotonic()
            parts[name]()
            self._print(f"growth-{name} took {time.monotonic() - began:.0f} s")

    # ── the parts ─────────────────────────────────────────────────────────────────────────────────

    def _pending(self) -> None:
        states = [self._make(f"growth-pending-{n}", self.scaled(n)) for n in PENDING]
        self._alternate(states)
        least, most = states[0], states[-1]
        filler = Filler(self.testbed.postgres, most.database)
        filler.scheduled("async", self.scaled(SCHEDULED))
        filler.blocked("async", self.scaled(BLOCKED))
        filler.finished("async", self.scaled(FINISHED))
        filler.vacuum()
        self.results.forget("growth-full")
        least.name, most.name = "growth-full-base", "growth-full"
        self._alternate([least, most])
        self._drop(states)

    def _types(self) -> None:
        states = [
            self._make(f"growth-types-{n}", self.scaled(JOBS_OF_ALL_TYPES), min(n, self.scaled(n)))
            for n in TYPES
        ]
        self._alternate(states)
        self._drop(states)

    def _held(self) -> None:
        """Open a transaction, claim and complete jobs until there are so many dead entries, and then measure a worker,
        alternating with a worker on an equal queue without an open transaction."""
        for peer in [HOWDAH, *self.other_peers]:
            name = "howdah" if peer is HOWDAH else peer.name
            try:
                self._hold(peer, name)
            except AdapterError as error:
                if peer is HOWDAH:
                    raise
                self._print(f"growth-held {name} is left out: {error}")
                self.results.leave_out(f"{name}: growth-held", str(error))

    def _hold(self, peer: Peer, name: str) -> None:
        postgres = self.testbed.postgres
        # A worker has prefetched some more jobs when it is stopped.
        measured = (
            len(DEAD) * self.rounds * (2 * self.scaled(JOBS) + growth_measurements.SPARE_JOBS)
        )
        total = self.scaled(DEAD[-1]) + measured
        free, held = f"growth_free_{name}", f"growth_held_{name}"
        for database, jobs in ((free, measured), (held, total)):
            postgres.recreate(database, f"empty_{peer.name}")
            filler = Filler(postgres, database)
            if peer is HOWDAH:
                filler.pending("async", 0, jobs)
            else:
                growth_data.fill_peer(postgres, name, database, 0, jobs)
            filler.vacuum()
        self._measure_both(peer, name, free, held, total, 0)
        with growth_data.held_transaction(postgres, held):
            for dead in DEAD[1:]:
                there = growth_data.dead_entries(postgres, name, held)
                growth_data.churn(postgres, name, held, max(0, self.scaled(dead) - there), "async")
                self._measure_both(peer, name, free, held, total, dead)
        postgres.drop(free)
        postgres.drop(held)

    def _measure_both(
        self, peer: Peer, name: str, free: str, held: str, highest: int, dead: int
    ) -> None:
        for number in range(1, self.rounds + 1):
            self._measure_held(peer, name, free, highest, f"growth-held-{dead}-free", number)
            self._measure_held(peer, name, held, highest, f"growth-held-{dead}", number)

    def _measure_held(
        self, peer: Peer, name: str, database: str, highest: int, workload: str, number: int
    ) -> None:
        facts = {"dead_entries": growth_data.dead_entries(self.testbed.postgres, name, database)}
        jobs = self.scaled(JOBS)
        figures = growth_measurements.throughput(self.testbed, peer, database, jobs, highest)
        if peer is HOWDAH:
            figures |= growth_measurements.claims(
                self.testbed, database, ["async"], self._claims(jobs)
            )
        self._record(workload, name, number, figures, facts)

    def _processes(self) -> None:
        jobs = 3 * self.scaled(JOBS)
        for number in range(1, self.rounds + 1):
            for processes in PROCESSES:
                state = self._make(f"growth-processes-{processes}", 2 * jobs)
                figures = growth_measurements.throughput(
                    self.testbed,
                    HOWDAH,
                    state.database,
                    jobs,
                    state.next_number,
                    processes=processes,
                )
                self._record(state.name, "howdah", number, figures, {})
                self._drop([state])

    def _idle(self) -> None:
        for number in range(1, self.rounds + 1):
            state = self._make(
                "growth-idle", 0
            )  # a new database: workers of the last round may still be registered
            figures = growth_measurements.idle(
                self.testbed, HOWDAH, state.database, IDLE, IDLE_PROCESSES, self.seconds
            )
            self._record(f"growth-idle-{IDLE}", "howdah", number, figures, {})
            self._drop([state])

    # ── states ────────────────────────────────────────────────────────────────────────────────────

    def _make(self, name: str, pending: int, types: int = 1) -> State:
        began = time.monotonic()
        state = State(name, name.replace("-", "_"), pending, types)
        self.testbed.postgres.recreate(state.database, f"empty_{HOWDAH.name}")
        filler = Filler(self.testbed.postgres, state.database)
        filler.pending(state.job_type, 0, pending, types)
        state.next_number = pending
        filler.vacuum()
        self._print(f"{name}: {pending:,} jobs made in {time.monotonic() - began:.0f} s")
        return state

    def _top_up(self, state: State) -> None:
        """Add pending jobs up to the initial number. In large states the few missing jobs do not matter."""
        if state.pending > self.scaled(100_000):
            return
        filler = Filler(self.testbed.postgres, state.database)
        pending = self.testbed.postgres.value(
            "SELECT count(*) FROM howdah.live_jobs WHERE status = 'pending' AND blockers = 0 "
            "AND run_at <= clock_timestamp() AND job_type <> 'stale'",
            database=state.database,
        )
        end = state.next_number + state.pending - pending
        # Due now: earlier claims may have moved the lane head up to the present.
        filler.pending(state.job_type, state.next_number, end, state.types, rate=None)
        state.next_number = max(state.next_number, end)

    def _alternate(self, states: list[State]) -> None:
        for number in range(1, self.rounds + 1):
            for state in states:
                self._top_up(state)
                self.testbed.postgres.checkpoint()
                jobs = min(self.scaled(JOBS), state.pending // 2)
                figures = growth_measurements.throughput(
                    self.testbed, HOWDAH, state.database, jobs, state.next_number, state.handler
                )
                self._top_up(state)
                figures |= growth_measurements.claims(
                    self.testbed, state.database, state.job_types, self._claims(state.pending)
                )
                facts = {"pending": state.pending, "types": state.types}
                self._record(state.name, "howdah", number, figures, facts)

    def _claims(self, pending: int) -> int:
        return max(20, min(CLAIMS, pending // growth_measurements.BATCH_JOBS // 2))

    def _drop(self, states: list[State]) -> None:
        for state in states:
            self.testbed.postgres.drop(state.database)

    def _check_filling(self) -> None:
        self.testbed.postgres.recreate("growth_check", f"empty_{HOWDAH.name}")
        Filler(self.testbed.postgres, "growth_check").check()
        self.testbed.postgres.drop("growth_check")

    def _record(
        self, workload: str, peer: str, number: int, figures: Figures, facts: dict[str, int]
    ) -> None:
        kept = facts | self.testbed.checked | {"scale": self.scale}
        self.testbed.checked = {}
        self.results.record(workload, peer, number, figures, kept)
        text = "  ".join(
            f"{name} {value:,.2f}" if value < 100 else f"{name} {value:,.0f}"
            for name, value in (figures | facts).items()
        )
        self._print(f"{workload:<24} {peer:<10} round {number}  {text}")

    def _print(self, text: str) -> None:
        print(text, flush=True)


def main() -> int:
    options = _options()
    HOME.mkdir(exist_ok=True)
    results = Results(options.results)
    with Postgres(SETTINGS) as postgres:
        results.describe(
            growth={"machine": describe(), "postgres": postgres.facts(), "scale": options.scale}
        )
        testbed = Testbed(postgres, None)
        growth = Growth(testbed, results, options.scale, options.rounds, options.seconds)
        known = {peer.name: peer for peer in peers.PEERS}
        wanted = options.other_peers and "held" in (options.only or "held")
        for name in (name for name in OTHER_PEERS if wanted and name in known):
            try:
                known[name].install()
                testbed.setup(known[name])
                growth.other_peers.append(known[name])
            except peers.NotInstalled as why:
                print(f"{name} is skipped: {why}")
        growth.run(options.only)
    results.save()
    if options.results == RESULTS:
        from bench import report  # imports this module

        report.write(results)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.growth", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all numbers of jobs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="pending, types, held, processes, idle; comma-separated")
    parser.add_argument("--no-rivals", dest="other_peers", action="store_false", help="only Howdah")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="how long to measure idle workers"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AdapterError as error:
        sys.exit(str(error))
