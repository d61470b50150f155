"""Counts the jobs that a worker finished. The counts are written with its heartbeat, so that rates and waiting
times need no count of rows (decision 0012)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from howdah.protocol.worker_statements import Claimed

_COLUMNS = {
    "completed": "completed",
    "failed": "failed",
    "retrying": "retried",
    "cancelled": "cancelled",
}


class Counts(msgspec.Struct):
    """The counts of one queue and job type since they were last written."""

    queue: str
    job_type: str
    completed: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    wait_seconds: float = 0.0
    run_seconds: float = 0.0


class Throughput:
    """Counts by queue and job type. The event loop adds to them; the heartbeat's thread takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], Counts] = {}

    def add(self, ended: Iterable[tuple[Claimed, str, float]]) -> None:
        """Count acknowledged runs: the job, its new state, and the seconds it ran."""
        with self._lock:
            for job, state, seconds in ended:
                column = _COLUMNS.get(state)
                if column is None:
                    continue
                key = (job.queue, job.job_type)
                count = self._counts.get(key)
                if count is None:
                    count = self._counts[key] = Counts(job.queue, job.job_type)
                setattr(count, column, getattr(count, column) + 1)
                count.wait_seconds += job.waited
                count.run_seconds += seconds

    def take(self) -> str | None:
        """The counts as the JSON that `add_throughput` reads, and reset them."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return msgspec.json.encode(list(counts.values())).decode() if counts else None
