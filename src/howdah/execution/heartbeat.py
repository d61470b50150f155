"""Extends leases and writes progress and events, in its own thread and over its own connection: a handler that
blocks the event loop keeps its lease (decision 0008).

The heartbeat aborts runs whose lease was lost or whose job was cancelled. Stopping the handler is left to the code
that runs it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from howdah.errors import DatabaseUnreachable
from howdah.execution import fault_points

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta
    from uuid import UUID

    from howdah.database.store import Store
    from howdah.execution.run import Run
    from howdah.outcome import AbortReason
    from howdah.protocol.statements import Statement
    from howdah.protocol.worker_statements import WorkerStatements

logger = logging.getLogger(__name__)

URGENT_FLUSH_SECONDS = 0.05
FLUSH_SECONDS = 0.5
MAX_PERIOD_SECONDS = 10.0  # also with long leases: the beat shows that the worker is alive
SUSPECT_SECONDS = 0.5  # a job that has run for this long is not suspected of killing the worker


ReportedEvent: TypeAlias = "tuple[Run, str, str]"
"""An event of a run: its kind, and its data as JSON text."""


class Heartbeat:
    """The heartbeat's thread. It is also the `Sink` of the contexts in this process."""

    def __init__(
        self,
        store: Store,
        statements: WorkerStatements,
        lease: timedelta,
        on_abort: Callable[[Run], None],
        on_beat: Callable[[], Statement[Any] | None] = lambda: None,
    ) -> None:
        self._store = store
        self._statements = statements
        self._lease = lease
        self._on_abort = on_abort
        self._on_beat = on_beat
        self._runs: dict[UUID, Run] = {}
        self._progress: dict[UUID, tuple[int | None, str | None]] = {}
        self._last_stages: dict[UUID, str | None] = {}
        self._events: list[ReportedEvent] = []
        self._buffer_lock = threading.Lock()  # never held while a statement runs
        # Reports and leases are sent one after the other: each skips rows that the other has locked.
        self._send_lock = threading.Lock()
        self._wake = threading.Event()
        self._beat_now = False
        self._last_beat = time.monotonic()
        self._stopping = False
        self._flush_at = float("inf")
        self._thread = threading.Thread(target=self._loop, name="howdah-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Send the buffered reports and end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

    # ── runs in flight ────────────────────────────────────────────────────────────────────────────

    def add(self, run: Run) -> None:
        """Extend the lease of this run from now on."""
        self._runs[run.id] = run

    def remove(self, runs: Iterable[Run]) -> None:
        """Stop extending the leases of these runs."""
        with self._buffer_lock:
            for run in runs:
                if self._runs.get(run.id) is run:
                    del self._runs[run.id]
                    self._last_stages.pop(run.id, None)

    def runs(self) -> list[Run]:
        """The runs in flight."""
        return list(self._runs.values())

    def age(self) -> float:
        """Seconds since the last successful beat."""
        return time.monotonic() - self._last_beat

    @property
    def period(self) -> float:
        """Seconds between two beats."""
        return min(self._lease.total_seconds() / 3, MAX_PERIOD_SECONDS)

    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def beat_soon(self) -> None:
        """Beat now instead of at the end of the period: a job was cancelled or taken over."""
        self._beat_now = True
        self._wake.set()

    # ── Sink ──────────────────────────────────────────────────────────────────────────────────────

    def progress(self, job_id: UUID, percent: int | None, stage: str | None) -> None:
        """Buffer progress. A first report or a new stage is sent within 50 ms, the rest twice a second."""
        with self._buffer_lock:
            run = self._runs.get(job_id)
            if run is None:
                return  # the run has ended, but its abandoned thread still reports
            run.dirty = True
            self._progress[job_id] = (percent, stage)
            urgent = self._last_stages.get(job_id, "") != stage
            self._last_stages[job_id] = stage
            self._schedule_flush(URGENT_FLUSH_SECONDS if urgent else FLUSH_SECONDS)

    def event(self, job_id: UUID, kind: str, data: str) -> None:
        """Buffer an event."""
        with self._buffer_lock:
            run = self._runs.get(job_id)
            if run is None:
                return
            run.dirty = True
            self._events.append((run, kind, data))
            self._schedule_flush(URGENT_FLUSH_SECONDS)

    def _schedule_flush(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        if at < self._flush_at:
            self._flush_at = at
            self._wake.set()

    def flush(self) -> None:
        """Send buffered progress and events now. Also called before an outcome is written: no report of a
        handler is lost or written after its job ended. If the database cannot be reached, the reports
        stay buffered."""
        with self._send_lock:
            with self._buffer_lock:
                self._flush_at = float("inf")
                progress, self._progress = self._progress, {}
                events, self._events = self._events, []
                live = dict(self._runs)
            reports = [
                (live[i], percent, stage) for i, (percent, stage) in progress.items() if i in live
            ]
            try:
                self._send_progress(reports)
                progress = {}
                events = self._send_events([each for each in events if each[0].id in live])
            finally:
                with self._buffer_lock:
                    self._progress = progress | self._progress
                    self._events = events + self._events
                    if self._progress or any(
                        not run.completed_by_handler for run, _, _ in self._events
                    ):
                        self._schedule_flush(FLUSH_SECONDS)
                    waiting = {*self._progress, *(run.id for run, _, _ in self._events)}
                    for run in live.values():
                        run.dirty = run.dirty and run.id in waiting

    def _send_progress(self, reports: list[tuple[Run, int | None, str | None]]) -> None:
        if not reports:
            return
        statement = self._statements.report_progress(
            [run.id for run, _, _ in reports],
            [run.lease_id for run, _, _ in reports],
            [percent for _, percent, _ in reports],
            [stage for _, _, stage in reports],
        )
        answers = self._store.run(statement)
        self._abort_lost_and_cancelled([run for run, _, _ in reports], answers)
        skipped = {job_id for job_id, reported, mine, _ in answers if mine and not reported}
        with self._buffer_lock:
            for run, percent, stage in reports:
                # Its row was locked: send it again, unless there is newer progress.
                if run.id in skipped and not run.finishing:
                    self._progress.setdefault(run.id, (percent, stage))

    def _send_events(self, events: list[ReportedEvent]) -> list[ReportedEvent]:
        """Send events; returns those to send later."""
        # The transaction of a handler that completes its job may have locked the row: its events are sent
        # after the handler has ended.
        waiting = [each for each in events if _is_completing(each[0])]
        now = [each for each in events if not _is_completing(each[0])]
        accepted = self._add_events(self._statements.add_events, now)
        rejected = [each for each in now if each[0].id not in accepted]
        late = [each for each in rejected if each[0].completed_by_handler]
        accepted |= self._add_events(self._statements.add_late_events, late)
        return waiting + [
            (run, kind, data)
            for run, kind, data in rejected
            # The row is locked, or the lease was lost and the next beat will abort the run.
            if run.id not in accepted and not run.finishing and run.abort_reason != "lost"
        ]

    def _add_events(
        self, statement: Callable[..., Statement[list[UUID]]], events: list[ReportedEvent]
    ) -> set[UUID]:
        """Send events in one statement. If the database rejects it, split it until the bad event is alone."""
        if not events:
            return set()
        try:
            return set(
                self._store.run(
                    statement(
                        [run.id for run, _, _ in events],
                        [run.lease_id for run, _, _ in events],
                        [kind for _, kind, _ in events],
                        [data for _, _, data in events],
                    )
                )
            )
        except DatabaseUnreachable:
            raise
        except Exception:
            if len(events) == 1:
                run, kind, _ = events[0]
                logger.warning(
                    "event rejected by the database",
                    exc_info=True,
                    extra={"job_id": str(run.id), "kind": kind},
                )
                return {run.id}
        middle = len(events) // 2
        first, second = events[:middle], events[middle:]
        return self._add_events(statement, first) | self._add_events(statement, second)

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        period = self.period
        beat_at = time.monotonic() + period
        while True:
            self._wake.wait(max(0.0, min(beat_at, self._flush_at) - time.monotonic()))
            self._wake.clear()
            if time.monotonic() >= self._flush_at or self._stopping:
                self._try(self.flush)
            if self._beat_now or time.monotonic() >= beat_at:
                self._beat_now = False
                succeeded = self._try(self.beat)
                beat_at = time.monotonic() + (period if succeeded else min(1.0, period))
            if self._stopping:
                return

    def _try(self, step: Callable[[], None]) -> bool:
        # Flush and beat fail separately: a report that cannot be written must not cost a lease.
        try:
            step()
        except DatabaseUnreachable as error:
            logger.warning(
                "database unreachable; heartbeat will retry", extra={"error": str(error)}
            )
            return False
        except Exception:
            logger.warning("heartbeat failed; retrying", exc_info=True)
            return False
        return True

    def beat(self) -> None:
        """Extend every lease in one statement.

        If this process is killed, the jobs with a started_at in the database lose an attempt. So the
        started_at of a run is written only after `SUSPECT_SECONDS`: a run that has just started may have
        started next to the job that kills this process."""
        fault_points.reach("before-heartbeat")
        now = time.monotonic()
        runs = self.runs()
        if runs:
            statement = self._statements.extend_jobs(
                [run.id for run in runs],
                [run.lease_id for run in runs],
                self._lease,
                [_elapsed(run, now) for run in runs],
            )
            with self._send_lock:
                answers = self._store.run(statement)
            self._abort_lost_and_cancelled(runs, answers)
        touch = self._on_beat()
        if touch is not None:
            self._store.run(touch)
        self._last_beat = time.monotonic()
        fault_points.reach("after-heartbeat")

    def _abort_lost_and_cancelled(
        self, runs: list[Run], answers: list[tuple[UUID, bool, bool, bool]]
    ) -> None:
        # Only the runs that were sent: this worker may have claimed the same job again meanwhile.
        sent = {run.id: run for run in runs}
        for job_id, _, mine, cancel_requested in answers:
            run = sent[job_id]
            if self._runs.get(job_id) is not run or run.finishing or run.completed_by_handler:
                continue  # acknowledged meanwhile, or about to be
            if not mine:
                self._abort(run, "lost")
            elif cancel_requested:
                self._abort(run, "cancelled")

    def _abort(self, run: Run, reason: AbortReason) -> None:
        if run.abort(reason):
            self._on_abort(run)


def _is_completing(run: Run) -> bool:
    return run.completed_by_handler and not run.finishing


def _elapsed(run: Run, now: float) -> float | None:
    if run.started is None or now - run.started < SUSPECT_SECONDS:
        return None
    return now - run.started
