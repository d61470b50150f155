"""Processes of adapters: started in the peer's own environment, spoken to in lines of JSON.

The first line to a process is its request; `driver.py` lists the verbs. What it answers are events:
`ready`, then, after `go`, `done` with what it measured. A worker works until it is told to stop."""

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
PATIENCE = 120.0


class AdapterError(Exception):
    """A peer's process ended, or kept silent for too long. Says what it last wrote."""


class AdapterProcess:
    """One process of an adapter. Use as a context manager: it never outlives the block."""

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
        # The session was made for this process: what is left in it are its own children.
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

    def expect(self, event: str, patience: float = PATIENCE) -> dict[str, Any]:
        """Wait for an event, which must be this one."""
        try:
            told = self._events.get(timeout=patience)
        except queue.Empty:
            raise self._failure(f"said nothing for {patience:g} s") from None
        if told is None:
            raise self._failure(f"ended with {self._process.wait()}")
        if told.get("event") != event:
            raise self._failure(f"said {told} where {event!r} was expected")
        return told

    def go(self) -> None:
        """Begin what the request asked for."""
        self._send({"verb": "go"})

    def check(self) -> None:
        """Raise if it has ended."""
        if self._process.poll() is not None:
            raise self._failure(f"ended with {self._process.returncode}")

    def stop(self, patience: float = 60.0) -> None:
        """Tell a worker to stop in good order and wait until it has ended."""
        self._send({"verb": "stop"})
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            raise self._failure(f"did not stop within {patience:g} s") from None

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process.stdin is None:
            raise ValueError("no pipe to the process")
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("does not listen") from None

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._events.put(json.loads(line))
        self._events.put(None)

    def _failure(self, what: str) -> AdapterError:
        lines = self.log.read_text(errors="replace").splitlines()[-12:]
        return AdapterError("\n  ".join([f"{self.name} {what}", *lines]))
