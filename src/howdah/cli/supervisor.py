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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.25
RESTART_PAUSE = 1.0
KILL_AFTER = 10.0  # seconds past the grace period
PARENT = "HOWDAH_SUPERVISOR"


class Supervisor:
    """Starts a child for each command, starts dead ones again, and passes signals on."""

    def __init__(
        self, commands: Sequence[Sequence[str]], *, reload: bool = False, grace: float
    ) -> None:
        self._commands = [[sys.executable, "-m", "howdah", *command] for command in commands]
        self._reload = reload
        self._grace = grace
        self._signals = 0
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._not_before = [0.0] * len(commands)

    def run(self) -> int:
        """Supervise until told to stop; the exit code of the worst child."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        seen = dict(_sources()) if self._reload else {}
        while not self._signals:
            self._reap()
            self._start_missing()
            if self._reload and (now := dict(_sources())) != seen:
                seen = now
                logger.info("a source file changed; starting anew")
                self._stop()
                self._not_before = [0.0] * len(self._commands)
            time.sleep(LOOK_EVERY)
        return self._stop()

    def _start_missing(self) -> None:
        for index, command in enumerate(self._commands):
            if index not in self._children and time.monotonic() >= self._not_before[index]:
                # A group of its own: Ctrl-C in a terminal reaches the supervisor, who passes it on.
                self._children[index] = subprocess.Popen(  # noqa: S603 - our own command
                    command, process_group=0, env={**os.environ, PARENT: str(os.getpid())}
                )
                # One that dies at once is not started again at once.
                self._not_before[index] = time.monotonic() + RESTART_PAUSE

    def _reap(self) -> None:
        for index, child in list(self._children.items()):
            status = child.poll()
            if status is None:
                continue
            del self._children[index]
            fields = {"pid": child.pid, "status": status}
            if self._reload and status > 0:
                # It has said what is wrong with the code, and would say it again.
                self._not_before[index] = float("inf")
                logger.warning("the worker ended and waits for a file to change", extra=fields)
            else:
                logger.warning("a worker process ended and is started again", extra=fields)

    def _stop(self) -> int:
        """Ask every child to stop, wait for the grace period and a little, then kill."""
        give_up = time.monotonic() + self._grace + KILL_AFTER
        worst = told = 0
        while self._children:
            if told < max(1, self._signals):
                # The second is another signal: a service manager may have sent its SIGTERM to the
                # children too, and two of those are to mean one.
                self._send(signal.SIGINT if told else signal.SIGTERM)
                told += 1
            if time.monotonic() > give_up:
                self._send(signal.SIGKILL)
            for index, child in list(self._children.items()):
                if child.poll() is not None:
                    # One that had just been started knew no better than to die of our signal.
                    if child.returncode != -signal.SIGTERM:
                        worst = worst or child.returncode
                    del self._children[index]
            time.sleep(0.02)
        return worst

    def _send(self, number: signal.Signals) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1


def stop_with_supervisor() -> bool:
    """In a child: get a SIGTERM when the supervisor dies, even by SIGKILL. False if there is none."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return False
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, Linux only
    if os.getppid() != int(parent):
        raise SystemExit(1)  # it died before we asked
    return True


def _sources() -> Iterator[tuple[str, int]]:
    for directory, folders, files in os.walk(os.curdir):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [
            f for f in folders if f[0] != "." and f not in ("node_modules", "__pycache__")
        ]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    yield path, os.stat(path).st_mtime_ns
