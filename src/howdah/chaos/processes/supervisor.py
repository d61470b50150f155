"""The worker and producer processes of a run: started, watched, replaced when they die, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from howdah.chaos.ledger import LEDGER_VARIABLE, Ledger
from howdah.errors import HowdahError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from howdah.chaos.scenario import Place

LOOK_EVERY = 0.05
STARTED = b"r started"  # a worker's log, or a producer's
START_PATIENCE = 60.0
STOP_PATIENCE = 20.0
APP = "howdah.chaos.processes.app:app"
PRODUCER = "howdah.chaos.processes.producer"
BARE_WORKER = "howdah.chaos.processes.bare_queue_worker"
SCHEMA_VARIABLE = "HOWDAH_CHAOS_SCHEMA"
LEASE_VARIABLE = "HOWDAH_CHAOS_LEASE"
COMMAND_TIMEOUT = 3.0
"""Seconds that bare queues wait for an answer: work is to resume within five."""
BARE = "chaos.bare"
"""The type of jobs that workers with a loop of their own claim, and no others."""
EFFECTS = "chaos_effects"
"""The table of rows that handlers write together with their completion."""


class ChaosError(HowdahError):
    """The run itself could not go on; nothing is known about the promises."""


class Child:
    """A worker or producer process."""

    def __init__(self, role: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.role = role
        self.process = process
        self.log = log
        self.noted = False
        self._ready = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether it said that it has started."""
        self._ready = self._ready or STARTED in self.log.read_bytes()
        return self._ready

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if there is still somebody to get it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.send(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def wait(self, timeout: float) -> int | None:
        """Its exit code, negative for a signal; None if it still runs then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout)
        return None


class Crew:
    """Starts processes on one place, with one ledger. Keeps `size` workers running until it is closed."""

    def __init__(
        self,
        place: Place,
        directory: Path,
        ledger: Ledger,
        *,
        lease: float,
        environment: Mapping[str, str] | None = None,
        worker_options: Sequence[str] = (),
        app: str = APP,
        producer: str = PRODUCER,
        bare: str = BARE_WORKER,
    ) -> None:
        self.place = place
        self.directory = directory
        self.ledger = ledger
        self.lease = lease
        self.size = 0
        self._producing = self._numbers = self._bare = 0
        self._producer_options: Sequence[str] = ()
        self.exits: Counter[str] = Counter()
        """How processes ended, as "worker -9"."""
        self._environment = dict(environment or {})
        self._worker_options = list(worker_options)
        self._app = app
        self._producer = producer
        self._bare_worker = bare
        self._children: list[Child] = []
        self._started: set[int] = set()
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="chaos-crew", daemon=True)
        self._watching.start()

    # ── starting ──────────────────────────────────────────────────────────────────────────────────

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """What every child is told."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HOWDAH_")}
        return inherited | {
            "HOWDAH_DATABASE_URL": self.place.database,
            SCHEMA_VARIABLE: self.place.schema,
            LEASE_VARIABLE: str(self.lease),
            LEDGER_VARIABLE: self.ledger.path,
            **self._environment,
            **more,
        }

    def start(self, role: str, arguments: Sequence[str], **environment: str) -> Child:
        """Start `python ARGUMENTS…` in a process group of its own."""
        with self._lock:
            if self._closing.is_set():
                raise ChaosError("the run is over; no process is started any more.")
            log = self.directory / f"{len(self._children):04}-{role}.log"
            with open(log, "wb") as file:
                process = subprocess.Popen(  # noqa: S603 - our own command
                    [sys.executable, *arguments],
                    env=self.environment(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    process_group=0,
                )
            child = Child(role, process, log)
            self._children.append(child)
            return child

    def start_worker(self, *options: str, role: str = "worker", **environment: str) -> Child:
        """One more worker, as `howdah worker` starts it. HOWDAH_FAULT="point:kill:n" arms it."""
        command = [
            "-m",
            "howdah",
            "worker",
            self._app,
            "--log-json",
            *self._worker_options,
            *options,
        ]
        return self.start(role, command, **environment)

    def produce(self, size: int, *options: str) -> None:
        """Have so many producers, from now on, and wait until they have started."""
        with self._lock:
            self._producing = size
            self._producer_options = options
            self._replace()
        self.await_ready("producer", size)

    def _replace(self) -> None:
        """Start as many as are missing."""
        for _ in range(self.size - len(self.workers())):
            self.start_worker()
        for _ in range(self._bare - len(self.children("bare"))):
            self.start("bare", ["-m", self._bare_worker])
        for _ in range(self._producing - len(self.producers())):
            # Each has a number of its own, by which it names its jobs.
            self._numbers += 1
            number = ["--number", str(self._numbers)]
            self.start("producer", ["-m", self._producer, *number, *self._producer_options])

    def man(self, size: int, bare: int = 0) -> None:
        """Have so many workers, and so many with a loop of their own on a bare queue, from now on, and wait
        until they have started."""
        with self._lock:
            self.size, self._bare = size, bare
            self._replace()
        self.await_ready("worker", size)
        self.await_ready("bare", bare)

    def await_ready(self, role: str, size: int) -> None:
        """Wait until so many have started."""
        give_up = time.monotonic() + START_PATIENCE
        while sum(child.ready for child in self.children(role)) < size:
            if time.monotonic() > give_up:
                logs = [child.log.read_text(errors="replace")[-500:] for child in self._children]
                raise ChaosError(f"the {role}s did not start within a minute: {logs}")
            time.sleep(LOOK_EVERY)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────

    def children(self, role: str | None = None) -> list[Child]:
        """The living processes, oldest first."""
        with self._lock:
            return [c for c in self._children if c.alive and role in (None, c.role)]

    def workers(self) -> list[Child]:
        """The living workers."""
        return self.children("worker")

    def producers(self) -> list[Child]:
        """The living producers."""
        return self.children("producer")

    def logs(self) -> list[Path]:
        """The logs of every process there was."""
        return [child.log for child in self._children]

    def _watch(self) -> None:
        """Note how processes end, and replace workers."""
        while not self._closing.wait(LOOK_EVERY):
            with self._lock:
                self._note_exits()
                self._note_starts()
                self._replace()

    def _note_exits(self) -> None:
        for child in self._children:
            if not child.noted and not child.alive:
                child.noted = True
                code = child.process.returncode
                _end_group(child.pid)
                self.exits[f"{child.role} {code}"] += 1
                self.ledger.write("exit", child=child.pid, role=child.role, code=code)

    def _note_starts(self) -> None:
        for child in self._children:
            if child.pid not in self._started and child.alive and child.ready:
                self._started.add(child.pid)
                self.ledger.write("ready", child=child.pid, role=child.role)

    # ── stopping ──────────────────────────────────────────────────────────────────────────────────

    def dismiss(self, role: str, patience: float = STOP_PATIENCE) -> None:
        """Ask all of a role to stop; kill those that do not."""
        with self._lock:
            match role:
                case "worker":
                    self.size = 0
                case "bare":
                    self._bare = 0
                case _:
                    self._producing = 0
        leaving = self.children(role)
        for child in leaving:
            child.resume()
            child.send(signal.SIGTERM)
        give_up = time.monotonic() + patience
        for child in leaving:
            if child.wait(max(0.0, give_up - time.monotonic())) is None:
                child.kill()
                child.wait(5)

    def close(self) -> None:
        """Kill what still runs."""
        self._closing.set()
        self._watching.join(10)
        with self._lock:
            self.size = self._producing = self._bare = 0
            for child in self.children():
                child.kill()
                child.wait(5)
            self._note_exits()


def _end_group(leader: int) -> None:
    """Kill what a process that has just ended left of its group: task processes, children of handlers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
