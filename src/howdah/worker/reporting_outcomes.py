"""Outcomes that wait for the reports of their own runs: no event is written after its job ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.execution.heartbeat import Heartbeat
    from howdah.execution.run import Run
    from howdah.outcome import Outcome

TIMEOUT_SECONDS = 60.0  # an outcome waits so long for the reports of its run
CHECK_SECONDS = 1.0


class ReportingOutcomes:
    """`write` receives an outcome when the reports of its run are written, or take too long. While another
    transaction has locked the job, neither can be written; `on_locked` is then called."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        write: Callable[[Run, Outcome], None],
        on_locked: Callable[[Run], None],
    ) -> None:
        self._heartbeat = heartbeat
        self._write = write
        self._on_locked = on_locked
        self._outcomes: dict[Run, Outcome] = {}

    def put(self, run: Run, outcome: Outcome) -> None:
        """Add an outcome. The reports of its run are sent now."""
        self._outcomes[run] = outcome
        loop = asyncio.get_running_loop()

        def end(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._end, run)

        self._check(run, time.monotonic() + TIMEOUT_SECONDS)
        self._heartbeat.when_reported(run).add_done_callback(end)

    def hurry(self) -> None:
        """Write every outcome now, without the reports that are not written yet."""
        for run in list(self._outcomes):
            self._end(run)

    def _check(self, run: Run, deadline: float) -> None:
        now = time.monotonic()
        if run not in self._outcomes:
            return
        if self._heartbeat.is_locked(run):
            deadline = now + TIMEOUT_SECONDS
            self._on_locked(run)
        elif now >= deadline:
            self._end(run)
            return
        asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check, run, deadline)

    def _end(self, run: Run) -> None:
        outcome = self._outcomes.pop(run, None)
        if outcome is not None:
            self._write(run, outcome)
