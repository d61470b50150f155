"""Runs handlers in the process of the test, with or without an event loop. `inline` and `drain` describe what to do
as steps, decide what follows from an outcome, and share the two functions that take the steps."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from howdah.execution.handler import aexecute, execute
from howdah.outcome import Failed, Outcome
from howdah.protocol.statements import Statement

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from howdah.context import Context
    from howdah.task import Task

T = TypeVar("T")
Steps: TypeAlias = Generator["Statement[Any] | tuple[Task[..., Any], Context]", Any, T]
"""Statements to send and handlers to run, one after the other. Each answer or outcome is sent back."""


def drive(steps: Steps[T], send: Callable[[Statement[Any]], Any] | None = None) -> T:
    """Take the steps from sync code, and return the value of the generator."""
    answer, error = None, None
    while True:
        try:
            step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            value: T = stop.value
            return value
        answer = error = None
        try:
            if not isinstance(step, Statement):
                answer = run(*step)
            elif send is not None:
                answer = send(step)
        except Exception as raised:
            error = raised


async def drive_async(
    steps: Steps[T], send: Callable[[Statement[Any]], Awaitable[Any]] | None = None
) -> T:
    """Take the steps from async code, and return the value of the generator."""
    answer, error = None, None
    while True:
        try:
            step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            value: T = stop.value
            return value
        answer = error = None
        try:
            if not isinstance(step, Statement):
                answer = await arun(*step)
            elif send is not None:
                answer = await send(step)
        except Exception as raised:
            error = raised


def run(task: Task[..., Any], context: Context) -> Outcome:
    """Run a sync or async handler from sync code: in this thread, or in a new thread if this one has a running
    event loop, because in a worker a handler never runs below an event loop of others."""
    copied = contextvars.copy_context()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return copied.run(_run_here, task, context)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copied.run, _run_here, task, context).result()


async def arun(task: Task[..., Any], context: Context) -> Outcome:
    """Run an async handler in this event loop, or a sync handler in a thread."""
    if task.options.run_in == "async":
        return await aexecute(task, context)
    return await asyncio.to_thread(execute, task, context)


def _run_here(task: Task[..., Any], context: Context) -> Outcome:
    if task.options.run_in != "async":
        return execute(task, context)
    # With a loop factory, Runner does not change the current event loop of the thread.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(aexecute(task, context))


def raise_interrupt(outcome: Outcome) -> None:
    """Raise Ctrl-C and the outcomes of pytest, such as `pytest.skip`. A worker treats them as failures."""
    if isinstance(outcome, Failed):
        cause = outcome.cause
        if cause is not None and not isinstance(cause, Exception | SystemExit):
            raise cause
