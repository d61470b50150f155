"""The runs in flight, and what their handlers report: buffers progress and events, and sends them in few statements. The
heartbeat decides when; a run whose report shows that its lease was lost, or its job cancelled, is aborted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, TypeGuard

from howdah.database.driver_errors import is_statement_cancelled, is_too_much, is_transient
from howdah.encoding.safe_logger import get_logger
from howdah.errors import DatabaseUnreachable, TooManyEvents
from howdah.execution.event_buffer import OVERFLOW, RUN_EVENTS, EventBuffer, ReportedEvent
from howdah.execution.repeated_lines import RepeatedLines
from howdah.execution.run import Lease, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from uuid import UUID

    from howdah.context import RunState
    from howdah.database.store import Store
    from howdah.outcome import AbortReason
    from howdah.protocol.statements import Statement
    from howdah.protocol.worker_statements import WorkerStatements

logger = get_logger(__name__)

URGENT_FLUSH_SECONDS = 0.05
FLUSH_SECONDS = 0.5
FULL_WAIT_SECONDS = 0.1


class Reports:
    """The `Sink` of the contexts in this process. Its methods may be called from any thread."""

    def __init__(
        self, store: Store, statements: WorkerStatements, on_abort: Callable[[Run], None]
    ) -> None:
        self._store = store
        self._statements = statements
        self._on_abort = on_abort
        self.lines = RepeatedLines()
        self._runs: dict[UUID, Run] = {}  # in flight: the newest run of each job
        self._leases: dict[UUID, Lease] = {}  # of these runs
        self._ended: list[UUID] = []  # leases to remove
        self._progress: dict[Run, tuple[int | None, str | None]] = {}
        self._last_stages: dict[Run, str | None] = {}
        self._events = EventBuffer()
        # Runs whose job another transaction has locked, and when to try their events again.
        self._locked: dict[Run, float] = {}
        self._reported: dict[Run, Future[None]] = {}
        self._buffer_lock = threading.Lock()  # never held while a statement runs
        self._sent = threading.Condition(self._buffer_lock)
        # Reports and leases are sent one after the other: each skips rows that the other has locked.
        self._send_lock = threading.Lock()
        self._wake = threading.Event()
        self._flush_at = float("inf")

    # ── runs in flight ────────────────────────────────────────────────────────────────────────────

    def add(self, runs: Sequence[Run]) -> None:
        """Extend the leases of these runs from now on. An older run of one of their jobs has lost its lease to this
        claim, so it is aborted."""
        older: list[Run] = []
        with self._buffer_lock:
            lease: Lease | None = None
            for run in runs:
                before = self._runs.get(run.id)
                if before is not None:
                    self._end_flight(before, is_accepted=False)
                    older.append(before)
                if lease is None or lease.id != run.lease_id:
                    lease = self._leases.get(run.lease_id) or Lease(run.lease_id)
                    self._leases[lease.id] = lease
                run.lease = lease
                lease.left += 1
                self._runs[run.id] = run
        for run in older:
            if not run.finishing:
                self._abort(run, "lost")

    def _end_flight(self, run: Run, *, is_accepted: bool) -> None:
        lease, run.lease = run.lease, None
        if lease is not None:
            del self._runs[run.id]
            lease.left -= 1
            lease.rejected += not is_accepted
            if not lease.left:
                self._leases.pop(lease.id, None)
                if lease.has_ended:
                    self._ended.append(lease.id)

    def remove(self, runs: Iterable[Run], *, is_accepted: bool) -> None:
        """Stop extending the leases of these runs. `is_accepted`: the database has written their outcomes."""
        with self._buffer_lock:
            for run in runs:
                self._end_flight(run, is_accepted=is_accepted)
                if self._last_stages:
                    self._last_stages.pop(run, None)
                if self._locked:
                    self._locked.pop(run, None)
                if run in self._events:
                    self.lines.log(
                        logger, logging.WARNING, "events were not written before their job ended",
                        kind=("events", run.job.job_type),
                        fields={"job_id": str(run.id), "events": self._events.remove(run)},
                    )  # fmt: skip

    def runs(self) -> list[Run]:
        """The runs in flight."""
        return list(self._runs.values())

    # ── Sink ──────────────────────────────────────────────────────────────────────────────────────

    def progress(self, run: RunState, percent: int | None, stage: str | None) -> None:
        """Buffer progress. A first report or a new stage is sent within 50 ms, the rest twice a second."""
        with self._buffer_lock:
            if not self.is_in_flight(run):
                return
            run.dirty = True
            self._progress[run] = (percent, stage)
            urgent = self._last_stages.get(run, "") != stage
            self._last_stages[run] = stage
            self._schedule_flush(URGENT_FLUSH_SECONDS if urgent else FLUSH_SECONDS)

    def event(self, run: RunState, kind: str, data: str) -> bool:
        """Buffer an event. A handler with too many events waits until some are written; one in the event loop,
        which must not wait there, may have more of them, and is then refused. False: not yet."""
        with self._buffer_lock:
            if not self.is_in_flight(run) or run.finishing:
                return True
            if self._events.is_full(run):
                if not _has_running_loop():
                    self._sent.wait(FULL_WAIT_SECONDS)
                    return False
                if self._events.is_full(run, OVERFLOW):
                    raise TooManyEvents(run.id)
            run.dirty = True
            self._events.add(run, kind, data)
            self._schedule_flush(URGENT_FLUSH_SECONDS)
        return True

    def is_locked(self, run: Run) -> bool:
        """Whether the last events of a run were not written because another transaction has locked its job."""
        return run in self._locked

    def has_room(self, run: Run) -> bool:
        """Whether a run may buffer another event."""
        with self._buffer_lock:
            return not self._events.is_full(run)

    def is_in_flight(self, run: RunState) -> TypeGuard[Run]:
        """False for a run that has ended although its abandoned thread still reports, and for a run whose job
        was claimed again: its reports must not count for the newer run."""
        return isinstance(run, Run) and run.lease is not None

    def _schedule_flush(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        if at < self._flush_at:
            self._flush_at = at
            self._wake.set()

    def when_reported(self, run: Run) -> Future[None]:
        """A future that is done when the reports of a run are written. They are sent now."""
        with self._buffer_lock:
            future = self._reported.setdefault(run, Future())
            if not run.dirty:
                self._end_waiting(run)
            self._schedule_flush(0.0)
        return future

    def _end_waiting(self, run: Run) -> None:
        future = self._reported.pop(run, None)
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # the caller no longer waits
                future.set_result(None)

    def flush(self) -> None:
        """Send buffered progress and events now."""
        while self.flush_some():
            pass

    def flush_some(self) -> bool:
        """Send progress, and events in one statement, and return whether there are more to send now. If they cannot
        be written, they stay buffered: no report of a handler is lost, or written after its job ended."""
        with self._send_lock:
            with self._buffer_lock:
                self._flush_at = float("inf")
                progress, self._progress = self._progress, {}
                for run in [run for run in self._events if not self.is_in_flight(run)]:
                    self._events.remove(run)
                events = self._events.take(self._share)
            touched = {*progress, *(run for run, *_ in events)}
            progress = {run: sent for run, sent in progress.items() if self.is_in_flight(run)}
            unsent = events
            is_sent = False
            try:
                self._send_progress([(run, *sent) for run, sent in progress.items()])
                progress = {}
                unsent = self._send_events(events)
                is_sent = True
            except Exception as error:
                if is_too_much(error):
                    self._events.shrink(len(events))
                raise
            finally:
                with self._buffer_lock:
                    self._progress = progress | self._progress
                    self._events.put_back([each for each in unsent if each[0].lease is not None])
                    if is_sent:
                        self._note_locked(events, unsent)
                    for run in touched:
                        run.dirty = run in self._progress or run in self._events
                    for run in [run for run in self._reported if not run.dirty]:
                        self._end_waiting(run)
                    has_more = any(map(self._share, self._events))
                    if self._progress or has_more or self._locked:
                        self._schedule_flush(0.0 if is_sent and has_more else FLUSH_SECONDS)
                    self._sent.notify_all()
            self._events.grow()
            return has_more

    def _share(self, run: Run) -> int:
        """How many events of a run to send in one statement."""
        if _is_completing(run):
            return 0
        if run in self._locked:
            # One shows whether the job is still locked: the others would be sent in vain, instead of other runs'.
            return int(self._locked[run] <= time.monotonic())
        return RUN_EVENTS

    def _note_locked(self, sent: list[ReportedEvent], unsent: list[ReportedEvent]) -> None:
        locked = {run for run, *_ in unsent}
        for run in {run for run, *_ in sent} - locked:
            self._locked.pop(run, None)
        later = time.monotonic() + FLUSH_SECONDS
        self._locked.update(dict.fromkeys((run for run in locked if self.is_in_flight(run)), later))

    def _send_progress(self, reports: list[tuple[Run, int | None, str | None]]) -> None:
        """Send progress in one statement. If the database rejects it, split it until the bad report is alone."""
        if not reports:
            return
        statement = self._statements.report_progress(
            [run.id for run, _, _ in reports],
            [run.lease_id for run, _, _ in reports],
            [percent for _, percent, _ in reports],
            [stage for _, _, stage in reports],
        )
        try:
            answers = self._store.run(statement)
        except Exception as error:
            if _is_transient(error):
                raise
            if len(reports) == 1:
                self._log_rejected("progress rejected by the database", reports[0][0], error)
                return
            middle = len(reports) // 2
            self._send_progress(reports[:middle])
            self._send_progress(reports[middle:])
            return
        self._abort_lost_and_cancelled([run for run, _, _ in reports], answers)
        skipped = {job_id for job_id, reported, mine, _ in answers if mine and not reported}
        with self._buffer_lock:
            for run, percent, stage in reports:
                # Its row was locked: send it again, unless there is newer progress.
                if run.id in skipped and not run.finishing:
                    self._progress.setdefault(run, (percent, stage))

    def _send_events(self, events: list[ReportedEvent]) -> list[ReportedEvent]:
        """Send events; returns those to send later."""
        # Not those of a handler that is completing its job: its transaction may have locked the row. They are sent
        # after the handler has ended.
        rejected = self._add_events(self._statements.add_events, events)
        late = [each for each in rejected if each[0].completed_by_handler]
        unsent = [each for each in rejected if not each[0].completed_by_handler]
        unsent += self._add_events(self._statements.add_late_events, late)
        if not unsent:
            return []
        # The row is locked, or the lease was lost and the next beat will abort the run.
        runs = list({run for run, *_ in unsent})
        held = set(
            self._store.run(
                self._statements.held_jobs([run.id for run in runs], [run.lease_id for run in runs])
            )
        )
        return [each for each in unsent if (each[0].id, each[0].lease_id) in held]

    def _add_events(
        self, statement: Callable[..., Statement[list[UUID]]], events: list[ReportedEvent]
    ) -> list[ReportedEvent]:
        """Send events in one statement; returns those of the runs that were not accepted. If the database rejects
        the statement, split it until the bad event is alone."""
        if not events:
            return []
        try:
            accepted = set(
                self._store.run(
                    dataclasses.replace(
                        statement(
                            [run.id for run, *_ in events],
                            [run.lease_id for run, *_ in events],
                            [kind for _, kind, _, _ in events],
                            [data for _, _, data, _ in events],
                            [number for *_, number in events],
                        ),
                        is_divisible=True,
                    )
                )
            )
            return [each for each in events if each[0].id not in accepted]
        except Exception as error:
            if _is_transient(error):
                raise
            if len(events) == 1:
                run, kind, *_ = events[0]
                self._log_rejected("event rejected by the database", run, error, kind=kind)
                return []
        middle = len(events) // 2
        rejected = self._add_events(statement, events[:middle])
        # The later events of the same runs are sent after these: each only once its predecessors are written.
        waiting = {run for run, *_ in rejected}
        rejected += [each for each in events[middle:] if each[0] in waiting]
        return rejected + self._add_events(
            statement, [each for each in events[middle:] if each[0] not in waiting]
        )

    def _log_rejected(self, message: str, run: Run, error: Exception, **fields: str) -> None:
        self.lines.log(
            logger, logging.WARNING, message,
            kind=(message, run.job.job_type, type(error)),
            fields={"job_id": str(run.id), **fields}, exc_info=error,
        )  # fmt: skip

    def _abort_lost_and_cancelled(
        self, runs: list[Run], answers: list[tuple[UUID, bool, bool, bool]]
    ) -> None:
        # Only the runs that were sent: this worker may have claimed the same job again meanwhile.
        sent = {run.id: run for run in runs}
        for job_id, _, mine, cancel_requested in answers:
            run = sent[job_id]
            if run.lease is None or run.finishing or run.completed_by_handler:
                continue  # acknowledged meanwhile, or about to be
            if not mine:
                self._abort(run, "lost")
            elif cancel_requested:
                self._abort(run, "cancelled")

    def _abort(self, run: Run, reason: AbortReason) -> None:
        if run.abort(reason):
            self._on_abort(run)


def _has_running_loop() -> bool:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


def _is_transient(error: Exception) -> bool:
    """Whether the same reports may be written later. A statement that the server cancels is split instead: it may
    end every attempt."""
    if isinstance(error, DatabaseUnreachable):
        return True
    return is_transient(error) and not is_statement_cancelled(error)


def _is_completing(run: Run) -> bool:
    return run.completed_by_handler and not run.finishing
