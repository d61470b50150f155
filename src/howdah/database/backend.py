"""What is below a queue's public methods: the operations of one schema and the store that runs them.

`JobQueue`, tasks, `task.run` and `howdah.testing` share these two classes, so that no code uses the private
attributes of a queue. `backend_of` in `queue.py` and `async_queue.py` returns a queue's backend.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from howdah.database.backoff import Backoff
from howdah.database.driver_errors import refused_id
from howdah.database.service_task import ServiceTask
from howdah.encoding.safe_logger import get_logger
from howdah.errors import HowdahError, InvalidJob, PayloadTooLarge
from howdah.protocol.duties import DueDuties
from howdah.protocol.enqueue_batcher import EnqueueBatcher
from howdah.protocol.settling import Settled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from howdah.database.async_store import AsyncStore
    from howdah.database.store import Store
    from howdah.model import Handle, NewJob, NewJobLike
    from howdah.protocol.duties import Duties
    from howdah.protocol.operations import Operations
    from howdah.protocol.settling import Steps
    from howdah.protocol.statements import Statement

T = TypeVar("T")

MAINTENANCE_SECONDS = 2.0
CLAIM_DUTIES_SECONDS = 0.5  # how long a claim waits for duties that have more to do
DUTIES_SECONDS = 60.0
# Between two attempts to acknowledge a job that another transaction has locked.
LOCKED_FIRST_SECONDS, LOCKED_MOST_SECONDS = 0.02, 0.2

logger = get_logger(__name__)


class Backend:
    """The operations and the store of a sync queue."""

    def __init__(self, operations: Operations, store: Store) -> None:
        self.operations = operations
        self.store = store
        self._clock = _MaintenanceClock()

    def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        return self.store.run(statement, conn)

    def settle(self, steps: Steps, conn: Any = None) -> Settled:
        """Acknowledge jobs until it is certain what became of each, or for `command_timeout`."""
        settling = _Settling(steps, self.store.command_timeout)
        while (statement := settling.next_statement()) is not None:
            if settling.delay:
                time.sleep(settling.delay)
            settling.answer = self.store.run(statement, conn)
        return settling.settled

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

    def run_maintenance(
        self, seconds: float = DUTIES_SECONDS, timeout: float | None = DUTIES_SECONDS
    ) -> Duties:
        """Run the maintenance duties that are due, each step in its own transaction, recovery first."""
        duties = DueDuties(self.operations.statements, seconds=seconds, timeout=timeout)
        while (statement := duties.next_statement()) is not None:
            duties.record(self.store.run(statement))
        return duties.ran()

    def run_maintenance_if_due(self) -> None:
        """The same, at most every two seconds, before a claim. The claim waits for it: each statement has the
        timeout of a claim, and duties that need longer continue before a later claim."""
        if self._clock.is_due():
            with _log_failure:
                self.run_maintenance(CLAIM_DUTIES_SECONDS, None)


class AsyncBackend:
    """The operations and the store of an async queue."""

    def __init__(self, operations: Operations, store: AsyncStore) -> None:
        self.operations = operations
        self.store = store
        # One statement has the jobs of many callers. A handler that cancels all tasks must not cancel those jobs.
        self._batcher = EnqueueBatcher(
            self._send, partial(ServiceTask, name="howdah-enqueue-batcher")
        )
        self._clock = _MaintenanceClock()

    async def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        return await self.store.run(statement, conn)

    async def settle(self, steps: Steps, conn: Any = None) -> Settled:
        """Acknowledge jobs until it is certain what became of each, or for `command_timeout`."""
        settling = _Settling(steps, self.store.command_timeout)
        while (statement := settling.next_statement()) is not None:
            if settling.delay:
                await asyncio.sleep(settling.delay)
            settling.answer = await self.store.run(statement, conn)
        return settling.settled

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

    async def run_maintenance(
        self, seconds: float = DUTIES_SECONDS, timeout: float | None = DUTIES_SECONDS
    ) -> Duties:
        """Run the maintenance duties that are due, each step in its own transaction, recovery first."""
        duties = DueDuties(self.operations.statements, seconds=seconds, timeout=timeout)
        while (statement := duties.next_statement()) is not None:
            duties.record(await self.store.run(statement))
        return duties.ran()

    async def run_maintenance_if_due(self) -> None:
        """The same, at most every two seconds, before a claim."""
        if self._clock.is_due():
            with _log_failure:
                await self.run_maintenance(CLAIM_DUTIES_SECONDS, None)


class _Settling:
    """The next statement of an acknowledgement, and the delay before it: while another transaction has locked a job,
    the statements are repeated, at most for the given seconds."""

    def __init__(self, steps: Steps, seconds: float) -> None:
        self._steps = steps
        self._deadline = time.monotonic() + seconds
        self._backoff = Backoff(LOCKED_FIRST_SECONDS, LOCKED_MOST_SECONDS)
        self.delay = 0.0
        self.answer: Any = None
        self.settled = Settled()

    def next_statement(self) -> Statement[Any] | None:
        """The next statement, given the answer to the last one. None if `settled` is known."""
        self.delay = 0.0
        while True:
            try:
                step = self._steps.send(self.answer)
            except StopIteration as end:
                self.settled = end.value
                return None
            if step is not None:
                return step
            self.answer = has_time = time.monotonic() < self._deadline
            if has_time:
                self.delay = self._backoff.next()


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


def _with_index(error: InvalidJob, jobs: list[dict[str, Any]]) -> InvalidJob:
    """The error for a bulk enqueue that the database refused, with the index of the job if it is known.

    The server does not report which data are too large. Whatever its limit is, the largest exceed it."""
    refused = refused_id(error.__cause__)
    if isinstance(error, PayloadTooLarge):
        refused = str(max(jobs, key=lambda job: len(memoryview(job["data"])))["id"])
    indexes = (index for index, job in enumerate(jobs) if str(job["id"]) == refused)
    index = next(indexes, None)
    return error if index is None else error.at(index)
