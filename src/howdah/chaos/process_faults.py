"""Faults of worker processes: what can be done to anybody's, with nothing but signals."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from howdah.chaos import fault_hits
from howdah.chaos.scenario import Fault, Scenario, Stage
from howdah.execution.fault_points import POINTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from random import Random

    from howdah.chaos.history import History
    from howdah.chaos.processes.supervisor import Child
    from howdah.chaos.scenario import Place

DEATH_PATIENCE = 15.0
STOP_PATIENCE = 30.0
SLOW_POINTS = ("before-heartbeat", "after-heartbeat", "before-maintenance", "during-shutdown")


class Calm(Scenario):
    """The load alone."""

    name = "calm"
    about = "no fault: only the load"


class KillWorkers(Scenario):
    """kill -9 at any time."""

    name = "kill workers"
    about = "kill -9 of workers at random"
    every = 2.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill worker", {"worker": random.randrange(100)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        worker = stage.pick(fault.detail["worker"])
        if worker is not None:
            with stage.fault(fault.name, scope="worker", target=worker.pid):
                worker.kill()
                worker.wait(DEATH_PATIENCE)


class FaultPoints(Scenario):
    """kill -9 at every step of a worker."""

    name = "fault points"
    about = "kill -9 of workers at every fault point"
    every = 4.0
    least = 30.0
    at_once = 2
    tries = 6
    _drawn: frozenset[str] = frozenset()

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        faults = super().schedule(random, seconds)
        self._drawn = frozenset(point for fault in faults for point in fault.detail["points"])
        return faults

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        points = tuple(self.deal(random, list(POINTS), self.at_once))
        return "kill at fault point", {"points": points, "time": random.randint(1, 3)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        """Several at once, as each takes its time to start."""
        points = fault.detail["points"]
        with ThreadPoolExecutor(len(points)) as pool:
            list(pool.map(lambda point: self._kill_at(stage, fault, point), points))

    def _kill_at(self, stage: Stage, fault: Fault, point: str) -> None:
        # Beats and ticks are slow to come: the first one will do. Before its first claims it has nothing.
        least = 1 if point in SLOW_POINTS else fault.detail["time"]
        least += 5 if point == "before-claim" else 0
        for count in range(least, least + self.tries):
            victim = stage.crew.start_worker(role="victim", HOWDAH_FAULT=f"{point}:kill:{count}")
            with stage.fault(fault.name, scope="worker", target=victim.pid, point=point):
                self._await_death(stage, victim, point)
            # One that died idle has shown nothing.
            if stage.in_hand().get(victim.pid) or stage.stopping.is_set():
                return

    def _await_death(self, stage: Stage, victim: Child, point: str) -> None:
        while victim.alive and not victim.ready and not stage.sleep(0.05):
            pass
        if point == "during-shutdown":
            give_up = time.monotonic() + DEATH_PATIENCE
            while not stage.in_hand().get(victim.pid) and time.monotonic() < give_up:
                stage.sleep(0.02)
            victim.send(signal.SIGTERM)
        if point == "after-start":
            give_up = time.monotonic() + DEATH_PATIENCE
            while victim.wait(0.05) is None and time.monotonic() < give_up:
                stage.raise_suspicion()
        if victim.wait(DEATH_PATIENCE) is None:
            victim.send(signal.SIGTERM)
            victim.wait(DEATH_PATIENCE)

    def missed(self, history: History, planned: Iterable[str], lease: float) -> list[str]:
        reached = {window.begin.get("point") for window in fault_hits.windows(history, lease)}
        left = sorted(self._drawn - reached)
        return [f"no worker died with a job in hand at {point}" for point in left]


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
            if (worker := stage.pick(number)) is not None
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
    about = "SIGTERM of one worker after another (rolling restart)"
    every = 3.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "restart worker", {"worker": 0}  # the oldest

    def strike(self, stage: Stage, fault: Fault) -> None:
        worker = stage.pick(fault.detail["worker"])
        if worker is not None:
            with stage.fault(fault.name, scope="worker", target=worker.pid):
                worker.send(signal.SIGTERM)
                worker.wait(STOP_PATIENCE)


class KillProducers(Scenario):
    """kill -9 of those who enqueue."""

    name = "kill producers"
    about = "kill -9 of producers during an enqueue or a transaction"
    first = 2.0
    every = 4.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill producer", {"producer": random.randrange(100)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        give_up = time.monotonic() + DEATH_PATIENCE
        producers = stage.crew.producers()
        while producers and time.monotonic() < give_up and not stage.sleep(0.001):
            producer = producers[fault.detail["producer"] % len(producers)]
            # It is stopped for a look: is it waiting for an answer?
            producer.pause()
            if is_enqueueing(stage.ledger.path, producer.pid):
                with stage.fault(fault.name, scope="producer", target=producer.pid):
                    producer.kill()
                    producer.wait(DEATH_PATIENCE)
                return
            producer.resume()
            producers = stage.crew.producers()


def is_enqueueing(path: str, producer: int) -> bool:
    """Whether the last line of a producer says that it asked for something."""
    with open(path, "rb") as file:
        file.seek(-min(os.fstat(file.fileno()).st_size, 262_144), os.SEEK_END)
        mine = [line for line in file if b'"pid":%d,' % producer in line]
    return bool(mine) and b'"kind":"enqueue-invoked"' in mine[-1]


class Mixed(Scenario):
    """Several scenarios side by side."""

    name = "mixed"

    def __init__(self, parts: Sequence[Scenario], name: str = "mixed") -> None:
        self.parts = parts
        self.name = name
        self.about = "combined: " + ", ".join(part.name for part in parts)
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


WORKERS: tuple[type[Scenario], ...] = (
    KillWorkers, FaultPoints, PauseWorkers, RollingRestarts, KillProducers,
)  # fmt: skip
