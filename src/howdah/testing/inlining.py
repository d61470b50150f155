"""Inline mode: inside the block, a task runs where it is enqueued, without a database. Arguments and results go
through the same checks, JSON encoding and conversions as in production.

The `Log` shows every job, which `inline_jobs.py` keeps in memory. After the block the app is as before; handles from
inside the block keep working. Queue methods that need a database or a worker raise `HowdahError`."""

from __future__ import annotations

import copy
import inspect
from contextlib import AsyncContextDecorator, ContextDecorator
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

from howdah.errors import JobFailed
from howdah.model import Status
from howdah.task import TaskHandle
from howdah.testing.inline_backend import InlineBackend, InlineWatcher
from howdah.testing.inline_jobs import InlineJobs
from howdah.testing.running import drive, drive_async

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from howdah.app import App
    from howdah.execution.watch import Change
    from howdah.model import Event, Handle, Job, JobRef
    from howdah.task import Task

F = TypeVar("F", bound="Callable[..., Any]")


class Log:
    """The jobs that were enqueued in the block, and their history."""

    def __init__(
        self, app: App, *, raise_errors: bool = False, resources: Mapping[str, Any] | None = None
    ) -> None:
        self._jobs = jobs = InlineJobs(app, raise_errors=raise_errors, resources=resources)
        # The queues keep their methods and checks. What is below them is replaced.
        queue, backend = copy.copy(app.queue), InlineBackend(jobs, app.backend, drive)
        vars(queue).update(_operations=backend, _backend=backend)
        aqueue, abackend = copy.copy(app.aqueue), InlineBackend(jobs, app.abackend, drive_async)
        vars(aqueue).update(_operations=abackend, _backend=abackend)
        watcher = InlineWatcher(jobs)
        self._replacements: dict[str, Any] = {
            "queue": queue,
            "aqueue": aqueue,
            "backend": backend,
            "abackend": abackend,
            "_handle": self._handle,
            "_run": lambda task, job: drive(jobs.run_task(task, job)),
            "_arun": lambda task, job: drive_async(jobs.run_task(task, job)),
            "_watcher": lambda: watcher,
            "_background_watcher": lambda: watcher,
        }
        # Handles are bound to a copy of the app that stays inline, so they also work after the block.
        self._inline_app = copy.copy(app)
        vars(self._inline_app).update(self._replacements)

    @property
    def jobs(self) -> list[Job]:
        """All jobs as they are now, in the order in which they were enqueued."""
        return [entry.job for entry in self._jobs.entries()]

    @property
    def failed(self) -> list[Job]:
        """The jobs that failed permanently. The test has then inspected them."""
        return [entry.inspect() for entry in self._jobs.entries(Status.FAILED)]

    def changes(self, job: JobRef) -> list[Change]:
        """All state changes of the job, from the beginning."""
        entry = self._jobs.entry(job)
        entry.inspect()
        return list(entry.changes)

    def progress(self, job: JobRef) -> list[tuple[int, str | None]]:
        """Every (percent, stage) that its handler reported."""
        return list(self._jobs.entry(job).reports)

    def events(self, job: JobRef) -> list[Event]:
        """Its events, oldest first."""
        return self._jobs.entry(job).events()

    def error(self, job: JobRef) -> BaseException | None:
        """The exception that ended its last attempt."""
        entry = self._jobs.entry(job)
        entry.inspect()
        return entry.error

    def run_pending(self) -> int:
        """Run the pending jobs now, in due order, although they are delayed. Returns their number."""
        return drive(self._jobs.run(self._jobs.pending()))

    async def arun_pending(self) -> int:
        """`run_pending`, awaited."""
        return await drive_async(self._jobs.run(self._jobs.pending()))

    def _handle(self, handle: Handle, task: Task[..., Any]) -> TaskHandle[Any]:
        bound = task.using()
        bound.app = self._inline_app
        return TaskHandle(handle.id, handle.is_new, bound)


class Inline(ContextDecorator, AsyncContextDecorator):
    """`inline(app)`: a context manager, sync and async, that gives the `Log`; also a decorator."""

    def __init__(
        self, app: App, *, raise_errors: bool = False, resources: Mapping[str, Any] | None = None
    ) -> None:
        self._app = app
        self._options: dict[str, Any] = {"raise_errors": raise_errors, "resources": resources}
        self._entered: list[tuple[Log, Any]] = []

    def __enter__(self) -> Log:
        log = Log(self._app, **self._options)
        patch = mock.patch.multiple(self._app, create=True, **log._replacements)
        patch.__enter__()
        self._entered.append((log, patch))
        return log

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        log, patch = self._entered.pop()
        patch.__exit__(None, None, None)
        if kind is None:
            for entry in log._jobs.failures():
                raise JobFailed(entry.job) from entry.error

    async def __aenter__(self) -> Log:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.__exit__(kind, *rest)

    def __call__(self, function: F) -> F:
        is_async = inspect.iscoroutinefunction(function)
        decorator = AsyncContextDecorator if is_async else ContextDecorator
        return decorator.__call__(self, function)


def inline(
    app: App, *, raise_errors: bool = False, resources: Mapping[str, Any] | None = None
) -> Inline:
    """Run the app's tasks where they are enqueued, without a database, inside the block.

    If a job fails permanently, `handle.result()` raises `JobFailed`, as in production. If the test has not
    inspected a failed job, the end of the block raises `JobFailed`. With `raise_errors`, the outermost
    enqueue raises the handler's own exception instead. Handlers read `resources` from
    `ctx.resources`."""
    return Inline(app, raise_errors=raise_errors, resources=resources)
