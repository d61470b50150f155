"""The three ways to run a handler: in the event loop, in a thread, in a process that can be killed. Each
takes a run to an `Outcome`; slots decide when, and the completer writes what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from howdah.execution.handler import aborted, execute, judge

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from howdah.context import Context
    from howdah.outcome import Outcome
    from howdah.task import Task


Executor: TypeAlias = "Callable[[Task[..., Any], Context], Awaitable[Outcome]]"
"""Runs a handler and says how it ended. Never raises but for the worker's own cancellation. That of `async
def` is `aexecute`: in the slot's own asyncio task, so that cancelling the slot cancels the handler."""


class ThreadExecutor:
    """`def`: in daemon threads, as many as there are runs at once. A thread cannot be stopped from outside:
    its handler is told at its next call of the context. One that stays past its time limit for another
    `patience` seconds is given up; its job fails, and its late reports are refused."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.busy = 0
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._ended: deque[Callable[[], None]] = deque()
        self._called = False

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
            if not self._called:
                self._called = True
                # An error says that the loop was closed: nobody waits any more.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._deliver)

        self.busy += 1
        inbox.put(work)
        limit = task.options.timeout
        try:
            if limit is None:
                return await future
            async with asyncio.timeout(limit + self._patience):
                return await future
        except TimeoutError:
            return judge(task, context, aborted(context, "timeout"))
        except asyncio.CancelledError as error:
            if context.run.abort_reason is None:
                raise
            return judge(task, context, error)

    def _deliver(self) -> None:
        """All that has ended: threads that end at the same time wake the loop once."""
        self._called = False  # first: what ends from here on calls again
        while self._ended:
            self._ended.popleft()()

    def _spawn(self) -> queue.SimpleQueue[Callable[[], None]]:
        inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), name="howdah-task", daemon=True).start()
        return inbox


def _serve(inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        # What one handler puts into context variables is not for the next to find.
        contextvars.Context().run(inbox.get())
