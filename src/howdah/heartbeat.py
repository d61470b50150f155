"""Keeps leases alive and carries progress and events to the database, from a thread and a connection of
its own: a handler that blocks the event loop loses nothing.

It tells of jobs that are no longer ours or are to be cancelled; what is done about them is up to whoever
runs them."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from howdah import faults

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from uuid import UUID

    from howdah.context import Context
    from howdah.statements import Statement, Statements
    from howdah.store import Store

logger = logging.getLogger(__name__)

FLUSH_URGENT = 0.05
FLUSH = 0.5
LONGEST_PERIOD = 10.0  # a worker is seen alive this often, whatever its leases


@dataclass(slots=True, eq=False)
class Run:
    """A claimed job in this process: waiting in a buffer, running, or on its way to the completer."""

    id: UUID
    lease_id: UUID
    job: Any
    task: Any = None
    context: Context | None = None
    started: float | None = None
    finishing: bool = False
    dirty: bool = False
    settled: bool = False
    abort: str | None = None


class Heartbeat:
    """The thread. It is also the `Sink` of the contexts of this process."""

    def __init__(
        self,
        store: Store,
        statements: Statements,
        lease: timedelta,
        on_abort: Callable[[Run, str], None],
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
        self._events: list[tuple[UUID, str, str]] = []
        self._flushing = threading.Lock()
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

    def remove(self, run: Run) -> None:
        """Let go of a job."""
        if self._runs.get(run.id) is run:
            del self._runs[run.id]
        self._shown.pop(run.id, None)

    def runs(self) -> list[Run]:
        """Everything in flight."""
        return list(self._runs.values())

    def age(self) -> float:
        """Seconds since the database last answered a heartbeat."""
        return time.monotonic() - self._beaten

    def poke(self) -> None:
        """Look at the leases now: somebody was cancelled or taken over."""
        self._beat_now = True
        self._wake.set()

    # ── Sink ──────────────────────────────────────────────────────────────────────────────────────

    def progress(self, job_id: UUID, percent: int | None, stage: str | None) -> None:
        """Buffer progress. A first report and a new stage are sent at once, the rest twice a second."""
        self._progress[job_id] = (percent, stage)
        urgent = self._shown.get(job_id, "") != stage
        self._shown[job_id] = stage
        self._schedule(FLUSH_URGENT if urgent else FLUSH)

    def event(self, job_id: UUID, kind: str, data: str) -> None:
        """Buffer an event."""
        run = self._runs.get(job_id)
        if run is not None:
            run.dirty = True
        self._events.append((job_id, kind, data))
        self._schedule(FLUSH_URGENT)

    def settle(self, job_id: UUID) -> None:
        """The handler completes this job itself."""
        run = self._runs.get(job_id)
        if run is not None:
            run.settled = True

    def _schedule(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        if at < self._flush_at:
            self._flush_at = at
            self._wake.set()

    def flush(self) -> None:
        """Send buffered progress and events now. Also called before an outcome is written, so that
        nothing a handler reported is lost or comes after its end."""
        with self._flushing:
            self._flush_at = float("inf")
            progress, self._progress = self._progress, {}
            events, self._events = self._events, []
            live = dict(self._runs)
            self._send_progress([(live[i], p, s) for i, (p, s) in progress.items() if i in live])
            self._send_events([(live[i], kind, data) for i, kind, data in events if i in live])

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
        self._judge(answers)
        skipped = {job_id for job_id, reported, mine, _ in answers if mine and not reported}
        for run, percent, stage in reports:
            # Its row was locked: once more, unless there is something newer.
            if run.id in skipped and run.id not in self._progress:
                self._progress[run.id] = (percent, stage)
                self._schedule(FLUSH)

    def _send_events(self, events: list[tuple[Run, str, str]]) -> None:
        if events:
            statement = self._statements.add_events(
                [run.id for run, _, _ in events],
                [run.lease_id for run, _, _ in events],
                [kind for _, kind, _ in events],
                [data for _, _, data in events],
            )
            self._store.run(statement)

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        period = min(self._lease.total_seconds() / 3, LONGEST_PERIOD)
        beat_at = time.monotonic() + period
        while True:
            self._wake.wait(max(0.0, min(beat_at, self._flush_at) - time.monotonic()))
            self._wake.clear()
            try:
                if time.monotonic() >= self._flush_at or self._stopping:
                    self.flush()
                if self._beat_now or time.monotonic() >= beat_at:
                    self._beat_now = False
                    beat_at = time.monotonic() + period
                    self.beat()
            except Exception:
                logger.warning("the heartbeat failed and will try again", exc_info=True)
                beat_at = time.monotonic() + min(1.0, period)
            if self._stopping:
                return

    def beat(self) -> None:
        """Extend every lease, in one statement."""
        faults.reach("before-heartbeat")
        now = time.monotonic()
        runs = self.runs()
        if runs:
            self._judge(
                self._store.run(
                    self._statements.extend_jobs(
                        [run.id for run in runs],
                        [run.lease_id for run in runs],
                        self._lease,
                        [None if run.started is None else now - run.started for run in runs],
                    )
                )
            )
        statement = self._on_beat()
        if statement is not None:
            self._store.run(statement)
        self._beaten = time.monotonic()
        faults.reach("after-heartbeat")

    def _judge(self, answers: list[tuple[UUID, bool, bool, bool]]) -> None:
        for job_id, _, mine, cancel_requested in answers:
            run = self._runs.get(job_id)
            if run is None or run.finishing or run.settled or run.abort is not None:
                continue  # acknowledged meanwhile, or known already
            if not mine:
                self._abort(run, "lost")
            elif cancel_requested:
                self._abort(run, "cancelled")

    def _abort(self, run: Run, why: str) -> None:
        run.abort = why
        if run.context is not None:
            run.context.abort = why
        self._on_abort(run, why)
