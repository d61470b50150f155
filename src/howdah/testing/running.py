"""One run of a handler in the process that tests it, whether that has an event loop or not. What is done
with the outcome is up to the caller."""

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
    """Run a handler of any kind from sync code: in this thread, or in another one where this has a
    running event loop, as no handler finds one that it did not start."""
    copied = contextvars.copy_context()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return copied.run(_run_here, task, context)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copied.run, _run_here, task, context).result()


async def arun(task: Task[..., Any], context: Context) -> Outcome:
    """Run a handler of any kind from async code: in this event loop, or in a thread."""
    if task.options.run_in == "async":
        return await aexecute(task, context)
    return await asyncio.to_thread(execute, task, context)


def _run_here(task: Task[..., Any], context: Context) -> Outcome:
    if task.options.run_in != "async":
        return execute(task, context)
    # With a factory of its own it leaves the thread's current event loop as it was.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(aexecute(task, context))


def pass_on_interrupt(outcome: Outcome) -> None:
    """Raise what a worker counts as a failure and a test must not: Ctrl-C, and pytest's own outcomes."""
    if isinstance(outcome, Failed):
        cause = outcome.cause
        if cause is not None and not isinstance(cause, Exception | SystemExit):
            raise cause
