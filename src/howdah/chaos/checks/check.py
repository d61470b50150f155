"""What the checks share: findings, the record of a job, and the faults that may excuse an irregularity."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.history import Database, Enqueue, FaultWindow, History, Lease, Row
    from howdah.chaos.ledger import Line

PROMISES = {
    "P1": "no acknowledged job is lost",
    "P2": "a job ends once",
    "P3": "at most one live lease per job, and no stale write is accepted",
    "P4": "never more attempts than allowed",
    "P5": "a rolled-back enqueue never runs",
    "P6": "no job is completed without its work; effects in the database happen exactly once",
    "P7": "jobs with the same ordering key run in order",
    "P8": "a bad job does not affect other jobs",
    "P9": "work resumes automatically",
}
FINAL = ("completed", "failed", "cancelled")
JUMP_SECONDS = 0.5
"""A jump of the server's clock happens within this time of its line in the ledger."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: which one, which job, a sentence, and the ledger lines that prove it."""

    promise: str
    job: str
    what: str
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = f" (ledger lines {', '.join(map(str, self.lines))})" if self.lines else ""
        return f"{self.promise} {self.job}: {self.what}{lines}"


@dataclass(slots=True)
class JobRecord:
    """One job: its leases in the ledger, its rows in the database, and its enqueue."""

    id: str
    leases: list[Lease]
    rows: list[Row]
    enqueue: Enqueue | None


class Check:
    """The history and the rows that a check reads. Each check is a subclass."""

    def __init__(self, history: History, database: Database, lease: float) -> None:
        self.history = history
        self.database = database
        self.lease = lease
        self.failing = times(history.windows_of("connection", "server"))
        """When statements failed, although they may have been committed."""
        self.delays = times(history.windows_of("delay"))
        clocks = history.windows_of("clock")
        self.clocks = times(clocks)
        """When the server's clock was wrong."""
        self.jumps = [jump for window in clocks for jump in _jumps(window)]
        # Work goes on while the clock is wrong: only the jumps themselves excuse a pause.
        self.common = sorted(self.failing + self.delays + [(e, e) for w in self.clocks for e in w])
        self.by_worker: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for window in history.windows_of("worker"):
            if window.target is not None:
                self.by_worker[window.target] += times([window])

    def check(self, records: Iterable[JobRecord]) -> Iterator[Finding]:
        """The findings about single jobs, and about all jobs together."""
        raise NotImplementedError

    def worker_faults(self, worker: int) -> list[tuple[float, float]]:
        """When a fault kept a worker from its work."""
        return self.common + self.by_worker[worker]


def successions(leases: list[Lease]) -> Iterator[tuple[Lease, Lease]]:
    """Every lease, paired with each lease of the same job that is certainly later: requested after the first one
    was recorded. A worker may receive and record its claim long after other workers claimed the job."""
    for first in leases:
        for second in leases:
            if second.claim is not None and second.claim["asked"] > first.began:
                yield first, second


def _jumps(window: FaultWindow) -> Iterator[tuple[float, float]]:
    """When the server's clock jumped ahead, to its wrong time or back to the right one."""
    if window.begin["by"] > 0:
        yield window.begin.t, window.begin.t + JUMP_SECONDS
    elif window.end is not None:
        yield window.end.t - JUMP_SECONDS, window.end.t


def times(windows: Iterable[FaultWindow]) -> list[tuple[float, float]]:
    """The begin and the end of each window."""
    return [(window.begin.t, window.until()) for window in windows]


def numbers(*lines: Line | None) -> tuple[int, ...]:
    """The numbers of the lines that prove a finding."""
    return tuple(line.number for line in lines if line is not None)
