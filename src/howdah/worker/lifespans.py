"""Enters and exits the lifespans of an app. Their code belongs to the program: it may raise, wait forever or block the
event loop, and the worker still stops."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from typing import TYPE_CHECKING, Any

from howdah.database.service_task import ServiceTask
from howdah.encoding.safe_logger import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

logger = get_logger(__name__)

EXIT_SECONDS = 10.0  # for each lifespan
CANCEL_SECONDS = 1.0  # until an exit that was cancelled is given up


class Lifespans:
    """The lifespans of one worker, entered in its task and exited in the same one."""

    def __init__(self, functions: Sequence[Callable[[], Any]], stopping: asyncio.Event) -> None:
        self._functions = functions
        self._stopping = stopping
        self.resources: dict[str, Any] = {}
        self.late: list[str] = []
        """The names of those that did not exit in time."""
        self.on_stuck: Callable[[], object] | None = None
        """Called in a thread if one neither exits nor ends when it is cancelled: it may block the event loop."""

    async def enter(self, stack: contextlib.AsyncExitStack) -> bool:
        """Enter all. False if the worker was asked to stop first."""
        for function in self._functions:
            if inspect.isasyncgenfunction(function):
                manager = contextlib.asynccontextmanager(function)()
            else:
                manager = _in_loop(contextlib.contextmanager(function)())
            name = getattr(function, "__qualname__", repr(function))
            scope = asyncio.timeout(None)
            try:
                async with scope, self._expiring_at_stop(scope):
                    given = await manager.__aenter__()
            except Exception as error:
                if scope.expired():
                    logger.info("stopped while a lifespan started", extra={"lifespan": name})
                    return False
                error.add_note(f"in the lifespan {name}, which could not start")
                raise
            stack.push_async_exit(self._exit(name, manager))
            self.resources.update(given or {})
        return True

    @contextlib.asynccontextmanager
    async def _expiring_at_stop(self, scope: asyncio.Timeout) -> AsyncIterator[None]:
        async def watch() -> None:
            await self._stopping.wait()
            scope.reschedule(asyncio.get_running_loop().time())

        watching = ServiceTask(watch(), name="howdah-lifespan")
        try:
            yield
        finally:
            watching.end()

    def _exit(self, name: str, manager: Any) -> Any:
        async def leave(*error: Any) -> Any:
            timer = threading.Timer(EXIT_SECONDS + CANCEL_SECONDS, self._give_up, (name,))
            timer.daemon = True
            timer.start()
            scope = asyncio.timeout(EXIT_SECONDS)
            try:
                async with scope:
                    return await manager.__aexit__(*error)
            except TimeoutError:
                if not scope.expired():
                    raise
                self._report(name)
                return False
            finally:
                timer.cancel()

        return leave

    def _report(self, name: str) -> None:
        self.late.append(name)
        logger.error("lifespan did not exit in time", extra={"lifespan": name})

    def _give_up(self, name: str) -> None:
        self._report(name)
        if self.on_stuck is not None:
            self.on_stuck()


@contextlib.asynccontextmanager
async def _in_loop(manager: contextlib.AbstractContextManager[Any]) -> AsyncIterator[Any]:
    with manager as given:
        yield given
