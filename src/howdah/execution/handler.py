"""Runs a handler to an `Outcome`: converts the arguments, enters the middlewares, calls the handler, and encodes
the result or the exception. Every executor uses it, and so do `task.run` and `howdah.testing`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from typing import TYPE_CHECKING, Any

from howdah.context import _current
from howdah.encoding import payload, validation
from howdah.encoding.arguments import encode_result
from howdah.encoding.safe_logger import get_logger
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

logger = get_logger(__name__)

TRACEBACK_CHARACTERS = 16 * 1024
POLICY_FAILED_RETRY_SECONDS = 10.0
CANCELLED_BY_ITSELF = "raised by the handler or a library; the job was not cancelled"

_COMPLETED_WITHOUT_RESULT = Completed(None)


def execute(task: Task[..., Any], context: Context) -> Outcome:
    """Run a sync handler in this thread."""
    try:
        args, kwargs = task.arguments.unpack(context.given, context)
        with _entered(context), contextlib.ExitStack() as stack:
            for middleware in task.app.middlewares:
                if not inspect.isasyncgenfunction(middleware):
                    stack.enter_context(contextlib.contextmanager(middleware)(context))
            context.check()
            value = None  # the result if a middleware suppresses the handler's exception
            value = task.function(*args, **kwargs)
        return _completed(task, context, value)
    except BaseException as error:
        return outcome_of(task, context, error)


async def aexecute(task: Task[..., Any], context: Context) -> Outcome:
    """Run an async handler in this event loop, within the task's timeout."""
    # Called tens of thousands of times a second: two lines are cheaper than a context manager.
    current_context = _current.set(context)
    request = request_id.set(context.request_id)
    try:
        args, kwargs = task.arguments.unpack(context.given, context)
        if task.app.middlewares:
            value = await _call_in_middlewares(task, context, args, kwargs)
        elif task.options.timeout is None:
            value = await task.function(*args, **kwargs)
        else:
            value = await _call_with_timeout(task, context, args, kwargs)
        return _completed(task, context, value)
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if context.run.abort_reason is None and current is not None and current.cancelling():
            raise  # the caller's asyncio task is being cancelled, not this job
        return outcome_of(task, context, error)
    except BaseException as error:
        return outcome_of(task, context, error)
    finally:
        request_id.reset(request)
        _current.reset(current_context)


async def _call_in_middlewares(
    task: Task[..., Any], context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    async with contextlib.AsyncExitStack() as stack:
        for middleware in task.app.middlewares:
            if inspect.isasyncgenfunction(middleware):
                entered = contextlib.asynccontextmanager(middleware)(context)
                await stack.enter_async_context(entered)
            else:
                stack.enter_context(contextlib.contextmanager(middleware)(context))
        return await _call_with_timeout(task, context, args, kwargs)
    return None  # a middleware suppressed the handler's exception


async def _call_with_timeout(
    task: Task[..., Any], context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    timeout = task.options.timeout
    if timeout is None:
        return await task.function(*args, **kwargs)
    try:
        async with asyncio.timeout(timeout) as scope:
            return await task.function(*args, **kwargs)
    except TimeoutError:
        if scope.expired():
            raise aborted(context, "timeout") from None
        raise


@contextlib.contextmanager
def _entered(context: Context) -> Iterator[None]:
    current_context = _current.set(context)
    request = request_id.set(context.request_id)
    try:
        yield
    finally:
        request_id.reset(request)
        _current.reset(current_context)


def _completed(task: Task[..., Any], context: Context, value: Any) -> Outcome:
    if context.run.completed_by_handler:
        return CompletedByHandler()
    if value is None:
        return _COMPLETED_WITHOUT_RESULT
    try:
        return Completed(encode_result(value, task.options.result_limit))
    except InvalidJob as error:
        # No retry: the work is done, and the value of a second run could not be stored either.
        text = f"{task.name} returned a value that cannot be stored as its result: {error.message}"
        return Failed(payload.clean_text(text, payload.ERROR_LIMIT), None, None, error)


def aborted(context: Context, reason: AbortReason) -> Aborted:
    """Abort a run, and return the exception to raise. If it was aborted before, the first reason counts."""
    context.run.abort(reason)
    return Aborted(context.run.abort_reason or reason)


def outcome_of(task: Task[..., Any], context: Context, error: BaseException) -> Outcome:
    """The outcome of a run that raised this exception. Never raises, even if formatting the exception does."""
    try:
        return _outcome_of(task, context, error)
    except BaseException as second:
        return Failed(payload.format_error(second), _trace(error), None, error)


def _outcome_of(task: Task[..., Any], context: Context, error: BaseException) -> Outcome:
    reason = context.run.abort_reason
    if isinstance(error, asyncio.CancelledError):
        if reason is not None:
            error = Aborted(reason)
        elif not error.args:
            error.args = (CANCELLED_BY_ITSELF,)
    match error:
        case Aborted(why="lost"):
            return Lost()
        case Aborted(why="shutdown"):
            return Released()
        case Aborted(why="cancelled"):
            return Cancelled("cancelled while running")
        case Aborted(why="timeout"):
            timeout = task.options.timeout or 0
            return _failed(task, context, TimeoutError(f"timed out after {timeout:g} s"))
        case Snooze():
            return _snoozed(error)
        case Cancel():
            return Cancelled(payload.clean_text(error.reason, payload.ERROR_LIMIT))
        case Fail() | InvalidJob():
            return Failed(payload.format_error(error), _trace(error), None, error)
        case _ if reason == "shutdown":
            return Released()  # the handler was interrupted and raised something else
        case _:
            return _failed(task, context, error)


def _snoozed(error: Snooze) -> Outcome:
    try:
        return Released(validation.to_timedelta(error.delay, "delay").total_seconds())
    except Exception as invalid:
        return Failed(payload.format_error(invalid), _trace(error), None)


def _failed(task: Task[..., Any], context: Context, error: BaseException) -> Failed:
    try:
        retry_in = task.options.retry.seconds(context.attempt, error)
        if retry_in is not None:
            retry_in = validation.to_timedelta(retry_in, "the retry delay").total_seconds()
    except BaseException:
        logger.warning(
            "retry policy failed; retrying the job in 10 s",
            exc_info=True,
            extra={"job_id": str(context.id), "job_type": task.name},
        )
        retry_in = POLICY_FAILED_RETRY_SECONDS
    return Failed(payload.format_error(error), _trace(error), retry_in, error)


def _trace(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as second:
        text = f"(the traceback could not be formatted: {type(second).__name__})"
    return payload.clean_text(text[-TRACEBACK_CHARACTERS:], TRACEBACK_CHARACTERS)
