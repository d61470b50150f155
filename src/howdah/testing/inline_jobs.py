"""The jobs of inline mode, in memory: which of them an idempotency key refers to, and which run when.

Due jobs run immediately, and so do their retries. Delayed and snoozed jobs stay pending until `Log.run_pending`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from howdah.context import _current
from howdah.errors import HowdahError, IdempotencyConflict, JobFailed, JobNotFound, TaskInFlight
from howdah.model import Handle, Status
from howdah.protocol.job_refs import to_id
from howdah.testing import running
from howdah.testing.inline_entry import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from howdah.app import App
    from howdah.model import JobRef, NewJob
    from howdah.task import Task
    from howdah.testing.running import Steps

MAX_DEPTH = 20
MAX_RUNS = 10_000


class InlineJobs:
    """The jobs that were enqueued in one block."""

    def __init__(
        self, app: App, *, raise_errors: bool, resources: Mapping[str, Any] | None
    ) -> None:
        self._app = app
        self._raise_errors = raise_errors
        self._resources = resources
        self._lock = threading.Lock()
        self._by_id: dict[UUID, Entry] = {}
        self._by_key: dict[tuple[str, str], Entry] = {}
        self._postponed: list[Entry] = []

    def entries(self, status: Status | None = None) -> list[Entry]:
        """The jobs, in the order in which they were enqueued."""
        entries = list(self._by_id.values())  # a copy: other threads may add entries
        return [entry for entry in entries if status in (None, entry.job.status)]

    def entry(self, ref: JobRef) -> Entry:
        """The job that a caller refers to."""
        job_id = to_id(ref)
        if job_id not in self._by_id:
            raise JobNotFound(job_id)
        return self._by_id[job_id]

    def pending(self) -> list[Entry]:
        """The pending jobs of this app's tasks, in due order."""
        pending = self.entries(Status.PENDING)
        runnable = [entry for entry in pending if entry.job.job_type in self._app.tasks]
        return sorted(runnable, key=lambda entry: (entry.job.run_at, entry.job.seq))

    def failures(self) -> list[Entry]:
        """The failed jobs that the test has not inspected."""
        return [entry for entry in self.entries(Status.FAILED) if not entry.inspected]

    def enqueue(self, jobs: list[dict[str, Any]], *, is_bulk: bool = True) -> Steps[list[Handle]]:
        """Add encoded jobs, all or none, and run those that are new and due."""
        added = self._add([Entry.of(fields) for fields in jobs], is_bulk=is_bulk)
        new = {handle.id for handle in added if handle.is_new}
        yield from self.run([e for e in self.pending() if e.job.id in new and e.is_due()])
        return added

    def enqueue_one(self, job: dict[str, Any]) -> Steps[Handle]:
        """Add one encoded job, and run it if it is new and due."""
        (handle,) = yield from self.enqueue([job], is_bulk=False)
        return handle

    def _add(self, entries: list[Entry], *, is_bulk: bool) -> list[Handle]:
        with self._lock:  # other threads may use the same keys
            taken: dict[tuple[str, str], Entry] = {}
            firsts = [
                self._first_of_key(entry, taken, index if is_bulk else None)
                for index, entry in enumerate(entries)
            ]
            self._by_key |= taken
            self._by_id |= {first.job.id: first for first in firsts}
        return [
            Handle(first.job.id, first is entry)
            for first, entry in zip(firsts, entries, strict=True)
        ]

    def _first_of_key(
        self, entry: Entry, taken: dict[tuple[str, str], Entry], index: int | None
    ) -> Entry:
        """The job that holds the idempotency key of this one: another job, or this one, which is added to `taken`."""
        if entry.job.idempotency_key is None:
            return entry
        key = (entry.job.job_type, entry.job.idempotency_key)
        first = taken.get(key) or self._by_key.get(key)
        if first is None or first.job.status in (Status.FAILED, Status.CANCELLED):
            taken[key] = entry
            return entry
        if first.job.data != entry.job.data:
            raise IdempotencyConflict(
                f'the idempotency key "{key[1]}" of job type "{key[0]}" belongs to job {first.job.id}, '
                "which has other data. Use another key for other data.",
                id=first.job.id,
                index=index,
            )
        return first

    def run(self, entries: list[Entry]) -> Steps[int]:
        """Run jobs one after the other, and the jobs that they enqueue. Returns the number of `entries`."""
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
        if depth == 0 and self._raise_errors and (failures := self.failures()):
            for entry in failures:
                entry.inspect()
            raise failures[0].error or JobFailed(failures[0].job)
        return len(entries)

    def _run_one(self, entry: Entry) -> Steps[None]:
        """The attempts of one job, until it has ended or is delayed."""
        again = entry.job.status is Status.PENDING
        while again:
            task = self._app.get_task(entry.job.job_type)
            outcome = yield task, entry.start(task, self._resources)
            again = entry.finish(outcome)
            running.raise_interrupt(outcome)

    def run_task(self, task: Task[..., Any], job: NewJob) -> Steps[Any]:
        """`task.run`."""
        handle = yield from self.enqueue_one(self._app.backend.operations.encode(job))
        entry = self.entry(handle)
        entry.inspect()
        if entry.error is not None:
            raise entry.error
        if not entry.job.status.is_final:
            raise TaskInFlight(handle.id)
        return task.read_result(entry.job)
