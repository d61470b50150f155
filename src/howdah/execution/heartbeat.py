"""Extends leases, and sends what handlers report, in its own thread and over its own connection: a handler that
blocks the event loop keeps its lease (decision 0008). The jobs that wait for the blocked loop are released.

The heartbeat aborts runs whose lease was lost or whose job was cancelled. Stopping the handler is left to the code
that runs it."""

from __future__ import annotations

import logging
import math
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from howdah.database.backoff import Backoff
from howdah.database.driver_errors import is_transient
from howdah.encoding.safe_logger import get_logger
from howdah.errors import DatabaseUnreachable
from howdah.execution import fault_points
from howdah.execution.repeated_lines import Outages, shape_of
from howdah.execution.reports import FLUSH_SECONDS, URGENT_FLUSH_SECONDS, Reports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from howdah.database.store import Store
    from howdah.execution.run import Lease, Run
    from howdah.protocol.statements import Statement
    from howdah.protocol.worker_statements import WorkerStatements

logger = get_logger(__name__)

MAX_PERIOD_SECONDS = 10.0  # also with long leases: the beat shows that the worker is alive
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 2.0
EXTENDED_RUNS = 2000  # in one statement, which is then far from its timeout
LOCKED_SECONDS = 1.0  # to the next beat, if another transaction has locked a lease
LAST_FLUSH_SECONDS = 1.0
CHECK_SECONDS = 1.0  # between two looks for a blocked event loop
SUSPECT_SECONDS = 0.5  # a job that has run for this long is not suspected of killing the worker


class Heartbeat(Reports):
    """The heartbeat's thread, with the reports that it sends."""

    def __init__(
        self,
        store: Store,
        statements: WorkerStatements,
        lease: timedelta,
        on_abort: Callable[[Run], None],
        on_beat: Callable[[], Statement[bool] | None] = lambda: None,
        on_missing: Callable[[], Statement[None] | None] = lambda: None,
        take_unstarted: Callable[[], list[Run]] = list,
    ) -> None:
        super().__init__(store, statements, on_abort)
        self._lease = lease
        self._on_beat = on_beat
        self._on_missing = on_missing
        self._take_unstarted = take_unstarted
        self.outages = Outages(self.lines)
        self.can_extend = False
        """Whether the last beat reached the database. A worker does not claim what it could not keep."""
        self._beat_now = False
        self._is_lease_locked = False
        self._given_up: list[Run] = []
        self._release_at = 0.0
        self._last_beat = time.monotonic()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="howdah-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Send the buffered reports and end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

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

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        period = self.period
        backoff = Backoff(RETRY_SECONDS, min(MAX_RETRY_SECONDS, period))
        flush_backoff = Backoff(FLUSH_SECONDS, MAX_RETRY_SECONDS)
        beat_at = time.monotonic() + period
        while True:
            wait = min(beat_at, self._flush_at) - time.monotonic()
            self._wake.wait(max(0.0, min(wait, CHECK_SECONDS)))
            self._wake.clear()
            self._try(self._release_unstarted)
            self._try(self._release_given_up)
            if self._stopping:
                self._flush_at_stop()
            elif time.monotonic() >= self._flush_at:
                # One statement, then perhaps a beat: no number of events may cost a lease.
                self._flush_at = math.inf
                if not self._try(self.flush_some):
                    self._schedule_flush(flush_backoff.next())
                else:
                    flush_backoff.reset()
            if self._beat_now or time.monotonic() >= beat_at:
                self._beat_now = False
                succeeded = self._try(self.beat)
                if succeeded:
                    backoff.reset()
                wait = min(period, LOCKED_SECONDS) if self._is_lease_locked else period
                beat_at = time.monotonic() + (wait if succeeded else backoff.next())
            if self._stopping:
                return

    def _flush_at_stop(self) -> None:
        """Send the buffered reports. Those of a job that another transaction has locked are sent again for a while."""
        deadline = time.monotonic() + LAST_FLUSH_SECONDS
        while self._try(self.flush) and any(self._events) and time.monotonic() < deadline:
            time.sleep(URGENT_FLUSH_SECONDS)

    def _try(self, step: Callable[[], object]) -> bool:
        # Flush and beat fail separately: a report that cannot be written must not cost a lease.
        try:
            step()
        except DatabaseUnreachable as error:
            self.outages.report(logger, "database unreachable; heartbeat will retry", error)
            return False
        except Exception as error:
            self.lines.log(
                logger, logging.WARNING, "heartbeat failed; retrying",
                kind=("heartbeat", type(error), shape_of(str(error))), fields={}, exc_info=error,
            )  # fmt: skip
            return False
        return True

    def beat(self) -> None:
        """Extend every lease, a bounded number in one statement, and register the worker again if its row is gone.

        If this process is killed, the jobs with a started_at in the database lose an attempt. So the
        started_at of a run is written only after `SUSPECT_SECONDS`: a run that has just started may have
        started next to the job that kills this process."""
        fault_points.reach("before-heartbeat")
        now = time.monotonic()
        self._is_lease_locked = False
        with self._buffer_lock:
            leases = list(self._leases.values())
            # Those that may have to stop.
            runs = [run for run in self._runs.values() if not run.finishing]
        try:
            for first in range(0, max(len(leases), len(runs)), EXTENDED_RUNS):
                some = slice(first, first + EXTENDED_RUNS)
                self._extend(leases[some], runs[some], now)
        except BaseException:
            self.can_extend = False
            raise
        self._touch(extended=bool(leases))
        self.can_extend = True
        self._last_beat = time.monotonic()
        self.outages.end(logger)
        self.lines.summarize()
        fault_points.reach("after-heartbeat")
        self._try(self._remove_ended_leases)  # by itself: it must not cost a lease

    def _extend(self, leases: list[Lease], runs: list[Run], now: float) -> None:
        statement = self._statements.extend_jobs(
            [run.id for run in runs],
            [run.lease_id for run in runs],
            self._lease,
            [_elapsed(run, now) for run in runs],
            [lease.id for lease in leases],
        )
        with self._send_lock:
            answers = self._store.run(statement)
        self._abort_lost_and_cancelled(runs, [each for each in answers if each[0] is not None])
        if any(mine and not extended for _, extended, mine, _ in answers):
            self._is_lease_locked = True

    def _remove_ended_leases(self) -> None:
        while self._ended:
            with self._buffer_lock:
                some, self._ended = self._ended[:EXTENDED_RUNS], self._ended[EXTENDED_RUNS:]
            try:
                self._store.run(self._statements.extend_jobs([], [], self._lease, [], [], some))
            except BaseException:
                with self._buffer_lock:
                    self._ended += some
                raise

    def _release_unstarted(self) -> None:
        """Release the jobs that wait for a blocked event loop: other workers run them."""
        runs = self._take_unstarted()
        if not runs:
            return
        self.lines.log(
            logger, logging.WARNING, "a handler blocks the event loop; releasing jobs that have not started",
            kind=("blocked",), fields={"jobs": len(runs)},
        )  # fmt: skip
        self.give_up(runs)

    def give_up(self, runs: Sequence[Run]) -> None:
        """Release the jobs of these runs, from the thread of the heartbeat, until the database has accepted it or their
        leases are lost. Their leases may be extended for other jobs, so recovery would not find them."""
        self.remove(runs, is_accepted=False)
        with self._buffer_lock:
            self._given_up += runs
        self._wake.set()

    def _release_given_up(self) -> None:
        if not self._given_up or time.monotonic() < self._release_at:
            return
        with self._buffer_lock:
            left, self._given_up = self._given_up, []
        locked: list[Run] = []
        try:
            while left:
                locked += self._release(left[:EXTENDED_RUNS])
                left = left[EXTENDED_RUNS:]
        finally:
            with self._buffer_lock:
                self._given_up += locked + left
            self._release_at = time.monotonic() + CHECK_SECONDS

    def _release(self, runs: list[Run]) -> list[Run]:
        """Release jobs. Returns those to release later: they are locked, or the database rejects it."""
        fences = [run.id for run in runs], [run.lease_id for run in runs]
        try:
            accepted = self._store.run(self._statements.release_jobs(*fences, timedelta(0)))
        except Exception as error:
            if isinstance(error, DatabaseUnreachable) or is_transient(error):
                raise
            if len(runs) > 1:
                middle = len(runs) // 2
                return self._release(runs[:middle]) + self._release(runs[middle:])
            self.lines.log(
                logger, logging.WARNING, "job cannot be released; trying again",
                kind=("release", runs[0].job.job_type),
                fields={"job_id": str(runs[0].id), "error": str(error)},
            )  # fmt: skip
            return runs
        if len(accepted) == len(runs):
            return []
        held = set(self._store.run(self._statements.held_jobs(*fences)))
        return [run for run in runs if (run.id, run.lease_id) in held]

    def _touch(self, *, extended: bool) -> None:
        touch = self._on_beat()
        if touch is None:
            return
        try:
            if not self._store.run(touch):
                # Pruned after a day without a heartbeat, or the tables are new.
                register = self._on_missing()
                if register is not None:
                    self._store.run(register)
        except DatabaseUnreachable:
            self.can_extend = extended
            raise
        except Exception:
            self.can_extend = True  # the database answers: only the worker's row was not written
            raise


def _elapsed(run: Run, now: float) -> float | None:
    if run.started is None or now - run.started < SUSPECT_SECONDS:
        return None
    return now - run.started
