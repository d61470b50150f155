"""One run of a handler, from its data to an outcome: convert the arguments, go through the middlewares,
call, encode the result, and turn whatever was raised into an `Outcome`. Used by every executor, by durable
runs in the caller's process, and by the testing mode."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import traceback
from typing import TYPE_CHECKING, Any

from howdah.context import _current
from howdah.encoding import payload, validation
from howdah.encoding.arguments import encode_result
from howdah.errors import InvalidJob
from howdah.model import request_id
from howdah.outcome import (
    Aborted,
    Cancel,
    Cancelled,
    Completed,
    CompletedByHandler,
    Fail,
    Failed,
    Lost,
    Outcome,
    Released,
    Snooze,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.context import Context
    from howdah.outcome import AbortReason
    from howdah.task import Task

logger = logging.getLogger(__name__)

TRACEBACK_LIMIT = 16 * 1024

_NOTHING = Completed(None)


def execute(task: Task[..., Any], context: Context) -> Outcome:
    """Run a sync handler here."""
    try:
        args, kwargs = task.arguments.unpack(context.given, context)
        with _entered(context), contextlib.ExitStack() as stack:
            for middleware in task.app.middlewares:
                if not inspect.isasyncgenfunction(middleware):
                    stack.enter_context(contextlib.contextmanager(middleware)(context))
            context.check()
            value = None  # of a run whose exception a middleware keeps to itself
            value = task.function(*args, **kwargs)
        return _succeeded(task, context, value)
    except BaseException as error:
        return judge(task, context, error)


async def aexecute(task: Task[..., Any], context: Context) -> Outcome:
    """Run an async handler in this event loop, within the task's time limit."""
    # Tens of thousands of these a second: no context manager where two lines do.
    here = _current.set(context)
    request = request_id.set(context.request_id)
    try:
        args, kwargs = task.arguments.unpack(context.given, context)
        if task.app.middlewares:
            value = await _surrounded(task, context, args, kwargs)
        elif task.options.timeout is None:
            value = await task.function(*args, **kwargs)
        else:
            value = await _limited(task, context, args, kwargs)
        return _succeeded(task, context, value)
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if context.run.abort_reason is None and current is not None and current.cancelling():
            raise  # not about this job: whoever runs it is being cancelled
        return judge(task, context, error)
    except BaseException as error:
        return judge(task, context, error)
    finally:
        request_id.reset(request)
        _current.reset(here)


async def _surrounded(
    task: Task[..., Any], context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    async with contextlib.AsyncExitStack() as stack:
        for middleware in task.app.middlewares:
            if inspect.isasyncgenfunction(middleware):
                around = contextlib.asynccontextmanager(middleware)(context)
                await stack.enter_async_context(around)
            else:
                stack.enter_context(contextlib.contextmanager(middleware)(context))
        return await _limited(task, context, args, kwargs)
    return None  # a middleware has kept the exception to itself


async def _limited(
    task: Task[..., Any], context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    limit = task.options.timeout
    if limit is None:
        return await task.function(*args, **kwargs)
    try:
        async with asyncio.timeout(limit) as scope:
            return await task.function(*args, **kwargs)
    except TimeoutError:
        if scope.expired():
            raise aborted(context, "timeout") from None
        raise


@contextlib.contextmanager
def _entered(context: Context) -> Iterator[None]:
    here = _current.set(context)
    request = request_id.set(context.request_id)
    try:
        yield
    finally:
        request_id.reset(request)
        _current.reset(here)


def _succeeded(task: Task[..., Any], context: Context, value: Any) -> Outcome:
    if context.run.completed_by_handler:
        return CompletedByHandler()
    if value is None:
        return _NOTHING
    try:
        return Completed(encode_result(value, task.options.result_limit))
    except InvalidJob as error:
        # The work is done; doing it again would not make the value storable.
        what = f"{task.name} returned what cannot be stored as its result: {error.message}"
        return Failed(payload.clean_text(what, payload.ERROR_LIMIT), None, None, error)


def aborted(context: Context, reason: AbortReason) -> Aborted:
    """Abort a run, and give what to raise: if it was aborted before, the first reason counts."""
    context.run.abort(reason)
    return Aborted(context.run.abort_reason or reason)


def judge(task: Task[..., Any], context: Context, error: BaseException) -> Outcome:
    """The outcome that an exception stands for. Never raises, whatever the exception does."""
    try:
        return _judge(task, context, error)
    except BaseException as second:
        return Failed(payload.format_error(second), _trace(error), None, error)


def _judge(task: Task[..., Any], context: Context, error: BaseException) -> Outcome:
    reason = context.run.abort_reason
    if isinstance(error, asyncio.CancelledError) and reason is not None:
        error = Aborted(reason)
    match error:
        case Aborted(why="lost"):
            return Lost()
        case Aborted(why="shutdown"):
            return Released(0.0, "shutdown")
        case Aborted(why="cancelled"):
            return Cancelled("cancelled while it ran")
        case Aborted(why="timeout"):
            limit = task.options.timeout or 0
            return _failed(task, context, TimeoutError(f"timed out after {limit:g} s"))
        case Snooze():
            return _snoozed(error)
        case Cancel():
            return Cancelled(payload.clean_text(error.reason, payload.ERROR_LIMIT))
        case Fail() | InvalidJob():
            return Failed(payload.format_error(error), _trace(error), None, error)
        case _ if reason == "shutdown":
            return Released(0.0, "shutdown")  # it was interrupted, whatever it made of that
        case _:
            return _failed(task, context, error)


def _snoozed(error: Snooze) -> Outcome:
    try:
        return Released(validation.to_timedelta(error.delay, "delay").total_seconds(), "snoozed")
    except Exception as wrong:
        return Failed(payload.format_error(wrong), _trace(error), None)


def _failed(task: Task[..., Any], context: Context, error: BaseException) -> Failed:
    try:
        pause = task.options.retry.seconds(context.attempt, error)
        if pause is not None:
            pause = validation.to_timedelta(pause, "the pause").total_seconds()
    except BaseException:
        logger.warning(
            "a retry policy failed; the job is tried again in 10 s",
            exc_info=True,
            extra={"job_id": str(context.id), "job_type": task.name},
        )
        pause = 10.0
    return Failed(payload.format_error(error), _trace(error), pause, error)


def _trace(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as second:
        text = f"(the traceback could not be read: {type(second).__name__})"
    return payload.clean_text(text[-TRACEBACK_LIMIT:], TRACEBACK_LIMIT)
