"""Keeps leases alive and carries progress and events to the database, from a thread and a connection of
its own: a handler that blocks the event loop loses nothing.

It tells of jobs that are no longer ours or are to be cancelled; what is done about them is up to whoever
runs them."""

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

FLUSH_URGENT = 0.05
FLUSH = 0.5
LONGEST_PERIOD = 10.0  # a worker is seen alive this often, whatever its leases
SUSPICION = 0.5  # seconds a job may run before it is trusted not to kill us


Reported: TypeAlias = "tuple[Run, str, str]"
"""An event: whose, its kind, and its data as JSON text."""


class Heartbeat:
    """The thread. It is also the `Sink` of the contexts of this process."""

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
        self._shown: dict[UUID, str | None] = {}
        self._events: list[Reported] = []
        self._buffering = threading.Lock()  # never held across a statement
        self._sending = (
            threading.Lock()
        )  # reports and leases: one must not skip a row for the other
        self._wake = threading.Event()
        self._beat_now = False
        self._beaten = time.monotonic()
        self._stopping = False
        self._flush_at = float("inf")
        self._thread = threading.Thread(target=self._loop, name="howdah-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Send what is buffered and end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

    # ── what is in flight ─────────────────────────────────────────────────────────────────────────

    def add(self, run: Run) -> None:
        """Keep this job's lease alive from now on."""
        self._runs[run.id] = run

    def remove(self, runs: Iterable[Run]) -> None:
        """Let go of jobs."""
        with self._buffering:
            for run in runs:
                if self._runs.get(run.id) is run:
                    del self._runs[run.id]
                    self._shown.pop(run.id, None)

    def runs(self) -> list[Run]:
        """Everything in flight."""
        return list(self._runs.values())

    def age(self) -> float:
        """Seconds since the database last answered a heartbeat."""
        return time.monotonic() - self._beaten

    @property
    def period(self) -> float:
        """Seconds between two beats."""
        return min(self._lease.total_seconds() / 3, LONGEST_PERIOD)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def poke(self) -> None:
        """Look at the leases now: somebody was cancelled or taken over."""
        self._beat_now = True
        self._wake.set()

    # ── Sink ──────────────────────────────────────────────────────────────────────────────────────

    def progress(self, job_id: UUID, percent: int | None, stage: str | None) -> None:
        """Buffer progress. A first report and a new stage are sent at once, the rest twice a second."""
        with self._buffering:
            run = self._runs.get(job_id)
            if run is None:
                return  # it has ended: a thread that was given up still reports
            run.dirty = True
            self._progress[job_id] = (percent, stage)
            urgent = self._shown.get(job_id, "") != stage
            self._shown[job_id] = stage
            self._schedule(FLUSH_URGENT if urgent else FLUSH)

    def event(self, job_id: UUID, kind: str, data: str) -> None:
        """Buffer an event."""
        with self._buffering:
            run = self._runs.get(job_id)
            if run is None:
                return
            run.dirty = True
            self._events.append((run, kind, data))
            self._schedule(FLUSH_URGENT)

    def _schedule(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        if at < self._flush_at:
            self._flush_at = at
            self._wake.set()

    def flush(self) -> None:
        """Send buffered progress and events now. Also called before an outcome is written, so that
        nothing a handler reported is lost or comes after its end. What the database did not take, for
        it could not be reached, stays buffered."""
        with self._sending:
            with self._buffering:
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
                with self._buffering:
                    self._progress = progress | self._progress
                    self._events = events + self._events
                    if self._progress or any(
                        not run.completed_by_handler for run, _, _ in self._events
                    ):
                        self._schedule(FLUSH)
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
        self._judge([run for run, _, _ in reports], answers)
        skipped = {job_id for job_id, reported, mine, _ in answers if mine and not reported}
        with self._buffering:
            for run, percent, stage in reports:
                # Its row was locked: once more, unless there is something newer.
                if run.id in skipped and not run.finishing:
                    self._progress.setdefault(run.id, (percent, stage))

    def _send_events(self, events: list[Reported]) -> list[Reported]:
        """Send events; gives those that must wait."""
        # A run that completes itself may have locked its row: its events wait until it has ended.
        waiting = [
            each for each in events if each[0].completed_by_handler and not each[0].finishing
        ]
        now = [
            each for each in events if not (each[0].completed_by_handler and not each[0].finishing)
        ]
        accepted = self._add(self._statements.add_events, now)
        refused = [each for each in now if each[0].id not in accepted]
        late = [each for each in refused if each[0].completed_by_handler]
        accepted |= self._add(self._statements.add_late_events, late)
        return waiting + [
            (run, kind, data)
            for run, kind, data in refused
            # Locked for the moment. If the lease is lost, the next beat will tell.
            if run.id not in accepted and not run.finishing and run.abort_reason != "lost"
        ]

    def _add(
        self, statement: Callable[..., Statement[list[UUID]]], events: list[Reported]
    ) -> set[UUID]:
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
                    "an event was refused by the database",
                    exc_info=True,
                    extra={"job_id": str(run.id), "kind": kind},
                )
                return {run.id}
        middle = len(events) // 2
        return self._add(statement, events[:middle]) | self._add(statement, events[middle:])

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
        # Each by itself: a report that cannot be written must not cost a lease.
        try:
            step()
        except DatabaseUnreachable as error:
            logger.warning("the heartbeat waits for the database", extra={"error": str(error)})
            return False
        except Exception:
            logger.warning("the heartbeat failed and will try again", exc_info=True)
            return False
        return True

    def beat(self) -> None:
        """Extend every lease, in one statement.

        A run of which the database knows that it started pays an attempt if this process is killed. So
        one that has just begun is not told of yet: it may have begun beside the one that will kill us."""
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
            with self._sending:
                answers = self._store.run(statement)
            self._judge(runs, answers)
        touch = self._on_beat()
        if touch is not None:
            self._store.run(touch)
        self._beaten = time.monotonic()
        fault_points.reach("after-heartbeat")

    def _judge(self, runs: list[Run], answers: list[tuple[UUID, bool, bool, bool]]) -> None:
        # Of the runs that were asked about: a job may have been retried, and be ours again, meanwhile.
        asked = {run.id: run for run in runs}
        for job_id, _, mine, cancel_requested in answers:
            run = asked[job_id]
            if self._runs.get(job_id) is not run or run.finishing or run.completed_by_handler:
                continue  # acknowledged meanwhile
            if not mine:
                self._abort(run, "lost")
            elif cancel_requested:
                self._abort(run, "cancelled")

    def _abort(self, run: Run, reason: AbortReason) -> None:
        if run.abort(reason):
            self._on_abort(run)


def _elapsed(run: Run, now: float) -> float | None:
    if run.started is None or now - run.started < SUSPICION:
        return None
    return now - run.started
