"""Scenarios with faults of clients or of their connections."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from builds import newer_build, pointing_to
from commit_cuts import CALLS, CommitCutter, schedule
from commit_proxy import CommitProxy
from embedded_servers import running_server, workspace
from fake_clock import HOUR, off_by
from recorded_enqueue import enqueue_recorded
from server_scenarios import while_loaded

from children import until
from howdah import JobQueue
from howdah.chaos import ledger
from howdah.chaos.history import History
from howdah.chaos.scenario import Fault, Place, RunContext, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


MIN_CUTS = 100
"""The number of commits that a run must cut."""


class CutCommits(Scenario):
    """Connections are cut between a commit and its reply: enqueues, claims and completions."""

    name = "cut commits"
    about = "the connection is cut between COMMIT and its reply"
    min_seconds = 40.0
    cuts_per_call: ClassVar[int] = 40
    cutter: CommitCutter

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        self.cutter = CommitCutter(common.checker, common.schema)
        proxy = CommitProxy.in_front_of(common.checker, self.cutter)
        try:
            yield Place(proxy.url(), common.checker, common.schema)
        finally:
            proxy.close()

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        """One fault that makes all cuts: which statements are cut matters, not when, and the seed decides it."""
        detail = {"of each call": self.cuts_per_call, "seed": random.randrange(10**9)}
        return [Fault(0.1, self.name, detail)]

    def inject(self, run: RunContext, fault: Fault) -> None:
        random = Random(fault.detail["seed"])
        self.cutter.begin(schedule(random, fault.detail["of each call"]), run)
        while_loaded(run, lambda: self.cutter.is_done)
        self.cutter.end()

    def missed(self, history: History, planned: Iterable[str], lease: float) -> list[str]:
        return super().missed(history, [f"cut {called}" for called in CALLS], lease)

    def findings(self, run: RunContext) -> list[str]:
        counts = self.cutter.counts()
        few = (
            []
            if sum(counts.values()) >= MIN_CUTS
            else [f"only {sum(counts.values())} cuts were made"]
        )
        return few + [
            f"no cut of {called} {'was' if committed else 'was not'} committed"
            for called in CALLS
            for committed in (True, False)
            if not counts[called, committed]
        ]


class WrongClocks(Scenario):
    """The clocks of workers and producers are wrong by an hour, some ahead and some behind."""

    about = "clocks of workers and producers one hour ahead and behind"
    min_seconds = 12.0
    every_seconds = 4.0

    def __init__(self, seconds: int = HOUR) -> None:
        self.environment = off_by(seconds)
        self.name = f"clocks {'ahead' if seconds > 0 else 'behind'}"

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill worker", {"clock of its replacement": random.choice([HOUR, -HOUR, 0])}

    def inject(self, run: RunContext, fault: Fault) -> None:
        """Kill a busy worker, and start another one with another clock."""
        while_loaded(run, lambda: sum(worker.ready for worker in run.supervisor.workers()) >= 3)
        victim = run.pick_busy_worker(0)
        if victim is not None:
            with run.fault(fault.name, scope="worker", target=victim.pid):
                victim.kill()
                victim.wait(30)
            run.supervisor.start_worker(**off_by(fault.detail["clock of its replacement"]))


# A release that changes what old workers use: columns of both tables, and a function that every worker calls with
# each heartbeat, which is dropped and created with one more parameter, as a release may do.
NEXT_STEP = """
-- drops: extend_jobs(uuid[], uuid[], interval, float8[])
ALTER TABLE live_jobs ADD COLUMN next_release text NOT NULL DEFAULT 'yes';
ALTER TABLE finished_jobs ADD COLUMN next_release text;
"""
NEXT_EDITS = {
    "progress.sql": {
        "p_lease interval DEFAULT '30 seconds',\n    p_elapsed float8[] DEFAULT NULL)":
        "p_lease interval DEFAULT '30 seconds',\n    p_elapsed float8[] DEFAULT NULL,\n"
        "    p_next text DEFAULT NULL)"
    }
}  # fmt: skip


class RollingUpgrade(Scenario):
    """The next release migrates the schema while old workers run; then they are replaced one by one."""

    name = "rolling upgrade"
    about = "the next release migrates, and replaces the old workers one by one"
    min_seconds = 15.0
    build: Path
    old: frozenset[int]

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with (
            workspace("upgrade") as home,
            running_server(home / "pg", max_connections="100") as server,
        ):
            self.build = newer_build(home / "next", NEXT_STEP, edits=NEXT_EDITS, oldest_code=1)
            yield Place(server.url, server.url)

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        step = seconds / (self.workers + 2)
        times = [round(step * (n + random.uniform(0.4, 1)), 2) for n in range(self.workers + 1)]
        return [Fault(times[0], "migrate"), *(Fault(at, "replace worker") for at in times[1:])]

    def inject(self, run: RunContext, fault: Fault) -> None:
        if fault.name == "migrate":
            self.old = frozenset(worker.pid for worker in run.supervisor.workers())
            # A migration must not disturb the workers.
            with run.fault(fault.name, scope="neighbour"):
                migrate(run, self.build)
            return
        new = run.supervisor.start_worker(**pointing_to(self.build))
        until(lambda: new.ready or not new.alive, "a worker of the next release started")
        old = [worker for worker in run.supervisor.workers() if worker.pid in self.old]
        if old:
            with run.fault(fault.name, scope="worker", target=old[0].pid):
                old[0].send(signal.SIGTERM)
                until(lambda: not old[0].alive, "the old worker exited")

    def findings(self, run: RunContext) -> list[str]:
        history = History(ledger.read(run.ledger.path))
        workers = history.by_worker().keys() & history.ready.keys()
        lines = [f"worker {pid} of the old release claimed no job" for pid in self.old - workers]
        if not workers - self.old:
            lines.append("no worker of the next release claimed a job")
        return lines


def migrate(run: RunContext, build: Path) -> None:
    """`howdah migrate` of another build."""
    subprocess.run(
        [sys.executable, "-m", "howdah", "migrate"],
        env=run.supervisor.environment(pointing_to(build)),
        check=True,
        capture_output=True,
    )


class Stalls(Scenario):
    """Handlers that block the event loop for longer than several leases."""

    name = "stalls"
    about = "a handler blocks the event loop past several leases"
    min_seconds = 12.0
    workers = 2
    every_seconds = 6.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "stall", {"leases": round(random.uniform(1.5, 3), 1)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        seconds = fault.detail["leases"] * run.lease
        with contextlib.closing(JobQueue(run.place.checker, schema=run.place.schema)) as queue:
            job_id = enqueue_recorded(
                run, queue, "chaos.staller", f"stall-{fault.at}", 3, seconds=seconds
            )
            until(lambda: queue.get(job_id).worker_id, "the staller was claimed")
            target = int(str(queue.get(job_id).worker_id).split(":")[1])
            with run.fault(fault.name, scope="worker", target=target):
                until(lambda: queue.get(job_id).status == "completed", "the handler returned")

    def findings(self, run: RunContext) -> list[str]:
        """The heartbeat runs in its own thread: no lease may expire, and no job may be claimed a second time before
        its first run ended."""
        return [
            f"job {job} was claimed from a worker whose event loop was blocked"
            for job, leases in History(ledger.read(run.ledger.path)).jobs.items()
            for first, second in itertools.pairwise(leases)
            if first.starts and not any(line.t < second.began for line in first.invoked)
        ]
