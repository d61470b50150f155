"""Keeps child processes of the same command running: several workers on one machine, or one that is
started anew when a source file changes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.25
CALM = 5.0


class Supervisor:
    """Starts the children, starts dead ones again, and passes signals on."""

    def __init__(self, arguments: Sequence[str], count: int, *, reload: bool, grace: float) -> None:
        self._command = [sys.executable, "-m", "howdah", *arguments]
        self._count = count
        self._reload = reload
        self._grace = grace
        self._signals = 0
        self._children: dict[subprocess.Popen[bytes], float] = {}

    def run(self) -> int:
        """Supervise until told to stop; the exit code of the worst child."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        seen = dict(_sources()) if self._reload else {}
        not_before = 0.0
        while not self._signals:
            self._reap()
            missing = self._count - len(self._children)
            if missing > 0 and time.monotonic() >= not_before:
                for _ in range(missing):
                    self._start()
                # A child that dies at once is not started again at once.
                not_before = time.monotonic() + 1.0
            if self._reload and (now := dict(_sources())) != seen:
                seen = now
                logger.info("a source file changed; starting anew")
                self._stop()
                not_before = 0.0
            time.sleep(LOOK_EVERY)
        return self._stop()

    def _start(self) -> None:
        # A group of its own: Ctrl-C in the terminal reaches the supervisor only, who passes it on.
        child = subprocess.Popen(self._command, process_group=0)  # noqa: S603 - our own command
        self._children[child] = time.monotonic()

    def _reap(self) -> None:
        for child in list(self._children):
            if child.poll() is not None:
                lived = time.monotonic() - self._children.pop(child)
                logger.warning(
                    "a worker process ended and is started again",
                    extra={"pid": child.pid, "status": child.returncode, "lived": f"{lived:.1f} s"},
                )

    def _stop(self) -> int:
        """Ask every child to stop, wait for the grace period and a little, then kill."""
        give_up = time.monotonic() + self._grace + CALM * 2
        worst = 0
        told = 0
        while self._children:
            if told < max(1, self._signals):
                told += 1
                for child in self._children:
                    _send(child, signal.SIGTERM)
            if time.monotonic() > give_up:
                for child in self._children:
                    _send(child, signal.SIGKILL)
            for child in list(self._children):
                if child.poll() is not None:
                    worst = worst or child.returncode
                    del self._children[child]
            time.sleep(0.02)
        return worst

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _sources() -> Iterator[tuple[str, int]]:
    for directory, folders, files in os.walk(Path.cwd()):
        folders[:] = [f for f in folders if not f.startswith(".") and f != "node_modules"]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(directory, name)
                try:
                    yield path, os.stat(path).st_mtime_ns
                except FileNotFoundError:
                    continue
