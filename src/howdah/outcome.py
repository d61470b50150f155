"""How one run of a job ended. Executors make outcomes; `protocol/acknowledge.py` turns them into statements.

A handler raises `Snooze`, `Cancel` or `Fail` to choose its outcome. A context raises `Aborted` inside a handler
that must stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from howdah.model import Seconds


@dataclass(frozen=True, slots=True)
class Completed:
    """The handler returned; the result is JSON text, or None."""

    result: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler failed. `retry_in` is in seconds, or None for no retry. `cause` is the exception if it was
    raised in this process."""

    error: str
    traceback: str | None
    retry_in: float | None
    cause: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Released:
    """The job is given back without using an attempt: snoozed, or interrupted by a shutdown. `delay` is in
    seconds."""

    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The job was cancelled, by an operator or by its handler."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease was lost: another worker may have claimed the job. Nothing is written."""


@dataclass(frozen=True, slots=True)
class CompletedByHandler:
    """The handler completed the job in its own transaction. Nothing is left to write."""


Acknowledgement: TypeAlias = Completed | Failed | Released | Cancelled | CompletedByHandler
"""An outcome that is written to the database under the run's fence."""

Outcome: TypeAlias = Acknowledgement | Lost

NOT_COMMITTED = (
    "the handler returned, but the transaction that should have completed the job did not commit"
)


AbortReason: TypeAlias = Literal["cancelled", "lost", "timeout", "shutdown"]
"""Why a handler must stop."""


class Snooze(Exception):
    """Raise it to run the job again after `delay` without using an attempt."""

    def __init__(self, delay: Seconds) -> None:
        self.delay = delay
        super().__init__(f"snoozed for {delay}")


class Cancel(Exception):
    """Raise it to end the job with the status cancelled."""

    def __init__(self, reason: str = "cancelled by its handler") -> None:
        self.reason = reason
        super().__init__(reason)


class Fail(Exception):
    """Raise it to end the job with the status failed, even if attempts are left."""


class Aborted(BaseException):
    """Raised inside a handler that must stop. It is not an `Exception`, so `except Exception` in a loop does
    not catch it. `why` is "cancelled", "lost", "timeout" or "shutdown"."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)
