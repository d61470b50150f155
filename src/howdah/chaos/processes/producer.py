"""A producer: enqueues in every supported way until SIGTERM, and records each request and its reply in the ledger.

python -m howdah.chaos.processes.producer --number 1 --seed 7 --rate 60 --harmful
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from random import Random
from typing import TYPE_CHECKING, Any

from howdah.chaos.processes.environment import (
    BARE,
    COMMAND_TIMEOUT_SECONDS,
    SCHEMA_VARIABLE,
    required_ledger,
    start_logging,
)
from howdah.database import connection
from howdah.database.connection import DatabaseError
from howdah.errors import HowdahError, InvalidJob
from howdah.model import BACKFILL, DISCOVERED, EXPLICIT, NewJob
from howdah.queue import JobQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from howdah.chaos.ledger import Ledger

ORDERING_KEYS = 3
BULK_JOBS = 40
TIMEOUT_SECONDS = 10.0
BACKLOG_CHECK_SECONDS = 1.0
PRIORITIES = (EXPLICIT, DISCOVERED, BACKFILL)
POISON_RESULTS = ("nul", "unprintable", "nan", "huge", "object", "text")
POISON_PAYLOADS: Sequence[Any] = ("\x00", "\ud800", float("inf"), "x" * 200_000, [object()])
NAP = "chaos.nap"
PLAIN_TYPES = ("chaos.quick", NAP, "chaos.thread")
HARMFUL_TASKS = (
    "chaos.killer", "chaos.staller", "chaos.deaf", "chaos.forker", "chaos.segfault", "chaos.glutton",
    "chaos.canceller", "chaos.swallower", "chaos.stopper", "chaos.quitter", "chaos.filler", "chaos.leaker",
)  # fmt: skip


class Producer:
    """Enqueues jobs from one process."""

    def __init__(
        self, url: str, schema: str, ledger: Ledger, number: int, seed: int, backlog: int
    ) -> None:
        self._url = url
        self._ledger = ledger
        self._number = number
        self._random = Random(f"producer {number} of {seed}")  # noqa: S311 - to be repeatable
        self._queue = JobQueue(
            url,
            schema=schema,
            timeout=TIMEOUT_SECONDS,
            create=False,
            command_timeout=COMMAND_TIMEOUT_SECONDS,
        )
        self._calls = itertools.count(1)
        self._tags = itertools.count(1)
        self._next = dict.fromkeys((f"key-{number}-{k}" for k in range(ORDERING_KEYS)), 0)
        # In turn; each producer starts with a different one.
        self._harmful = itertools.cycle(
            HARMFUL_TASKS[number % len(HARMFUL_TASKS) :]
            + HARMFUL_TASKS[: number % len(HARMFUL_TASKS)]
        )
        self._backlog = backlog
        self._backlog_checked_at = 0.0
        self._stopping = False

    def stop(self) -> None:
        """End `run` after the current call."""
        self._stopping = True

    def run(
        self, rate: float, limit: int | None, *, harmful: bool, processes: bool, bare: bool
    ) -> None:
        """Enqueue about `rate` jobs per second until `stop` is called, or `limit` jobs."""
        began, done = time.monotonic(), 0
        ways: list[tuple[int, Callable[[], int]]] = [
            (40, self.single), (20, self.bulk), (12, self.ordered), (8, self.transaction),
            (3, self.savepoint),
            (8, self.unique), (5, self.delayed), (5, self.once), (5, self.flaky),
            (1, self.poison), (1, self.poison_payload),
        ]  # fmt: skip
        if processes:
            ways.append((1, self.in_process))
        if bare:
            ways.append((8, self.bare))
        if harmful:
            ways.append((3, self.harmful))
        while not self._stopping and (limit is None or done < limit):
            (way,) = self._random.choices([w for _, w in ways], [weight for weight, _ in ways])
            done += way()
            ahead = done / rate - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(min(ahead, 1.0))
            elif ahead < -2:
                began -= ahead + 2  # jobs missed during a fault are not enqueued in one burst
            self._wait_for_backlog()

    def _wait_for_backlog(self) -> None:
        """Once per second: wait until fewer jobs are pending than the backlog allows."""
        while not self._stopping and self._backlog_check_is_due():
            with contextlib.suppress(HowdahError, DatabaseError):
                if self._queue.pending() < self._backlog:
                    self._backlog_checked_at = time.monotonic()
            if self._backlog_check_is_due():
                time.sleep(0.2)

    def _backlog_check_is_due(self) -> bool:
        return time.monotonic() - self._backlog_checked_at > BACKLOG_CHECK_SECONDS

    # ── ways to enqueue ───────────────────────────────────────────────────────────────────────────

    def single(self) -> int:
        """One at a time."""
        return self._enqueue([self._plain()])

    def bulk(self) -> int:
        """Many in one call."""
        return self._enqueue([self._plain() for _ in range(self._random.randint(5, BULK_JOBS))])

    def ordered(self) -> int:
        """Several with one ordering key."""
        key = self._random.choice(list(self._next))
        jobs = []
        for _ in range(self._random.randint(1, 5)):
            n, self._next[key] = self._next[key], self._next[key] + 1
            jobs.append(self._job("chaos.ordered", {"n": n}, ordering_key=key, max_attempts=5))
        return self._enqueue(jobs)

    def unique(self) -> int:
        """The same idempotency key twice, which must create one job."""
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
        """Fails once or more; sometimes more often than its max_attempts."""
        failures = self._random.randint(1, 3)
        most = self._random.choice([1, 3, 4])
        return self._enqueue([self._job("chaos.flaky", {"failures": failures}, max_attempts=most)])

    def poison(self) -> int:
        """A result or an exception that cannot be stored, between two plain jobs."""
        kind = self._random.choice(POISON_RESULTS)
        bad = self._job("chaos.poison", {"kind": kind}, max_attempts=2)
        return self._enqueue([self._plain(), bad, self._plain()])

    def poison_payload(self) -> int:
        """Data that cannot be stored: refused before anything is written."""
        poison = self._random.choice(POISON_PAYLOADS)
        return self._enqueue([self._job("chaos.quick", {"poison": poison})])

    def in_process(self) -> int:
        """Runs in a separate process."""
        return self._enqueue([self._job("chaos.process", max_attempts=5)])

    def harmful(self) -> int:
        """A handler that harms its worker."""
        return self._enqueue([self._job(next(self._harmful), max_attempts=2)])

    def bare(self) -> int:
        """For a bare queue worker."""
        data = {
            "seconds": round(self._random.choice([0.0, 0.05, 0.2]), 2),
            "failures": self._random.choice([0, 0, 0, 1]),
        }
        priority = self._random.choice(PRIORITIES)
        return self._enqueue([self._job(BARE, data, max_attempts=3, priority=priority)])

    def transaction(self) -> int:
        """In the caller's transaction, which is rolled back in some cases."""
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
            # Only a COMMIT that was sent may have taken effect.
            kind = "enqueue-unknown" if committing else "enqueue-rolled-back"
            self._ledger.write(kind, call=call, ids=ids)
            time.sleep(0.2)
            return len(jobs)
        self._ledger.write("enqueue-acknowledged", call=call, ids=ids)
        return len(jobs)

    def savepoint(self) -> int:
        """In the caller's transaction, of which a part is rolled back to a savepoint. The part that is kept is
        enqueued before and after it."""
        kept, undone = [self._plain(), self._plain()], [self._plain()]
        kept_call, undone_call = self._invoked(kept), self._invoked(undone)
        committing = False
        ids: list[str] = []
        lost: list[str] = []
        try:
            with connection.connect(self._url, autocommit=False) as conn:
                ids += [str(h.id) for h in self._queue.enqueue_many(kept[:1], conn=conn)]
                conn.execute(b"SAVEPOINT before_it")
                lost += [str(h.id) for h in self._queue.enqueue_many(undone, conn=conn)]
                conn.execute(b"ROLLBACK TO before_it")
                ids += [str(h.id) for h in self._queue.enqueue_many(kept[1:], conn=conn)]
                committing = True
        except (DatabaseError, HowdahError):
            kind = "enqueue-unknown" if committing else "enqueue-rolled-back"
            self._ledger.write(kind, call=kept_call, ids=ids)
            time.sleep(0.2)
        else:
            self._ledger.write("enqueue-acknowledged", call=kept_call, ids=ids)
        self._ledger.write("enqueue-rolled-back", call=undone_call, ids=lost)
        return len(kept)

    # ── one call ──────────────────────────────────────────────────────────────────────────────────

    def _plain(self) -> NewJob:
        (kind,) = self._random.choices(PLAIN_TYPES, [12, 4, 1])
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
        except (HowdahError, DatabaseError):  # unreachable, or its disk is full
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
    parser.add_argument("--limit", type=int)
    parser.add_argument("--backlog", type=int, default=2000)
    parser.add_argument("--harmful", action="store_true")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    producer = Producer(
        os.environ["HOWDAH_DATABASE_URL"], os.environ[SCHEMA_VARIABLE], required_ledger(),
        options.number, options.seed, options.backlog,
    )  # fmt: skip
    start_logging(__name__, "producer started", on_stop=producer.stop)
    producer.run(
        options.rate, options.limit,
        harmful=options.harmful, processes=options.processes, bare=options.bare,
    )  # fmt: skip


if __name__ == "__main__":
    main()
