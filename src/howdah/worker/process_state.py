"""In a task process: what a handler may change and the next one must not inherit, as far as it can be compared cheaply.
Howdah restores it after each run. Where it cannot, the process ends after the run.

Not compared: what modules have in their variables, among them random seeds, log levels and warning filters; the locale;
threads, child processes and open files that a handler leaves; the user, the groups and the priority of the process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys

# The functions of `signal` without an enum for each value: 3 µs instead of 60 for all signals.
from _signal import getsignal, pthread_sigmask  # type: ignore[import-not-found]
from dataclasses import dataclass
from typing import Any

_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
_SIGNALS = sorted(int(each) for each in signal.valid_signals())
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_STREAMS = ("stdin", "stdout", "stderr")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of this process before a handler runs."""

    directory: str
    umask: int
    environ: tuple[Any, Any]
    environment: dict[bytes, bytes]
    module_path: tuple[list[str], list[str]]
    limits: list[tuple[int, tuple[int, int]]]
    handlers: list[tuple[int, Any]]
    mask: set[int]
    timers: list[int]
    streams: list[tuple[str, Any]]
    files: list[tuple[int, int] | None]
    socket_timeout: float | None
    recursion_limit: int

    @classmethod
    def now(cls) -> ProcessState:
        umask = os.umask(0o077)  # the only way to read it
        os.umask(umask)
        try:
            directory = os.getcwd()
        except OSError:  # it was removed
            directory = "/"
        return cls(
            directory,
            umask,
            (os.environ, os.environb),
            dict(os.environb),
            (sys.path, list(sys.path)),
            [(each, resource.getrlimit(each)) for each in _LIMITS],
            [(each, getsignal(each)) for each in _SIGNALS],
            pthread_sigmask(signal.SIG_BLOCK, ()),
            [each for each in _TIMERS if signal.getitimer(each) == (0.0, 0.0)],
            [(name, getattr(sys, name)) for name in _STREAMS],
            _standard_files(),
            socket.getdefaulttimeout(),
            sys.getrecursionlimit(),
        )

    def restore(self) -> bool:
        """Undo what a handler has changed. False if that is not possible."""
        for timer in self.timers:
            signal.setitimer(timer, 0)
        try:
            # First: the rest may need memory and files.
            for which, limits in self.limits:
                if resource.getrlimit(which) != limits:
                    resource.setrlimit(which, limits)
            sys.setrecursionlimit(self.recursion_limit)
            for number, handler in self.handlers:
                if getsignal(number) is not handler:
                    signal.signal(number, handler)
            if pthread_sigmask(signal.SIG_BLOCK, ()) != self.mask:
                pthread_sigmask(signal.SIG_SETMASK, self.mask)
        except (OSError, ValueError, TypeError, RecursionError):
            # The handler has lowered a hard limit, or has replaced a signal handler that is not Python's.
            return False
        socket.setdefaulttimeout(self.socket_timeout)
        os.umask(self.umask)
        os.environ, os.environb = self.environ
        sys.path, sys.path[:] = self.module_path[0], self.module_path[1]
        if dict(os.environb) != self.environment:
            os.environb.clear()
            os.environb.update(self.environment)
        with contextlib.suppress(OSError):  # it was removed
            os.chdir(self.directory)
        for name, stream in self.streams:
            setattr(sys, name, stream)
        is_open = all(stream is None or not stream.closed for _, stream in self.streams)
        return is_open and _standard_files() == self.files


def _standard_files() -> list[tuple[int, int] | None]:
    """What the file descriptors 0, 1 and 2 refer to."""
    found: list[tuple[int, int] | None] = []
    for number in range(3):
        try:
            status = os.fstat(number)
        except OSError:  # closed
            found.append(None)
        else:
            found.append((status.st_dev, status.st_ino))
    return found


def address_space() -> int:
    """The size of the address space of this process, in bytes. 0: unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not on this system
        return 0


def limit_memory(limit: int) -> None:
    """Limit the address space, to no more than the hard limit of this process. `ProcessState.restore` ends it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
