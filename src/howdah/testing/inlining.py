"""Inline mode: inside the block a task runs where it is enqueued, and no database is needed. Arguments and
results go through the same checks, JSON and conversions as in production.

What is due runs at once, and is tried again at once while it has attempts left. What is delayed or snoozed
stays pending until `Log.run_pending`. Everything is kept in the `Log`; the app is as it was after the block,
and handles from inside go on working."""

from __future__ import annotations

import copy
import functools
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from howdah.errors import HowdahError, JobFailed, TaskInFlight
from howdah.task import TaskHandle
from howdah.testing import running
from howdah.testing.memory import AsyncMemoryQueue, Entry, Memory, MemoryQueue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping
    from uuid import UUID

    from howdah.app import App
    from howdah.execution.watch import Change
    from howdah.model import Event, Handle, Job, JobRef, NewJob
    from howdah.task import Task

F = TypeVar("F", bound="Callable[..., Any]")

DEEPEST = 20
RUNS_LIMIT = 10_000


class Log:
    """What was enqueued and what became of it."""

    def __init__(
        self, app: App, *, raise_errors: bool = False, resources: Mapping[str, Any] | None = None
    ) -> None:
        self._raise_errors = raise_errors
        self._memory = Memory(app, resources)
        self._postponed: list[Entry] = []
        queue = MemoryQueue(self._memory, self._run)
        aqueue = AsyncMemoryQueue(queue, self._arun)
        watcher = _Recording(self)
        self.replacements: dict[str, Any] = {
            "queue": queue,
            "aqueue": aqueue,
            "backend": SimpleNamespace(
                enqueue=queue.enqueue_job, operations=app.backend.operations
            ),
            "abackend": SimpleNamespace(enqueue=aqueue.enqueue_job),
            "_handle": self._handle,
            "_run": self._run_task,
            "_arun": self._arun_task,
            "_watcher": lambda: watcher,
            "_background_watcher": lambda: watcher,
        }
        # Handles are bound to a copy that stays inline, so that they work after the block as well.
        self._copy = copy.copy(app)
        vars(self._copy).update(self.replacements)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────

    @property
    def jobs(self) -> list[Job]:
        """Every job, in the order in which they were enqueued, as it is now."""
        return [entry.job for entry in self._memory.all()]

    @property
    def failed(self) -> list[Job]:
        """The jobs that failed for good. They are then taken to have been looked at."""
        return [entry.look() for entry in self._memory.failures(seen=True)]

    def changes(self, job: JobRef) -> list[Change]:
        """The job's whole life: a snapshot after everything that happened to it."""
        entry = self._memory.entry(job)
        entry.look()
        return list(entry.changes)

    def progress(self, job: JobRef) -> list[tuple[int, str | None]]:
        """Every (percent, stage) that its handler reported."""
        return list(self._memory.entry(job).reports)

    def events(self, job: JobRef) -> list[Event]:
        """Its events, oldest first."""
        return list(self._memory.entry(job).events)

    def error(self, job: JobRef) -> BaseException | None:
        """The exception with which its last attempt failed."""
        entry = self._memory.entry(job)
        entry.look()
        return entry.cause

    # ── running ───────────────────────────────────────────────────────────────────────────────────

    def run_pending(self) -> int:
        """Run what was delayed or snoozed, in due order, as if its time had come. Returns how many."""
        entries = self._memory.pending()
        self._run(entries)
        return len(entries)

    async def arun_pending(self) -> int:
        """`run_pending`, awaited."""
        entries = self._memory.pending()
        await self._arun(entries)
        return len(entries)

    def _run(self, entries: Iterable[Entry]) -> None:
        todo = self._take(entries)
        runs = 0
        while todo:
            work = self._memory.attempts(todo.pop(0))
            outcome = None
            while (run := _next(work, outcome)) is not None:
                outcome = running.run(*run)
            runs += 1
            todo += self._more(runs)
        self._surface()

    async def _arun(self, entries: Iterable[Entry]) -> None:
        todo = self._take(entries)
        runs = 0
        while todo:
            work = self._memory.attempts(todo.pop(0))
            outcome = None
            while (run := _next(work, outcome)) is not None:
                outcome = await running.arun(*run)
            runs += 1
            todo += self._more(runs)
        self._surface()

    def _take(self, entries: Iterable[Entry]) -> list[Entry]:
        """What is to be run now. What is nested too deeply is left to the outermost call: a task that
        enqueues its successor would run into Python's recursion limit."""
        depth = self._memory.depth()
        todo = list(entries)
        for entry in todo:
            entry.depth = depth
        if depth <= DEEPEST:
            return todo
        self._postponed += todo
        return []

    def _more(self, runs: int) -> list[Entry]:
        if self._memory.depth() > 0:
            return []
        if runs > RUNS_LIMIT:
            raise HowdahError(
                f"one enqueue led to more than {RUNS_LIMIT:,} jobs in inline mode; "
                "a task seems to enqueue itself without end."
            )
        postponed, self._postponed = self._postponed, []
        return postponed

    def _surface(self) -> None:
        if self._raise_errors and self._memory.depth() == 0:
            failures = self._memory.failures()
            for entry in failures:
                entry.look()
            for entry in failures[:1]:
                raise entry.cause or JobFailed(entry.job)

    # ── in the place of the app's own ─────────────────────────────────────────────────────────────

    def _handle(self, handle: Handle, task: Task[..., Any]) -> TaskHandle[Any]:
        own = task.using()
        own.app = self._copy
        return TaskHandle(handle.id, handle.is_new, own)

    def _run_task(self, task: Task[..., Any], job: NewJob) -> Any:
        entry, is_new = self._memory.add([job])[0]
        if is_new:
            self._run([entry])
        return self._result(task, entry)

    async def _arun_task(self, task: Task[..., Any], job: NewJob) -> Any:
        entry, is_new = self._memory.add([job])[0]
        if is_new:
            await self._arun([entry])
        return self._result(task, entry)

    def _result(self, task: Task[..., Any], entry: Entry) -> Any:
        job = entry.look()
        if entry.cause is not None:
            raise entry.cause
        if not job.status.is_final:
            raise TaskInFlight(job.id)
        return task.read_result(job)

    def close_block(self) -> None:
        """At the end of the block: a failure that nobody has looked at is raised."""
        for entry in self._memory.failures():
            raise JobFailed(entry.job) from entry.cause


class _Recording:
    """A watcher of what has happened already."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def get(self, job_id: UUID) -> Job:
        return self._log.changes(job_id)[-1].job

    async def changes(self, job_id: UUID) -> AsyncIterator[Change]:
        for change in self._log.changes(job_id):
            yield change
        if not change.status.is_final:
            raise HowdahError(
                f"job {job_id} ({change.job.job_type}) is {change.status} and nothing runs it: inline "
                "mode does not wait. Delayed and snoozed jobs run when you call log.run_pending()."
            )


def _next(work: Any, outcome: Any) -> Any:
    try:
        return work.send(outcome)
    except StopIteration:
        return None


class Inline:
    """`inline(app)`: a context manager, sync and async, that gives the `Log`; also a decorator."""

    def __init__(
        self, app: App, *, raise_errors: bool = False, resources: Mapping[str, Any] | None = None
    ) -> None:
        self._app = app
        self._options: dict[str, Any] = {"raise_errors": raise_errors, "resources": resources}
        self._entered: list[tuple[Log, dict[str, Any]]] = []

    def __enter__(self) -> Log:
        log = Log(self._app, **self._options)
        attributes = vars(self._app)
        self._entered.append((log, dict(attributes)))
        attributes.update(log.replacements)
        return log

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        log, before = self._entered.pop()
        attributes = vars(self._app)
        for name in log.replacements:
            attributes.pop(name)
            if name in before:
                attributes[name] = before[name]
        if kind is None:
            log.close_block()

    async def __aenter__(self) -> Log:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.__exit__(kind, *rest)

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return cast("F", async_wrapper if inspect.iscoroutinefunction(function) else wrapper)


def inline(
    app: App, *, raise_errors: bool = False, resources: Mapping[str, Any] | None = None
) -> Inline:
    """Run the app's tasks where they are enqueued, without a database, for the length of a block.

    A job that fails for good makes `handle.result()` raise `JobFailed`, as in production; one that
    nobody has looked at raises it at the end of the block. With `raise_errors` its own exception is
    raised by the outermost enqueue instead. `resources` is what handlers find in `ctx.resources`."""
    return Inline(app, raise_errors=raise_errors, resources=resources)
