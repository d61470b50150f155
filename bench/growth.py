"""`python -m bench.growth`: what becomes of a queue as it grows. Millions that wait, are scheduled, blocked
or finished; a thousand job types; a transaction that somebody forgot; more workers, busy and idle.

States that are compared have a database each, side by side on one server, and take turns round by round."""

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
from bench.workloads import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.peers import Peer
    from bench.workloads import Figures

HOWDAH = peers.Peer("howdah_growth", "Howdah", "postgres")
RIVALS = ("pgqueuer", "graphile")
PENDING = (10_000, 100_000, 1_000_000, 5_000_000)
SCHEDULED = BLOCKED = 1_000_000
FINISHED = 10_000_000
TYPES = (1, 20, 200, 1000)
OF_TYPES = 100_000
DEAD = (0, 100_000, 300_000, 1_000_000)
PROCESSES = (1, 2, 4)
IDLE, IDLE_PROCESSES = 100, 10
JOBS = 20_000  # of a worker's round
CLAIMS = 300
SETTINGS = {"max_connections": "1000"}


@dataclass
class State:
    """A queue in a database of its own. `pending` are kept up from round to round."""

    name: str
    database: str
    pending: int
    types: int = 1
    made: int = 0
    """Numbers given to jobs so far."""

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
    """One run of everything, or of some of it."""

    stage: Stage
    results: Results
    scale: float
    rounds: int
    seconds: float = 20.0
    rivals: list[Peer] = field(default_factory=list)

    def scaled(self, number: int) -> int:
        return max(1000, int(number * self.scale))

    def run(self, only: str | None) -> None:
        """Measure each part, or those that are named."""
        parts: dict[str, Callable[[], None]] = {
            "pending": self._pending,
            "types": self._types,
            "held": self._held,
            "processes": self._processes,
            "idle": self._idle,
        }
        self.stage.setup(HOWDAH)
        self._check_filling()
        for name in only.split(",") if only else parts:
            self.results.forget(f"growth-{name}")
            began = time.monotonic()
            parts[name]()
            self._say(f"growth-{name} took {time.monotonic() - began:.0f} s")

    # ── the parts ─────────────────────────────────────────────────────────────────────────────────

    def _pending(self) -> None:
        states = [self._make(f"growth-pending-{n}", self.scaled(n)) for n in PENDING]
        self._take_turns(states)
        least, most = states[0], states[-1]
        filler = Filler(self.stage.postgres, most.database)
        filler.scheduled("async", self.scaled(SCHEDULED))
        filler.blocked("async", self.scaled(BLOCKED))
        filler.finished("async", self.scaled(FINISHED))
        filler.settle()
        self.results.forget("growth-full")
        least.name, most.name = "growth-full-base", "growth-full"
        self._take_turns([least, most])
        self._drop(states)

    def _types(self) -> None:
        states = [
            self._make(f"growth-types-{n}", self.scaled(OF_TYPES), min(n, self.scaled(n)))
            for n in TYPES
        ]
        self._take_turns(states)
        self._drop(states)

    def _held(self) -> None:
        """A transaction is opened, jobs come and go until so many dead entries have piled up, and then a
        worker is measured; in turns with one on a twin of the queue that nobody holds up."""
        for peer in [HOWDAH, *self.rivals]:
            name = "howdah" if peer is HOWDAH else peer.name
            try:
                self._hold(peer, name)
            except AdapterError as error:
                if peer is HOWDAH:
                    raise
                self._say(f"growth-held {name} is left out: {error}")
                self.results.leave_out(f"{name}: growth-held", str(error))

    def _hold(self, peer: Peer, name: str) -> None:
        postgres = self.stage.postgres
        # A worker has some more at hand when it is told to stop.
        measured = len(DEAD) * self.rounds * (2 * self.scaled(JOBS) + growth_measurements.SPARE)
        total = self.scaled(DEAD[-1]) + measured
        free, held = f"growth_free_{name}", f"growth_held_{name}"
        for database, jobs in ((free, measured), (held, total)):
            postgres.recreate(database, f"empty_{peer.name}")
            filler = Filler(postgres, database)
            if peer is HOWDAH:
                filler.pending("async", 0, jobs)
            else:
                growth_data.fill_peer(postgres, name, database, 0, jobs)
            filler.settle()
        self._measure_both(peer, name, free, held, total, 0)
        with growth_data.held_transaction(postgres, held):
            for dead in DEAD[1:]:
                there = growth_data.dead_entries(postgres, name, held)
                growth_data.burn(postgres, name, held, max(0, self.scaled(dead) - there), "async")
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
        facts = {"dead_entries": growth_data.dead_entries(self.stage.postgres, name, database)}
        jobs = self.scaled(JOBS)
        figures = growth_measurements.throughput(self.stage, peer, database, jobs, highest)
        if peer is HOWDAH:
            figures |= growth_measurements.claims(
                self.stage, database, ["async"], self._claims(jobs)
            )
        self._record(workload, name, number, figures, facts)

    def _processes(self) -> None:
        jobs = 3 * self.scaled(JOBS)
        for number in range(1, self.rounds + 1):
            for processes in PROCESSES:
                state = self._make(f"growth-processes-{processes}", 2 * jobs)
                figures = growth_measurements.throughput(
                    self.stage, HOWDAH, state.database, jobs, state.made, processes=processes
                )
                self._record(state.name, "howdah", number, figures, {})
                self._drop([state])

    def _idle(self) -> None:
        for number in range(1, self.rounds + 1):
            state = self._make("growth-idle", 0)  # those of the last round may be registered still
            figures = growth_measurements.idle(
                self.stage, HOWDAH, state.database, IDLE, IDLE_PROCESSES, self.seconds
            )
            self._record(f"growth-idle-{IDLE}", "howdah", number, figures, {})
            self._drop([state])

    # ── states ────────────────────────────────────────────────────────────────────────────────────

    def _make(self, name: str, pending: int, types: int = 1) -> State:
        began = time.monotonic()
        state = State(name, name.replace("-", "_"), pending, types)
        self.stage.postgres.recreate(state.database, f"empty_{HOWDAH.name}")
        filler = Filler(self.stage.postgres, state.database)
        filler.pending(state.job_type, 0, pending, types)
        state.made = pending
        filler.settle()
        self._say(f"{name}: {pending:,} jobs made in {time.monotonic() - began:.0f} s")
        return state

    def _top_up(self, state: State) -> None:
        """As many pending as there were; the few that are missing of a million do not matter."""
        if state.pending > self.scaled(100_000):
            return
        filler = Filler(self.stage.postgres, state.database)
        there = self.stage.postgres.value(
            "SELECT count(*) FROM howdah.live_jobs WHERE status = 'pending' AND blockers = 0 "
            "AND run_at <= clock_timestamp() AND job_type <> 'stale'",
            database=state.database,
        )
        end = state.made + state.pending - there
        # Due from now on: what is claimed already may have moved the head of the lane up to here.
        filler.pending(state.job_type, state.made, end, state.types, rate=None)
        state.made = max(state.made, end)

    def _take_turns(self, states: list[State]) -> None:
        for number in range(1, self.rounds + 1):
            for state in states:
                self._top_up(state)
                self.stage.postgres.checkpoint()
                jobs = min(self.scaled(JOBS), state.pending // 2)
                figures = growth_measurements.throughput(
                    self.stage, HOWDAH, state.database, jobs, state.made, state.handler
                )
                self._top_up(state)
                figures |= growth_measurements.claims(
                    self.stage, state.database, state.job_types, self._claims(state.pending)
                )
                facts = {"pending": state.pending, "types": state.types}
                self._record(state.name, "howdah", number, figures, facts)

    def _claims(self, pending: int) -> int:
        return max(20, min(CLAIMS, pending // growth_measurements.BATCH // 2))

    def _drop(self, states: list[State]) -> None:
        for state in states:
            self.stage.postgres.drop(state.database)

    def _check_filling(self) -> None:
        self.stage.postgres.recreate("growth_check", f"empty_{HOWDAH.name}")
        Filler(self.stage.postgres, "growth_check").check()
        self.stage.postgres.drop("growth_check")

    def _record(
        self, workload: str, peer: str, number: int, figures: Figures, facts: dict[str, int]
    ) -> None:
        kept = facts | self.stage.checked | {"scale": self.scale}
        self.stage.checked = {}
        self.results.record(workload, peer, number, figures, kept)
        told = "  ".join(
            f"{name} {value:,.2f}" if value < 100 else f"{name} {value:,.0f}"
            for name, value in (figures | facts).items()
        )
        self._say(f"{workload:<24} {peer:<10} round {number}  {told}")

    def _say(self, text: str) -> None:
        print(text, flush=True)


def main() -> int:
    options = _options()
    HOME.mkdir(exist_ok=True)
    results = Results(options.results)
    with Postgres(SETTINGS) as postgres:
        results.describe(
            growth={"machine": describe(), "postgres": postgres.facts(), "scale": options.scale}
        )
        stage = Stage(postgres, None)
        growth = Growth(stage, results, options.scale, options.rounds, options.seconds)
        known = {peer.name: peer for peer in peers.PEERS}
        wanted = options.rivals and "held" in (options.only or "held")
        for name in (name for name in RIVALS if wanted and name in known):
            try:
                known[name].install()
                stage.setup(known[name])
                growth.rivals.append(known[name])
            except peers.NotInstalled as why:
                print(f"{name} is skipped: {why}")
        growth.run(options.only)
    results.save()
    if options.results == RESULTS:
        from bench import report  # which asks this module for what was measured

        report.write(results)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.growth", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers of jobs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="pending, types, held, processes, idle; separated by commas")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help="Howdah alone")
    parser.add_argument("--seconds", type=float, default=20.0, help="to watch idle workers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AdapterError as error:
        sys.exit(str(error))
