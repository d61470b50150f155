"""Tasks: functions that can be enqueued. An `App` is a registry of them and the database they live in;
it does no I/O when it is made. Running them is the worker's business."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import weakref
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)
from uuid import UUID

import msgspec

from howdah import payload
from howdah.arguments import Arguments, decode_result
from howdah.context import Context, _current
from howdah.errors import (
    DuplicateTask,
    InvalidJob,
    InvalidOption,
    JobCancelled,
    JobFailed,
    ResultTimeout,
    UnknownTask,
)
from howdah.model import DISCOVERED, Handle, Job, JobRef, NewJob, Seconds, Status
from howdah.operations import to_id
from howdah.queue import AsyncJobQueue, JobQueue
from howdah.retry import Delay, Retry, to_retry
from howdah.watching import Change, Watcher, background
from howdah.worker_statements import WorkerStatements

if TYPE_CHECKING:
    from howdah.hooks import Hook

P = ParamSpec("P")
R = TypeVar("R")

RunIn = Literal["async", "thread", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """How a task runs."""

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
    "priority", "queue", "run_at", "delay", "max_attempts", "idempotency_key", "ordering_key",
    "request_id", "traceparent", "keep", "conn",
)  # fmt: skip


class TaskHandle(Handle, Generic[R], frozen=True):
    """An enqueued call of a task. Accepted wherever a job's id is."""

    task: Any

    def job(self) -> Job:
        """The job as it is now."""
        return self._app.queue.get(self.id)

    async def ajob(self) -> Job:
        """`job`, awaited."""
        return await self._app.aqueue.get(self.id)

    def result(self, timeout: float | None = None) -> R:
        """Wait for the job to end and give its result, as the type the function says it returns.

        Raises `JobFailed`, `JobCancelled`, or `ResultTimeout` after `timeout` seconds."""
        return background.run(self._wait(self._app._background_watcher(), timeout))

    async def aresult(self, timeout: float | None = None) -> R:
        """`result`, awaited."""
        return await self._wait(self._app._watcher(), timeout)

    def watch(self) -> Iterator[Change]:
        """Follow the job: its state now, then every change and event, until it ends."""
        return background.iterate(self._app._background_watcher().changes(self.id))

    def awatch(self) -> AsyncIterator[Change]:
        """`watch`, for `async for`."""
        return self._app._watcher().changes(self.id)

    def cancel(self) -> bool:
        """Cancel the job, or ask its worker to stop it. False if it had ended already."""
        return bool(self._app.queue.cancel(self.id))

    async def acancel(self) -> bool:
        """`cancel`, awaited."""
        return bool(await self._app.aqueue.cancel(self.id))

    @property
    def _app(self) -> App:
        return cast("App", self.task.app)

    async def _wait(self, watcher: Watcher, timeout: float | None) -> R:
        job = await watcher.get(self.id)  # also where there is no time to wait
        try:
            if not job.status.is_final:
                async with asyncio.timeout(timeout):
                    async for change in watcher.changes(self.id):
                        job = change.job
        except TimeoutError:
            raise ResultTimeout(self.id, timeout or 0) from None
        return cast("R", self.task.read_result(job))


class Task(Generic[P, R]):
    """A function that can be called, and enqueued. `@app.task` makes these."""

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

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now, as if it were not a task. Its context, unless one is given, is
        that of the job which calls it, or one that reports to nobody."""
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
        `max_attempts`, `idempotency_key`, `ordering_key`, `request_id`, `keep`, and `conn` to join your
        transaction."""
        for option in options:
            if option not in _CALL_OPTIONS:
                raise InvalidOption.unknown(option, _CALL_OPTIONS)
        bound = copy.copy(self)
        bound._call = {**self._call, **options}
        return bound

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue a call. The arguments are checked against the signature now."""
        job = self._new_job(args, kwargs)
        handle = self.app.queue.enqueue(
            **{name: getattr(job, name) for name in NewJob.__struct_fields__},
            conn=self._call.get("conn"),
        )
        return self.app._handle(handle, self)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """`enqueue`, awaited. Calls that are awaited at the same time are sent together."""
        job = self._new_job(args, kwargs)
        handle = await self.app.aqueue.enqueue(
            **{name: getattr(job, name) for name in NewJob.__struct_fields__},
            conn=self._call.get("conn"),
        )
        return self.app._handle(handle, self)

    def enqueue_many(
        self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]
    ) -> list[TaskHandle[R]]:
        """Enqueue many calls, all or none: each a tuple of arguments or a mapping of them by name."""
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
        """Run it now, in this process, durably: if the process dies, a worker takes the job over.

        Returns the result. A second call under the same `idempotency_key` gives the stored result, or
        raises `TaskInFlight` while the first is under way. If the function raises, the job is retried
        by a worker as its policy says, and the exception is raised here."""
        return cast("R", self.app._run(self, self._job_to_run(args, kwargs)))

    async def arun(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """`run`, for a coroutine function: it runs in this event loop."""
        return cast("R", await self.app._arun(self, self._job_to_run(args, kwargs)))

    def read_result(self, job: Job) -> Any:
        """The result of a job that has ended, or the error it ended with."""
        match job.status:
            case Status.COMPLETED:
                return decode_result(job.result, self.arguments.returns)
            case Status.CANCELLED:
                raise JobCancelled(job)
            case _:
                raise JobFailed(job)

    def _new_jobs(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[NewJob]:
        jobs = []
        for index, call in enumerate(calls):
            try:
                if isinstance(call, Mapping):
                    jobs.append(self._new_job((), call))
                else:
                    jobs.append(self._new_job(tuple(call), {}))
            except InvalidJob as error:
                raise error.at(index) from None
        return jobs

    def _job_to_run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NewJob:
        for option in ("run_at", "delay", "ordering_key", "conn"):
            if self._call.get(option) is not None:
                raise InvalidOption(
                    f"{option} has no meaning for a task that is run here and now; enqueue it instead."
                )
        return self._new_job(args, kwargs)

    def _new_job(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NewJob:
        options = {name: value for name, value in self._call.items() if name != "conn"}
        job = NewJob(
            job_type=self.name,
            data=self.arguments.pack(args, kwargs),
            queue=self.options.queue,
            priority=self.options.priority,
            max_attempts=self.options.max_attempts,
            keep=self.options.keep,
        )
        return msgspec.structs.replace(job, **options) if options else job


class AsyncTask(Task[P, R]):
    """A task whose function is an `async def`: calling it gives a coroutine."""

    if TYPE_CHECKING:

        def __call__(  # type: ignore[override]
            self, *args: P.args, **kwargs: P.kwargs
        ) -> Coroutine[Any, Any, R]: ...


class App:
    """A registry of tasks and the database they live in.

    The parameters are those of `JobQueue`. `queue` and `aqueue` are the bare queues behind the tasks.
    """

    def __init__(
        self,
        database: str | None = None,
        *,
        schema: str = "howdah",
        lease: Seconds = 30,
        keep: Seconds | None = None,
        payload_limit: int = payload.DATA_LIMIT,
        idempotency_ttl: Seconds = timedelta(days=7),
    ) -> None:
        options: dict[str, Any] = {
            "schema": schema,
            "lease": lease,
            "keep": keep,
            "payload_limit": payload_limit,
            "idempotency_ttl": idempotency_ttl,
        }
        self.database = database
        self.schema = schema
        self.lease = payload.to_timedelta(lease, "lease", minimum=0.001)
        self.idempotency_ttl = payload.to_timedelta(idempotency_ttl, "idempotency_ttl")
        self.tasks: dict[str, Task[..., Any]] = {}
        self.hooks: list[Hook] = []
        self.middlewares: list[Callable[[Context], Any]] = []
        self.lifespans: list[Callable[[], Any]] = []
        self.statements = WorkerStatements(schema)
        self.queue = JobQueue(database, **options)
        self.aqueue = AsyncJobQueue(database, **options)
        self._make_queue = functools.partial(AsyncJobQueue, database, **options)
        self._watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Watcher] = (
            weakref.WeakKeyDictionary()
        )

    # ── registering ───────────────────────────────────────────────────────────────────────────────

    @overload
    def task(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        function: None = None,
        /,
        *,
        name: str | None = ...,
        queue: str = ...,
        priority: int = ...,
        max_attempts: int = ...,
        retry: Retry | Delay | None = ...,
        timeout: Seconds | None = ...,
        run_in: RunIn | None = ...,
        keep: Seconds | None = ...,
        result_limit: int = ...,
        memory_limit: int | None = ...,
    ) -> _Decorator: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: int = DISCOVERED,
        max_attempts: int = 3,
        retry: Retry | Delay | None = None,
        timeout: Seconds | None = None,
        run_in: RunIn | None = None,
        keep: Seconds | None = None,
        result_limit: int = payload.RESULT_LIMIT,
        memory_limit: int | None = None,
    ) -> Any:
        """Make a function a task.

        `async def` runs in the worker's loop, `def` in a thread, and `run_in="process"` in a process
        that can be killed: at its `timeout`, when it is cancelled, or past `memory_limit` bytes.
        `retry` is a `Retry` or a callable; `keep` how long finished jobs stay."""

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            options = _options(
                queue=queue,
                priority=priority,
                max_attempts=max_attempts,
                retry=to_retry(retry),
                timeout=timeout,
                run_in=_executor(function, run_in),
                keep=keep,
                result_limit=result_limit,
                memory_limit=memory_limit,
            )
            return self._register(function, name or function.__name__, options)

        return register if function is None else register(function)

    def _register(
        self, function: Callable[..., Any], name: str, options: TaskOptions
    ) -> Task[..., Any]:
        _checked(payload.check_name, name, "the task's name")
        known = self.tasks.get(name)
        if known is not None and _place(known.function) != _place(function):
            raise DuplicateTask(name, _place(known.function), _place(function))
        kind = AsyncTask if options.run_in == "async" else Task
        task: Task[..., Any] = kind(self, function, name, options)
        self.tasks[name] = task
        return task

    def get_task(self, name: str) -> Task[..., Any]:
        """The task of that name; `UnknownTask` says what you may have meant."""
        try:
            return self.tasks[name]
        except KeyError:
            raise UnknownTask(name, self.tasks) from None

    def on_state_change(self, hook: Hook) -> Hook:
        """Call a function, after the commit, whenever a worker of this app changes a job's state.

        It gets a `StateChange`, runs in a thread of its own, and can neither break nor slow a worker."""
        self.hooks.append(hook)
        return hook

    def middleware(self, function: Callable[[Context], Any]) -> Callable[[Context], Any]:
        """Put a generator function around every run: it gets the context, does what comes before,
        yields once, and does what comes after. An exception of the handler is raised at its yield.
        Async generators surround async tasks only; plain ones surround all."""
        self.middlewares.append(function)
        return function

    def lifespan(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Surround a worker's life: a generator function, async or not, that yields a mapping of
        resources, found in `ctx.resources`. Plain ones also run in each task process."""
        self.lifespans.append(function)
        return function

    # ── looking and operating ─────────────────────────────────────────────────────────────────────

    def find(self, **filters: Any) -> list[Job]:
        """Jobs that match, newest first: see `JobQueue.find`."""
        return self.queue.find(**filters)

    def counts(self, queue: str | None = None, job_type: str | None = None) -> dict[Status, int]:
        """How many jobs there are of each status."""
        return self.queue.counts(queue, job_type)

    def takeover(self, job: JobRef) -> bool:
        """Take a running job away from its worker, who stops it, and let another one have it. The
        attempt that was cut off does not count. False if no worker had it."""
        return bool(self.queue._store.run(self.statements.takeover_jobs([to_id(job)])))

    async def atakeover(self, job: JobRef) -> bool:
        """`takeover`, awaited."""
        return bool(await self.aqueue._store.run(self.statements.takeover_jobs([to_id(job)])))

    def handle(self, job: JobRef) -> TaskHandle[Any]:
        """A handle for a job of one of these tasks, to wait for it or watch it."""
        found = self.queue.get(job)
        return self._handle(Handle(found.id, False), self.get_task(found.job_type))

    def close(self) -> None:
        """Close the connections of sync callers."""
        watcher = None if background.loop is None else self._watchers.pop(background.loop, None)
        if watcher is not None:
            background.run(watcher.close())
        self.queue.close()

    async def aclose(self) -> None:
        """Close the async connections of this event loop."""
        watcher = self._watchers.pop(asyncio.get_running_loop(), None)
        if watcher is not None:
            await watcher.close()
        await self.aqueue.close()

    # Tasks reach the queue through `queue`, `aqueue` and what follows; a test may put others in place.

    def _handle(self, handle: Handle, task: Task[..., Any]) -> TaskHandle[Any]:
        return TaskHandle(handle.id, handle.is_new, task)

    def _run(self, task: Task[..., Any], job: NewJob) -> Any:
        from howdah.durable import run

        return run(task, job)

    async def _arun(self, task: Task[..., Any], job: NewJob) -> Any:
        from howdah.durable import arun

        return await arun(task, job)

    def _watcher(self) -> Watcher:
        loop = asyncio.get_running_loop()
        if loop not in self._watchers:
            self._watchers[loop] = Watcher(self._make_queue(), self.statements)
        return self._watchers[loop]

    def _background_watcher(self) -> Watcher:
        async def get() -> Watcher:
            return self._watcher()

        return background.run(get())


class _Decorator:
    """What `@app.task(…)` returns; only there for type checkers."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R]) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> Task[P, R]: ...
    def __call__(self, function: Callable[..., Any]) -> Task[..., Any]:
        raise TypeError


def _options(
    *, timeout: Seconds | None, keep: Seconds | None, memory_limit: int | None, **others: Any
) -> TaskOptions:
    if memory_limit is not None and others["run_in"] != "process":
        raise InvalidOption(
            'memory_limit needs run_in="process": only a process can be held to it.'
        )
    limits = {
        "priority": payload.PRIORITY_RANGE,
        "max_attempts": (1, payload.MAX_ATTEMPTS_LIMIT),
        "result_limit": (0, 2**30),
    }
    for option, (low, high) in limits.items():
        _checked(payload.check_integer, others[option], option, low, high)
    _checked(payload.check_name, others["queue"], "queue")
    if memory_limit is not None:
        _checked(payload.check_integer, memory_limit, "memory_limit", 1, 2**62)
    if timeout is not None:
        timeout = payload.to_timedelta(timeout, "timeout", minimum=0.001).total_seconds()
    if keep is not None:
        keep = payload.to_timedelta(keep, "keep")
    return TaskOptions(timeout=timeout, keep=keep, memory_limit=memory_limit, **others)


def _checked(check: Callable[..., object], *arguments: Any) -> None:
    try:
        check(*arguments)
    except InvalidJob as error:
        raise InvalidOption(error.message) from None


def _executor(function: Callable[..., Any], run_in: RunIn | None) -> RunIn:
    is_async = inspect.iscoroutinefunction(function)
    if run_in is None:
        return "async" if is_async else "thread"
    if run_in not in ("async", "thread", "process"):
        raise InvalidOption.unknown(run_in, ("async", "thread", "process"), "run_in")
    if is_async != (run_in == "async"):
        kind = "an async def" if is_async else "a def"
        raise InvalidOption(f'{function.__name__} is {kind}, which cannot run_in="{run_in}".')
    return run_in


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
