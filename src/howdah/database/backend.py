"""What is below a queue's public methods: the operations of one schema and the store that runs them.

`JobQueue`, tasks, `task.run` and `howdah.testing` share these two classes, so that no code uses the private
attributes of a queue. `backend_of` in `queue.py` and `async_queue.py` returns a queue's backend.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from howdah.database.driver_errors import refused_id
from howdah.errors import HowdahError, InvalidJob, PayloadTooLarge
from howdah.protocol.enqueue_batcher import EnqueueBatcher

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from howdah.database.async_store import AsyncStore
    from howdah.database.store import Store
    from howdah.model import Handle, NewJob, NewJobLike
    from howdah.protocol.operations import Operations
    from howdah.protocol.statements import Statement

T = TypeVar("T")

Duties: TypeAlias = "list[tuple[str, timedelta, str | None]]"
"""The maintenance duties that were run: (duty, duration, error) of each."""

MAINTENANCE_SECONDS = 2.0

logger = logging.getLogger(__name__)


class Backend:
    """The operations and the store of a sync queue."""

    def __init__(self, operations: Operations, store: Store) -> None:
        self.operations = operations
        self.store = store
        self._clock = _MaintenanceClock()

    def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        return self.store.run(statement, conn)

    def enqueue(self, job: NewJob, conn: Any = None) -> Handle:
        """Enqueue one job."""
        (statement,) = self.operations.enqueue([self.operations.encode(job)])
        return self.store.run(statement, conn)[0]

    def enqueue_many(self, jobs: Iterable[NewJobLike], conn: Any = None) -> list[Handle]:
        """Enqueue jobs, all or none. An error names the index of the job that was refused."""
        bulk = self.operations.enqueue_many(jobs, on_caller_connection=conn is not None)
        try:
            if conn is not None:
                answers = [self.store.run(each, conn) for each in bulk.statements()]
            else:
                answers = self.store.run_all(bulk.statements()) if bulk else []
        except InvalidJob as error:
            raise _with_index(error, bulk.encoded) from error.__cause__
        return [handle for answer in answers for handle in answer]

    def run_maintenance(self) -> Duties:
        """Run the maintenance duties that are due."""
        return self.store.run(self.operations.statements.run_maintenance())

    def run_maintenance_if_due(self) -> None:
        """The same, at most every two seconds, before a claim. The claim waits for it, so the statement has
        the timeout of a claim."""
        if not self._clock.is_due():
            return
        with _log_failure:
            log_failed_duties(
                self.store.run(self.operations.statements.run_maintenance(timeout=None))
            )


class AsyncBackend:
    """The operations and the store of an async queue."""

    def __init__(self, operations: Operations, store: AsyncStore) -> None:
        self.operations = operations
        self.store = store
        self._batcher = EnqueueBatcher(self._send)
        self._clock = _MaintenanceClock()

    async def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        return await self.store.run(statement, conn)

    async def enqueue(self, job: NewJob, conn: Any = None) -> Handle:
        """Enqueue one job, in a batch with the jobs of other callers in this event loop."""
        encoded = self.operations.encode(job)
        # An enqueue with an idempotency key may wait for another caller's transaction, so it must not
        # share a statement with jobs that need not wait.
        if conn is None and job.idempotency_key is None:
            return await self._batcher.enqueue(encoded)
        (statement,) = self.operations.enqueue([encoded])
        return (await self.store.run(statement, conn))[0]

    async def _send(self, jobs: list[dict[str, Any]]) -> list[Handle]:
        answers = await self.store.run_all(self.operations.enqueue(jobs))
        return [handle for answer in answers for handle in answer]

    async def enqueue_many(self, jobs: Iterable[NewJobLike], conn: Any = None) -> list[Handle]:
        """Enqueue jobs, all or none. An error names the index of the job that was refused."""
        bulk = self.operations.enqueue_many(jobs, on_caller_connection=conn is not None)
        try:
            if conn is not None:
                answers = [await self.store.run(each, conn) for each in bulk.statements()]
            else:
                answers = await self.store.run_all(bulk.statements()) if bulk else []
        except InvalidJob as error:
            raise _with_index(error, bulk.encoded) from error.__cause__
        return [handle for answer in answers for handle in answer]

    async def run_maintenance(self) -> Duties:
        """Run the maintenance duties that are due."""
        return await self.store.run(self.operations.statements.run_maintenance())

    async def run_maintenance_if_due(self) -> None:
        """The same, at most every two seconds, before a claim."""
        if not self._clock.is_due():
            return
        with _log_failure:
            log_failed_duties(
                await self.store.run(self.operations.statements.run_maintenance(timeout=None))
            )


class _MaintenanceClock:
    """Decides when this process runs maintenance again."""

    def __init__(self) -> None:
        self._last = 0.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last < MAINTENANCE_SECONDS:
            return False
        self._last = now
        return True


class _LogFailure:
    """Logs a failure of maintenance instead of failing the claim that ran it. Howdah's errors, such as an
    unreachable database, are raised: the claim would fail as well."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, HowdahError):
            return False
        logger.warning("maintenance failed", exc_info=error)
        return True


_log_failure = _LogFailure()


def log_failed_duties(duties: Duties) -> None:
    """Log the maintenance duties that failed."""
    for duty, took, error in duties:
        if error is not None:
            logger.warning(
                "maintenance duty failed",
                extra={"duty": duty, "took": str(took), "error": error},
            )


def _with_index(error: InvalidJob, jobs: list[dict[str, Any]]) -> InvalidJob:
    """The error for a bulk enqueue that the database refused, with the index of the job if it is known.

    The server does not report which data are too large. Whatever its limit is, the largest exceed it."""
    refused = refused_id(error.__cause__)
    if isinstance(error, PayloadTooLarge):
        refused = str(max(jobs, key=lambda job: len(memoryview(job["data"])))["id"])
    indexes = (index for index, job in enumerate(jobs) if str(job["id"]) == refused)
    index = next(indexes, None)
    return error if index is None else error.at(index)
