"""State-change hooks: functions that are told, after the commit, what became of jobs. They run in a thread
of their own behind a bounded queue, so they can neither break nor slow a worker."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from uuid import UUID

logger = logging.getLogger(__name__)

WAITING_LIMIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """What happened: "running", "completed", "retrying", "failed", "cancelled", "released" or "lost"."""

    id: UUID
    job_type: str
    queue: str
    state: str
    attempt: int
    error: str | None = None
    request_id: str | None = None


Hook: TypeAlias = Callable[[StateChange], Awaitable[None] | None]


class Hooks:
    """The thread that calls them."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks
        self._waiting: queue.SimpleQueue[StateChange | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self.active = bool(hooks)
        if self.active:
            self._thread = threading.Thread(target=self._run, name="howdah-hooks", daemon=True)
            self._thread.start()

    def tell(self, change: StateChange) -> None:
        """Pass a change on; drop it, with a warning, when the hooks are too far behind."""
        if self._waiting.qsize() >= WAITING_LIMIT:
            self._dropped += 1
            if self._dropped == 1 or self._dropped % 1000 == 0:
                logger.warning(
                    "state-change hooks are too slow; changes are dropped",
                    extra={"dropped": self._dropped},
                )
            return
        self._waiting.put(change)

    def stop(self, timeout: float = 5.0) -> None:
        """Wait for what is queued, up to a limit."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (change := self._waiting.get()) is not None:
            for hook in self._hooks:
                try:
                    answer = hook(change)
                    if inspect.isawaitable(answer):
                        asyncio.run(_await(answer))
                except BaseException:
                    logger.warning(
                        "a state-change hook failed",
                        exc_info=True,
                        extra={"job_id": str(change.id), "job_type": change.job_type},
                    )


async def _await(answer: Awaitable[None]) -> None:
    await answer
