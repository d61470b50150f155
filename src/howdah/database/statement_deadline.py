"""Hangs up on a server that does not answer in time. libpq would wait for it as long as the network says
that somebody is there, and a proxy in between always is.

One thread watches over every connection of the process that waits for an answer. It sleeps until the first
of them is late, so that a statement which is answered costs a look at the clock and no more."""

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


class Patience:
    """How long to wait for answers on one connection, as a context. When it is over the connection is
    hung up on, and what broke for that is raised as `Unanswered`."""

    def __init__(self, conn: psycopg.Connection[Any], seconds: float) -> None:
        self._conn = conn
        self._over = False
        self._seconds = seconds
        self.until = time.monotonic() + seconds
        _watch.add(self)

    def renew(self, seconds: float) -> None:
        """From now on so many seconds, for the next answer."""
        before, self._seconds = self.until, seconds
        self.until = time.monotonic() + seconds
        if self.until < before:
            _watch.add(self)

    def end(self) -> None:
        """Time is up: hang up."""
        self._over = True
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
        _watch.remove(self)
        if self._over:
            self._conn.close()
            if isinstance(error, psycopg.Error):
                raise Unanswered(self._seconds) from error


class _Watch:
    """The thread, started on first use, and what it watches over."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may enqueue, too
        self._changed = threading.Condition(self._lock)
        self._waiting: set[Patience] = set()
        self._wakes_at = float("inf")
        self._thread: threading.Thread | None = None

    def add(self, patience: Patience) -> None:
        with self._lock:
            self._waiting.add(patience)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="howdah-patience", daemon=True
                )
                self._thread.start()
            elif patience.until < self._wakes_at:
                self._changed.notify()

    def remove(self, patience: Patience) -> None:
        # Under the lock: whoever has the connection next is not hung up on.
        with self._lock:
            self._waiting.discard(patience)

    def _run(self) -> None:
        with self._lock:
            while True:
                now = time.monotonic()
                for patience in [each for each in self._waiting if each.until <= now]:
                    self._waiting.discard(patience)
                    patience.end()
                self._wakes_at = min((each.until for each in self._waiting), default=float("inf"))
                self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))


_watch = _Watch()


def _after_fork() -> None:
    # The parent's thread is not in the child, and its lock may be held for ever.
    _watch.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
