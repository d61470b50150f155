"""The bare queue. `operations.py` builds the statements and `database/` runs them; `async_queue.py` is the same
for asyncio."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Never

from howdah.database.backend import Backend
from howdah.database.retry_loop import COMMAND_TIMEOUT_SECONDS, TIMEOUT_SECONDS
from howdah.database.store import Store
from howdah.encoding import payload
from howdah.model import DISCOVERED, Event, Handle, Job, JobRef, NewJobLike, Seconds, Status
from howdah.protocol.operations import Operations

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

    import psycopg_pool


class JobQueue:
    """A job queue in a PostgreSQL database.

    `database` is a URL or a psycopg `ConnectionPool`. The default is HOWDAH_DATABASE_URL, then
    DATABASE_URL, then the embedded server of this directory. Making a queue does no I/O. The first call
    creates the schema unless `create=False`. A queue may be shared by threads and survives a fork.

    `lease` is the duration of a claim, `keep` the retention of finished jobs, `payload_limit` the size in
    bytes above which data are refused, and `idempotency_ttl` how long a key is remembered. `timeout` is
    how long a statement is retried while the database cannot be reached. `command_timeout` is how long to
    wait for the answer to one statement; then the connection is closed and the statement resent on
    another one.
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
        idempotency_ttl: Seconds | None = None,
        ordering_key: str | None = None,
        request_id: str | None = None,
        traceparent: str | None = None,
        keep: Seconds | None = None,
        conn: Any = None,
        **unknown: Never,
    ) -> Handle:
        """Add a job and return its handle.

        The job is due at once, at `run_at`, or after `delay`. A second enqueue of the job type with the same
        `idempotency_key` returns the first job's handle, with `is_new=False`, during `idempotency_ttl`
        (by default that of the queue), and raises `IdempotencyConflict` if it has other data. Jobs with the
        same `ordering_key` run strictly one at a time, in order. `conn` is your own connection (psycopg,
        SQLAlchemy, Django; asyncpg for the async queue): the job is then enqueued in its transaction,
        and exists only if that commits.
        """
        job = self._operations.new_job(
            job_type, data, unknown, priority=priority, queue=queue, run_at=run_at, delay=delay,
            max_attempts=max_attempts, idempotency_key=idempotency_key, idempotency_ttl=idempotency_ttl,
            ordering_key=ordering_key, request_id=request_id, traceparent=traceparent, keep=keep,
        )  # fmt: skip
        return self._backend.enqueue(job, conn)

    def enqueue_many(self, jobs: Iterable[NewJobLike], *, conn: Any = None) -> list[Handle]:
        """Add many jobs, all or none, in few round trips. Returns their handles in the same order.

        Each job is a `NewJob`, a mapping of its fields, or `(job_type, data)`. An error names the index.
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
        """Claim up to `batch_size` due jobs of these types (None: any), highest priority first.

        Complete, fail, release or extend each job before its lease expires; after that, the job returns to
        the queue. Every few seconds, a claim also runs the maintenance that is due.
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

        With `conn` the job is completed in your transaction: your rows and the completion commit together
        or not at all. Raises `LeaseLost` for jobs whose lease was lost; the others are completed. If another
        transaction has locked a job, waits for it, at most `command_timeout`, and then raises `JobLocked`.
        """
        self._backend.settle(
            self._operations.complete(job, result, on_caller_connection=conn is not None), conn
        )

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
        """Fail a claimed job. It is retried while it has attempts left: at once, at `run_at`, or after
        `delay`. With `retry=False` it fails permanently. Raises `LeaseLost` like `complete`."""
        steps = self._operations.fail(
            job, reason, retry, run_at, delay, on_caller_connection=conn is not None
        )
        self._backend.settle(steps, conn)

    def release(
        self, job: JobRef | Iterable[JobRef], *, delay: Seconds | None = None, conn: Any = None
    ) -> None:
        """Release a claimed job: it returns to the queue, after `delay` if given, without using an attempt."""
        self._backend.settle(
            self._operations.release(job, delay, on_caller_connection=conn is not None), conn
        )

    def extend(
        self, job: JobRef | Iterable[JobRef], *, lease: Seconds | None = None, conn: Any = None
    ) -> None:
        """Extend the lease of a claimed job to `lease` from now. Jobs of one type and priority that were claimed at once
        share a lease. Raises `LeaseLost` if it was lost."""
        self._backend.run(self._operations.extend(job, lease), conn)

    def progress(
        self,
        job: JobRef | Iterable[JobRef],
        percent: float | None = None,
        stage: str | None = None,
        *,
        conn: Any = None,
    ) -> None:
        """Report the progress of a claimed job: percent, which never decreases, and stage."""
        self._backend.run(self._operations.progress(job, percent, stage), conn)

    def event(
        self, job: JobRef | Iterable[JobRef], kind: str, data: Any = None, *, conn: Any = None
    ) -> None:
        """Append an event to a claimed job's durable stream."""
        self._backend.settle(self._operations.event(job, kind, data), conn)

    def recover_stale_jobs(self, timeout: Seconds | None = None, *, limit: int = 1000) -> int:
        """Return jobs whose lease has expired to the queue; with `timeout`, instead, jobs that were claimed
        longer ago than that, whatever their lease. Returns how many. Claims and workers do this automatically, every two seconds."""
        return self._backend.run(self._operations.recover_stale_jobs(timeout, limit))

    def cancel(self, job: JobRef | Iterable[JobRef], *, conn: Any = None) -> dict[UUID, str]:
        """Cancel jobs. Returns for each unfinished job "cancelled", or "cancelling" if it is claimed; its
        worker is then notified. A job is "locked" and not cancelled if another transaction, such as that of
        its handler, has locked it for five seconds. If all of them are locked, raises `JobLocked`."""
        return self._backend.run(self._operations.cancel(job), conn)

    def retry(self, job: JobRef | Iterable[JobRef], *, conn: Any = None) -> list[UUID]:
        """Reopen finished jobs under the same ids, with no attempts used. Returns the reopened ids."""
        return self._backend.run(self._operations.retry(job), conn)

    def pending(self, queue: str | None = None, job_type: str | None = None) -> int:
        """The number of pending jobs: due, scheduled and blocked."""
        return self._backend.run(self._operations.pending(queue, job_type))

    def counts(self, queue: str | None = None, job_type: str | None = None) -> dict[Status, int]:
        """The number of jobs of each status."""
        return self._backend.run(self._operations.counts(queue, job_type))

    def get(self, job: JobRef, *, conn: Any = None) -> Job:
        """A job in its current state, live or finished. Raises `JobNotFound`."""
        return self._backend.run(self._operations.get(job), conn)

    def events(self, job: JobRef, *, after: int = 0) -> list[Event]:
        """A job's events after event id `after`, oldest first."""
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

        For the next page, pass the last job of this page as `before`.
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
        """Run the maintenance that is due: (duty, duration, error) of each. Workers and claims also do this."""
        return self._backend.run_maintenance()

    def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        self._backend.store.close()


def backend_of(queue: JobQueue) -> Backend:
    """The operations and the store of a queue, for the rest of the package."""
    return queue._backend
