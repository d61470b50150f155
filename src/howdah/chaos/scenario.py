"""A scenario: a schedule of faults, derived from a seed, and the code that injects each fault.

    class KillWorkers(Scenario):
        name = "kill workers"
        about = "kill -9 of workers at random"
        every_seconds = 2.0

        def draw(self, random):
            return "kill worker", {"worker": random.randrange(100)}

        def inject(self, run, fault):
            worker = run.pick_busy_worker(fault.detail["worker"])
            with run.fault(fault.name, scope="worker", target=worker.pid):
                worker.kill()

The schedule is made and printed before the run: equal seeds give equal schedules. Which faults hit a job is decided
after the run, from exit codes and the ledger. A scenario that needs its own servers, a proxy or a pooler sets them up
in `place`. Each scenario injects its faults one after the other in its own thread, so `inject` may wait; several
scenarios may run side by side."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from howdah.chaos import fault_hits
from howdah.database import connection
from howdah.database.connection import Connection, DatabaseError
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from random import Random

    from howdah.chaos.checker import Finding
    from howdah.chaos.history import History
    from howdah.chaos.ledger import Ledger
    from howdah.chaos.processes.supervisor import Child, Supervisor

BUSY_JOBS = 3
"""A fault picks workers with at least this many jobs in flight."""
BUSY_TIMEOUT_SECONDS = 5.0
CLAIM_REPLY_SECONDS = 0.05
"""A worker has received the reply to a claim after this time."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault: seconds after the start of the scenario, a name, and details."""

    at: float
    name: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        detail = ", ".join(f"{key} {value}" for key, value in self.detail.items())
        return f"{self.at:6.1f} s  {self.name}" + (f" ({detail})" if detail else "")


@dataclass(frozen=True, slots=True)
class Place:
    """The database and schema of a run."""

    database: str
    """The URL that workers and producers use; it may lead to a proxy or a pooler."""
    checker: str
    """A URL directly to the server, for the checker and for samples."""
    schema: str = "howdah"

    def connect(self) -> Connection:
        """A connection for samples, with a short statement timeout."""
        return connection.connect(
            self.checker,
            options="-c statement_timeout=5s" if "options" not in self.checker else None,
        )  # fmt: skip


@dataclass(slots=True)
class RunContext:
    """What a scenario uses to inject faults into a run."""

    place: Place
    directory: Path
    """The directory of the run, with the ledger and the logs."""
    random: Random
    ledger: Ledger
    supervisor: Supervisor
    """The running workers and producers."""
    lease: float
    """The lease of the workers, in seconds."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def sleep(self, seconds: float) -> bool:
        """Wait, unless the run ends first; returns whether it ended."""
        return self.stopping.wait(seconds)

    def wait_until(
        self, condition: Callable[[], object], timeout: float, poll: float = 0.02
    ) -> None:
        """Wait until the condition is true, the timeout passes, or the run ends."""
        deadline = time.monotonic() + timeout
        while not condition() and time.monotonic() < deadline and not self.sleep(poll):
            pass

    def jobs_in_flight(self, for_seconds: float = 0.0) -> dict[int, int]:
        """The number of jobs that each worker claimed at least this many seconds ago, by process id. Empty while the
        server is unreachable."""
        query = (
            "SELECT split_part(worker_id, ':', 2)::int, count(*) "
            f"FROM {quote_schema(self.place.schema)}.jobs "
            "WHERE status IN ('claimed', 'running') AND lease_expires_at > clock_timestamp() "
            "AND claimed_at <= clock_timestamp() - make_interval(secs => %s) GROUP BY 1"
        )
        with contextlib.suppress(DatabaseError), self.place.connect() as conn:
            return dict(conn.execute(query.encode(), [for_seconds]).fetchall())
        return {}

    def mark_as_recovered(self) -> None:
        """Make pending jobs look as if two workers were killed with them before they reported a start. A worker
        then writes to the database that it starts such a job before it does."""
        jobs = f"{quote_schema(self.place.schema)}.live_jobs"
        mark = (
            f"UPDATE {jobs} SET claims = attempts + 2 WHERE id = ANY (ARRAY (SELECT id FROM {jobs} "
            "WHERE status = 'pending' AND claims - attempts < 2 LIMIT 100 FOR UPDATE SKIP LOCKED))"
        )
        with contextlib.suppress(DatabaseError), self.place.connect() as conn:
            conn.execute(mark.encode())

    def wait_for_busy_workers(self, timeout: float = BUSY_TIMEOUT_SECONDS) -> list[Child]:
        """The workers with jobs in flight, oldest first, as soon as there are any: a fault that hits no job in
        flight proves nothing. Returns early when the load ends."""
        busy: list[Child] = []

        def found() -> bool:
            jobs = self.jobs_in_flight(CLAIM_REPLY_SECONDS)
            workers = self.supervisor.workers() + self.supervisor.children("bare")
            busy[:] = [worker for worker in workers if jobs.get(worker.pid, 0) >= BUSY_JOBS]
            return bool(busy) or not self.supervisor.producers()

        self.wait_until(found, timeout)
        return busy

    def pick_busy_worker(self, number: int) -> Child | None:
        """One of the busy workers, selected by a number from the schedule."""
        busy = self.wait_for_busy_workers()
        return busy[number % len(busy)] if busy else None

    @contextlib.contextmanager
    def fault(self, name: str, *, scope: str, **fields: Any) -> Iterator[None]:
        """Record a fault in the ledger that lasts as long as the block. `scope` names its permitted consequences;
        the checker excuses nothing else:

            worker, producer   anything that happens to one process, named by `target=pid`
            neighbour          none: it happens in the same database and must disturb no job
            delay              every process may wait; no statement fails, nothing is undone
            clock              the server's clock jumps `by` seconds and comes back: a jump ahead ends leases
                               early, and what is ordered by time may change its order
            connection         statements fail, and whether they were committed is unknown
            server             the same, and claims that were not flushed are undone: a crash
        """
        number = next(_numbers)
        self.ledger.write("fault", fields, fault=number, name=name, scope=scope, phase="begin")
        try:
            yield
        finally:
            self.ledger.write("fault", fields, fault=number, name=name, scope=scope, phase="end")


class Scenario:
    """One kind of fault, or several. Subclasses define which faults, and when."""

    name: str
    about: str = ""
    workers: int = 3
    """The number of workers to run."""
    min_seconds: float = 0.0
    """Shorter runs cannot prove what the scenario is for."""
    environment: Mapping[str, str] = {}
    """Environment variables of the workers and producers."""
    first_seconds: float = 1.0
    """Seconds until the first fault."""
    every_seconds: float | None = None
    """The approximate time from one fault to the next."""
    _remaining: Sequence[str] = ()

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        """Where the scenario runs: on the common server of the run, unless the scenario sets up another one. The
        run creates the schema."""
        yield common

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        """The planned faults. They must depend on `random` alone."""
        self._remaining = ()
        if self.every_seconds is None:
            return []
        times = fault_times(random, seconds, self.every_seconds, self.first_seconds)
        return [Fault(at, *self.draw(random)) for at in times]

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        """The name and the details of the next fault."""
        return self.name, {}

    def draw_in_turn(self, random: Random, kinds: Sequence[str], count: int = 1) -> Sequence[str]:
        """The next of these kinds in random order; every kind is drawn once before any is drawn again."""
        self._remaining = self._remaining or random.sample(kinds, len(kinds))
        drawn, self._remaining = self._remaining[:count], self._remaining[count:]
        return drawn

    def inject(self, run: RunContext, fault: Fault) -> None:
        """Inject one fault, and end it."""
        raise NotImplementedError(f"{self.name} schedules faults and does not implement inject()")

    def findings(self, run: RunContext) -> list[str]:
        """Problems that the common checker cannot detect, as sentences. Called after the run."""
        return []

    def missed(self, history: History, planned: Iterable[str], lease: float) -> list[str]:
        """What the run failed to exercise, as sentences. `planned` are the names of its faults; each must have hit
        a job in flight."""
        hit = fault_hits.count(history, lease)
        return [f'no "{name}" hit a job in the middle' for name in planned if not hit.get(name)]

    def excused(self, run: RunContext, findings: Sequence[Finding]) -> Sequence[Finding]:
        """The findings that the fault must cause, with proof: data that existed only on a lost server."""
        return []


def fault_times(random: Random, seconds: float, every: float, first: float) -> Iterator[float]:
    """Times for faults, about `every` seconds apart."""
    at = first
    while at < seconds:
        yield round(at, 2)
        at += every * random.uniform(0.7, 1.3)
