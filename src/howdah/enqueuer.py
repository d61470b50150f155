"""Sends the single enqueues of one event loop together: while a statement is under way, what is asked
for meanwhile piles up and goes with the next. No timer, so a lone enqueue is sent at once.

A batch that the database refuses is split until the bad job stands alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias

from howdah.drivers import sqlstate
from howdah.errors import InvalidJob

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from howdah.model import Handle

Send: TypeAlias = "Callable[[list[dict[str, Any]]], Awaitable[list[Handle]]]"
Waiting: TypeAlias = "list[tuple[dict[str, Any], asyncio.Future[Handle]]]"

# Cardinality, data, integrity, check option, program limit, a user's own trigger.
_DATA_ERRORS = frozenset({"21", "22", "23", "44", "54", "P0"})


def _is_fault_of_a_job(error: Exception) -> bool:
    return isinstance(error, InvalidJob) or sqlstate(error)[:2] in _DATA_ERRORS


class Enqueuer:
    """Collects jobs of concurrent callers and hands each its own handle or error."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: Waiting = []
        self._sender: asyncio.Task[None] | None = None

    async def enqueue(self, job: dict[str, Any]) -> Handle:
        """Send one encoded job with its neighbours."""
        loop = asyncio.get_running_loop()
        if self._sender is None or self._sender.done() or self._sender.get_loop() is not loop:
            self._waiting = []
            self._sender = loop.create_task(
                self._send_waiting(self._waiting), name="howdah-enqueuer"
            )
        future: asyncio.Future[Handle] = loop.create_future()
        self._waiting.append((job, future))
        return await future

    async def _send_waiting(self, waiting: Waiting) -> None:
        batch: Waiting = []
        try:
            while waiting:
                batch = [entry for entry in waiting if not entry[1].cancelled()]
                waiting.clear()
                await self._send_batch(batch)
        finally:
            # Only where the loop ends, or somebody cancels every task there is.
            for _, future in (*batch, *waiting):
                future.cancel()

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
