"""A producer: enqueues in every way there is until it is told to stop, and writes to the ledger what it asked
for and what it was told.

    python -m howdah.chaos.processes.producer --number 1 --seed 7 --rate 60 --misfits
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import signal
import time
from random import Random
from typing import TYPE_CHECKING, Any

from howdah.chaos.ledger import Ledger, from_environment
from howdah.chaos.processes.supervisor import BARE, COMMAND_TIMEOUT, SCHEMA_VARIABLE
from howdah.database import connection
from howdah.database.connection import DatabaseError
from howdah.errors import HowdahError, InvalidJob
from howdah.model import BACKFILL, DISCOVERED, EXPLICIT, NewJob
from howdah.queue import JobQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEYS = 3
BULK = 40
TIMEOUT = 10.0
PRIORITIES = (EXPLICIT, DISCOVERED, BACKFILL)
POISON_RESULTS = ("nul", "unspeakable", "nan", "huge", "object", "text")
POISON_PAYLOADS: Sequence[Any] = ("\x00", "\ud800", float("inf"), "x" * 200_000, [object()])
NAP = "chaos.nap"
QUIET_TYPES = ("chaos.quick", NAP, "chaos.thread")
MISFITS = (
    "chaos.killer", "chaos.staller", "chaos.deaf", "chaos.forker", "chaos.segfault", "chaos.glutton",
)  # fmt: skip


class Producer:
    """One process's enqueueing."""

    def __init__(
        self, url: str, schema: str, ledger: Ledger, number: int, seed: int, backlog: int
    ) -> None:
        self._url = url
        self._ledger = ledger
        self._number = number
        self._random = Random(f"producer {number} of {seed}")  # noqa: S311 - to be repeatable
        self._queue = JobQueue(
            url, schema=schema, timeout=TIMEOUT, create=False, command_timeout=COMMAND_TIMEOUT
        )
        self._calls = itertools.count(1)
        self._tags = itertools.count(1)
        self._next = dict.fromkeys((f"key-{number}-{k}" for k in range(KEYS)), 0)
        # Each has its turn, and no two producers begin with the same one.
        self._misfits = itertools.cycle(
            MISFITS[number % len(MISFITS) :] + MISFITS[: number % len(MISFITS)]
        )
        self._backlog = backlog
        self._looked = 0.0
        self.stopping = False

    def run(
        self, rate: float, most: int | None, *, misfits: bool, processes: bool, bare: bool
    ) -> None:
        """Enqueue about `rate` jobs a second until told to stop, or `most` of them."""
        began, done = time.monotonic(), 0
        ways: list[tuple[int, Callable[[], int]]] = [
            (40, self.single), (20, self.bulk), (12, self.ordered), (10, self.transaction),
            (8, self.unique), (5, self.delayed), (5, self.once), (5, self.flaky),
            (1, self.poison), (1, self.poison_payload),
        ]  # fmt: skip
        if processes:
            ways.append((1, self.in_process))
        if bare:
            ways.append((8, self.bare))
        if misfits:
            ways.append((3, self.misfit))
        while not self.stopping and (most is None or done < most):
            (way,) = self._random.choices([w for _, w in ways], [weight for weight, _ in ways])
            done += way()
            ahead = done / rate - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(min(ahead, 1.0))
            elif ahead < -2:
                began -= ahead + 2  # what was missed in a fault is not made up for in a rush
            self._hold_back()

    def _hold_back(self) -> None:
        """Wait while there is more to do than the workers can."""
        while not self.stopping and time.monotonic() - self._looked > 1:
            with contextlib.suppress(HowdahError, DatabaseError):
                if self._queue.pending() < self._backlog:
                    self._looked = time.monotonic()
            if time.monotonic() - self._looked > 1:
                time.sleep(0.2)

    # ── ways to enqueue ───────────────────────────────────────────────────────────────────────────

    def single(self) -> int:
        """One at a time."""
        return self._enqueue([self._plain()])

    def bulk(self) -> int:
        """Many at once."""
        return self._enqueue([self._plain() for _ in range(self._random.randint(5, BULK))])

    def ordered(self) -> int:
        """Some with one ordering key, in a row."""
        key = self._random.choice(list(self._next))
        jobs = []
        for _ in range(self._random.randint(1, 5)):
            n, self._next[key] = self._next[key], self._next[key] + 1
            jobs.append(self._job("chaos.ordered", {"n": n}, ordering_key=key, max_attempts=5))
        return self._enqueue(jobs)

    def unique(self) -> int:
        """The same idempotency key twice: one job."""
        key = f"unique-{self._number}-{next(self._tags)}"
        job = self._job("chaos.quick", idempotency_key=key, max_attempts=5)
        return self._enqueue([job]) and self._enqueue([job])

    def delayed(self) -> int:
        """Due a little later."""
        delay = round(self._random.uniform(0.1, 3), 2)
        return self._enqueue([self._job("chaos.quick", delay=delay, max_attempts=5)])

    def once(self) -> int:
        """Completed in the handler's own transaction."""
        return self._enqueue([self._job("chaos.once", max_attempts=5)])

    def flaky(self) -> int:
        """Fails, in some cases more often than it may."""
        failures = self._random.randint(1, 3)
        most = self._random.choice([1, 3, 4])
        return self._enqueue([self._job("chaos.flaky", {"failures": failures}, max_attempts=most)])

    def poison(self) -> int:
        """A result or an exception that cannot be stored, in the middle of good neighbours."""
        kind = self._random.choice(POISON_RESULTS)
        bad = self._job("chaos.poison", {"kind": kind}, max_attempts=2)
        return self._enqueue([self._plain(), bad, self._plain()])

    def poison_payload(self) -> int:
        """Data that no database takes: refused before anything is written."""
        poison = self._random.choice(POISON_PAYLOADS)
        return self._enqueue([self._job("chaos.quick", {"poison": poison})])

    def in_process(self) -> int:
        """Run in a process of its own."""
        return self._enqueue([self._job("chaos.process", max_attempts=5)])

    def misfit(self) -> int:
        """A handler that should never have been written."""
        return self._enqueue([self._job(next(self._misfits), max_attempts=2)])

    def bare(self) -> int:
        """For a worker with a loop of its own."""
        data = {
            "seconds": round(self._random.choice([0.0, 0.05, 0.2]), 2),
            "failures": self._random.choice([0, 0, 0, 1]),
        }
        priority = self._random.choice(PRIORITIES)
        return self._enqueue([self._job(BARE, data, max_attempts=3, priority=priority)])

    def transaction(self) -> int:
        """In a transaction of the caller's own, which now and then is rolled back."""
        jobs = [self._plain() for _ in range(self._random.randint(1, 3))]
        undo = self._random.random() < 0.4
        call = self._invoked(jobs)
        committing = False
        ids: list[str] = []
        try:
            with connection.connect(self._url, autocommit=False) as conn:
                ids = [str(h.id) for h in self._queue.enqueue_many(jobs, conn=conn)]
                if undo:
                    conn.rollback()
                    self._ledger.write("enqueue-rolled-back", call=call, ids=ids)
                    return len(jobs)
                committing = True
        except (DatabaseError, HowdahError):
            # A COMMIT that was sent may have come through; nothing else can have.
            kind = "enqueue-unknown" if committing else "enqueue-rolled-back"
            self._ledger.write(kind, call=call, ids=ids)
            time.sleep(0.2)
            return len(jobs)
        self._ledger.write("enqueue-acknowledged", call=call, ids=ids)
        return len(jobs)

    # ── one call ──────────────────────────────────────────────────────────────────────────────────

    def _plain(self) -> NewJob:
        (kind,) = self._random.choices(QUIET_TYPES, [12, 4, 1])
        most = 1 if self._random.random() < 0.1 else 5
        data = {"seconds": round(self._random.uniform(0.05, 0.8), 2)} if kind == NAP else None
        return self._job(kind, data, max_attempts=most, priority=self._random.choice(PRIORITIES))

    def _job(self, job_type: str, data: dict[str, Any] | None = None, **options: Any) -> NewJob:
        tag = f"{self._number}-{next(self._tags)}"
        return NewJob(job_type=job_type, data={"tag": tag, **(data or {})}, **options)

    def _invoked(self, jobs: Sequence[NewJob]) -> str:
        call = f"{self._number}-{next(self._calls)}"
        described = [
            {
                "tag": job.data["tag"], "type": job.job_type, "queue": job.queue,
                "priority": job.priority, "key": job.ordering_key, "n": job.data.get("n"),
                "delay": job.delay, "max_attempts": job.max_attempts, "unique": job.idempotency_key,
            }
            for job in jobs
        ]  # fmt: skip
        self._ledger.write("enqueue-invoked", call=call, jobs=described)
        return call

    def _enqueue(self, jobs: Sequence[NewJob]) -> int:
        call = self._invoked(jobs)
        try:
            ids = [str(handle.id) for handle in self._queue.enqueue_many(jobs)]
        except InvalidJob:
            self._ledger.write("enqueue-refused", call=call)
        except (HowdahError, DatabaseError):  # unreachable, or out of room
            self._ledger.write("enqueue-unknown", call=call)
            time.sleep(0.1)
        else:
            self._ledger.write("enqueue-acknowledged", call=call, ids=ids)
        return len(jobs)


def main() -> None:
    """Enqueue until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rate", type=float, default=60)
    parser.add_argument("--most", type=int)
    parser.add_argument("--backlog", type=int, default=2000)
    parser.add_argument("--misfits", action="store_true")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    ledger = from_environment()
    if ledger is None:
        raise SystemExit("a producer is a part of a chaos run and needs its ledger.")
    producer = Producer(
        os.environ["HOWDAH_DATABASE_URL"], os.environ[SCHEMA_VARIABLE], ledger,
        options.number, options.seed, options.backlog,
    )  # fmt: skip

    def stop(number: int, frame: object) -> None:
        producer.stopping = True

    signal.signal(signal.SIGTERM, stop)
    logging.basicConfig(level=logging.INFO)
    logging.getLogger(__name__).info("producer started")
    producer.run(
        options.rate, options.most,
        misfits=options.misfits, processes=options.processes, bare=options.bare,
    )  # fmt: skip


if __name__ == "__main__":
    main()
