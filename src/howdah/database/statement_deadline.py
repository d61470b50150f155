"""Closes connections whose server does not answer before the deadline. libpq waits for as long as the peer
acknowledges packets, and a proxy in between always does.

One thread watches every connection of the process that waits for an answer. It sleeps until the first
deadline, so a statement that is answered in time costs one reading of the clock (decision 0022)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import psycopg

from howdah.database.driver_errors import Unanswered

if TYPE_CHECKING:
    from types import TracebackType


class StatementDeadline:
    """A deadline for the answers on one connection, as a context. When it passes, the connection is shut
    down, and the error that this causes is raised as `Unanswered`."""

    def __init__(self, conn: psycopg.Connection[Any], seconds: float) -> None:
        self._conn = conn
        self._passed = False
        self._seconds = seconds
        self.at = time.monotonic() + seconds
        _watchdog.add(self)

    def renew(self, seconds: float) -> None:
        """Set the deadline of the next answer to `seconds` from now."""
        before, self._seconds = self.at, seconds
        self.at = time.monotonic() + seconds
        if self.at < before:
            _watchdog.add(self)

    def shut_down(self) -> None:
        """Shut the connection down: the deadline has passed."""
        self._passed = True
        with (
            contextlib.suppress(OSError, psycopg.Error),
            socket.socket(fileno=os.dup(self._conn.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _watchdog.remove(self)
        if self._passed:
            self._conn.close()
            if isinstance(error, psycopg.Error):
                raise Unanswered(self._seconds) from error


class _Watchdog:
    """The thread, started on first use, and the deadlines that it watches."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may enqueue, too
        self._changed = threading.Condition(self._lock)
        self._deadlines: set[StatementDeadline] = set()
        self._wakes_at = float("inf")
        self._thread: threading.Thread | None = None

    def add(self, deadline: StatementDeadline) -> None:
        with self._lock:
            self._deadlines.add(deadline)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="howdah-statement-deadline", daemon=True
                )
                self._thread.start()
            elif deadline.at < self._wakes_at:
                self._changed.notify()

    def remove(self, deadline: StatementDeadline) -> None:
        # Under the lock: the next user of the connection must not be shut down.
        with self._lock:
            self._deadlines.discard(deadline)

    def _run(self) -> None:
        with self._lock:
            while True:
                now = time.monotonic()
                for deadline in [each for each in self._deadlines if each.at <= now]:
                    self._deadlines.discard(deadline)
                    deadline.shut_down()
                self._wakes_at = min((each.at for each in self._deadlines), default=float("inf"))
                self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))


_watchdog = _Watchdog()


def _after_fork() -> None:
    # The parent's thread does not exist in the child, and its lock may be held forever.
    _watchdog.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
