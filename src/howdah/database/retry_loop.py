"""What the two stores share: their settings, and what follows a failed attempt to run statements. Nothing
here opens a connection."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psycopg_pool

from howdah.database.driver_errors import (
    Address,
    Unanswered,
    is_connection_lost,
    is_own_pool,
    is_pool_closed,
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
RETRY_DELAY_SECONDS = 0.05


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
        self.last_error: BaseException | None = None
        """The last failure to connect: the reason to report when a wait for another caller times out."""

    def unreachable(self, error: BaseException) -> DatabaseUnreachable:
        """The error to raise for a database that cannot be reached."""
        return unreachable(self.address, error, self.last_error)


class RetryLoop:
    """Decides what follows a failed attempt to run statements. Each store drives one per call."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self.deadline = time.monotonic() + settings.timeout
        self.resend = False
        """Whether an earlier attempt lost its answer, so that the idempotent forms must be sent."""

    def after(self, error: BaseException) -> bool:
        """Raise the error for the caller, unless the statements must be run again. If they must, return
        whether the connection broke and must be replaced."""
        settings = self._settings
        if is_refused(error):
            raise settings.unreachable(error) from error
        if not is_connection_lost(error):
            raise_translated(error, settings.schema)
        if isinstance(error, Unanswered) and not self.resend:
            # The answer may have taken the whole timeout. Resending finds out whether it was executed.
            self.deadline = max(self.deadline, time.monotonic() + settings.timeout)
        # If the caller's pool is closed, it stays closed: only the caller may open it.
        is_hopeless = not settings.is_own_pool and is_pool_closed(error)
        if is_hopeless or time.monotonic() >= self.deadline:
            raise settings.unreachable(error) from error
        if isinstance(error, psycopg_pool.PoolTimeout):
            return False  # nothing was sent, and the next checkout makes the pool connect again
        if not isinstance(error, TimeoutError):
            settings.last_error = error
        self.resend = True
        return True


def _to_seconds(value: Seconds, name: str) -> float:
    return validation.to_timedelta(value, name, minimum=0.001).total_seconds()
