"""Batches the single enqueues of one event loop: jobs that arrive while a statement is in flight are sent
together with the next. There is no timer, so a lone enqueue is sent at once.

Many callers are served by two statements at a time: the server stores the jobs of one half while the callers
of the other half receive their answers and enqueue again. A batch that the database refuses is split until
the invalid job is alone. (Decision 0021.)"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias

from howdah.errors import InvalidJob, sqlstate
from howdah.protocol.per_loop import PerLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from howdah.model import Handle

Send: TypeAlias = "Callable[[list[dict[str, Any]]], Awaitable[list[Handle]]]"
StartTask: TypeAlias = "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]"
Waiting: TypeAlias = "list[tuple[dict[str, Any], asyncio.Future[Handle]]]"

MIN_BATCH_JOBS = (
    8  # a second statement with fewer jobs costs the server more than it saves the callers
)
# Cardinality, data, integrity, check option, program limit, an error of the user's trigger.
_DATA_ERRORS = frozenset({"21", "22", "23", "44", "54", "P0"})


def _is_caused_by_a_job(error: Exception) -> bool:
    return isinstance(error, InvalidJob) or sqlstate(error)[:2] in _DATA_ERRORS


class EnqueueBatcher:
    """Collects the jobs of concurrent callers, and gives each caller its handle or error."""

    def __init__(self, send: Send, start_task: StartTask) -> None:
        self._send = send
        self._start_task = start_task
        self._senders = PerLoop(self._make_senders)

    def _make_senders(self) -> _Senders:
        return _Senders(self._send, self._start_task, asyncio.get_running_loop())

    async def enqueue(self, job: dict[str, Any]) -> Handle:
        """Send one encoded job, in a batch with those of other callers."""
        return await self._senders.get().enqueue(job)


class _Senders:
    """The one or two statements in flight in an event loop, and the jobs that wait for the next."""

    def __init__(self, send: Send, start_task: StartTask, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._send = send
        self._start_task = start_task
        self._waiting: Waiting = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._second_at = MIN_BATCH_JOBS  # waiting jobs that justify a second statement
        self._ordered = 0  # jobs with an ordering key, which must not overtake each other

    async def enqueue(self, job: dict[str, Any]) -> Handle:
        future: asyncio.Future[Handle] = self.loop.create_future()
        ordered = "ordering_key" in job
        self._ordered += ordered
        self._waiting.append((job, future))
        if not self._tasks or (len(self._waiting) >= self._second_at and self._is_second_allowed()):
            self._start()
        try:
            return await future
        finally:
            self._ordered -= ordered

    def _is_second_allowed(self) -> bool:
        return len(self._tasks) == 1 and not self._ordered

    def _start(self) -> None:
        task = self._start_task(self._send_waiting())
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            # This happens if the loop ends.
            while self._waiting:
                self._waiting.pop()[1].cancel()
        elif self._waiting and not self._tasks:
            self._start()

    async def _send_waiting(self) -> None:
        while self._waiting and not (self._ordered and len(self._tasks) == 2):
            batch = self._take_batch()
            try:
                await self._send_batch(batch)
            finally:
                for _, future in batch:
                    future.cancel()  # without effect on those that have their answer

    def _take_batch(self) -> Waiting:
        """The jobs to send now: all that wait, or half of them if they are many."""
        count = len(self._waiting)
        if count >= 2 * MIN_BATCH_JOBS and self._is_second_allowed():
            count = (count + 1) // 2
            self._start()
        batch = [entry for entry in self._waiting[:count] if not entry[1].cancelled()]
        del self._waiting[:count]
        self._second_at = max(MIN_BATCH_JOBS, count // 2)
        return batch

    async def _send_batch(self, batch: Waiting) -> None:
        if not batch:
            return
        try:
            handles = await self._send([job for job, _ in batch])
        except Exception as error:
            if len(batch) > 1 and _is_caused_by_a_job(error):
                middle = len(batch) // 2
                await self._send_batch(batch[:middle])
                await self._send_batch(batch[middle:])
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), handle in zip(batch, handles, strict=True):
            if not future.done():
                future.set_result(handle)
