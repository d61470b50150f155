"""Calls state-change hooks after the commit. Hooks run in their own thread behind a bounded queue, so they
cannot fail or slow a worker."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from howdah.encoding.safe_logger import get_logger

if TYPE_CHECKING:
    from uuid import UUID

    from howdah.protocol.worker_statements import Claimed

logger = get_logger(__name__)

QUEUE_LIMIT = 10_000  # state changes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """A job's new state: "running", "completed", "retrying", "failed", "cancelled", "released" or "lost"."""

    id: UUID
    job_type: str
    queue: str
    state: str
    attempt: int
    error: str | None = None
    request_id: str | None = None


Hook: TypeAlias = Callable[[StateChange], Awaitable[None] | None]


class Hooks:
    """The thread that calls the hooks."""

    def __init__(
        self,
        hooks: Sequence[Hook],
        report: Callable[[StateChange, BaseException], None] | None = None,
    ) -> None:
        """`report` logs what a hook has raised, which may be the same for every job."""
        self._hooks = hooks
        self._report = report or _log_failure
        self._changes: queue.SimpleQueue[StateChange | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self.active = bool(hooks)
        if self.active:
            self._thread = threading.Thread(target=self._run, name="howdah-hooks", daemon=True)
            self._thread.start()

    def notify(self, job: Claimed, state: str, error: str | None = None) -> None:
        """Queue a state change for the hooks. If the queue is full, drop it and log a warning."""
        if self._changes.qsize() >= QUEUE_LIMIT:
            self._dropped += 1
            if self._dropped == 1 or self._dropped % 1000 == 0:
                logger.warning(
                    "state-change hooks are too slow; dropping state changes",
                    extra={"dropped": self._dropped},
                )
            return
        self._changes.put(
            StateChange(
                id=job.id,
                job_type=job.job_type,
                queue=job.queue,
                state=state,
                attempt=job.attempts,
                error=error,
                request_id=job.request_id,
            )
        )

    def stop(self, timeout: float = 5.0) -> None:
        """Wait for the hooks to process the queue, for at most `timeout` seconds."""
        if self._thread is not None:
            self._changes.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (change := self._changes.get()) is not None:
            for hook in self._hooks:
                try:
                    answer = hook(change)
                    if inspect.isawaitable(answer):
                        asyncio.run(_await(answer))
                except BaseException as error:
                    self._report(change, error)


def _log_failure(change: StateChange, error: BaseException) -> None:
    logger.warning(
        "state-change hook failed",
        exc_info=error,
        extra={"job_id": str(change.id), "job_type": change.job_type},
    )


async def _await(answer: Awaitable[None]) -> None:
    await answer
