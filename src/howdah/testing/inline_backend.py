"""What replaces the database in inline mode: the backends of the queues and the watchers, with the jobs in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from howdah.encoding import payload
from howdah.errors import HowdahError
from howdah.model import Status
from howdah.protocol.job_refs import to_id, to_refs
from howdah.protocol.statements import Statement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from uuid import UUID

    from howdah.app import App
    from howdah.execution.watch import Change
    from howdah.model import Event, Job, JobRef, NewJob, NewJobLike
    from howdah.testing.inline_jobs import InlineJobs
    from howdah.testing.running import Steps

T = TypeVar("T")


def inline_jobs(app: App) -> list[Job] | None:
    """The jobs of the inline block that the app is in, or None outside of one."""
    backend: Any = app.backend
    return backend.jobs() if isinstance(backend, InlineBackend) else None


class InlineBackend:
    """Replaces the operations and the backend of a queue: `get`, `find`, `cancel` and the like return
    answers instead of statements, and `run` passes them on. With `drive_async`, methods return coroutines.
    """

    def __init__(self, jobs: InlineJobs, replaced: Any, drive: Callable[[Steps[Any]], Any]) -> None:
        self._jobs = jobs
        self._drive = drive
        self.operations = replaced.operations
        self.store = replaced.store
        self.new_job = self.operations.new_job

    def __getattr__(self, name: str) -> Any:
        raise _unavailable(name)

    def enqueue(self, job: NewJob, conn: Any = None) -> Any:
        """Add one job, and run it if it is due."""
        return self._drive(self._jobs.enqueue_one(self.operations.encode(job)))

    def enqueue_many(self, jobs: Iterable[NewJobLike], conn: Any = None) -> Any:
        """Add jobs, all or none, and run those that are due."""
        return self._drive(self._jobs.enqueue(self.operations.encode_many(jobs)))

    def run(self, answer: Any, conn: Any = None) -> Any:
        """Pass on an answer. Only the app itself builds statements, for `takeover`."""
        if isinstance(answer, Statement):
            raise _unavailable(answer.operation)
        return self._drive(_give(answer))

    settle = run  # nothing else can lock a job here

    def jobs(self) -> list[Job]:
        """All jobs as they are now, in the order in which they were enqueued."""
        return [entry.job for entry in self._jobs.entries()]

    def get(self, job: JobRef) -> Job:
        """The job as it is now."""
        return self._jobs.entry(job).inspect()

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
            for entry in sorted(self._jobs.entries(), key=lambda entry: entry.job.id, reverse=True)
            if (before is None or entry.job.id < to_id(before))
            and all(_matches(getattr(entry.job, name), value) for name, value in filters.items())
            and (data is None or _contains(entry.job.data, data))
        ]
        return [entry.inspect() for entry in matching[:limit]]

    def counts(self, queue: str | None, job_type: str | None) -> dict[Status, int]:
        """The number of jobs of each status."""
        jobs = [
            job
            for job in self.jobs()
            if _matches(job.queue, queue) and _matches(job.job_type, job_type)
        ]
        return {status: sum(job.status is status for job in jobs) for status in Status}

    def pending(self, queue: str | None, job_type: str | None) -> int:
        """The number of pending jobs."""
        return self.counts(queue, job_type)[Status.PENDING]

    def events(self, job: JobRef, after: int) -> list[Event]:
        """The events of a job after event id `after`, oldest first."""
        return [event for event in self._jobs.entry(job).events() if event.event_id > after]

    def complete(self, job: JobRef, result: Any, *, on_caller_connection: bool = False) -> None:
        """Accept the completion of a handler that completes its job in its own transaction."""
        value = None if result is None else payload.decode(payload.clean_json(result))
        self._jobs.entry(job).completion = (value,)

    def cancel(self, jobs: JobRef | Iterable[JobRef]) -> dict[UUID, str]:
        """Cancel pending jobs. A running job stops at its next report."""
        answer = {}
        for entry in map(self._jobs.entry, to_refs(jobs)):
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


class InlineWatcher:
    """Replaces the watchers of the app: the changes are those of the log."""

    def __init__(self, jobs: InlineJobs) -> None:
        self._jobs = jobs

    async def get(self, job_id: UUID) -> Job:
        """The job as it is now."""
        return self._jobs.entry(job_id).inspect()

    async def changes(self, job_id: UUID) -> AsyncIterator[Change]:
        """All changes so far. No further change follows while the caller waits."""
        entry = self._jobs.entry(job_id)
        entry.inspect()
        for change in list(entry.changes):
            yield change
        if not change.status.is_final:
            raise HowdahError(
                f"job {job_id} ({change.job.job_type}) is {change.status} and nothing runs it: inline "
                "mode does not wait. Delayed and snoozed jobs run when you call log.run_pending()."
            )
