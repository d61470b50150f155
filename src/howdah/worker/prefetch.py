"""Decides how many jobs a worker claims ahead, and of which types: by how fast its jobs end and by how long each
type takes. The fetcher claims them; the slots run them."""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from howdah.execution.run import Run

AHEAD = 0.2  # seconds of work to have at hand
PREFETCH_LIMIT = 8000  # of jobs; more only make claims long
SMOOTHING = 0.1


class Wanted(NamedTuple):
    """What to claim: so many jobs of any type, and then so many more of types known to be short."""

    any_type: int
    short: int
    short_types: list[str]


class Prefetch:
    """Measures the runs of a worker's slots."""

    def __init__(self, slots: int, job_types: Collection[str]) -> None:
        self._slots = slots
        self._job_types = job_types
        self._seconds: dict[str, float] = {}  # smoothed duration of each type
        self._rate = 0.0  # smoothed, of jobs that end in a second
        self._looked = time.monotonic()
        self.ended = 0
        """Runs that ended since the rate was last measured."""

    def measure(self, job_type: str, seconds: float) -> None:
        """Note how long a run took."""
        known = self._seconds.get(job_type)
        self._seconds[job_type] = (
            seconds if known is None else known + SMOOTHING * (seconds - known)
        )

    def wanted(self, buffer: Collection[Run], running: Collection[Run]) -> Wanted:
        """How many more jobs to claim; none while more than half of what should be at hand is.

        Long jobs, and those of types that were never measured, are had only for slots that no such job
        has: one that waits for another could run in another worker meanwhile."""
        ahead = self._ahead()
        missing = self._slots + ahead - len(buffer) - len(running)
        if missing <= 0 or (ahead and len(buffer) > ahead // 2):
            return Wanted(0, 0, [])
        short_types = [name for name in self._job_types if self._is_short(name)]
        if len(short_types) == len(self._job_types):
            return Wanted(missing, 0, [])
        any_type = max(0, min(missing, self._slots - self._count_long(buffer, running)))
        return Wanted(any_type, missing - any_type if short_types else 0, short_types)

    def _ahead(self) -> int:
        """How many jobs end in the time to claim ahead for, as things go now. By the rate, not by the
        duration: slots that are busy for long take part in it by ending nothing."""
        now = time.monotonic()
        passed = now - self._looked
        if passed > AHEAD / 20:
            seen = self.ended / passed
            self._rate += (1 - math.exp(-passed / AHEAD)) * (seen - self._rate)
            # At once, what the slots could keep up even if every job were of the slowest type.
            slowest = max(self._seconds.values(), default=math.inf)
            self._rate = max(self._rate, min(seen, self._slots / max(slowest, 1e-6)))
            self._looked, self.ended = now, 0
        return min(PREFETCH_LIMIT, int(self._rate * AHEAD))

    def _is_short(self, job_type: str) -> bool:
        return self._seconds.get(job_type, math.inf) < AHEAD

    def _count_long(self, buffer: Collection[Run], running: Collection[Run]) -> int:
        late = time.monotonic() - AHEAD
        return sum(
            not self._is_short(run.job.job_type) or (run.started is not None and run.started < late)
            for run in itertools.chain(running, buffer)
        )
