"""Decides how many jobs a worker claims, and of which types, from the rate at which its jobs end and the duration
of each type. The fetcher claims them; the slots run them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from howdah.execution.run import Run

PREFETCH_SECONDS = 0.2  # of work in the buffer; a type whose runs take longer counts as long
PREFETCH_JOBS = 8000  # more jobs would only slow down claims
SMOOTHING = 0.1


class Demand(NamedTuple):
    """What to claim. `is_whole` is False for additional jobs, of the types known to be short alone."""

    batch_size: int
    job_types: list[str]
    is_whole: bool


class Prefetch:
    """Measures the runs of an executor's slots."""

    def __init__(self, slots: int, job_types: Collection[str]) -> None:
        self._slots = slots
        self._job_types = list(job_types)
        self._seconds: dict[str, float] = {}  # smoothed duration of each type
        self._rate = 0.0  # smoothed, jobs that end per second
        self._measured_at = time.monotonic()
        self.target = 0
        """How many jobs the buffer should have, as of the last demand."""
        self.ended = 0
        """Runs that ended since the rate was last measured."""

    def measure(self, job_type: str, seconds: float) -> None:
        """Record how long a run took."""
        known = self._seconds.get(job_type)
        self._seconds[job_type] = (
            seconds if known is None else known + SMOOTHING * (seconds - known)
        )

    def demand(self, buffer: Collection[Run], running: Collection[Run]) -> list[Demand]:
        """How many more jobs to claim: none while the buffer is more than half full.

        Jobs of long types, and of types never measured, are claimed only for slots without such a job:
        another worker could run them meanwhile."""
        self.target = target = self._buffer_target()
        missing = self._slots + target - len(buffer) - len(running)
        if missing <= 0 or (target and len(buffer) > target // 2):
            return []
        short_types = [name for name in self._job_types if self._is_short(name)]
        if len(short_types) == len(self._job_types):
            return [Demand(missing, self._job_types, True)]
        whole = max(0, min(missing, self._slots - self._count_long(buffer, running)))
        demands = [Demand(whole, self._job_types, True)] if whole else []
        if short_types and missing > whole:
            demands.append(Demand(missing - whole, short_types, False))
        return demands

    def _buffer_target(self) -> int:
        """How many jobs end in `PREFETCH_SECONDS` at the current rate. The rate is measured, not derived from
        durations: slots that are busy with long jobs lower it."""
        now = time.monotonic()
        passed = now - self._measured_at
        if passed > PREFETCH_SECONDS / 20:
            current = self.ended / passed
            self._rate += (1 - math.exp(-passed / PREFETCH_SECONDS)) * (current - self._rate)
            # Rise without smoothing to what the slots can sustain even if every job is of the slowest type.
            slowest = max(self._seconds.values(), default=math.inf)
            self._rate = max(self._rate, min(current, self._slots / max(slowest, 1e-6)))
            self._measured_at, self.ended = now, 0
        return min(PREFETCH_JOBS, int(self._rate * PREFETCH_SECONDS))

    def _is_short(self, job_type: str) -> bool:
        return self._seconds.get(job_type, math.inf) < PREFETCH_SECONDS

    def _count_long(self, buffer: Collection[Run], running: Collection[Run]) -> int:
        late = time.monotonic() - PREFETCH_SECONDS
        runs = [*running, *buffer]  # a copy: the heartbeat's thread may take jobs out of the buffer
        return sum(
            not self._is_short(run.job.job_type) or (run.started is not None and run.started < late)
            for run in runs
        )
