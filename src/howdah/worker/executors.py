"""Runs handlers in threads. The other executors are `execution.handler.aexecute`, in the event loop, and
`processes.ProcessExecutor`. Slots call executors; the completer writes their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from howdah.execution.handler import aborted, execute, outcome_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from howdah.context import Context
    from howdah.outcome import Outcome
    from howdah.task import Task


Executor: TypeAlias = "Callable[[Task[..., Any], Context], Awaitable[Outcome]]"
"""Runs a handler to an outcome. Raises only if the worker itself is cancelled. The executor of `async def` is
`aexecute`: it runs in the slot's asyncio task, so cancelling the slot cancels the handler."""


class ThreadExecutor:
    """Runs `def` handlers in daemon threads, one for each concurrent run.

    A thread cannot be stopped from outside: its handler stops at its next call of the context. If a handler
    is still running `abandon_seconds` after its timeout, its thread is abandoned: the job fails, and late
    reports are rejected."""

    def __init__(self, abandon_seconds: float) -> None:
        self._abandon_seconds = abandon_seconds
        self.busy = 0
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._ended: deque[Callable[[], None]] = deque()
        self._delivery_scheduled = False

    async def execute(self, task: Task[..., Any], context: Context) -> Outcome:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        inbox = self._idle.pop() if self._idle else self._spawn()

        def deliver(outcome: Outcome) -> None:
            self.busy -= 1
            self._idle.append(inbox)
            if not future.done():
                future.set_result(outcome)

        def work() -> None:
            outcome = execute(task, context)
            self._ended.append(partial(deliver, outcome))
            if not self._delivery_scheduled:
                self._delivery_scheduled = True
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(self._deliver)

        self.busy += 1
        inbox.put(work)
        timeout = task.options.timeout
        try:
            if timeout is None:
                return await future
            async with asyncio.timeout(timeout + self._abandon_seconds):
                return await future
        except TimeoutError:
            return outcome_of(task, context, aborted(context, "timeout"))
        except asyncio.CancelledError as error:
            if context.run.abort_reason is None:
                raise
            return outcome_of(task, context, error)

    def _deliver(self) -> None:
        """Deliver the outcomes of all runs that have ended: threads that end together wake the loop once."""
        self._delivery_scheduled = (
            False  # first: a run that ends from here on schedules a new delivery
        )
        while self._ended:
            self._ended.popleft()()

    def _spawn(self) -> queue.SimpleQueue[Callable[[], None]]:
        inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(inbox,), name="howdah-task", daemon=True).start()
        return inbox


def _work(inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        # The next handler must not see the context variables that this one has set.
        contextvars.Context().run(inbox.get())
