"""An `App`: a registry of tasks and the database that holds their jobs. Creating one does no I/O. Workers run the
tasks."""

from __future__ import annotations

import asyncio
import functools
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    TypeVar,
    overload,
)

from howdah.async_queue import AsyncJobQueue
from howdah.async_queue import backend_of as async_backend_of
from howdah.database.retry_loop import COMMAND_TIMEOUT_SECONDS, TIMEOUT_SECONDS
from howdah.encoding import payload, validation
from howdah.errors import (
    DuplicateTask,
    UnknownTask,
)
from howdah.execution.watch import Watcher, background
from howdah.model import DISCOVERED, Handle, Job, JobRef, NewJob, Seconds, Status
from howdah.protocol.job_refs import to_id
from howdah.protocol.per_loop import PerLoop
from howdah.protocol.worker_statements import WorkerStatements
from howdah.queue import JobQueue, backend_of
from howdah.retry import Delay, Retry, to_retry
from howdah.task import (
    AsyncTask,
    RunIn,
    Task,
    TaskHandle,
    TaskOptions,
    executor_of,
    place_of,
    task_options,
)

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Coroutine,
    )

    from howdah.context import Context
    from howdah.hooks import Hook

P = ParamSpec("P")
R = TypeVar("R")


class App:
    """A registry of tasks and the database that holds their jobs.

    The parameters are those of `JobQueue`; a worker has its own, shorter `command_timeout`. `queue` and
    `aqueue` are the bare queues behind the tasks.
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
        create: bool = True,
        timeout: float = TIMEOUT_SECONDS,
        command_timeout: float = COMMAND_TIMEOUT_SECONDS,
    ) -> None:
        options: dict[str, Any] = {
            "schema": schema,
            "lease": lease,
            "keep": keep,
            "create": create,
            "payload_limit": payload_limit,
            "idempotency_ttl": idempotency_ttl,
            "timeout": timeout,
            "command_timeout": command_timeout,
        }
        self.database = database
        self.schema = schema
        self.create = create
        self.lease = validation.to_lease(lease)
        self.idempotency_ttl = validation.to_timedelta(idempotency_ttl, "idempotency_ttl")
        self.tasks: dict[str, Task[..., Any]] = {}
        self.hooks: list[Hook] = []
        self.middlewares: list[Callable[[Context], Any]] = []
        self.lifespans: list[Callable[[], Any]] = []
        self.statements = WorkerStatements(schema)
        self.queue = JobQueue(database, **options)
        self.aqueue = AsyncJobQueue(database, **options)
        # Internal: tasks, `task.run` and `howdah.testing` use these.
        self.backend = backend_of(self.queue)
        self.abackend = async_backend_of(self.aqueue)
        self._make_queue = functools.partial(AsyncJobQueue, database, **options)
        self._watchers = PerLoop(lambda: Watcher(self._make_queue(), self.statements))

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

        `async def` runs in the worker's event loop, `def` in a thread, and `run_in="process"` in a process
        that can be killed: at its `timeout`, when its job is cancelled, or above `memory_limit` bytes.
        `retry` is a `Retry` or a callable; `keep` is how long finished jobs are kept."""

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            options = task_options(
                queue=queue,
                priority=priority,
                max_attempts=max_attempts,
                retry=to_retry(retry),
                timeout=timeout,
                run_in=executor_of(function, run_in),
                keep=keep,
                result_limit=result_limit,
                memory_limit=memory_limit,
            )
            return self._register(function, name or function.__name__, options)

        return register if function is None else register(function)

    def _register(
        self, function: Callable[..., Any], name: str, options: TaskOptions
    ) -> Task[..., Any]:
        validation.check_option(validation.check_name, name, "the task's name")
        known = self.tasks.get(name)
        if known is not None and place_of(known.function) != place_of(function):
            raise DuplicateTask(name, place_of(known.function), place_of(function))
        kind = AsyncTask if options.run_in == "async" else Task
        task: Task[..., Any] = kind(self, function, name, options)
        self.tasks[name] = task
        return task

    def get_task(self, name: str) -> Task[..., Any]:
        """The task with this name. `UnknownTask` suggests the nearest name."""
        try:
            return self.tasks[name]
        except KeyError:
            raise UnknownTask(name, self.tasks) from None

    def on_state_change(self, hook: Hook) -> Hook:
        """Call a function after the commit whenever a worker of this app changes a job's state.

        The function receives a `StateChange`. It runs in its own thread, so it cannot fail or slow a worker."""
        self.hooks.append(hook)
        return hook

    def middleware(self, function: Callable[[Context], Any]) -> Callable[[Context], Any]:
        """Wrap every run in a generator function: it receives the context and yields once, where the handler
        runs. An exception of the handler is raised at the yield. Async generators wrap async tasks only;
        plain generators wrap all tasks."""
        self.middlewares.append(function)
        return function

    def lifespan(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Run a generator function around each worker: the code before its yield when the worker starts, the
        rest when it stops. It may be async. It yields a mapping of resources for `ctx.resources`. Plain
        generators also run in each task process, but only up to the yield: the process ends by being killed."""
        self.lifespans.append(function)
        return function

    # ── reading and operating ─────────────────────────────────────────────────────────────────────

    def find(self, **filters: Any) -> list[Job]:
        """Jobs that match, newest first: see `JobQueue.find`."""
        return self.queue.find(**filters)

    def counts(self, queue: str | None = None, job_type: str | None = None) -> dict[Status, int]:
        """The number of jobs with each status."""
        return self.queue.counts(queue, job_type)

    def takeover(self, job: JobRef) -> bool:
        """Take a claimed job away from its worker, which stops the handler, and requeue the job. The attempt
        does not count. False if no worker has claimed the job."""
        return bool(self.backend.run(self.statements.takeover_jobs([to_id(job)])))

    async def atakeover(self, job: JobRef) -> bool:
        """`takeover`, awaited."""
        return bool(await self.abackend.run(self.statements.takeover_jobs([to_id(job)])))

    def handle(self, job: JobRef) -> TaskHandle[Any]:
        """A handle for a job of one of these tasks, to wait for its result or to watch it."""
        found = self.queue.get(job)
        return self._handle(Handle(found.id, False), self.get_task(found.job_type))

    def close(self) -> None:
        """Close the connections of the sync methods."""
        watcher = None if background.loop is None else self._watchers.pop(background.loop)
        if watcher is not None:
            background.run(watcher.close())
        self.queue.close()

    async def aclose(self) -> None:
        """Close the connections of the async methods in this event loop."""
        watcher = self._watchers.pop(asyncio.get_running_loop())
        if watcher is not None:
            await watcher.close()
        await self.aqueue.close()

    # Tasks use `queue`, `aqueue`, the backends and these methods; `howdah.testing.inline` replaces them all.

    def _handle(self, handle: Handle, task: Task[..., Any]) -> TaskHandle[Any]:
        return TaskHandle(handle.id, handle.is_new, task)

    def _run(self, task: Task[..., Any], job: NewJob) -> Any:
        from howdah.execution.run_here import run

        return run(task, job)

    async def _arun(self, task: Task[..., Any], job: NewJob) -> Any:
        from howdah.execution.run_here import arun

        return await arun(task, job)

    def _watcher(self) -> Watcher:
        return self._watchers.get()

    def _background_watcher(self) -> Watcher:
        async def get() -> Watcher:
            return self._watcher()

        return background.run(get())


class _Decorator:
    """The type of `@app.task(…)`, for type checkers."""

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
