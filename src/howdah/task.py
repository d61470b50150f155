"""Tasks: functions that can be called and enqueued, and the handles of enqueued calls. An `App` creates and registers
tasks; workers run them."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, cast
from uuid import UUID

from howdah.context import Context, _current
from howdah.encoding import payload, validation
from howdah.encoding.arguments import Arguments, decode_result
from howdah.errors import InvalidOption, JobCancelled, JobFailed, ResultTimeout
from howdah.execution.watch import Change, Watcher, background
from howdah.model import Handle, Job, NewJob, Seconds, Status
from howdah.protocol.new_jobs import LazyJobs

if TYPE_CHECKING:
    from howdah.app import App
    from howdah.retry import Retry

P = ParamSpec("P")
R = TypeVar("R")

RunIn = Literal["async", "thread", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """The options of a task."""

    queue: str
    priority: int
    max_attempts: int
    retry: Retry
    timeout: float | None
    run_in: RunIn
    keep: Seconds | None
    result_limit: int
    memory_limit: int | None


_CALL_OPTIONS = (
    "priority", "queue", "run_at", "delay", "max_attempts", "idempotency_key", "idempotency_ttl",
    "ordering_key", "request_id", "traceparent", "keep", "conn",
)  # fmt: skip


class TaskHandle(Handle, Generic[R], frozen=True):
    """An enqueued call of a task. Accepted wherever a job's id is accepted."""

    task: Any

    def job(self) -> Job:
        """The job as it is now."""
        return self._app.queue.get(self.id)

    async def ajob(self) -> Job:
        """`job`, awaited."""
        return await self._app.aqueue.get(self.id)

    def result(self, timeout: float | None = None) -> R:
        """Wait for the job to end and return its result, converted to the function's annotated return type.

        Raises `JobFailed`, `JobCancelled`, or `ResultTimeout` after `timeout` seconds."""
        return background.run(self._wait(self._app._background_watcher(), timeout))

    async def aresult(self, timeout: float | None = None) -> R:
        """`result`, awaited."""
        return await self._wait(self._app._watcher(), timeout)

    def watch(self) -> Iterator[Change]:
        """Watch the job: its current state, then every change and event until it ends."""
        return background.iterate(self._app._background_watcher().changes(self.id))

    def awatch(self) -> AsyncIterator[Change]:
        """`watch`, for `async for`."""
        return self._app._watcher().changes(self.id)

    def cancel(self) -> bool:
        """Cancel the job, or ask its worker to stop it. False if it has already ended."""
        return bool(self._app.queue.cancel(self.id))

    async def acancel(self) -> bool:
        """`cancel`, awaited."""
        return bool(await self._app.aqueue.cancel(self.id))

    @property
    def _app(self) -> App:
        return cast("App", self.task.app)

    async def _wait(self, watcher: Watcher, timeout: float | None) -> R:
        job = await watcher.get(self.id)  # first, so that a timeout of 0 returns an existing result
        try:
            if not job.status.is_final:
                async with asyncio.timeout(timeout):
                    async for change in watcher.changes(self.id):
                        job = change.job
        except TimeoutError:
            raise ResultTimeout(self.id, timeout or 0) from None
        return cast("R", self.task.read_result(job))


class Task(Generic[P, R]):
    """A function that can be called and enqueued, made by `@app.task`."""

    def __init__(
        self, app: App, function: Callable[..., Any], name: str, options: TaskOptions
    ) -> None:
        functools.update_wrapper(self, function)
        self.app = app
        self.function = function
        self.name = name
        self.options = options
        self.arguments = Arguments.of(function, name, Context)
        self._call: dict[str, Any] = {}
        self._job_options: dict[str, Any] = {
            "queue": options.queue,
            "priority": options.priority,
            "max_attempts": options.max_attempts,
            "keep": options.keep,
        }

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly, not as a job. Its context, unless you pass one, is that of the calling
        job, or a context whose reports are discarded."""
        arguments = self.arguments
        given = arguments.context in kwargs or any(isinstance(each, Context) for each in args)
        if arguments.context is None or given:
            return cast("R", self.function(*args, **kwargs))
        values = arguments.signature.bind(*args, **kwargs).arguments
        context = _current.get() or Context(id=UUID(int=0), job_type=self.name)
        positional, named = arguments.place(values, context)
        return cast("R", self.function(*positional, **named))

    def using(self, **options: Any) -> Self:
        """The same task with options for the next call: `priority`, `queue`, `run_at` or `delay`,
        `max_attempts`, `idempotency_key` and its `idempotency_ttl`, `ordering_key`, `request_id`,
        `traceparent`, `keep`, and `conn` to enqueue in your transaction."""
        for option in options:
            if option not in _CALL_OPTIONS:
                raise InvalidOption.unknown(option, _CALL_OPTIONS)
        bound = copy.copy(self)
        bound._call = {**self._call, **options}
        bound._job_options = {**self._job_options, **options}
        bound._job_options.pop("conn", None)
        return bound

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue a call. The arguments are checked against the signature immediately."""
        job = self._new_job(args, kwargs)
        handle = self.app.backend.enqueue(job, self._call.get("conn"))
        return self.app._handle(handle, self)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """`enqueue`, awaited. Concurrent calls are sent in one statement."""
        job = self._new_job(args, kwargs)
        handle = await self.app.abackend.enqueue(job, self._call.get("conn"))
        return self.app._handle(handle, self)

    def enqueue_many(
        self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]
    ) -> list[TaskHandle[R]]:
        """Enqueue many calls, all or none. Each is a tuple of arguments or a mapping of arguments by name."""
        handles = self.app.queue.enqueue_many(self._new_jobs(calls), conn=self._call.get("conn"))
        return [self.app._handle(handle, self) for handle in handles]

    async def aenqueue_many(
        self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]
    ) -> list[TaskHandle[R]]:
        """`enqueue_many`, awaited."""
        jobs = self._new_jobs(calls)
        handles = await self.app.aqueue.enqueue_many(jobs, conn=self._call.get("conn"))
        return [self.app._handle(handle, self) for handle in handles]

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a job in this process, durably: if the process is killed, a worker runs the job.

        Returns the result. A second call with the same `idempotency_key` returns the stored result, or
        raises `TaskInFlight` while the job has not ended; if that job failed, a new one runs. If the function
        raises, the exception is raised here, and a worker retries the job according to its retry policy."""
        return cast("R", self.app._run(self, self._job_to_run(args, kwargs)))

    async def arun(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """`run`, awaited. A coroutine function runs in this event loop."""
        return cast("R", await self.app._arun(self, self._job_to_run(args, kwargs)))

    def read_result(self, job: Job) -> Any:
        """The result of a completed job. Raises `JobFailed` or `JobCancelled` for other jobs that have ended."""
        match job.status:
            case Status.COMPLETED:
                return decode_result(job.result, self.arguments.returns)
            case Status.CANCELLED:
                raise JobCancelled(job)
            case _:
                raise JobFailed(job)

    def _new_jobs(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> LazyJobs:
        return LazyJobs(calls, self._to_job)

    def _to_job(self, call: tuple[Any, ...] | Mapping[str, Any]) -> NewJob:
        if isinstance(call, Mapping):
            return self._new_job((), call)
        return self._new_job(tuple(call), {})

    def _job_to_run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NewJob:
        for option in ("run_at", "delay", "ordering_key", "conn"):
            if self._call.get(option) is not None:
                raise InvalidOption(
                    f"{option} does not apply to run(), which runs the task immediately; use enqueue()."
                )
        return self._new_job(args, kwargs)

    def _new_job(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NewJob:
        data = self.arguments.pack(args, kwargs)
        return NewJob(job_type=self.name, data=data, **self._job_options)


class AsyncTask(Task[P, R]):
    """A task whose function is an `async def`: calling it returns a coroutine."""

    if TYPE_CHECKING:

        def __call__(  # type: ignore[override]
            self, *args: P.args, **kwargs: P.kwargs
        ) -> Coroutine[Any, Any, R]: ...


def task_options(
    *, timeout: Seconds | None, keep: Seconds | None, memory_limit: int | None, **others: Any
) -> TaskOptions:
    if memory_limit is not None and others["run_in"] != "process":
        raise InvalidOption(
            'memory_limit needs run_in="process": it cannot be enforced in the worker\'s own process.'
        )
    limits = {
        "priority": payload.PRIORITY_RANGE,
        "max_attempts": (1, payload.MAX_ATTEMPTS_LIMIT),
        "result_limit": (0, 2**30),
    }
    for option, (low, high) in limits.items():
        validation.check_option(validation.check_integer, others[option], option, low, high)
    validation.check_option(validation.check_name, others["queue"], "queue")
    if memory_limit is not None:
        validation.check_option(validation.check_integer, memory_limit, "memory_limit", 1, 2**62)
    if timeout is not None:
        timeout = validation.to_timedelta(timeout, "timeout", minimum=0.001).total_seconds()
    if keep is not None:
        keep = validation.to_timedelta(keep, "keep")
    return TaskOptions(timeout=timeout, keep=keep, memory_limit=memory_limit, **others)


def executor_of(function: Callable[..., Any], run_in: RunIn | None) -> RunIn:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidOption(
            f"{function.__name__} is a generator, because it contains yield; a task returns its result."
        )
    is_async = inspect.iscoroutinefunction(function)
    if run_in is None:
        return "async" if is_async else "thread"
    if run_in not in ("async", "thread", "process"):
        raise InvalidOption.unknown(run_in, ("async", "thread", "process"), "run_in")
    if is_async != (run_in == "async"):
        kind = "an async def" if is_async else "a def"
        raise InvalidOption(f'{function.__name__} is {kind}, which cannot run_in="{run_in}".')
    return run_in


def place_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
