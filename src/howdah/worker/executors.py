"""Runs handlers in threads. The other executors are `execution.handler.aexecute`, in the event loop, and
`processes.ProcessExecutor`. Slots call executors; the completer writes their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from howdah.encoding.safe_logger import get_logger
from howdah.execution import forks
from howdah.execution.handler import aborted, execute, outcome_of
from howdah.execution.run import Run
from howdah.outcome import Released

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from howdah.context import Context
    from howdah.outcome import Outcome
    from howdah.task import Task


Executor: TypeAlias = "Callable[[Task[..., Any], Context], Awaitable[Outcome]]"
"""Runs a handler to an outcome. Raises only if the worker itself is cancelled. The executor of `async def` is
`aexecute`: it runs in the slot's asyncio task, so cancelling the slot cancels the handler."""


logger = get_logger(__name__)

IDLE_THREAD_SECONDS = 30.0
NO_THREAD_RETRY_SECONDS = 1.0


class ThreadExecutor:
    """Runs `def` handlers in daemon threads, one for each concurrent run. A thread without work for
    `IDLE_THREAD_SECONDS` ends.

    A thread cannot be stopped from outside: its handler stops at its next call of the context. If a handler
    is still running `abandon_seconds` after its timeout, its thread is abandoned: the job fails, and late
    reports are rejected."""

    def __init__(self, abandon_seconds: float) -> None:
        self._abandon_seconds = abandon_seconds
        self.busy = 0
        self._idle: deque[tuple[float, _Thread]] = deque()  # oldest first
        self._reaper: asyncio.TimerHandle | None = None
        self._ended: deque[_Thread] = deque()
        self._delivery_scheduled = False

    async def execute(self, task: Task[..., Any], context: Context) -> Outcome:
        """Run a handler in a thread."""
        work = _Work(task, context, asyncio.get_running_loop().create_future())
        self.busy += 1
        self._start(work)
        timeout = task.options.timeout
        try:
            if timeout is None:
                return await work.future
            async with asyncio.timeout(timeout + self._abandon_seconds):
                return await work.future
        except TimeoutError:
            return outcome_of(task, context, aborted(context, "timeout"))
        except asyncio.CancelledError as error:
            if context.run.abort_reason is None:
                raise
            return outcome_of(task, context, error)

    def _start(self, work: _Work) -> None:
        try:
            thread = self._idle.pop()[1] if self._idle else self._spawn(work.future.get_loop())
        except RuntimeError:  # handlers have started as many threads as the system allows
            run = work.context.run
            assert isinstance(run, Run)  # noqa: S101 - the slots make it
            run.started = None
            self._end(work, Released(NO_THREAD_RETRY_SECONDS))
            return
        thread.work = work
        thread.inbox.put(work.run)

    def _end(self, work: _Work, outcome: Outcome) -> None:
        self.busy -= 1
        if not work.future.done():
            work.future.set_result(outcome)

    def _deliver(self) -> None:
        """Deliver the outcomes of all runs that have ended: threads that end together wake the loop once."""
        self._delivery_scheduled = (
            False  # first: a run that ends from here on schedules a new delivery
        )
        while self._ended:
            thread = self._ended.popleft()
            work, thread.work = thread.work, None
            if work is not None and work.outcome is not None:
                self._put_aside(thread)
                self._end(work, work.outcome)

    def _put_aside(self, thread: _Thread) -> None:
        self._idle.append((time.monotonic(), thread))
        if self._reaper is None:
            loop = asyncio.get_running_loop()
            self._reaper = loop.call_later(IDLE_THREAD_SECONDS, self._reap)

    def _reap(self) -> None:
        """End the threads that were idle for long. The newest are used first, so the oldest stay idle."""
        self._reaper = None
        now = time.monotonic()
        while self._idle and now - self._idle[0][0] >= IDLE_THREAD_SECONDS:
            self._idle.popleft()[1].inbox.put(None)
        if self._idle:
            wait = self._idle[0][0] + IDLE_THREAD_SECONDS - now
            self._reaper = asyncio.get_running_loop().call_later(max(wait, 0.01), self._reap)

    def _on_killed(self, thread: _Thread, error: BaseException) -> None:
        """An exception from outside has ended a thread, perhaps with a job that it was given and has not started."""
        logger.warning("a thread of handlers was killed", extra={"error": type(error).__name__})
        self._deliver()  # the thread may have ended before it could schedule this
        self._idle = deque(each for each in self._idle if each[1] is not thread)
        work, thread.work = thread.work, None
        if work is None:
            return
        if not work.is_entered:
            self._start(work)
        else:
            self._end(work, work.outcome or outcome_of(work.task, work.context, error))

    # ── the threads ───────────────────────────────────────────────────────────────────────────────

    def _spawn(self, loop: asyncio.AbstractEventLoop) -> _Thread:
        thread = _Thread()
        threading.Thread(
            target=self._serve, args=(thread, loop), name="howdah-task", daemon=True
        ).start()
        return thread

    def _serve(self, thread: _Thread, loop: asyncio.AbstractEventLoop) -> None:
        # Libraries that limit the time of a call raise an exception in its thread, and may be late: it can be
        # raised anywhere here.
        try:
            while (run := thread.inbox.get()) is not None:
                # The next handler must not see the context variables that this one has set.
                contextvars.Context().run(run)
                del run  # it refers to the job's context
                self._ended.append(thread)
                if not self._delivery_scheduled:
                    self._delivery_scheduled = True
                    with contextlib.suppress(RuntimeError):  # the loop was closed
                        loop.call_soon_threadsafe(self._deliver)
        except BaseException as error:
            forks.leave_if_forked()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_killed, thread, error)


class _Thread:
    """A thread, and the work that it was given. Only the event loop sets `work`: what a thread takes from its
    inbox is lost if an exception is raised in it at that moment."""

    __slots__ = ("inbox", "work")

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.work: _Work | None = None


@dataclass(slots=True, eq=False)
class _Work:
    """One run of a handler. It can be given to another thread until it is entered."""

    task: Task[..., Any]
    context: Context
    future: asyncio.Future[Outcome]
    is_entered: bool = False
    outcome: Outcome | None = None

    def run(self) -> None:
        """Called in the thread."""
        self.is_entered = True
        self.outcome = execute(self.task, self.context)
        forks.leave_if_forked()
