"""Jobs in memory, for inline mode: what the database would make of the same calls, as far as a test can
tell. Who runs the jobs, and when, is `inlining.py`'s business."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID, uuid4

import msgspec

from howdah.context import Context, _current
from howdah.encoding import payload
from howdah.errors import HowdahError, JobNotFound
from howdah.execution.run import make_context
from howdah.execution.watch import Change
from howdah.model import Event, Handle, Job, JobRef, NewJobLike, Status
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
from howdah.protocol.operations import _many, to_id
from howdah.testing.running import pass_on_interrupt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from howdah.app import App
    from howdah.task import Task


@dataclass(slots=True, eq=False)
class Entry:
    """A job, its history, and whether the test has looked at how it ended."""

    job: Job
    depth: int = 0
    seen: bool = False
    context: Context | None = None
    cause: BaseException | None = None
    completion: tuple[Any] | None = None
    events: list[Event] = field(default_factory=list)
    reports: list[tuple[int, str | None]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def look(self) -> Job:
        """The job as it is, on behalf of the test."""
        self.seen = True
        return self.job

    def change(self, *events: Event, **fields: Any) -> None:
        """Set fields, append events, and note what a watcher would be told."""
        self.events += events
        self.job = msgspec.structs.replace(self.job, events_count=len(self.events), **fields)
        self.changes.append(Change(self.job, events))

    def end(self, status: Status, **fields: Any) -> None:
        """The job's last change."""
        self.seen = False
        self.change(status=status, completed_at=_now(), lease_id=None, **fields)


Attempts: TypeAlias = Generator[tuple["Task[..., Any]", Context], Outcome, None]


class Memory:
    """The jobs of one inline block. It is also the `Sink` of their contexts."""

    def __init__(self, app: App, resources: Mapping[str, Any] | None) -> None:
        self._app = app
        self.operations = app.backend.operations
        self._resources = resources
        self._lock = threading.Lock()
        self._keys: dict[str, UUID] = {}
        self._numbers = count(1)
        self.entries: dict[UUID, Entry] = {}

    def all(self) -> list[Entry]:
        """The entries so far. A copy, as other threads may add to them."""
        return list(self.entries.values())

    def add(self, jobs: Iterable[NewJobLike]) -> list[tuple[Entry, bool]]:
        """Add jobs, all or none, unless their idempotency key is taken: (entry, is_new) of each."""
        encoded = self.operations.encode_many(jobs)
        with self._lock:
            return [self._add(fields) for fields in encoded]

    def _add(self, fields: dict[str, Any]) -> tuple[Entry, bool]:
        key, job_id = fields.get("idempotency_key"), fields["id"]
        if key is not None and (first := self._keys.setdefault(key, job_id)) != job_id:
            return self.entries[first], False
        now = _now()
        run_at = datetime.fromisoformat(fields["run_at"]) if "run_at" in fields else now
        values: dict[str, Any] = dict.fromkeys(Job.__struct_fields__) | {
            "queue": "default", "priority": 100, "max_attempts": 3, "status": Status.PENDING,
            "progress": 0, "events_count": 0, "claims": 0, "attempts": 0, "blockers": 0,
            "holds_key": False, "cancel_requested": False, "created_at": now,
        }  # fmt: skip
        values |= {name: value for name, value in fields.items() if name in values}
        values |= {
            "id": job_id,
            "seq": next(self._numbers),
            "data": payload.decode(bytes(memoryview(fields["data"])).decode()),
            "run_at": max(now, run_at + timedelta(seconds=fields.get("delay", 0))),
        }
        if "keep" in fields:
            values["keep"] = timedelta(seconds=float(fields["keep"].split()[0]))
        entry = self.entries[job_id] = Entry(Job(**values))
        entry.change()
        return entry, True

    def entry(self, ref: JobRef) -> Entry:
        """The entry of a job, or `JobNotFound`."""
        job_id = to_id(ref)
        if job_id not in self.entries:
            raise JobNotFound(job_id)
        return self.entries[job_id]

    def pending(self) -> list[Entry]:
        """What has not run, and could, in due order."""
        waiting = [entry for entry in self.all() if entry.job.status is Status.PENDING]
        known = [entry for entry in waiting if entry.job.job_type in self._app.tasks]
        return sorted(known, key=lambda entry: (entry.job.run_at, entry.job.seq))

    def failures(self, *, seen: bool = False) -> list[Entry]:
        """What failed for good; only what nobody has looked at unless `seen`."""
        failed = [entry for entry in self.all() if entry.job.status is Status.FAILED]
        return [entry for entry in failed if seen or not entry.seen]

    def depth(self) -> int:
        """How many of these jobs this code runs in, one inside the other."""
        context = _current.get()
        parent = None if context is None else self.entries.get(context.id)
        return 0 if parent is None else parent.depth + 1

    # ── one job ───────────────────────────────────────────────────────────────────────────────────

    def attempts(self, entry: Entry) -> Attempts:
        """The runs of a job, one after the other, until it has ended or waits for its time."""
        while entry.job.status is Status.PENDING:
            task, job, now = self._app.get_task(entry.job.job_type), entry.job, _now()
            entry.change(
                status=Status.RUNNING, attempts=job.attempts + 1, claims=job.claims + 1,
                claimed_at=now, started_at=now, lease_id=uuid4(), progress=0, current_stage=None,
            )  # fmt: skip
            entry.context = make_context(
                task, entry.job, data=entry.job.data, sink=self, resources=self._resources
            )
            outcome = yield task, entry.context
            entry.context, entry.cause = None, None
            waits = self._settle(entry, outcome)
            pass_on_interrupt(outcome)
            if waits:
                return

    def _settle(self, entry: Entry, outcome: Outcome) -> bool:
        """Take over an outcome; whether the job is to wait before it runs again."""
        job = entry.job
        match outcome:
            case Completed(result):
                value = None if result is None else payload.decode(result)
                entry.end(Status.COMPLETED, result=value, progress=100)
            case CompletedByHandler() if entry.completion is not None:
                entry.end(Status.COMPLETED, result=entry.completion[0], progress=100)
            case Released(delay):
                due = _now() + timedelta(seconds=delay)
                entry.change(
                    status=Status.PENDING, attempts=job.attempts - 1, run_at=due, lease_id=None,
                    started_at=None, claimed_at=None,
                )  # fmt: skip
                return True
            case Cancelled(reason):
                entry.end(Status.CANCELLED, last_error=reason)
            case Failed(error, traceback, retry_in, cause):
                entry.cause = cause
                self._fail(entry, error, traceback, again=retry_in is not None)
            case CompletedByHandler():
                self._fail(entry, NOT_COMMITTED, None, again=True)
            case Lost():
                self._fail(entry, "the handler says that its lease was lost", None, again=True)
        return False

    def _fail(self, entry: Entry, error: str, traceback: str | None, *, again: bool) -> None:
        job = entry.job
        data = {"error": error} | ({} if traceback is None else {"traceback": traceback})
        entry.change(self._event(job, "error", data), last_error=error)
        if again and job.attempts < job.max_attempts:
            entry.change(status=Status.PENDING, lease_id=None, started_at=None, claimed_at=None)
        else:
            entry.end(Status.FAILED)

    def _event(self, job: Job, kind: str, data: Any) -> Event:
        number = next(self._numbers)
        return Event(
            job_id=job.id, event_id=number, at=_now(), attempt=job.attempts, kind=kind, data=data
        )

    # ── Sink ──────────────────────────────────────────────────────────────────────────────────────

    def progress(self, job_id: UUID, percent: int | None, stage: str | None) -> None:
        """Note the progress of a job."""
        entry = self.entries[job_id]
        entry.reports.append((percent or 0, stage))
        entry.change(progress=percent, current_stage=stage)

    def event(self, job_id: UUID, kind: str, data: str) -> None:
        """Note an event."""
        entry = self.entries[job_id]
        entry.change(self._event(entry.job, kind, payload.decode(data)))


def _now() -> datetime:
    return datetime.now(UTC)


class MemoryQueue:
    """In the place of a `JobQueue`: what makes sense without a database and without workers."""

    def __init__(self, memory: Memory, run: Callable[[Iterable[Entry]], None]) -> None:
        self.memory = memory
        self._run = run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise HowdahError(f"inline mode has no {name}: there is no database. Use drain for that.")

    def enqueue(
        self, job_type: str, data: Any = None, *, conn: Any = None, **options: Any
    ) -> Handle:
        """Add a job, and run it."""
        job = {"job_type": job_type, "data": {} if data is None else data, **options}
        return self.enqueue_job(job)

    def enqueue_job(self, job: NewJobLike, conn: Any = None) -> Handle:
        return self.enqueue_many([job])[0]

    def enqueue_many(self, jobs: Iterable[NewJobLike], *, conn: Any = None) -> list[Handle]:
        """Add jobs, and run them one after the other."""
        added = self.memory.add(jobs)
        self._run(self.due(added))
        return [Handle(entry.job.id, is_new) for entry, is_new in added]

    def due(self, added: list[tuple[Entry, bool]]) -> list[Entry]:
        """Those of the added that run now: not what is known already, delayed, or nobody's task."""
        new = {entry.job.id for entry, is_new in added if is_new}
        now = _now()
        return [e for e in self.memory.pending() if e.job.id in new and e.job.run_at <= now]

    def complete(self, job: JobRef, result: Any = None, *, conn: Any = None) -> None:
        """The end of a job whose handler completes it in a transaction of its own."""
        value = None if result is None else payload.decode(payload.clean_json(result))
        self.memory.entry(job).completion = (value,)

    def get(self, job: JobRef, *, conn: Any = None) -> Job:
        """A job as it is now."""
        return self.memory.entry(job).look()

    def events(self, job: JobRef, *, after: int = 0) -> list[Event]:
        """A job's events."""
        return [event for event in self.memory.entry(job).events if event.event_id > after]

    def find(
        self, *, limit: int = 50, before: JobRef | None = None, data: Any = None, **filters: Any
    ) -> list[Job]:
        """Jobs that match, newest first. Of `data` only the topmost level is compared."""
        entries = sorted(self.memory.all(), key=lambda entry: entry.job.id, reverse=True)
        matching = [
            entry
            for entry in entries
            if (before is None or entry.job.id < to_id(before))
            and all(_is(getattr(entry.job, name), value) for name, value in filters.items())
            and (data or {}).items() <= entry.job.data.items()
        ]
        return [entry.look() for entry in matching[:limit]]

    def counts(self, queue: str | None = None, job_type: str | None = None) -> dict[Status, int]:
        """How many jobs there are of each status."""
        jobs = [
            entry.job
            for entry in self.memory.all()
            if queue in (None, entry.job.queue) and job_type in (None, entry.job.job_type)
        ]
        return {status: sum(job.status is status for job in jobs) for status in Status}

    def pending(self, queue: str | None = None, job_type: str | None = None) -> int:
        """How many jobs wait."""
        return self.counts(queue, job_type)[Status.PENDING]

    def cancel(self, job: JobRef | Iterable[JobRef], *, conn: Any = None) -> dict[UUID, str]:
        """Cancel jobs that wait, and stop those that run at their next report."""
        answer = {}
        for entry in map(self.memory.entry, _many(job)):
            if entry.context is not None:
                entry.context.run.abort("cancelled")
                answer[entry.job.id] = "cancelling"
            elif entry.job.status is Status.PENDING:
                entry.end(Status.CANCELLED)
                answer[entry.job.id] = "cancelled"
        return answer

    def close(self) -> None:
        """Nothing is open."""


def _is(found: object, wanted: str | Sequence[str] | None) -> bool:
    return wanted is None or found in ([wanted] if isinstance(wanted, str) else wanted)


class AsyncMemoryQueue:
    """In the place of an `AsyncJobQueue`."""

    def __init__(
        self, queue: MemoryQueue, arun: Callable[[Iterable[Entry]], Awaitable[None]]
    ) -> None:
        self._queue = queue
        self._arun = arun

    async def enqueue(
        self, job_type: str, data: Any = None, *, conn: Any = None, **options: Any
    ) -> Handle:
        """Add a job, and run it."""
        job = {"job_type": job_type, "data": {} if data is None else data, **options}
        return await self.enqueue_job(job)

    async def enqueue_job(self, job: NewJobLike, conn: Any = None) -> Handle:
        return (await self.enqueue_many([job]))[0]

    async def enqueue_many(self, jobs: Iterable[NewJobLike], *, conn: Any = None) -> list[Handle]:
        """Add jobs, and run them one after the other."""
        added = self._queue.memory.add(jobs)
        await self._arun(self._queue.due(added))
        return [Handle(entry.job.id, is_new) for entry, is_new in added]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._queue, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return call
