"""A worker that does without `howdah worker`: a loop of one's own on a bare `JobQueue`, as some users write it.
Claims a few jobs, extends their leases, completes them, fails some, and gives back what is left at SIGTERM.

    python -m howdah.chaos.processes.bare_queue_worker
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from typing import TYPE_CHECKING

from howdah.chaos.ledger import Ledger, from_environment
from howdah.chaos.processes import recording_stores
from howdah.chaos.processes.supervisor import BARE, COMMAND_TIMEOUT, LEASE_VARIABLE, SCHEMA_VARIABLE
from howdah.database.connection import DatabaseError
from howdah.errors import HowdahError, LeaseLost
from howdah.queue import JobQueue

if TYPE_CHECKING:
    from uuid import UUID

    from howdah.model import Job

BATCH = 5
IDLE = 0.05


class Bare:
    """One process's loop."""

    def __init__(self, url: str, schema: str, lease: float, ledger: Ledger) -> None:
        self._queue = JobQueue(
            url, schema=schema, lease=lease, create=False, command_timeout=COMMAND_TIMEOUT
        )
        self._ledger = ledger
        self._lease = lease
        self._mine: dict[UUID, Job] = {}
        self._extended = 0.0
        self.stopping = False

    def run(self) -> None:
        """Until it is told to stop."""
        while not self.stopping:
            # What it had when the database went away is somebody else's after the lease.
            with contextlib.suppress(HowdahError, DatabaseError):
                self._round()
        with contextlib.suppress(HowdahError, DatabaseError):
            self._queue.release(list(self._mine.values()))
        self._queue.close()

    def _round(self) -> None:
        self._extended = time.monotonic()
        self._mine = {job.id: job for job in self._queue.claim(BARE, batch_size=BATCH)}
        if not self._mine:
            time.sleep(IDLE)
        while self._mine and not self.stopping:
            self._work(next(iter(self._mine.values())))

    def _work(self, job: Job) -> None:
        self._note("start", job)
        until = time.monotonic() + job.data["seconds"]
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, self._lease / 10))
            self._keep()
        with contextlib.suppress(LeaseLost):
            if job.attempts <= job.data["failures"]:
                self._queue.fail(job, "not yet", delay=0.05)
            else:
                self._note("effect", job)
                self._queue.complete(job, {"by": os.getpid()})
        self._mine.pop(job.id, None)

    def _keep(self) -> None:
        """Extend the leases of all that it has, now and then."""
        if time.monotonic() - self._extended > self._lease / 4:
            self._extended = time.monotonic()
            # It notices of what was lost when it acknowledges it: too late is no harm.
            with contextlib.suppress(LeaseLost):
                self._queue.extend(list(self._mine.values()))

    def _note(self, kind: str, job: Job) -> None:
        about = {"job": job.id, "fence": job.lease_id, "attempt": job.attempts}
        self._ledger.write(kind, about)


def main() -> None:
    """Work until SIGTERM."""
    ledger = from_environment()
    if ledger is None:
        raise SystemExit("this worker is a part of a chaos run and needs its ledger.")
    lease = float(os.environ[LEASE_VARIABLE])
    recording_stores.watch(ledger, lease)
    bare = Bare(os.environ["HOWDAH_DATABASE_URL"], os.environ[SCHEMA_VARIABLE], lease, ledger)

    def stop(number: int, frame: object) -> None:
        bare.stopping = True

    signal.signal(signal.SIGTERM, stop)
    logging.basicConfig(level=logging.INFO)
    logging.getLogger(__name__).info("bare worker started")
    bare.run()


if __name__ == "__main__":
    main()
