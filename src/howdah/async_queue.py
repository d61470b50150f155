"""The bare queue for asyncio: the methods of `JobQueue`, awaited, with the same names, parameters and
docstrings. `operations.py` builds the statements and `database/` runs them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Never

from howdah.database.async_store import AsyncStore
from howdah.database.backend import AsyncBackend
from howdah.database.retry_loop import COMMAND_TIMEOUT_SECONDS, TIMEOUT_SECONDS
from howdah.encoding import payload
from howdah.model import DISCOVERED, Event, Handle, Job, JobRef, NewJobLike, Seconds, Status
from howdah.protocol.operations import Operations
from howdah.queue import JobQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

    import asyncpg


class AsyncJobQueue:
    """A job queue in a PostgreSQL database, for asyncio: the methods of `JobQueue`, awaited.

    `database` is a URL or an asyncpg `Pool`; the other parameters are those of `JobQueue`. Single
    enqueues that are awaited at the same time are sent in one batch.
    """

    def __init__(
        self,
        database: str | asyncpg.Pool | None = None,
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
        store = AsyncStore(
            database, schema, create=create, timeout=timeout, command_timeout=command_timeout
        )
        self._backend = AsyncBackend(self._operations, store)

    async def enqueue(
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
        job = self._operations.new_job(
            job_type, data, unknown, priority=priority, queue=queue, run_at=run_at, delay=delay,
            max_attempts=max_attempts, idempotency_key=idempotency_key, idempotency_ttl=idempotency_ttl,
            ordering_key=ordering_key, request_id=request_id, traceparent=traceparent, keep=keep,
        )  # fmt: skip
        return await self._backend.enqueue(job, conn)

    async def enqueue_many(self, jobs: Iterable[NewJobLike], *, conn: Any = None) -> list[Handle]:
        return await self._backend.enqueue_many(jobs, conn)

    async def claim(
        self,
        job_types: str | Sequence[str] | None = None,
        *,
        batch_size: int = 10,
        lease: Seconds | None = None,
        queues: str | Sequence[str] = "default",
        conn: Any = None,
    ) -> list[Job]:
        statement = self._operations.claim(job_types, batch_size, lease, queues)
        if conn is None:
            await self._backend.run_maintenance_if_due()
        return await self._backend.run(statement, conn)

    async def claim_one(
        self,
        job_types: str | Sequence[str] | None = None,
        *,
        lease: Seconds | None = None,
        queues: str | Sequence[str] = "default",
        conn: Any = None,
    ) -> Job | None:
        statement = self._operations.claim(job_types, 1, lease, queues, started=True)
        if conn is None:
            await self._backend.run_maintenance_if_due()
        jobs = await self._backend.run(statement, conn)
        return jobs[0] if jobs else None

    async def complete(
        self, job: JobRef | Iterable[JobRef], result: Any = None, *, conn: Any = None
    ) -> None:
        await self._backend.settle(
            self._operations.complete(job, result, on_caller_connection=conn is not None), conn
        )

    async def fail(
        self,
        job: JobRef | Iterable[JobRef],
        reason: BaseException | str,
        *,
        retry: bool = True,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        conn: Any = None,
    ) -> None:
        steps = self._operations.fail(
            job, reason, retry, run_at, delay, on_caller_connection=conn is not None
        )
        await self._backend.settle(steps, conn)

    async def release(
        self, job: JobRef | Iterable[JobRef], *, delay: Seconds | None = None, conn: Any = None
    ) -> None:
        await self._backend.settle(
            self._operations.release(job, delay, on_caller_connection=conn is not None), conn
        )

    async def extend(
        self, job: JobRef | Iterable[JobRef], *, lease: Seconds | None = None, conn: Any = None
    ) -> None:
        await self._backend.run(self._operations.extend(job, lease), conn)

    async def progress(
        self,
        job: JobRef | Iterable[JobRef],
        percent: float | None = None,
        stage: str | None = None,
        *,
        conn: Any = None,
    ) -> None:
        await self._backend.run(self._operations.progress(job, percent, stage), conn)

    async def event(
        self, job: JobRef | Iterable[JobRef], kind: str, data: Any = None, *, conn: Any = None
    ) -> None:
        await self._backend.settle(self._operations.event(job, kind, data), conn)

    async def recover_stale_jobs(self, timeout: Seconds | None = None, *, limit: int = 1000) -> int:
        return await self._backend.run(self._operations.recover_stale_jobs(timeout, limit))

    async def cancel(self, job: JobRef | Iterable[JobRef], *, conn: Any = None) -> dict[UUID, str]:
        return await self._backend.run(self._operations.cancel(job), conn)

    async def retry(self, job: JobRef | Iterable[JobRef], *, conn: Any = None) -> list[UUID]:
        return await self._backend.run(self._operations.retry(job), conn)

    async def pending(self, queue: str | None = None, job_type: str | None = None) -> int:
        return await self._backend.run(self._operations.pending(queue, job_type))

    async def counts(
        self, queue: str | None = None, job_type: str | None = None
    ) -> dict[Status, int]:
        return await self._backend.run(self._operations.counts(queue, job_type))

    async def get(self, job: JobRef, *, conn: Any = None) -> Job:
        return await self._backend.run(self._operations.get(job), conn)

    async def events(self, job: JobRef, *, after: int = 0) -> list[Event]:
        return await self._backend.run(self._operations.events(job, after))

    async def find(
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
        statement = self._operations.find(
            limit, before, data, unknown, status=status, job_type=job_type, queue=queue,
            request_id=request_id, ordering_key=ordering_key, worker_id=worker_id,
        )  # fmt: skip
        return await self._backend.run(statement)

    async def clear(
        self, older_than: Seconds = 0, *, statuses: str | Sequence[str] | None = None
    ) -> int:
        return await self._backend.run(self._operations.clear(older_than, statuses))

    async def maintain(self) -> list[tuple[str, timedelta, str | None]]:
        return await self._backend.run_maintenance()

    async def close(self) -> None:
        await self._backend.store.close()


def backend_of(queue: AsyncJobQueue) -> AsyncBackend:
    """The operations and the store of a queue, for the rest of the package."""
    return queue._backend


for _name, _method in vars(JobQueue).items():
    if not _name.startswith("_"):
        getattr(AsyncJobQueue, _name).__doc__ = _method.__doc__
