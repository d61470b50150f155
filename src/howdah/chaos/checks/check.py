"""What the checks share: what a finding is, what is known of a job, and which faults may excuse what."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from howdah.chaos.history import Database, Enqueue, History, Lease, Row, Window
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


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: which, of which job, in words, and the lines of the ledger that prove it."""

    promise: str
    job: str
    what: str
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = f" (ledger lines {', '.join(map(str, self.lines))})" if self.lines else ""
        return f"{self.promise} {self.job}: {self.what}{lines}"


@dataclass(slots=True)
class Case:
    """One job: what the ledger has of it, and what the database."""

    id: str
    leases: list[Lease]
    rows: list[Row]
    enqueue: Enqueue | None


class Judge:
    """The history and the rows that a check looks at. Each check is a subclass."""

    def __init__(self, history: History, database: Database, lease: float) -> None:
        self.history = history
        self.database = database
        self.lease = lease
        self.failing = times(history.windows_of("connection", "server"))
        """When statements failed, and might yet have been committed."""
        self.delays = times(history.windows_of("delay"))
        self.common = sorted(self.failing + self.delays)
        self.of_worker: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for window in history.windows_of("worker"):
            if window.target is not None:
                self.of_worker[window.target] += times([window])

    def check(self, cases: Iterable[Case]) -> Iterator[Finding]:
        """What is wrong with each job, and with all of them together."""
        raise NotImplementedError

    def worker_faults(self, worker: int) -> list[tuple[float, float]]:
        """When something kept a worker from its work."""
        return self.common + self.of_worker[worker]


def successions(leases: list[Lease]) -> Iterator[tuple[Lease, Lease]]:
    """Every lease with each of the same job that is certainly later: asked for after the first one was
    known. A worker may hear of its claim, and write it down, long after others have the job."""
    for first in leases:
        for second in leases:
            if second.claim is not None and second.claim["asked"] > first.began:
                yield first, second


def times(windows: Iterable[Window]) -> list[tuple[float, float]]:
    """From when to when each lasted."""
    return [(window.begin.t, window.until()) for window in windows]


def numbers(*lines: Line | None) -> tuple[int, ...]:
    """The numbers of the lines that prove something."""
    return tuple(line.number for line in lines if line is not None)
