"""Inline mode: inside the block, a task runs where it is enqueued, without a database. Arguments and results go
through the same checks, JSON encoding and conversions as in production.

Due jobs run immediately, and so do their retries. Delayed and snoozed jobs stay pending until
`Log.run_pending`. The `Log` keeps every job in memory. After the block the app is as before; handles from
inside the block keep working. Queue methods that need a database or a worker raise `HowdahError`."""

from __future__ import annotations

import copy
import inspect
from contextlib import AsyncContextDecorator, ContextDecorator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock
from uuid import UUID, uuid4

import msgspec

from howdah.context import Context, _current
from howdah.encoding import payload
from howdah.errors import HowdahError, JobFailed, JobNotFound, TaskInFlight
from howdah.execution.run import make_context
from howdah.execution.watch import Change
from howdah.model import Event, Handle, Job, Status
from howdah.outcome import (
    NOT_COMMITTED,
    Cancelled,
    Completed,
    CompletedByHandler,
    Failed,
    Lost,
    Outcome,
    Released,
)
from howdah.protocol.operations import to_id, to_refs
from howdah.protocol.statements import Statement
from howdah.task import TaskHandle
from howdah.testing import running
from howdah.testing.running import Steps, drive, drive_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from howdah.app import App
    from howdah.model import JobRef, NewJob, NewJobLike
    from howdah.task import Task

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

MAX_DEPTH = 20
MAX_RUNS = 10_000

_numbers = count(1)


class Log:
    """The jobs that were enqueued in the block, and their history."""

    def __init__(
        self, app: App, *, raise_errors: bool = False, resources: Mapping[str, Any] | None = None
    ) -> None:
        self._app = app
        self._raise_errors = raise_errors
        self._resources = resources
        self._by_id: dict[UUID, _Entry] = {}
        self._by_key: dict[str, _Entry] = {}
        self._postponed: list[_Entry] = []
        # The queues keep their methods and checks. What is below them is replaced.
        queue, backend = copy.copy(app.queue), _Backend(self, app.backend, drive)
        vars(queue).update(_operations=backend, _backend=backend)
        aqueue, abackend = copy.copy(app.aqueue), _Backend(self, app.abackend, drive_async)
        vars(aqueue).update(_operations=abackend, _backend=abackend)
        watcher = _Watcher(self)
        self._replacements: dict[str, Any] = {
            "queue": queue,
            "aqueue": aqueue,
            "backend": backend,
            "abackend": abackend,
            "_handle": self._handle,
            "_run": lambda task, job: drive(self._run_task(task, job)),
            "_arun": lambda task, job: drive_async(self._run_task(task, job)),
            "_watcher": lambda: watcher,
            "_background_watcher": lambda: watcher,
        }
        # Handles are bound to a copy of the app that stays inline, so they also work after the block.
        self._inline_app = copy.copy(app)
        vars(self._inline_app).update(self._replacements)

    @property
    def jobs(self) -> list[Job]:
        """All jobs as they are now, in the order in which they were enqueued."""
        return [entry.job for entry in self._entries()]

    @property
    def failed(self) -> list[Job]:
        """The jobs that failed permanently. The test has then inspected them."""
        return [entry.inspect() for entry in self._entries(Status.FAILED)]

    def changes(self, job: JobRef) -> list[Change]:
        """All state changes of the job, from the beginning."""
        entry = self._entry(job)
        entry.inspect()
        return list(entry.changes)

    def progress(self, job: JobRef) -> list[tuple[int, str | None]]:
        """Every (percent, stage) that its handler reported."""
        return list(self._entry(job).reports)

    def events(self, job: JobRef) -> list[Event]:
        """Its events, oldest first."""
        return [event for change in list(self._entry(job).changes) for event in change.events]

    def error(self, job: JobRef) -> BaseException | None:
        """The exception that ended its last attempt."""
        entry = self._entry(job)
        entry.inspect()
        return entry.error

    def run_pending(self) -> int:
        """Run the pending jobs now, in due order, although they are delayed. Returns their number."""
        return drive(self._run_all(self._pending()))

    async def arun_pending(self) -> int:
        """`run_pending`, awaited."""
        return await drive_async(self._run_all(self._pending()))

    def _entries(self, status: Status | None = None) -> list[_Entry]:
        entries = list(self._by_id.values())  # a copy: other threads may add entries
        return [entry for entry in entries if status in (None, entry.job.status)]

    def _entry(self, ref: JobRef) -> _Entry:
        job_id = to_id(ref)
        if job_id not in self._by_id:
            raise JobNotFound(job_id)
        return self._by_id[job_id]

    def _pending(self) -> list[_Entry]:
        """The pending jobs of this app's tasks, in due order."""
        pending = self._entries(Status.PENDING)
        runnable = [entry for entry in pending if entry.job.job_type in self._app.tasks]
        return sorted(runnable, key=lambda entry: (entry.job.run_at, entry.job.seq))

    def _failures(self) -> list[_Entry]:
        """The failed jobs that the test has not inspected."""
        return [entry for entry in self._entries(Status.FAILED) if not entry.inspected]

    def _enqueue(self, jobs: list[dict[str, Any]]) -> Steps[list[Handle]]:
        """Add encoded jobs and run those that are new and due."""
        added = [self._add(fields) for fields in jobs]
        new = {handle.id for handle in added if handle.is_new}
        now = _now()
        due = [e for e in self._pending() if e.job.id in new and e.job.run_at <= now]
        yield from self._run_all(due)
        return added

    def _enqueue_one(self, job: dict[str, Any]) -> Steps[Handle]:
        (handle,) = yield from self._enqueue([job])
        return handle

    def _add(self, fields: dict[str, Any]) -> Handle:
        entry = first = _Entry.of(fields)
        if (key := entry.job.idempotency_key) is not None:
            first = self._by_key.setdefault(key, entry)  # atomic: other threads may use the key
        self._by_id.setdefault(first.job.id, first)
        return Handle(first.job.id, first is entry)

    def _run_all(self, entries: list[_Entry]) -> Steps[int]:
        context = _current.get()
        parent = None if context is None else self._by_id.get(context.id)
        depth = 0 if parent is None else parent.depth + 1
        for entry in entries:
            entry.depth = depth
        if depth > MAX_DEPTH:
            # A task that enqueues its successor would reach Python's recursion limit. The outermost
            # call runs these jobs.
            self._postponed += entries
            return 0
        todo = list(entries)
        runs = 0
        while todo:
            yield from self._run_one(todo.pop(0))
            runs += 1
            if depth == 0:
                if runs > MAX_RUNS:
                    raise HowdahError(
                        f"one enqueue led to more than {MAX_RUNS:,} jobs in inline mode; "
                        "a task seems to enqueue itself without end."
                    )
                postponed, self._postponed = self._postponed, []
                todo += postponed
        if depth == 0 and self._raise_errors and (failures := self._failures()):
            for entry in failures:
                entry.inspect()
            raise failures[0].error or JobFailed(failures[0].job)
        return len(entries)

    def _run_one(self, entry: _Entry) -> Steps[None]:
        """The attempts of one job, until it has ended or is delayed."""
        again = entry.job.status is Status.PENDING
        while again:
            task = self._app.get_task(entry.job.job_type)
            outcome = yield task, entry.start(task, self._resources)
            again = entry.finish(outcome)
            running.raise_interrupt(outcome)

    def _run_task(self, task: Task[..., Any], job: NewJob) -> Steps[Any]:
        """`task.run`."""
        handle = yield from self._enqueue_one(self._app.backend.operations.encode(job))
        entry = self._entry(handle)
        entry.inspect()
        if entry.error is not None:
            raise entry.error
        if not entry.job.status.is_final:
            raise TaskInFlight(handle.id)
        return task.read_result(entry.job)

    def _handle(self, handle: Handle, task: Task[..., Any]) -> TaskHandle[Any]:
        bound = task.using()
        bound.app = self._inline_app
        return TaskHandle(handle.id, handle.is_new, bound)


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True, eq=False)
class _Entry:
    """A job and its history. It is also the `Sink` of the job's contexts."""

    job: Job
    depth: int = 0
    inspected: bool = False
    context: Context | None = None
    error: BaseException | None = None
    completion: tuple[Any] | None = None
    reports: list[tuple[int, str | None]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> _Entry:
        """The entry of an encoded job, with the column defaults of the database."""
        now = _now()
        run_at = datetime.fromisoformat(fields["run_at"]) if "run_at" in fields else now
        values: dict[str, Any] = dict.fromkeys(Job.__struct_fields__) | {
            "queue": "default", "priority": 100, "max_attempts": 3, "status": Status.PENDING,
            "progress": 0, "events_count": 0, "claims": 0, "attempts": 0, "blockers": 0,
            "holds_key": False, "cancel_requested": False, "created_at": now,
        }  # fmt: skip
        values |= {name: value for name, value in fields.items() if name in values}
        values["seq"] = next(_numbers)
        values["data"] = payload.decode(bytes(memoryview(fields["data"])).decode())
        values["run_at"] = max(now, run_at + timedelta(seconds=fields.get("delay", 0)))
        if "keep" in fields:
            values["keep"] = timedelta(seconds=float(fields["keep"].split()[0]))
        job = Job(**values)
        return cls(job, changes=[Change(job, ())])

    def inspect(self) -> Job:
        """The job, for the test. A failure that the test has inspected is not raised at the end."""
        self.inspected = True
        return self.job

    def start(self, task: Task[..., Any], resources: Mapping[str, Any] | None) -> Context:
        """Start an attempt."""
        now, job = _now(), self.job
        self.completion = None
        self._change(
            status=Status.RUNNING, attempts=job.attempts + 1, claims=job.claims + 1,
            claimed_at=now, started_at=now, lease_id=uuid4(), progress=0, current_stage=None,
        )  # fmt: skip
        self.context = make_context(
            task, self.job, data=self.job.data, sink=self, resources=resources
        )
        return self.context

    def finish(self, outcome: Outcome) -> bool:
        """End an attempt. Returns whether the job runs again now."""
        self.context = self.error = None
        match outcome:
            case Completed(result):
                value = None if result is None else payload.decode(result)
                self.end(Status.COMPLETED, result=value, progress=100)
            case Released(delay):
                run_at = _now() + timedelta(seconds=delay)
                self._requeue(attempts=self.job.attempts - 1, run_at=run_at)
                return False
            case Cancelled(reason):
                self.end(Status.CANCELLED, last_error=reason)
            case Failed(error, traceback, retry_in, cause):
                self.error = cause
                self._fail(error, traceback, retry=retry_in is not None)
            case Lost():
                self._fail("the handler reported that its lease was lost")
            case CompletedByHandler() if self.completion is not None:
                self.end(Status.COMPLETED, result=self.completion[0], progress=100)
            case CompletedByHandler():
                self._fail(NOT_COMMITTED)
        return not self.job.status.is_final

    def end(self, status: Status, **fields: Any) -> None:
        """Set a final status."""
        self.inspected = False
        self._change(status=status, completed_at=_now(), lease_id=None, **fields)

    def _fail(self, error: str, traceback: str | None = None, *, retry: bool = True) -> None:
        data = {"error": error} | ({} if traceback is None else {"traceback": traceback})
        self._change(("error", data), last_error=error)
        if retry and self.job.attempts < self.job.max_attempts:
            self._requeue()
        else:
            self.end(Status.FAILED)

    def _requeue(self, **fields: Any) -> None:
        idle: dict[str, Any] = {"lease_id": None, "started_at": None, "claimed_at": None}
        self._change(status=Status.PENDING, **idle, **fields)

    def _change(self, event: tuple[str, Any] | None = None, **fields: Any) -> None:
        """Set fields, add an event, and record what a watcher would receive."""
        events = () if event is None else (self._new_event(*event),)
        number = self.job.events_count + len(events)
        self.job = msgspec.structs.replace(self.job, events_count=number, **fields)
        self.changes.append(Change(self.job, events))

    def _new_event(self, kind: str, data: Any) -> Event:
        job, number = self.job, next(_numbers)
        return Event(
            job_id=job.id, event_id=number, at=_now(), attempt=job.attempts, kind=kind, data=data
        )

    def progress(self, job_id: UUID, percent: int | None, stage: str | None) -> None:
        """Record the progress that the handler reports."""
        self.reports.append((percent or 0, stage))
        self._change(progress=percent, current_stage=stage)

    def event(self, job_id: UUID, kind: str, data: str) -> None:
        """Record an event that the handler adds."""
        self._change((kind, payload.decode(data)))


class _Backend:
    """Replaces the operations and the backend of a queue: `get`, `find`, `cancel` and the like return
    answers instead of statements, and `run` passes them on. With `drive_async`, methods return coroutines.
    """

    def __init__(self, log: Log, replaced: Any, drive: Callable[[Steps[Any]], Any]) -> None:
        self._log = log
        self._drive = drive
        self.operations = replaced.operations
        self.store = replaced.store
        self.new_job = self.operations.new_job

    def __getattr__(self, name: str) -> Any:
        raise _unavailable(name)

    def enqueue(self, job: NewJob, conn: Any = None) -> Any:
        """Add one job, and run it if it is due."""
        return self._drive(self._log._enqueue_one(self.operations.encode(job)))

    def enqueue_many(self, jobs: Iterable[NewJobLike], conn: Any = None) -> Any:
        """Add jobs, all or none, and run those that are due."""
        return self._drive(self._log._enqueue(self.operations.encode_many(jobs)))

    def run(self, answer: Any, conn: Any = None) -> Any:
        """Pass on an answer. Only the app itself builds statements, for `takeover`."""
        if isinstance(answer, Statement):
            raise _unavailable(answer.operation)
        return self._drive(_give(answer))

    def get(self, job: JobRef) -> Job:
        """The job as it is now."""
        return self._log._entry(job).inspect()

    def find(
        self,
        limit: int,
        before: JobRef | None,
        data: Any,
        unknown: Mapping[str, Any],
        **filters: str | Sequence[str] | None,
    ) -> list[Job]:
        """Jobs that match, newest first. Only the top level of `data` is compared."""
        self.operations.find(limit, before, data, unknown, **filters)  # for its checks
        matching = [
            entry
            for entry in sorted(self._log._entries(), key=lambda entry: entry.job.id, reverse=True)
            if (before is None or entry.job.id < to_id(before))
            and all(_matches(getattr(entry.job, name), value) for name, value in filters.items())
            and (data is None or _contains(entry.job.data, data))
        ]
        return [entry.inspect() for entry in matching[:limit]]

    def counts(self, queue: str | None, job_type: str | None) -> dict[Status, int]:
        """The number of jobs of each status."""
        jobs = [
            job
            for job in self._log.jobs
            if _matches(job.queue, queue) and _matches(job.job_type, job_type)
        ]
        return {status: sum(job.status is status for job in jobs) for status in Status}

    def pending(self, queue: str | None, job_type: str | None) -> int:
        """The number of pending jobs."""
        return self.counts(queue, job_type)[Status.PENDING]

    def events(self, job: JobRef, after: int) -> list[Event]:
        """The events of a job after event id `after`, oldest first."""
        return [event for event in self._log.events(job) if event.event_id > after]

    def complete(self, job: JobRef, result: Any, *, on_caller_connection: bool = False) -> None:
        """Accept the completion of a handler that completes its job in its own transaction."""
        value = None if result is None else payload.decode(payload.clean_json(result))
        self._log._entry(job).completion = (value,)

    def cancel(self, jobs: JobRef | Iterable[JobRef]) -> dict[UUID, str]:
        """Cancel pending jobs. A running job stops at its next report."""
        answer = {}
        for entry in map(self._log._entry, to_refs(jobs)):
            if entry.context is not None:
                entry.context.run.abort("cancelled")
                answer[entry.job.id] = "cancelling"
            elif entry.job.status is Status.PENDING:
                entry.end(Status.CANCELLED)
                answer[entry.job.id] = "cancelled"
        return answer


def _give(answer: T) -> Steps[T]:
    return answer
    yield


def _matches(found: str, wanted: str | Sequence[str] | None) -> bool:
    return wanted is None or found in ([wanted] if isinstance(wanted, str) else wanted)


def _contains(found: Any, wanted: Mapping[str, Any]) -> bool:
    return isinstance(found, dict) and wanted.items() <= found.items()


def _unavailable(name: str) -> Exception:
    if name.startswith("__"):
        return AttributeError(name)
    return HowdahError(f"inline mode has no {name}: there is no database. Use drain for that.")


def inline_log(app: App) -> Log | None:
    """The log of the inline block that the app is in."""
    backend: Any = app.backend
    return backend._log if isinstance(backend, _Backend) else None


class _Watcher:
    """Replaces the watchers of the app: the changes are those of the log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def get(self, job_id: UUID) -> Job:
        """The job as it is now."""
        return self._log._entry(job_id).inspect()

    async def changes(self, job_id: UUID) -> AsyncIterator[Change]:
        """All changes so far. No further change follows while the caller waits."""
        for change in self._log.changes(job_id):
            yield change
        if not change.status.is_final:
            raise HowdahError(
                f"job {job_id} ({change.job.job_type}) is {change.status} and nothing runs it: inline "
                "mode does not wait. Delayed and snoozed jobs run when you call log.run_pending()."
            )


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
            for entry in log._failures():
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
