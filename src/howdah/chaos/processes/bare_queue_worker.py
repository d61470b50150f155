"""A worker without `howdah worker`: a user-written loop on a bare `JobQueue`. It claims a few jobs, extends their
leases, completes them, fails some, is killed by others, and releases the rest at SIGTERM.

    python -m howdah.chaos.processes.bare_queue_worker
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from howdah.chaos.processes import recording_stores
from howdah.chaos.processes.environment import (
    BARE,
    COMMAND_TIMEOUT_SECONDS,
    LEASE_VARIABLE,
    SCHEMA_VARIABLE,
    required_ledger,
    start_logging,
)
from howdah.database.connection import DatabaseError
from howdah.errors import HowdahError, LeaseLost
from howdah.queue import JobQueue

if TYPE_CHECKING:
    from uuid import UUID

    from howdah.chaos.ledger import Ledger
    from howdah.model import Job

BATCH_JOBS = 5
POLL_SECONDS = 0.05


class BareQueueWorker:
    """The loop of one process."""

    def __init__(self, url: str, schema: str, lease: float, ledger: Ledger) -> None:
        self._queue = JobQueue(
            url, schema=schema, lease=lease, create=False, command_timeout=COMMAND_TIMEOUT_SECONDS
        )
        self._ledger = ledger
        self._lease = lease
        self._claimed: dict[UUID, Job] = {}
        self._extended_at = 0.0
        self._stopping = False

    def run(self) -> None:
        """Work until `stop` is called."""
        while not self._stopping:
            # Jobs claimed before the database became unreachable go to other workers when their leases expire.
            with contextlib.suppress(HowdahError, DatabaseError):
                self._run_batch()
        with contextlib.suppress(HowdahError, DatabaseError):
            self._queue.release(list(self._claimed.values()))
        self._queue.close()

    def stop(self) -> None:
        """End `run` after the current job."""
        self._stopping = True

    def _run_batch(self) -> None:
        self._extended_at = time.monotonic()
        self._claimed = {job.id: job for job in self._queue.claim(BARE, batch_size=BATCH_JOBS)}
        if not self._claimed:
            time.sleep(POLL_SECONDS)
        while self._claimed and not self._stopping:
            self._run_job(next(iter(self._claimed.values())))

    def _run_job(self, job: Job) -> None:
        self._record("start", job)
        if job.data.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + job.data["seconds"]
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, self._lease / 10))
            self._extend_leases()
        with contextlib.suppress(LeaseLost):
            if job.attempts <= job.data["failures"]:
                self._queue.fail(job, "not yet", delay=0.05)
            else:
                self._record("effect", job)
                self._queue.complete(job, {"by": os.getpid()})
        self._claimed.pop(job.id, None)

    def _extend_leases(self) -> None:
        """Extend the leases of all claimed jobs, every quarter of a lease."""
        if time.monotonic() - self._extended_at > self._lease / 4:
            self._extended_at = time.monotonic()
            # A lost lease is detected when its job is acknowledged, which is soon enough.
            with contextlib.suppress(LeaseLost):
                self._queue.extend(list(self._claimed.values()))

    def _record(self, kind: str, job: Job) -> None:
        fields = {"job": job.id, "fence": job.lease_id, "attempt": job.attempts}
        self._ledger.write(kind, fields)


def main() -> None:
    """Work until SIGTERM."""
    ledger = required_ledger()
    lease = float(os.environ[LEASE_VARIABLE])
    recording_stores.install(ledger, lease)
    worker = BareQueueWorker(
        os.environ["HOWDAH_DATABASE_URL"], os.environ[SCHEMA_VARIABLE], lease, ledger
    )
    start_logging(__name__, "bare worker started", on_stop=worker.stop)
    worker.run()


if __name__ == "__main__":
    main()
