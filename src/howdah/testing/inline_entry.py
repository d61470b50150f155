"""One job of inline mode and its history: what each outcome of an attempt does to the job. `inline_jobs.py` decides
which job runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from howdah.encoding import payload
from howdah.execution.run import make_context
from howdah.execution.watch import Change
from howdah.model import Event, Job, Status
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from howdah.context import Context, RunState
    from howdah.task import Task

_numbers = count(1)


@dataclass(slots=True, eq=False)
class Entry:
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
    def of(cls, fields: Mapping[str, Any]) -> Entry:
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

    def events(self) -> list[Event]:
        """Its events, oldest first."""
        return [event for change in list(self.changes) for event in change.events]

    def is_due(self) -> bool:
        """Whether the job may run now."""
        return self.job.run_at <= _now()

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

    def progress(self, run: RunState, percent: int | None, stage: str | None) -> None:
        """Record the progress that the handler reports."""
        self.reports.append((percent or 0, stage))
        self._change(progress=percent, current_stage=stage)

    def event(self, run: RunState, kind: str, data: str) -> bool:
        """Record an event that the handler adds."""
        self._change((kind, payload.decode(data)))
        return True


def _now() -> datetime:
    return datetime.now(UTC)
