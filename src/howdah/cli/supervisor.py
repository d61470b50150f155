"""Runs worker processes as children: restarts those that end, and all of them when a source file changes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from howdah.encoding.safe_logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = get_logger(__name__)

POLL_SECONDS = 0.25
RESTART_DELAY_SECONDS = 1.0
# After the grace period: a child whose event loop is blocked says so, and ends, before.
KILL_AFTER_SECONDS = 20.0
SUPERVISOR_VARIABLE = "HOWDAH_SUPERVISOR"


class Supervisor:
    """Starts a child for each command, restarts children that end, and forwards signals."""

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
        """Supervise until a signal arrives. Returns the first exit code that is not 0."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        seen = dict(_sources()) if self._reload else {}
        while not self._signals:
            self._reap()
            self._start_missing()
            if self._reload and (now := dict(_sources())) != seen:
                seen = now
                logger.info("a source file changed; restarting")
                self._stop()
                self._not_before = [0.0] * len(self._commands)
            time.sleep(POLL_SECONDS)
        return self._stop()

    def _start_missing(self) -> None:
        for index, command in enumerate(self._commands):
            if index not in self._children and time.monotonic() >= self._not_before[index]:
                # In its own process group: Ctrl-C in a terminal reaches only the supervisor, which
                # forwards it.
                self._children[index] = subprocess.Popen(  # noqa: S603 - our own command
                    command,
                    process_group=0,
                    env={**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())},
                )
                # A child that ends at once is restarted after a delay.
                self._not_before[index] = time.monotonic() + RESTART_DELAY_SECONDS

    def _reap(self) -> None:
        for index, child in list(self._children.items()):
            status = child.poll()
            if status is None:
                continue
            del self._children[index]
            fields = {"pid": child.pid, "status": status}
            if self._reload and status > 0:
                # The code is broken: the child logged why, and would fail again.
                self._not_before[index] = float("inf")
                logger.warning("worker ended; restarting when a source file changes", extra=fields)
            else:
                logger.warning("worker process ended; restarting", extra=fields)

    def _stop(self) -> int:
        """Ask every child to stop; kill those that outlast the grace period and KILL_AFTER_SECONDS."""
        deadline = time.monotonic() + self._grace + KILL_AFTER_SECONDS
        worst = sent = 0
        while self._children:
            if sent < max(1, self._signals):
                # The second signal is SIGINT: a service manager may have sent SIGTERM to the children
                # too, and they count several SIGTERMs as one.
                self._send(signal.SIGINT if sent else signal.SIGTERM)
                sent += 1
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            for index, child in list(self._children.items()):
                if child.poll() is not None:
                    # A child that had just started had no signal handler yet: killed by our SIGTERM.
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


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a worker gracefully. A closed terminal sends SIGHUP, except to a program that was
    started with nohup, which ignores it."""
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def stop_with_supervisor() -> bool:
    """In a child: request a SIGTERM for when the supervisor ends, even if it is killed. Returns False
    without a supervisor."""
    parent = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if parent is None:
        return False
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, Linux only
    if os.getppid() != int(parent):
        raise SystemExit(1)  # the supervisor ended before the request
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
