"""Scenarios whose fault is the clients', or on their way to the server."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from builds import newer_build, pointing_to
from commit_cuts import CALLS, Cutter, schedule
from commit_proxy import Gate
from embedded_servers import machine, workspace
from fake_clock import HOUR, off_by
from server_scenarios import while_loaded

from children import until
from howdah import EXPLICIT, JobQueue
from howdah.chaos import ledger
from howdah.chaos.history import History
from howdah.chaos.scenario import Fault, Place, Scenario, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from uuid import UUID


FEWEST = 100
"""Cuts of commits that a run must make."""


class CutCommits(Scenario):
    """The line is cut between "commit" and its answer: enqueues, claims and completions."""

    name = "cut commits"
    about = "the connection is cut between COMMIT and its reply"
    least = 40.0
    each: ClassVar[int] = 40
    """Cuts of each kind."""
    cutter: Cutter

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        self.cutter = Cutter(common.checker, common.schema)
        gate = Gate.before(common.checker, self.cutter)
        try:
            yield Place(gate.url(), common.checker, common.schema)
        finally:
            gate.close()

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        """All begin at once: what counts is not the time but which of the statements is cut, and that
        the lot decides."""
        return [Fault(0.1, self.name, {"of each call": self.each, "lot": random.randrange(10**9)})]

    def strike(self, stage: Stage, fault: Fault) -> None:
        lot = Random(fault.detail["lot"])
        self.cutter.begin(schedule(lot, fault.detail["of each call"]), stage)
        while not self.cutter.is_done and stage.crew.producers():
            stage.sleep(0.1)
        self.cutter.end()

    def missed(self, history: History, planned: Iterable[str], lease: float) -> list[str]:
        return super().missed(history, [f"cut {called}" for called in CALLS], lease)

    def findings(self, stage: Stage) -> list[str]:
        counts = self.cutter.counts()
        few = (
            []
            if sum(counts.values()) >= FEWEST
            else [f"only {sum(counts.values())} cuts were made"]
        )
        return few + [
            f"no cut of {called} {'was' if committed else 'was not'} committed"
            for called in CALLS
            for committed in (True, False)
            if not counts[called, committed]
        ]


class WrongClocks(Scenario):
    """The clocks of workers and producers are an hour off, some ahead and some behind."""

    about = "clocks of workers and producers one hour ahead and behind"
    least = 12.0
    every = 4.0

    def __init__(self, seconds: int = HOUR) -> None:
        self.environment = off_by(seconds)
        self.name = f"clocks {'ahead' if seconds > 0 else 'behind'}"

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill worker", {"the next one's clock": random.choice([HOUR, -HOUR, 0])}

    def strike(self, stage: Stage, fault: Fault) -> None:
        """One that has jobs in hand dies; another with another clock takes its place."""
        while_loaded(stage, lambda: sum(worker.ready for worker in stage.crew.workers()) >= 3)
        victim = stage.pick(0)
        if victim is not None:
            with stage.fault(fault.name, scope="worker", target=victim.pid):
                victim.kill()
                victim.wait(30)
            stage.crew.start_worker(**off_by(fault.detail["the next one's clock"]))


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
    """The next release migrates the schema under the running workers, which are replaced one by one."""

    name = "rolling upgrade"
    about = "the next release migrates, and replaces the old workers one by one"
    least = 15.0
    build: Path
    old: frozenset[int]

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with workspace("upgrade") as home, machine(home / "pg", max_connections="100") as server:
            self.build = newer_build(home / "next", NEXT_STEP, edits=NEXT_EDITS, oldest_code=1)
            yield Place(server.url, server.url)

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        step = seconds / (self.workers + 2)
        times = [round(step * (n + random.uniform(0.4, 1)), 2) for n in range(self.workers + 1)]
        return [Fault(times[0], "migrate"), *(Fault(at, "replace worker") for at in times[1:])]

    def strike(self, stage: Stage, fault: Fault) -> None:
        if fault.name == "migrate":
            self.old = frozenset(worker.pid for worker in stage.crew.workers())
            # A migration of which the workers notice nothing is what is promised.
            with stage.fault(fault.name, scope="neighbour"):
                migrate(stage, self.build)
            return
        new = stage.crew.start_worker(**pointing_to(self.build))
        until(lambda: new.ready or not new.alive, "a worker of the next release started")
        old = [worker for worker in stage.crew.workers() if worker.pid in self.old]
        if old:
            with stage.fault(fault.name, scope="worker", target=old[0].pid):
                old[0].send(signal.SIGTERM)
                until(lambda: not old[0].alive, "the old worker left")

    def findings(self, stage: Stage) -> list[str]:
        history = History(ledger.read(stage.ledger.path))
        workers = history.by_worker().keys() & history.ready.keys()
        lines = [f"worker {pid} of the last release never worked" for pid in self.old - workers]
        if not workers - self.old:
            lines.append("no worker of the next release has worked")
        return lines


def migrate(stage: Stage, build: Path) -> None:
    """`howdah migrate` of another build."""
    subprocess.run(
        [sys.executable, "-m", "howdah", "migrate"],
        env=stage.crew.environment(pointing_to(build)),
        check=True,
        capture_output=True,
    )


class Stalls(Scenario):
    """Handlers that keep the event loop from turning, for longer than several leases."""

    name = "stalls"
    about = "a handler blocks the event loop past several leases"
    least = 12.0
    workers = 2
    every = 6.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "stall", {"leases": round(random.uniform(1.5, 3), 1)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        seconds = fault.detail["leases"] * stage.lease
        with contextlib.closing(JobQueue(stage.place.checker, schema=stage.place.schema)) as queue:
            job_id = _enqueue_staller(stage, queue, f"stall-{fault.at}", seconds)
            until(lambda: queue.get(job_id).worker_id, "the staller was claimed")
            target = int(str(queue.get(job_id).worker_id).split(":")[1])
            with stage.fault(fault.name, scope="worker", target=target):
                until(lambda: queue.get(job_id).status == "completed", "the stall is over")

    def findings(self, stage: Stage) -> list[str]:
        """The heartbeat is a thread of its own: no lease was lost, and no job claimed a second time
        unless its first run had come to an end."""
        return [
            f"job {job} was taken from a worker whose event loop stood still"
            for job, leases in History(ledger.read(stage.ledger.path)).jobs.items()
            for first, second in itertools.pairwise(leases)
            if first.starts and not any(line.t < second.began for line in first.invoked)
        ]


def _enqueue_staller(stage: Stage, queue: JobQueue, tag: str, seconds: float) -> UUID:
    described = {
        "tag": tag, "type": "chaos.staller", "queue": "default", "priority": EXPLICIT, "key": None,
        "n": None, "delay": None, "max_attempts": 3, "unique": None,
    }  # fmt: skip
    stage.ledger.write("enqueue-invoked", call=tag, jobs=[described])
    data = {"tag": tag, "seconds": seconds}
    handle = queue.enqueue("chaos.staller", data, priority=EXPLICIT, max_attempts=3)
    stage.ledger.write("enqueue-acknowledged", call=tag, ids=[str(handle.id)])
    return handle.id
