"""What the two stores share: their settings, and what follows a failed attempt to run statements. Nothing
here opens a connection."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psycopg_pool

from howdah.database.backoff import (
    ANSWERED_MOST_SECONDS,
    FIRST_SECONDS,
    MOST_SECONDS,
    doubled,
    jittered,
)
from howdah.database.driver_errors import (
    Address,
    Unanswered,
    is_closed,
    is_connection_limit,
    is_connection_lost,
    is_own_pool,
    is_pool_closed,
    is_read_only,
    is_refused,
    raise_translated,
    unreachable,
)
from howdah.encoding import validation

if TYPE_CHECKING:
    from howdah.errors import DatabaseUnreachable
    from howdah.model import Seconds

TIMEOUT_SECONDS = 10.0
"""Seconds during which a statement whose connection breaks is retried."""
COMMAND_TIMEOUT_SECONDS = 60.0
"""Seconds to wait for the answer to one statement, unless it has its own timeout."""
CHECKOUT_TIMEOUT_SECONDS = 1.0
"""Seconds to wait for one pool checkout. The pool's own attempts to connect grow further apart, so several
short checkouts find a server that is back sooner than one long checkout."""
POOL_CONNECTIONS = 10


class StoreSettings:
    """The settings and the address of a store."""

    def __init__(
        self,
        database: object,
        schema: str,
        *,
        create: bool,
        timeout: Seconds,
        command_timeout: Seconds,
    ) -> None:
        self.schema = schema
        self.create = create
        self.timeout = _to_seconds(timeout, "timeout")
        self.command_timeout = _to_seconds(command_timeout, "command_timeout")
        self.checkout_timeout = min(self.timeout, CHECKOUT_TIMEOUT_SECONDS)
        self.is_own_pool = is_own_pool(database)
        self.address: Address = ("(unknown)", "(unknown)")
        self.delay = 0.0
        """The last delay between two attempts of any caller, 0 after a success. A call starts with it: many
        short calls to a server that cannot serve are as far apart as the attempts of a long one."""
        self._last_error: tuple[float, BaseException] | None = None

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt found no usable connection."""
        return self.delay > 0

    def note_failure(self, error: BaseException) -> None:
        """Remember a failure to connect: the reason to report when a wait for another caller times out."""
        if not isinstance(error, TimeoutError):
            self._last_error = (time.monotonic(), error)

    def note_success(self) -> None:
        """Forget the failures: an attempt has succeeded."""
        self.delay = 0.0
        self._last_error = None

    def next_delay(self, last: float, error: BaseException) -> float:
        """The delay after one of `last` seconds, before jitter."""
        most = (
            ANSWERED_MOST_SECONDS
            if is_read_only(error) or is_connection_limit(error) or is_closed(error)
            else MOST_SECONDS
        )
        self.delay = doubled(last, FIRST_SECONDS, most)
        return self.delay

    def unreachable(self, error: BaseException, since: float) -> DatabaseUnreachable:
        """The error to raise for a database that cannot be reached by a call that began at `since`."""
        # An older failure is over, or the call would have met it itself.
        last = self._last_error
        recent = last[1] if last is not None and last[0] >= since else None
        return unreachable(self.address, error, recent)


class RetryLoop:
    """Decides what follows a failed attempt to run statements. Each store drives one per call."""

    def __init__(self, settings: StoreSettings, statements: object = ()) -> None:
        self._settings = settings
        # An iterable that builds its statements while they are sent has no such statement.
        self._is_divisible = isinstance(statements, list) and any(
            each.is_divisible for each in statements
        )
        self._delay = settings.delay
        self.began = time.monotonic()
        self.deadline = self.began + settings.timeout
        self.resend = False
        """Whether an earlier attempt lost its answer, so that the idempotent forms must be sent."""

    def pause(self, error: BaseException) -> float:
        """Seconds to wait before the next attempt, which is not after the deadline."""
        if isinstance(error, psycopg_pool.PoolTimeout):
            return 0.0  # the checkout has waited, perhaps for other callers only
        self._delay = self._settings.next_delay(self._delay, error)
        return min(jittered(self._delay), max(self.deadline - time.monotonic(), 0.0))

    def after(self, error: BaseException) -> bool:
        """Raise the error for the caller, unless the statements must be run again. If they must, return
        whether the connection broke and must be replaced."""
        settings = self._settings
        if is_refused(error):
            raise settings.unreachable(error, self.began) from error
        if not is_connection_lost(error):
            raise_translated(error, settings.schema)
        if isinstance(error, Unanswered) and self._is_divisible:
            raise settings.unreachable(error, self.began) from error
        if isinstance(error, Unanswered) and not self.resend:
            # The answer may have taken the whole timeout. Resending finds out whether it was executed.
            self.deadline = max(self.deadline, time.monotonic() + settings.timeout)
        # If the caller's pool is closed, it stays closed: only the caller may open it.
        is_hopeless = not settings.is_own_pool and is_pool_closed(error)
        if is_hopeless or time.monotonic() >= self.deadline:
            raise settings.unreachable(error, self.began) from error
        if isinstance(error, psycopg_pool.PoolTimeout):
            return False  # nothing was sent, and the next checkout makes the pool connect again
        settings.note_failure(error)
        self.resend = True
        return True


def _to_seconds(value: Seconds, name: str) -> float:
    return validation.to_timedelta(value, name, minimum=0.001).total_seconds()
