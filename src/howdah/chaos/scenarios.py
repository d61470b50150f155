"""Faults of worker processes: what can be done to anybody's, with nothing but signals."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

from howdah.chaos.scenario import Fault, Scenario, Stage
from howdah.faults import POINTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from random import Random

    from howdah.chaos.crew import Child
    from howdah.chaos.scenario import Place

DEATH_PATIENCE = 15.0
STOP_PATIENCE = 30.0


class Calm(Scenario):
    """The load alone."""

    name = "calm"
    about = "no fault at all: what the load does by itself"


class KillWorkers(Scenario):
    """kill -9 at any time."""

    name = "kill workers"
    about = "kill -9 of workers at random"
    every = 2.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill worker", {"worker": random.randrange(100)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        worker = stage.crew.pick(fault.detail["worker"])
        if worker is not None:
            with stage.fault(fault.name, scope="worker", target=worker.pid):
                worker.kill()
                worker.wait(DEATH_PATIENCE)


class FaultPoints(Scenario):
    """kill -9 at every step of a worker."""

    name = "fault points"
    about = "kill -9 of workers at every fault point"
    every = 2.0

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        self._left: list[str] = []
        return super().schedule(random, seconds)

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        # Each has had its turn before one has another.
        self._left = self._left or random.sample(list(POINTS), len(POINTS))
        return "kill at fault point", {"point": self._left.pop(), "time": random.randint(1, 3)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        point, time = fault.detail["point"], fault.detail["time"]
        # Beats and ticks are slow to come: the first one will do.
        count = 1 if point in ("during-shutdown", "before-maintenance") else time
        victim = stage.crew.start_worker(role="victim", HOWDAH_FAULT=f"{point}:kill:{count}")
        with stage.fault(fault.name, scope="worker", target=victim.pid, point=point):
            _await_ready(stage, victim)
            if point == "during-shutdown":
                stage.sleep(0.5)
                victim.send(signal.SIGTERM)
            if victim.wait(DEATH_PATIENCE) is None:
                victim.send(signal.SIGTERM)
                victim.wait(DEATH_PATIENCE)


class PauseWorkers(Scenario):
    """SIGSTOP until the lease has run out and somebody else has the jobs."""

    name = "pause workers"
    about = "SIGSTOP past the lease, then SIGCONT"
    workers = 4
    every = 1.0
    at_once = 2

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        workers = tuple(random.sample(range(100), self.at_once))
        return "pause worker", {"workers": workers, "leases": round(random.uniform(1.2, 1.8), 2)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        picked = {
            worker.pid: worker
            for number in fault.detail["workers"]
            if (worker := stage.crew.pick(number)) is not None
        }
        self._pause(stage, fault, list(picked.values()))

    def _pause(self, stage: Stage, fault: Fault, workers: list[Child]) -> None:
        if not workers:
            stage.sleep(fault.detail["leases"] * stage.lease)
            return
        worker, *others = workers
        with stage.fault(fault.name, scope="worker", target=worker.pid):
            worker.pause()
            try:
                self._pause(stage, fault, others)
            finally:
                worker.resume()


class RollingRestarts(Scenario):
    """SIGTERM, one worker after the other, as a deployment does it."""

    name = "rolling restarts"
    about = "SIGTERM of one worker after the other"
    every = 3.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "restart worker", {"worker": 0}  # the oldest

    def strike(self, stage: Stage, fault: Fault) -> None:
        worker = stage.crew.pick(fault.detail["worker"])
        if worker is not None:
            with stage.fault(fault.name, scope="worker", target=worker.pid):
                worker.send(signal.SIGTERM)
                worker.wait(STOP_PATIENCE)


class KillProducers(Scenario):
    """kill -9 of those who enqueue."""

    name = "kill producers"
    about = "kill -9 of producers, in the middle of a transaction at times"
    first = 2.0
    every = 4.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill producer", {"producer": random.randrange(100)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        producers = stage.crew.producers()
        if producers:
            producer = producers[fault.detail["producer"] % len(producers)]
            with stage.fault(fault.name, scope="producer", target=producer.pid):
                producer.kill()
                producer.wait(DEATH_PATIENCE)


class Mixed(Scenario):
    """Several scenarios side by side."""

    name = "mixed"

    def __init__(self, parts: Sequence[Scenario], name: str = "mixed") -> None:
        self.parts = parts
        self.name = name
        self.about = "at once: " + ", ".join(part.name for part in parts)
        self.workers = max(part.workers for part in parts)
        self.environment = {k: v for part in parts for k, v in part.environment.items()}

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        """Each part's within the one before it."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                common = stack.enter_context(part.place(common, directory))
            yield common

    def findings(self, stage: Stage) -> list[str]:
        return [finding for part in self.parts for finding in part.findings(stage)]


def _await_ready(stage: Stage, worker: Child) -> None:
    while worker.alive and not worker.ready and not stage.sleep(0.05):
        pass


WORKERS: tuple[type[Scenario], ...] = (
    KillWorkers, FaultPoints, PauseWorkers, RollingRestarts, KillProducers,
)  # fmt: skip
