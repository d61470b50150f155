"""Sends the single enqueues of one event loop together: while a statement is under way, what is asked
for meanwhile piles up and goes with the next. No timer, so a lone enqueue is sent at once.

Many callers are served by two statements at a time: the server stores one half of their jobs while the
other half hears of its own and makes the next. A batch that the database refuses is split until the bad
job stands alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias

from howdah.errors import InvalidJob, sqlstate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from howdah.model import Handle

Send: TypeAlias = "Callable[[list[dict[str, Any]]], Awaitable[list[Handle]]]"
Waiting: TypeAlias = "list[tuple[dict[str, Any], asyncio.Future[Handle]]]"

FEW = 8  # jobs: a statement of fewer costs the server more than it saves the callers
# Cardinality, data, integrity, check option, program limit, a user's own trigger.
_DATA_ERRORS = frozenset({"21", "22", "23", "44", "54", "P0"})


def _is_fault_of_a_job(error: Exception) -> bool:
    return isinstance(error, InvalidJob) or sqlstate(error)[:2] in _DATA_ERRORS


class EnqueueBatcher:
    """Collects jobs of concurrent callers and hands each its own handle or error."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._senders: _Senders | None = None

    async def enqueue(self, job: dict[str, Any]) -> Handle:
        """Send one encoded job with its neighbours."""
        loop = asyncio.get_running_loop()
        if self._senders is None or self._senders.loop is not loop:
            self._senders = _Senders(self._send, loop)
        return await self._senders.enqueue(job)


class _Senders:
    """The one or two statements that are under way in an event loop, and what waits for the next."""

    def __init__(self, send: Send, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._send = send
        self._waiting: Waiting = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._enough = FEW  # jobs that are worth a second statement
        self._ordered = 0  # jobs that must not overtake each other

    async def enqueue(self, job: dict[str, Any]) -> Handle:
        future: asyncio.Future[Handle] = self.loop.create_future()
        ordered = "ordering_key" in job
        self._ordered += ordered
        self._waiting.append((job, future))
        if not self._tasks or (len(self._waiting) >= self._enough and self._is_second_allowed()):
            self._start()
        try:
            return await future
        finally:
            self._ordered -= ordered

    def _is_second_allowed(self) -> bool:
        return len(self._tasks) == 1 and not self._ordered

    def _start(self) -> None:
        task = self.loop.create_task(self._send_waiting(), name="howdah-enqueue-batcher")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            # Only where the loop ends, or somebody cancels every task there is.
            while self._waiting:
                self._waiting.pop()[1].cancel()
        elif self._waiting and not self._tasks:
            self._start()

    async def _send_waiting(self) -> None:
        while self._waiting and not (self._ordered and len(self._tasks) == 2):
            batch = self._take()
            try:
                await self._send_batch(batch)
            finally:
                for _, future in batch:
                    future.cancel()  # those that were not answered, as when the loop ends

    def _take(self) -> Waiting:
        """What to send now: all that waits, or half of it if there is much."""
        count = len(self._waiting)
        if count >= 2 * FEW and self._is_second_allowed():
            count = (count + 1) // 2
            self._start()
        batch = [entry for entry in self._waiting[:count] if not entry[1].cancelled()]
        del self._waiting[:count]
        self._enough = max(FEW, count // 2)
        return batch

    async def _send_batch(self, batch: Waiting) -> None:
        if not batch:
            return
        try:
            handles = await self._send([job for job, _ in batch])
        except Exception as error:
            if len(batch) > 1 and _is_fault_of_a_job(error):
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
