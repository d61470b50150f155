"""Scenarios whose fault is the clients', or on their way to the server."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, ClassVar

from builds import newer_build, pointing_to
from clock import HOUR, off_by
from cuts import CALLS, Cutter, schedule
from gate import Gate
from machines import machine

from children import until
from howdah.chaos.scenario import Fault, Place, Scenario, Stage, regularly
from howdah.queue import JobQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from random import Random


class CutCommits(Scenario):
    """The line is cut between "commit" and its answer: enqueues, claims and completions."""

    name = "cut commits"
    about = "the line is cut between COMMIT and its answer"
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
        """All begin at once: what counts is not the time but which of the statements is cut."""
        return [Fault(0.5, "cut commits", schedule(random, self.each))]

    def strike(self, stage: Stage, fault: Fault) -> None:
        self.cutter.begin(fault.detail, stage)
        while not self.cutter.is_done and not stage.sleep(0.1):
            pass
        self.cutter.end()

    def findings(self, stage: Stage) -> list[str]:
        counts = self.cutter.counts()
        missing = [
            f"no cut of {called} {'was' if committed else 'was not'} committed"
            for called in CALLS
            for committed in (True, False)
            if not counts[called, committed]
        ]
        return missing


class WrongClocks(Scenario):
    """The clocks of workers and producers are an hour off, some ahead and some behind."""

    name = "wrong clocks"
    about = "clocks of workers and producers one hour ahead and behind"

    def __init__(self, seconds: int = HOUR) -> None:
        self._seconds = seconds
        self.environment = off_by(seconds)  # type: ignore[misc]

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        return [
            Fault(at, "worker whose clock is off", {"by": by, "instead of": random.randrange(100)})
            for at in regularly(random, seconds, every=4, first=1)
            if (by := random.choice([HOUR, -HOUR, 0])) is not None
        ]

    def strike(self, stage: Stage, fault: Fault) -> None:
        old = stage.crew.pick(fault.detail["instead of"])
        new = stage.crew.start_worker(**off_by(fault.detail["by"]))
        until(lambda: new.ready or not new.alive, "a worker started")
        if old is not None:
            with stage.fault("kill worker", scope="worker", target=old.pid):
                old.kill()


# A release that changes what there is to change: a column of the hot table, and a function that every
# worker calls, with a new parameter at the end.
NEXT = """
ALTER TABLE live_jobs ADD COLUMN next_release text NOT NULL DEFAULT 'yes';
ALTER TABLE finished_jobs ADD COLUMN next_release text;
"""


class RollingUpgrade(Scenario):
    """The next release migrates the schema under the running workers, which are replaced one by one."""

    name = "rolling upgrade"
    about = "the next release migrates, and replaces the old workers one by one"

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        self.build = newer_build(directory / "next", NEXT, oldest_code=1)
        with machine(directory / "pg", max_connections="100") as server:
            yield Place(server.url, server.url)

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        times = [round(seconds * (n + random.uniform(0.5, 1)) / (self.workers + 2), 2)
                 for n in range(self.workers + 1)]  # fmt: skip
        return [Fault(times[0], "migrate"), *(Fault(at, "replace a worker") for at in times[1:])]

    def strike(self, stage: Stage, fault: Fault) -> None:
        if fault.name == "migrate":
            # Without leniency: a migration that disturbs nobody is what is promised.
            self.old = [worker.pid for worker in stage.crew.workers()]
            migrate(stage, self.build)
            return
        new = stage.crew.start_worker(**pointing_to(self.build))
        until(lambda: new.ready or not new.alive, "a worker of the next release started")
        old = [worker for worker in stage.crew.workers() if worker.pid in self.old]
        if old:
            with stage.fault("SIGTERM", scope="worker", target=old[0].pid):
                old[0].send(signal.SIGTERM)
                until(lambda: not old[0].alive, "the old worker left")

    def findings(self, stage: Stage) -> list[str]:
        if stage.crew.exits["worker 0"] < self.workers:
            return ["not every old worker was replaced"]
        return []


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
    workers = 2

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        return [
            Fault(at, "stall", {"leases": round(random.uniform(1.5, 3), 1)})
            for at in regularly(random, seconds, every=6, first=1)
        ]

    def strike(self, stage: Stage, fault: Fault) -> None:
        seconds = fault.detail["leases"] * stage.lease
        tag = f"stall-{fault.at}"
        described = {
            "tag": tag, "type": "chaos.staller", "queue": "default", "priority": 100, "key": None,
            "n": None, "delay": None, "max_attempts": 3, "unique": None,
        }  # fmt: skip
        with contextlib.closing(JobQueue(stage.place.checker, schema=stage.place.schema)) as queue:
            stage.ledger.write("enqueue-invoked", call=tag, jobs=[described])
            data = {"tag": tag, "seconds": seconds}
            handle = queue.enqueue("chaos.staller", data, priority=150, max_attempts=3)
            stage.ledger.write("enqueue-acknowledged", call=tag, ids=[str(handle.id)])
            # No leniency: the heartbeat is a thread of its own, and no lease is lost.
            until(lambda: queue.get(handle.id).status == "completed", "the stall is over")
