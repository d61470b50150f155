"""Which maintenance duty runs next: one step of one due duty per statement, each in its own transaction, recovery
first. The stores send the statements; the database decides what is due."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from howdah.encoding.safe_logger import get_logger

if TYPE_CHECKING:
    from howdah.protocol.statements import Statement, Statements

Duties: TypeAlias = "list[tuple[str, timedelta, str | None]]"
"""The maintenance duties that were run: (duty, duration, error) of each."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DutyStep:
    """One step of a maintenance duty. `more`: the duty is due again at once."""

    duty: str
    took: timedelta
    error: str | None
    more: bool


class DueDuties:
    """Runs due duties step by step, for at most `seconds`, and collects what they did.

    `timeout` is the deadline of one statement; None is that of other statements."""

    def __init__(self, statements: Statements, *, seconds: float, timeout: float | None) -> None:
        self._statements = statements
        self._end = time.monotonic() + seconds
        self._timeout = timeout
        self._ran: dict[str, tuple[timedelta, str | None]] = {}
        self._complete: set[str] = set()
        self._nothing_is_due = False

    def next_statement(self) -> Statement[DutyStep | None] | None:
        """The next step, or None if nothing is due or the time is over."""
        if self._nothing_is_due or time.monotonic() > self._end:
            return None
        return self._statements.run_due_duty(sorted(self._complete), self._timeout)

    def record(self, step: DutyStep | None) -> None:
        """Note what a step did, and log its error."""
        if step is None:
            self._nothing_is_due = True
            return
        took, error = self._ran.get(step.duty, (timedelta(), None))
        self._ran[step.duty] = took + step.took, step.error or error
        if not step.more:
            self._complete.add(step.duty)
        if step.error is not None:
            logger.warning(
                "maintenance duty failed",
                extra={"duty": step.duty, "took": str(step.took), "error": step.error},
            )

    def ran(self) -> Duties:
        """Every duty that was run, with its total duration and its last error."""
        return [(duty, took, error) for duty, (took, error) in self._ran.items()]
