"""What a scenario is: a schedule of faults that a seed decides, and how each is made to happen.

    class KillWorkers(Scenario):
        name = "kill workers"
        about = "kill -9 of workers at random"
        every = 2.0

        def draw(self, random):
            return "kill worker", {"worker": random.randrange(100)}

        def strike(self, stage, fault):
            worker = stage.crew.pick(fault.detail["worker"])
            with stage.fault(fault.name, scope="worker", target=worker.pid):
                worker.kill()

The schedule is made before anything happens and printed: equal seeds give equal schedules. What really hit
is decided later, from exit codes and the ledger, not from the schedule. A scenario that needs servers of its
own, a proxy or a pooler sets them up in `place`. Faults of one scenario strike one after the other, in a
thread of the scenario's own, so `strike` may wait; scenarios may run side by side."""

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
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from random import Random

    from howdah.chaos.checker import Finding
    from howdah.chaos.history import History
    from howdah.chaos.ledger import Ledger
    from howdah.chaos.processes.supervisor import Child, Crew

BUSY = 3
"""Jobs in hand that make a worker worth a fault."""
BUSY_PATIENCE = 5.0
HEARD = 0.05
"""Seconds after which a worker has surely heard of what it claimed."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault: so many seconds after the scenario began, what, and its particulars."""

    at: float
    name: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        detail = ", ".join(f"{key} {value}" for key, value in self.detail.items())
        return f"{self.at:6.1f} s  {self.name}" + (f" ({detail})" if detail else "")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run happens."""

    database: str
    """The URL that workers and producers use; a proxy or a pooler may stand behind it."""
    checker: str
    """A URL straight to the server, for the checker and for looking."""
    schema: str = "howdah"

    def connect(self) -> Connection:
        """A connection for looking, which does not wait long."""
        return connection.connect(
            self.checker,
            options="-c statement_timeout=5s" if "options" not in self.checker else None,
        )  # fmt: skip


@dataclass(slots=True)
class Stage:
    """What a scenario is given."""

    place: Place
    directory: Path
    """The run's own directory: the ledger and the logs are in it."""
    random: Random
    ledger: Ledger
    crew: Crew
    """The running workers and producers."""
    lease: float
    """Seconds that the workers' leases last."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def sleep(self, seconds: float) -> bool:
        """Wait, unless the run ends before that; whether it did."""
        return self.stopping.wait(seconds)

    def in_hand(self, since: float = 0.0) -> dict[int, int]:
        """How many jobs each worker has had for so many seconds, by process id. Nobody knows while the
        server is away."""
        query = (
            "SELECT split_part(worker_id, ':', 2)::int, count(*) "
            f"FROM {quote_schema(self.place.schema)}.live_jobs "
            "WHERE status = 'claimed' AND lease_expires_at > clock_timestamp() "
            "AND claimed_at <= clock_timestamp() - make_interval(secs => %s) GROUP BY 1"
        )
        with contextlib.suppress(DatabaseError), self.place.connect() as conn:
            return dict(conn.execute(query.encode(), [since]).fetchall())
        return {}

    def raise_suspicion(self) -> None:
        """Have waiting jobs look as if two workers had died with them, without a trace: a worker then writes
        down that it starts them before it does."""
        jobs = f"{quote_schema(self.place.schema)}.live_jobs"
        mark = (
            f"UPDATE {jobs} SET claims = attempts + 2 WHERE id = ANY (ARRAY (SELECT id FROM {jobs} "
            "WHERE status = 'pending' AND claims - attempts < 2 LIMIT 100 FOR UPDATE SKIP LOCKED))"
        )
        with contextlib.suppress(DatabaseError), self.place.connect() as conn:
            conn.execute(mark.encode())

    def await_busy(self, patience: float = BUSY_PATIENCE) -> list[Child]:
        """The workers that have jobs in hand, oldest first, as soon as there are some: a fault that finds
        nobody in the middle shows nothing."""
        give_up = time.monotonic() + patience
        while True:
            jobs = self.in_hand(HEARD)
            there = self.crew.workers() + self.crew.children("bare")
            busy = [worker for worker in there if jobs.get(worker.pid, 0) >= BUSY]
            late = time.monotonic() > give_up or not self.crew.producers()
            if busy or late or self.sleep(0.02):
                return busy

    def pick(self, number: int) -> Child | None:
        """One of those, by a number that the schedule drew."""
        busy = self.await_busy()
        return busy[number % len(busy)] if busy else None

    @contextlib.contextmanager
    def fault(self, name: str, *, scope: str, **fields: Any) -> Iterator[None]:
        """A fault while the block lasts, in the ledger. `scope` says what it may do, and the checker
        excuses nothing else:

            worker, producer   whatever befalls one process, named by `target=pid`
            neighbour          nothing: it happens in the same database and may disturb nobody
            delay              keep everybody waiting; no statement fails, nothing is undone
            connection         let statements fail, of which nobody knows whether they were committed
            server             the same, and take back what had not been flushed: it crashes
        """
        number = next(_numbers)
        self.ledger.write("fault", fields, fault=number, name=name, scope=scope, phase="begin")
        try:
            yield
        finally:
            self.ledger.write("fault", fields, fault=number, name=name, scope=scope, phase="end")


class Scenario:
    """A kind of fault, or several. Subclasses say which and when."""

    name: str
    about: str = ""
    workers: int = 3
    """How many workers there should be."""
    least: float = 0.0
    """Seconds of load below which it cannot show what it is for."""
    environment: Mapping[str, str] = {}
    """Variables for the workers' and producers' environment."""
    first: float = 1.0
    """Seconds until its first fault."""
    every: float | None = None
    """Seconds from one fault to the next, more or less."""
    _deck: Sequence[str] = ()

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        """Where it happens: on the run's common server, unless the scenario sets up another one.
        The schema is made by the run."""
        yield common

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        """What happens when. Nothing but `random` may decide it."""
        self._deck = ()
        if self.every is None:
            return []
        times = regularly(random, seconds, self.every, self.first)
        return [Fault(at, *self.draw(random)) for at in times]

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        """The name and the particulars of the next fault."""
        return self.name, {}

    def deal(self, random: Random, kinds: Sequence[str], count: int = 1) -> Sequence[str]:
        """The next of these, each of which has its turn before one has another."""
        self._deck = self._deck or random.sample(kinds, len(kinds))
        dealt, self._deck = self._deck[:count], self._deck[count:]
        return dealt

    def strike(self, stage: Stage, fault: Fault) -> None:
        """Make one fault happen, and end."""
        raise NotImplementedError(f"{self.name} plans faults and does not know how to strike")

    def findings(self, stage: Stage) -> list[str]:
        """What is wrong that the common checker cannot know, as sentences. Called after the run."""
        return []

    def missed(self, history: History, planned: Iterable[str], lease: float) -> list[str]:
        """What the run was to show and did not, as sentences: `planned` are the names of its faults, each
        of which must have found a job in the middle."""
        hit = fault_hits.count(history, lease)
        return [f'no "{name}" hit a job in the middle' for name in planned if not hit.get(name)]

    def excused(self, stage: Stage, findings: Sequence[Finding]) -> Sequence[Finding]:
        """Those of the checker's findings that the fault was bound to bring about, and proof of it is at
        hand: where a server was lost with what only it knew."""
        return []


def regularly(random: Random, seconds: float, every: float, first: float) -> Iterator[float]:
    """Times for faults, about `every` seconds apart."""
    at = first
    while at < seconds:
        yield round(at, 2)
        at += every * random.uniform(0.7, 1.3)
