"""Runs the event loop of a worker to its end, and waits in it, although handlers run in the same loop."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

from howdah.database.service_task import ServiceTask
from howdah.encoding.safe_logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

logger = get_logger(__name__)

TICK_SECONDS = 0.5


def run_to_end(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """`loop.run_until_complete`, which a handler can end: with `loop.stop()`, or with `SystemExit` or
    `KeyboardInterrupt` in a task or callback of its own. The loop continues, and the log says so."""

    async def start() -> ServiceTask:
        return ServiceTask(work, name="howdah-main")

    task = loop.run_until_complete(start())
    while not task.done():
        try:
            loop.run_until_complete(task)
        except BaseException as error:  # also what logging raised about a callback that failed
            if task.done() or loop.is_closed():
                raise
            logger.error(
                "a handler stopped the event loop; continuing", extra={"error": repr(error)}
            )
    task.result()


class LoopClock:
    """Notes the time in the event loop, so that other threads know for how long a handler has blocked it."""

    def __init__(self) -> None:
        self._ticked_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to note the time."""
        self._ticked_at = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self.start)

    def stop(self) -> None:
        """The loop no longer counts as blocked."""
        self._ticked_at = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def blocked_seconds(self) -> float:
        """For how long the loop has been blocked; 0 if it runs. For any thread."""
        return max(0.0, time.monotonic() - self._ticked_at - TICK_SECONDS)


async def wait_for_first(*works: Awaitable[object]) -> None:
    """Wait for the first of these to end, and cancel the others."""
    waits = [work if isinstance(work, asyncio.Future) else _wait_task(work) for work in works]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            if isinstance(wait, ServiceTask):
                wait.end()
            else:
                wait.cancel()


def _wait_task(work: Awaitable[object]) -> ServiceTask:
    async def wait() -> None:
        await work

    return ServiceTask(wait(), name="howdah-wait")
