"""The bare queue. `operations.py` decides what is sent; this only sends it, and `async_queue.py` does the
same for asyncio."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Never

from howdah.database.backend import Backend
from howdah.database.driver_errors import COMMAND_TIMEOUT_SECONDS, TIMEOUT_SECONDS
from howdah.database.store import Store
from howdah.encoding import payload
from howdah.model import DISCOVERED, Event, Handle, Job, JobRef, NewJobLike, Seconds, Status
from howdah.protocol.operations import Operations

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

    import psycopg_pool

logger = logging.getLogger(__name__)


class JobQueue:
    """A job queue in a PostgreSQL database.

    `database` is a URL or a psycopg `ConnectionPool`; without it HOWDAH_DATABASE_URL, DATABASE_URL and
    then an embedded server that was asked for are used. Making a queue does no I/O. The first call
    creates the schema unless `create=False`. A queue may be shared by threads and survives a fork.

    `lease` is how long a claim is good for, `keep` how long finished jobs stay, `payload_limit` the
    size in bytes above which data are refused, `idempotency_ttl` how long a key is remembered,
    `timeout` how long to try to reach the database, and `command_timeout` how long to wait for its
    answer to one statement before the connection is given up and the statement sent again on another.
    """

    def __init__(
        self,
        database: str | psycopg_pool.ConnectionPool[Any] | None = None,
        *,
        schema: str = "howdah",
        lease: Seconds = 30,
        worker_id: str | None = None,
        keep: Seconds | None = None,
        payload_limit: int = payload.DATA_LIMIT,
        idempotency_ttl: Seconds = timedelta(days=7),
        create: bool = True,
        timeout: float = TIMEOUT_SECONDS,
        command_timeout: float = COMMAND_TIMEOUT_SECONDS,
    ) -> None:
        self._operations = Operations(
            schema=schema,
            lease=lease,
            worker_id=worker_id,
            keep=keep,
            payload_limit=payload_limit,
            idempotency_ttl=idempotency_ttl,
        )
        store = Store(
            database, schema, create=create, timeout=timeout, command_timeout=command_timeout
        )
        self._backend = Backend(self._operations, store)

    def enqueue(
        self,
        job_type: str,
        data: Any = None,
        *,
        priority: int = DISCOVERED,
        queue: str = "default",
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        max_attempts: int = 3,
        idempotency_key: str | None = None,
        ordering_key: str | None = None,
        request_id: str | None = None,
        traceparent: str | None = None,
        keep: Seconds | None = None,
        conn: Any = None,
        **unknown: Never,
    ) -> Handle:
        """Add a job and return its handle.

        Due at once, at `run_at`, or after `delay`. A second enqueue under one `idempotency_key` gives
        the first job's handle, with `is_new=False`. Jobs of one `ordering_key` run strictly one at a
        time, in order. `conn` is a connection of yours (psycopg, SQLAlchemy, Django; asyncpg for the
        async queue): the job then joins its transaction, and exists only if that commits.
        """
        job = self._operations.new_job(
            job_type, data, unknown, priority=priority, queue=queue, run_at=run_at, delay=delay,
            max_attempts=max_attempts, idempotency_key=idempotency_key, ordering_key=ordering_key,
            request_id=request_id, traceparent=traceparent, keep=keep,
        )  # fmt: skip
        return self._backend.enqueue(job, conn)

    def enqueue_many(self, jobs: Iterable[NewJobLike], *, conn: Any = None) -> list[Handle]:
        """Add many jobs, all or none, in few round trips; handles come in the order given.

        Each is a `NewJob`, a mapping of its fields, or `(job_type, data)`. An error names the index.
        """
        return self._backend.enqueue_many(jobs, conn)

    def claim(
        self,
        job_types: str | Sequence[str] | None = None,
        *,
        batch_size: int = 10,
        lease: Seconds | None = None,
        queues: str | Sequence[str] = "default",
        conn: Any = None,
    ) -> list[Job]:
        """Claim up to `batch_size` due jobs of these types (None: any), best first.

        Each must be completed, failed, released or extended before its lease runs out; after that it
        goes back to the queue. Every few seconds a claim also runs the maintenance that is due.
        """
        statement = self._operations.claim(job_types, batch_size, lease, queues)
        if conn is None:
            self._backend.run_maintenance_if_due()
        return self._backend.run(statement, conn)

    def claim_one(
        self,
        job_types: str | Sequence[str] | None = None,
        *,
        lease: Seconds | None = None,
        queues: str | Sequence[str] = "default",
        conn: Any = None,
    ) -> Job | None:
        """Claim the next due job, or None. It counts as started: nothing is prefetched."""
        statement = self._operations.claim(job_types, 1, lease, queues, started=True)
        if conn is None:
            self._backend.run_maintenance_if_due()
        jobs = self._backend.run(statement, conn)
        return jobs[0] if jobs else None

    def complete(
        self, job: JobRef | Iterable[JobRef], result: Any = None, *, conn: Any = None
    ) -> None:
        """Complete a claimed job, or several (`result` is then a list, or None).

        With `conn` the completion joins your transaction: your rows and the job's end commit together
        or not at all. Raises `LeaseLost` for jobs that are no longer yours; the others are completed.
        """
        self._backend.run(self._operations.complete(job, result, joined=conn is not None), conn)

    def fail(
        self,
        job: JobRef | Iterable[JobRef],
        reason: BaseException | str,
        *,
        retry: bool = True,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        conn: Any = None,
    ) -> None:
        """Fail a claimed job. It is tried again while it has attempts left: at once, at `run_at`, or
        after `delay`; with `retry=False` it ends as failed. Raises `LeaseLost` like `complete`."""
        joined = conn is not None
        statement = self._operations.fail(job, reason, retry, run_at, delay, joined=joined)
        self._backend.run(statement, conn)

    def release(
        self, job: JobRef | Iterable[JobRef], *, delay: Seconds | None = None, conn: Any = None
    ) -> None:
        """Give a claimed job back without using up an attempt, after `delay` if given."""
        self._backend.run(self._operations.release(job, delay, joined=conn is not None), conn)

    def extend(
        self, job: JobRef | Iterable[JobRef], *, lease: Seconds | None = None, conn: Any = None
    ) -> None:
        """Extend the lease of a claimed job to `lease` from now. Raises `LeaseLost` if it is not yours."""
        self._backend.run(self._operations.extend(job, lease), conn)

    def progress(
        self,
        job: JobRef | Iterable[JobRef],
        percent: float | None = None,
        stage: str | None = None,
        *,
        conn: Any = None,
    ) -> None:
        """Report how far a claimed job is: percent, which never goes back, and stage."""
        self._backend.run(self._operations.progress(job, percent, stage), conn)

    def event(
        self, job: JobRef | Iterable[JobRef], kind: str, data: Any = None, *, conn: Any = None
    ) -> None:
        """Append an event to a claimed job's durable stream."""
        self._backend.run(self._operations.event(job, kind, data), conn)

    def recover_stale_jobs(self, timeout: Seconds | None = None, *, limit: int = 1000) -> int:
        """Return jobs whose lease ran out, or that were claimed longer ago than `timeout`, to the
        queue. Claims and workers do this by themselves every two seconds."""
        return self._backend.run(self._operations.recover_stale_jobs(timeout, limit))

    def cancel(self, job: JobRef | Iterable[JobRef], *, conn: Any = None) -> dict[UUID, str]:
        """Cancel jobs. Of each live one: "cancelled", or "cancelling" if a worker has it, who is told."""
        return self._backend.run(self._operations.cancel(job), conn)

    def retry(self, job: JobRef | Iterable[JobRef], *, conn: Any = None) -> list[UUID]:
        """Reopen finished jobs under their own ids, with no attempts used. Returns those reopened."""
        return self._backend.run(self._operations.retry(job), conn)

    def pending(self, queue: str | None = None, job_type: str | None = None) -> int:
        """How many jobs wait: due, scheduled and blocked ones."""
        return self._backend.run(self._operations.pending(queue, job_type))

    def counts(self, queue: str | None = None, job_type: str | None = None) -> dict[Status, int]:
        """How many jobs there are of each status."""
        return self._backend.run(self._operations.counts(queue, job_type))

    def get(self, job: JobRef, *, conn: Any = None) -> Job:
        """A job as it is now, live or finished. Raises `JobNotFound`."""
        return self._backend.run(self._operations.get(job), conn)

    def events(self, job: JobRef, *, after: int = 0) -> list[Event]:
        """A job's events, oldest first, from behind event id `after` on."""
        return self._backend.run(self._operations.events(job, after))

    def find(
        self,
        *,
        status: str | Sequence[str] | None = None,
        job_type: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        request_id: str | None = None,
        ordering_key: str | None = None,
        worker_id: str | None = None,
        data: Mapping[str, Any] | None = None,
        limit: int = 50,
        before: JobRef | None = None,
        **unknown: Never,
    ) -> list[Job]:
        """Jobs that match every filter, newest first. `data` matches jobs whose data contain it.

        The next page is `before=` the last job of this one.
        """
        statement = self._operations.find(
            limit, before, data, unknown, status=status, job_type=job_type, queue=queue,
            request_id=request_id, ordering_key=ordering_key, worker_id=worker_id,
        )  # fmt: skip
        return self._backend.run(statement)

    def clear(self, older_than: Seconds = 0, *, statuses: str | Sequence[str] | None = None) -> int:
        """Remove jobs that finished longer ago than `older_than`. Returns how many."""
        return self._backend.run(self._operations.clear(older_than, statuses))

    def maintain(self) -> list[tuple[str, timedelta, str | None]]:
        """Run the maintenance that is due: (duty, time taken, error) of each. Workers do it anyway."""
        return self._backend.run_maintenance()

    def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        self._backend.store.close()


def backend_of(queue: JobQueue) -> Backend:
    """The operations and the store of a queue, for the rest of the package."""
    return queue._backend
