"""A handler's access to its run: progress, events, cancellation, deadline. It is the same in async, thread and
process tasks; the executor's `Sink` receives the reports.

A context never sends a statement, so a report costs a dictionary entry, not a round trip."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from howdah.database.service_task import running_job
from howdah.encoding import payload
from howdah.errors import HowdahError
from howdah.model import Claim
from howdah.outcome import Aborted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from howdah.outcome import AbortReason

_current = running_job


class Sink(Protocol):
    """Receives the reports of runs. A report names its run, not only its job: the worker may have claimed the
    same job again."""

    def progress(self, run: RunState, percent: int | None, stage: str | None) -> None:
        """Receive the newest progress of a run."""

    def event(self, run: RunState, kind: str, data: str) -> bool:
        """Receive an event. `data` is JSON text. False if it has to be given again: too many wait."""


# One lock for all runs, acquired only to abort a run. It is reentrant: in a task process, the signal handler
# that aborts a run may interrupt the same thread while it aborts that run because of a timeout.
_aborting = threading.RLock()


@dataclass(slots=True, eq=False)
class RunState:
    """Whether a run must stop, and whether its handler has completed the job.

    This is the only copy. The context reads it in the handler's thread; the heartbeat's thread and the
    event loop write it."""

    abort_reason: AbortReason | None = field(default=None, init=False)
    completed_by_handler: bool = field(default=False, init=False)

    def abort(self, reason: AbortReason) -> bool:
        """Request that the handler stops. Only the first reason counts; returns whether this is the first."""
        with _aborting:
            if self.abort_reason is not None:
                return False
            self.abort_reason = reason
            return True

    def complete_by_handler(self) -> None:
        """Record that the handler completes the job in its own transaction."""
        self.completed_by_handler = True


class Context:
    """One run of a job, for its handler."""

    __slots__ = (
        "_deadline", "_percent", "_sink", "_stage", "attempt", "given", "id", "idempotency_key",
        "job_type", "lease_id", "max_attempts", "queue", "request_id", "resources", "run",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id: UUID,
        job_type: str,
        queue: str = "default",
        data: Any = None,
        attempt: int = 1,
        max_attempts: int = 1,
        request_id: str | None = None,
        idempotency_key: str | None = None,
        lease_id: UUID | None = None,
        timeout: float | None = None,
        sink: Sink | None = None,
        resources: Mapping[str, Any] | None = None,
        run: RunState | None = None,
    ) -> None:
        self.id = id
        self.job_type = job_type
        self.queue = queue
        self.given = data
        self.attempt = attempt
        self.max_attempts = max_attempts
        self.request_id = request_id
        self.idempotency_key = idempotency_key
        self.lease_id = lease_id
        self.resources: Mapping[str, Any] = {} if resources is None else resources
        self.run = RunState() if run is None else run
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._sink = sink
        self._percent = 0
        self._stage: str | None = None

    @property
    def data(self) -> Any:
        """The job's data."""
        if (
            type(self.given) is msgspec.Raw
        ):  # decoded on first use: most handlers only use their arguments
            self.given = payload.decode(bytes(self.given).decode())
        return self.given

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: the job was cancelled, its lease was lost, or it timed out."""
        return self._abort_reason() is not None

    @property
    def deadline(self) -> datetime | None:
        """When the run times out, by this machine's clock, or None for no timeout."""
        if self._deadline is None:
            return None
        return datetime.now(UTC) + timedelta(seconds=self._deadline - time.monotonic())

    def check(self) -> None:
        """Raise `Aborted` if the handler should stop. `progress`, `event` and `log` call this first."""
        reason = self._abort_reason()
        if reason is not None:
            raise Aborted(reason)

    def progress(self, percent: float | None = None, stage: str | None = None) -> None:
        """Report the job's progress. Percent never decreases within an attempt.

        Raises `Aborted` if the job was cancelled, its lease was lost, or it timed out."""
        self.check()
        self._percent = max(self._percent, payload.clean_percent(percent) or 0)
        if stage is not None:
            self._stage = payload.clean_text(stage, payload.STAGE_LIMIT)
        if self._sink is not None:
            self._sink.progress(self.run, self._percent, self._stage)

    def event(self, kind: str, data: Any = None) -> None:
        """Append an event to the job's durable stream. Watchers receive it.

        While too many events of a handler are not written yet, a `def` handler waits here. An `async def`
        handler cannot wait here: with ten times as many, it gets `TooManyEvents`."""
        self.check()
        if self._sink is not None:
            text = payload.clean_json({} if data is None else data)
            kind = payload.clean_text(kind, 100) or "event"
            while not self._sink.event(self.run, kind, text):
                self.check()

    def log(self, text: str) -> None:
        """Append a line of text to the job's stream."""
        self.event("log", {"text": text})

    def completion(self) -> Claim:
        """This run's fence, for `queue.complete(ctx.completion(), conn=…)`: your transaction then completes the
        job together with your rows, and the worker does not.

        If the handler returns but that transaction did not commit, the attempt counts as failed."""
        self.check()
        if self._sink is None or self.lease_id is None:
            raise HowdahError(
                "this run has no lease, so it cannot complete a job: the task was called directly."
            )
        self.run.complete_by_handler()
        return Claim(self.id, self.lease_id)

    def _abort_reason(self) -> AbortReason | None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.run.abort("timeout")
        return self.run.abort_reason


def current() -> Context:
    """The context of the job that is running."""
    context: Context | None = _current.get()
    if context is None:
        raise HowdahError("howdah.current() was called outside of a running task.")
    return context
