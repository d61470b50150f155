"""Faults of worker and producer processes. They need only signals, so they run on any user's database."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from howdah.chaos import fault_hits
from howdah.chaos.scenario import Fault, RunContext, Scenario
from howdah.execution.fault_points import POINTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from random import Random

    from howdah.chaos.history import History
    from howdah.chaos.processes.supervisor import Child
    from howdah.chaos.scenario import Place

KILL_TIMEOUT_SECONDS = 15.0
STOP_TIMEOUT_SECONDS = 30.0
SLOW_POINTS = ("before-heartbeat", "after-heartbeat", "before-maintenance", "during-shutdown")


class Calm(Scenario):
    """The load without faults."""

    name = "calm"
    about = "no fault: only the load"


def signal_busy_worker(
    run: RunContext, fault: Fault, number: signal.Signals, timeout: float
) -> None:
    """Send a signal to the worker that the schedule selected, and wait until it exits."""
    worker = run.pick_busy_worker(fault.detail["worker"])
    if worker is not None:
        with run.fault(fault.name, scope="worker", target=worker.pid):
            worker.send(number)
            worker.wait(timeout)


class KillWorkers(Scenario):
    """kill -9 at any time."""

    name = "kill workers"
    about = "kill -9 of workers at random"
    every_seconds = 2.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill worker", {"worker": random.randrange(100)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        signal_busy_worker(run, fault, signal.SIGKILL, KILL_TIMEOUT_SECONDS)


class FaultPoints(Scenario):
    """kill -9 at every step of a worker."""

    name = "fault points"
    about = "kill -9 of workers at every fault point"
    every_seconds = 4.0
    min_seconds = 30.0
    concurrent_kills = 2
    max_tries = 6
    _drawn: frozenset[str] = frozenset()

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        faults = super().schedule(random, seconds)
        self._drawn = frozenset(point for fault in faults for point in fault.detail["points"])
        return faults

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        points = tuple(self.draw_in_turn(random, list(POINTS), self.concurrent_kills))
        return "kill at fault point", {"points": points, "time": random.randint(1, 3)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        """Several at once, since each worker takes time to start."""
        points = fault.detail["points"]
        with ThreadPoolExecutor(len(points)) as pool:
            list(pool.map(lambda point: self._kill_at(run, fault, point), points))

    def _kill_at(self, run: RunContext, fault: Fault, point: str) -> None:
        # Heartbeats and maintenance are rare: use the first one. Before its first claims a worker has no job in flight.
        first = 1 if point in SLOW_POINTS else fault.detail["time"]
        first += 5 if point == "before-claim" else 0
        for count in range(first, first + self.max_tries):
            victim = run.supervisor.start_worker(
                role="victim", HOWDAH_FAULT=f"{point}:kill:{count}"
            )
            with run.fault(fault.name, scope="worker", target=victim.pid, point=point):
                self._wait_for_exit(run, victim, point)
            # A worker that was killed while idle proves nothing.
            if run.jobs_in_flight().get(victim.pid) or run.stopping.is_set():
                return

    def _wait_for_exit(self, run: RunContext, victim: Child, point: str) -> None:
        run.wait_until(lambda: victim.ready or not victim.alive, math.inf, 0.05)
        if point == "during-shutdown":
            run.wait_until(lambda: run.jobs_in_flight().get(victim.pid), KILL_TIMEOUT_SECONDS)
            victim.send(signal.SIGTERM)
        if point == "after-start":
            # Only a job that was recovered before is written as started before it runs.
            deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
            while victim.wait(0.05) is None and time.monotonic() < deadline:
                run.mark_as_recovered()
        if victim.wait(KILL_TIMEOUT_SECONDS) is None:
            victim.send(signal.SIGTERM)
            victim.wait(KILL_TIMEOUT_SECONDS)

    def missed(self, history: History, planned: Iterable[str], lease: float) -> list[str]:
        reached = {window.begin.get("point") for window in fault_hits.windows(history, lease)}
        not_reached = sorted(self._drawn - reached)
        return [f"no worker was killed with a job in flight at {point}" for point in not_reached]


class PauseWorkers(Scenario):
    """SIGSTOP until the leases have expired and other workers have claimed the jobs."""

    name = "pause workers"
    about = "SIGSTOP past the lease, then SIGCONT"
    workers = 4
    every_seconds = 1.0
    concurrent_pauses = 2

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        workers = tuple(random.sample(range(100), self.concurrent_pauses))
        return "pause worker", {"workers": workers, "leases": round(random.uniform(1.2, 1.8), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        picked = {
            worker.pid: worker
            for number in fault.detail["workers"]
            if (worker := run.pick_busy_worker(number)) is not None
        }
        self._pause(run, fault, list(picked.values()))

    def _pause(self, run: RunContext, fault: Fault, workers: list[Child]) -> None:
        if not workers:
            run.sleep(fault.detail["leases"] * run.lease)
            return
        worker, *others = workers
        with run.fault(fault.name, scope="worker", target=worker.pid):
            worker.pause()
            try:
                self._pause(run, fault, others)
            finally:
                worker.resume()


class RollingRestarts(Scenario):
    """SIGTERM of one worker after the other, as in a deployment."""

    name = "rolling restarts"
    about = "SIGTERM of one worker after another (rolling restart)"
    every_seconds = 3.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "restart worker", {"worker": 0}  # the oldest

    def inject(self, run: RunContext, fault: Fault) -> None:
        signal_busy_worker(run, fault, signal.SIGTERM, STOP_TIMEOUT_SECONDS)


class KillProducers(Scenario):
    """kill -9 of producers during an enqueue."""

    name = "kill producers"
    about = "kill -9 of producers during an enqueue or a transaction"
    first_seconds = 2.0
    every_seconds = 4.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill producer", {"producer": random.randrange(100)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        def killed() -> bool:
            producers = run.supervisor.producers()
            if not producers:
                return True
            producer = producers[fault.detail["producer"] % len(producers)]
            # Paused, so that its state cannot change between the check and the kill.
            producer.pause()
            if not is_enqueueing(run.ledger.path, producer.pid):
                producer.resume()
                return False
            with run.fault(fault.name, scope="producer", target=producer.pid):
                producer.kill()
                producer.wait(KILL_TIMEOUT_SECONDS)
            return True

        run.wait_until(killed, KILL_TIMEOUT_SECONDS, 0.001)


def is_enqueueing(path: str, producer: int) -> bool:
    """Whether the last ledger line of a producer is an enqueue without a reply."""
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
        """The places of the parts, nested in order."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                common = stack.enter_context(part.place(common, directory))
            yield common

    def findings(self, run: RunContext) -> list[str]:
        return [finding for part in self.parts for finding in part.findings(run)]


PROCESS_SCENARIOS: tuple[type[Scenario], ...] = (
    KillWorkers, FaultPoints, PauseWorkers, RollingRestarts, KillProducers,
)  # fmt: skip
