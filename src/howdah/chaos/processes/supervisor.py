"""Starts the worker and producer processes of a run, replaces those that exit, and leaves none behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from howdah.chaos.ledger import LEDGER_VARIABLE, Ledger
from howdah.chaos.processes.environment import LEASE_VARIABLE, SCHEMA_VARIABLE
from howdah.errors import HowdahError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from howdah.chaos.scenario import Place

POLL_SECONDS = 0.05
STARTED = (
    b"r started"  # in the log of a worker ("worker started") or a producer ("producer started")
)
START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 20.0
APP = "howdah.chaos.processes.app:app"
PRODUCER = "howdah.chaos.processes.producer"
BARE_QUEUE_WORKER = "howdah.chaos.processes.bare_queue_worker"


class ChaosError(HowdahError):
    """The run itself failed; it says nothing about the promises."""


class Child:
    """A worker or producer process."""

    def __init__(self, role: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.role = role
        self.process = process
        self.log = log
        self.exit_recorded = False
        self._ready = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether it logged that it started."""
        self._ready = self._ready or STARTED in self.log.read_bytes()
        return self._ready

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has exited."""
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
        """Its exit code, negative for a signal; None if it still runs after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout)
        return None


class Supervisor:
    """Runs processes on one place with one ledger. Keeps the requested number of each role running until it is
    closed."""

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
        bare: str = BARE_QUEUE_WORKER,
    ) -> None:
        self.place = place
        self.directory = directory
        self.ledger = ledger
        self.lease = lease
        self._wanted: Counter[str] = Counter()  # processes to keep running, by role
        self._producer_numbers = itertools.count(1)
        self._producer_options: Sequence[str] = ()
        self.exits: Counter[str] = Counter()
        """The number of exits, by role and code: "worker -9"."""
        self._environment = dict(environment or {})
        self._worker_options = list(worker_options)
        self._app = app
        self._producer = producer
        self._bare_queue_worker = bare
        self._children: list[Child] = []
        self._started: set[int] = set()
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._monitor = threading.Thread(target=self._run, name="chaos-supervisor", daemon=True)
        self._monitor.start()

    # ── starting ──────────────────────────────────────────────────────────────────────────────────

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """The environment of every child process."""
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
        """Start `python ARGUMENTS…` in its own process group. The server knows its connections by the name of its
        log."""
        with self._lock:
            if self._closing.is_set():
                raise ChaosError("the run is over; no more processes are started.")
            name = f"{len(self._children):04}-{role}"
            log = self.directory / f"{name}.log"
            url = _with_application_name(self.place.database, name)
            with open(log, "wb") as file:
                process = subprocess.Popen(  # noqa: S603 - our own command
                    [sys.executable, *arguments],
                    env=self.environment({"HOWDAH_DATABASE_URL": url} | environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    process_group=0,
                )
            child = Child(role, process, log)
            self._children.append(child)
            return child

    def start_worker(self, *options: str, role: str = "worker", **environment: str) -> Child:
        """Start one more `howdah worker`. HOWDAH_FAULT="point:kill:n" arms a fault point."""
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

    def run_producers(self, count: int, *options: str) -> None:
        """Keep this many producers running, and wait until they have started."""
        with self._lock:
            self._wanted["producer"] = count
            self._producer_options = options
            self._start_missing()
        self.wait_until_ready("producer", count)

    def _start_missing(self) -> None:
        for role, count in self._wanted.items():
            for _ in range(count - len(self.children(role))):
                match role:
                    case "worker":
                        self.start_worker()
                    case "bare":
                        self.start(role, ["-m", self._bare_queue_worker])
                    case _:
                        # Each producer has a unique number, which is a part of the tags of its jobs.
                        number = ["--number", str(next(self._producer_numbers))]
                        self.start(role, ["-m", self._producer, *number, *self._producer_options])

    def run_workers(self, count: int, bare: int = 0) -> None:
        """Keep this many workers and bare queue workers running, and wait until they have started."""
        with self._lock:
            self._wanted["worker"], self._wanted["bare"] = count, bare
            self._start_missing()
        self.wait_until_ready("worker", count)
        self.wait_until_ready("bare", bare)

    def wait_until_ready(self, role: str, count: int) -> None:
        """Wait until this many have started."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while sum(child.ready for child in self.children(role)) < count:
            if time.monotonic() > deadline:
                logs = [child.log.read_text(errors="replace")[-500:] for child in self._children]
                raise ChaosError(
                    f"the {role} processes did not start within {START_TIMEOUT_SECONDS:g} s: {logs}"
                )
            time.sleep(POLL_SECONDS)

    # ── monitoring ────────────────────────────────────────────────────────────────────────────────

    def children(self, role: str | None = None) -> list[Child]:
        """The running processes, oldest first."""
        with self._lock:
            return [c for c in self._children if c.alive and role in (None, c.role)]

    def workers(self) -> list[Child]:
        """The running workers."""
        return self.children("worker")

    def producers(self) -> list[Child]:
        """The running producers."""
        return self.children("producer")

    def logs(self) -> list[Path]:
        """The logs of all processes, including those that exited."""
        return [child.log for child in self._children]

    def _run(self) -> None:
        """Record exits and starts, and replace processes that exited."""
        while not self._closing.wait(POLL_SECONDS):
            with self._lock:
                self._record_exits()
                self._record_starts()
                self._start_missing()

    def _record_exits(self) -> None:
        for child in self._children:
            if not child.exit_recorded and not child.alive:
                child.exit_recorded = True
                code = child.process.returncode
                _kill_group(child.pid)
                self.exits[f"{child.role} {code}"] += 1
                self.ledger.write("exit", child=child.pid, role=child.role, code=code)

    def _record_starts(self) -> None:
        for child in self._children:
            if child.pid not in self._started and child.alive and child.ready:
                self._started.add(child.pid)
                self.ledger.write("ready", child=child.pid, role=child.role)

    # ── stopping ──────────────────────────────────────────────────────────────────────────────────

    def stop(self, role: str, timeout: float = STOP_TIMEOUT_SECONDS) -> None:
        """Stop all processes of a role with SIGTERM; kill those that do not exit in time."""
        with self._lock:
            self._wanted[role] = 0
        stopping = self.children(role)
        for child in stopping:
            child.resume()
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        for child in stopping:
            if child.wait(max(0.0, deadline - time.monotonic())) is None:
                child.kill()
                child.wait(5)

    def close(self) -> None:
        """Kill every process that still runs."""
        self._closing.set()
        self._monitor.join(10)
        with self._lock:
            self._wanted.clear()
            for child in self.children():
                child.kill()
                child.wait(5)
            self._record_exits()


def _with_application_name(url: str, name: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}application_name={name}"


def _kill_group(leader: int) -> None:
    """Kill the rest of the process group of a process that exited: task processes, children of handlers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
