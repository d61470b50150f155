"""Adapter processes: started in the peer's own environment, with requests and events as lines of JSON.

The first line to a process is its request; `driver.py` lists the verbs. The process replies with events: `ready`,
then, after `go`, `done` with its measurements. A worker runs until it receives `stop`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.services import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".bench"
EVENT_TIMEOUT_SECONDS = 120.0


class AdapterError(Exception):
    """An adapter process exited, or sent no event in time. Contains the end of its log."""


class AdapterProcess:
    """One adapter process. A context manager: the process is killed at the end of the block."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        request: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"{name}-{request['verb']}"
        (HOME / "logs").mkdir(parents=True, exist_ok=True)
        self.log = HOME / "logs" / f"{self.name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=HOME,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                start_new_session=True,
            )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(request)

    def __enter__(self) -> AdapterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        # The session was created for this process; the rest of it are its children.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def expect(self, event: str, timeout: float = EVENT_TIMEOUT_SECONDS) -> dict[str, Any]:
        """Wait for the next event, which must be this one."""
        try:
            received = self._events.get(timeout=timeout)
        except queue.Empty:
            raise self._failure(f"sent no event for {timeout:g} s") from None
        if received is None:
            raise self._failure(f"exited with {self._process.wait()}")
        if received.get("event") != event:
            raise self._failure(f"sent {received} instead of {event!r}")
        return received

    def go(self) -> None:
        """Start what was requested."""
        self._send({"verb": "go"})

    def check(self) -> None:
        """Raise if the process has exited."""
        if self._process.poll() is not None:
            raise self._failure(f"exited with {self._process.returncode}")

    def stop(self, timeout: float = 60.0) -> None:
        """Stop a worker gracefully and wait until it exits."""
        self._send({"verb": "stop"})
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._failure(f"did not stop within {timeout:g} s") from None

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process.stdin is None:
            raise ValueError("no pipe to the process")
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("closed its input") from None

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._events.put(json.loads(line))
        self._events.put(None)

    def _failure(self, what: str) -> AdapterError:
        lines = self.log.read_text(errors="replace").splitlines()[-12:]
        return AdapterError("\n  ".join([f"{self.name} {what}", *lines]))
