"""The ledger, indexed: enqueues, and the leases of every job in order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from howdah.chaos.ledger import Line

LEASE_LINES = {
    "start": "starts",
    "effect": "effects",
    "beat": "beats",
    "report": "reports",
    "ack-invoked": "invoked",
    "ack-accepted": "accepted",
    "ack-refused": "refused",
    "ack-unknown": "unknown",
}
"""The list of a `Lease` in which lines of each kind are collected."""


class Row(NamedTuple):
    """A job in the database after the run."""

    id: str
    seq: int
    status: str
    job_type: str
    queue: str
    priority: int
    attempts: int
    max_attempts: int
    claims: int
    lease_id: str | None
    ordering_key: str | None
    tag: str | None
    last_error: str | None


@dataclass(slots=True)
class Database:
    """What the checker reads from the database: every job, every error event as (job, attempt), per job the number
    of rows that its handler wrote together with its completion, and the reports of runs as (job, fence)."""

    rows: Sequence[Row]
    errors: Sequence[tuple[str, int]] = ()
    effects: dict[str, int] = field(default_factory=dict)
    reports: frozenset[tuple[str, str]] = frozenset()


@dataclass(slots=True)
class Enqueue:
    """One call of a producer. Its outcome is acknowledged, unknown, refused or rolled-back."""

    invoked: Line
    answer: Line | None = None

    @property
    def outcome(self) -> str:
        # A producer that was killed during the call received no reply either.
        return "unknown" if self.answer is None else self.answer.kind.removeprefix("enqueue-")

    @property
    def ids(self) -> list[str]:
        return [] if self.answer is None else self.answer.get("ids", [])

    def jobs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The id and the description of each job whose id was returned."""
        yield from zip(self.ids, self.invoked["jobs"], strict=False)


@dataclass(slots=True)
class Lease:
    """One claim of one job."""

    job: str
    fence: str
    claim: Line | None = None
    announced: Line | None = None
    starts: list[Line] = field(default_factory=list)
    effects: list[Line] = field(default_factory=list)
    beats: list[Line] = field(default_factory=list)
    reports: list[Line] = field(default_factory=list)
    invoked: list[Line] = field(default_factory=list)
    accepted: list[Line] = field(default_factory=list)
    refused: list[Line] = field(default_factory=list)
    unknown: list[Line] = field(default_factory=list)

    @property
    def began(self) -> float:
        """The time of the first line about it: its claim happened before."""
        return self.first.t

    @property
    def first(self) -> Line:
        """The first line about it."""
        lines = [self.claim] if self.claim else []
        lines += [*self.starts[:1], *self.invoked[:1], *self.beats[:1], *self.accepted[:1]]
        return min((line for line in lines if line), key=lambda line: line.t)

    @property
    def worker(self) -> int:
        """The process that claimed it."""
        return (self.claim or self.first).pid

    def ended(self) -> float | None:
        """When its worker first sent an acknowledgement, or got one rejected."""
        times = [line.t for line in (*self.invoked, *self.accepted, *self.refused)]
        return min(times, default=None)


@dataclass(slots=True)
class FaultWindow:
    """A fault, from its begin to its end."""

    name: str
    scope: str
    begin: Line
    end: Line | None = None

    @property
    def target(self) -> int | None:
        found: int | None = self.begin.get("target")
        return found

    def until(self) -> float:
        """When it ended; infinity if it did not."""
        return float("inf") if self.end is None else self.end.t


class History:
    """The ledger, indexed."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.enqueues: dict[str, Enqueue] = {}
        self.jobs: dict[str, list[Lease]] = defaultdict(list)
        self.windows: dict[int, FaultWindow] = {}
        self.ready: dict[int, Line] = {}
        self.exits: dict[int, Line] = {}
        self.troubles: dict[int, list[Line]] = defaultdict(list)
        self.overdue: list[Line] = []
        self.samples: list[Line] = []
        self.notes: list[Line] = []
        self._leases: dict[tuple[str, str], Lease] = {}
        for line in lines:
            self._add(line)
        for leases in self.jobs.values():
            leases.sort(key=lambda lease: lease.began)

    def _add(self, line: Line) -> None:
        match line.kind:
            case "enqueue-invoked":
                self.enqueues[line["call"]] = Enqueue(line)
            case kind if kind.startswith("enqueue-"):
                self.enqueues[line["call"]].answer = line
            case "fault":
                if line["phase"] == "begin":
                    window = FaultWindow(line["name"], line["scope"], line)
                    self.windows[line["fault"]] = window
                else:
                    self.windows[line["fault"]].end = line
            case "ready":
                if line["role"] not in ("producer", "bare"):
                    self.ready[line["child"]] = line
            case "exit":
                self.exits[line["child"]] = line
            case "trouble" | "well":
                self.troubles[line.pid].append(line)
            case "overdue":
                self.overdue.append(line)
            case "sample":
                self.samples.append(line)
            case "note":
                self.notes.append(line)
            case _:
                self._add_to_lease(line)

    def _add_to_lease(self, line: Line) -> None:
        lease = self._lease(line["job"], line["fence"])
        match line.kind:
            case "claim":
                lease.claim = line
            case "announce":
                lease.announced = line
            case kind:
                lines: list[Line] = getattr(lease, LEASE_LINES[kind])
                lines.append(line)

    def _lease(self, job: str, fence: str) -> Lease:
        lease = self._leases.get((job, fence))
        if lease is None:
            lease = self._leases[job, fence] = Lease(job, fence)
            self.jobs[job].append(lease)
        return lease

    def acknowledged(self) -> Iterator[tuple[str, dict[str, Any], Enqueue]]:
        """Every job whose enqueue was acknowledged: id, description, call."""
        for enqueue in self.enqueues.values():
            if enqueue.outcome == "acknowledged":
                for job, described in enqueue.jobs():
                    yield job, described, enqueue

    def durable(self) -> Iterator[tuple[float, float]]:
        """For each durable statement, when its reply came and when it was sent."""
        for enqueue in self.enqueues.values():
            if enqueue.answer is not None and enqueue.outcome == "acknowledged":
                yield enqueue.answer.t, enqueue.invoked.t
        for lease in self._leases.values():
            for line in (*lease.accepted, *lease.beats):
                yield line.t, line["asked"]

    def windows_of(self, *scopes: str) -> list[FaultWindow]:
        """The faults with these scopes."""
        return [window for window in self.windows.values() if window.scope in scopes]

    def in_flight(self, worker: int, at: float) -> list[Lease]:
        """The leases that were in flight in a worker at a time."""
        return [
            lease
            for lease in self.by_worker().get(worker, ())
            if lease.began <= at and ((end := lease.ended()) is None or end > at)
        ]

    def by_worker(self) -> dict[int, list[Lease]]:
        """The leases of each worker process."""
        if not hasattr(self, "_by_worker"):
            found: dict[int, list[Lease]] = defaultdict(list)
            for lease in self._leases.values():
                found[lease.worker].append(lease)
            self._by_worker = found
        return self._by_worker
