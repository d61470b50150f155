"""Outcomes that the database rejected, until it is certain why.

The lease was lost, or another transaction has locked the job: one that cancels it, say, and may still roll back. Then
the outcome is written again, with the next ones, until that transaction has ended (decision 0004)."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from howdah.database.backoff import Backoff, jittered
from howdah.encoding.safe_logger import get_logger
from howdah.outcome import CompletedByHandler, Lost

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from howdah.database.async_store import AsyncStore
    from howdah.execution.repeated_lines import RepeatedLines
    from howdah.execution.run import Run
    from howdah.outcome import Acknowledgement, Outcome
    from howdah.protocol.statements import Statement
    from howdah.protocol.worker_statements import WorkerStatements

logger = get_logger(__name__)

T = TypeVar("T")

Rejected: TypeAlias = "tuple[Run, Acknowledgement]"

# A heartbeat that records a start locks the job for milliseconds, an operator for as long as a transaction is open.
LOCKED_SECONDS, LOCKED_DOUBLINGS = 0.02, 5
LOGGED_REJECTIONS = 3  # by then it is no heartbeat
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 2.0  # while the database cannot be asked


class RejectedOutcomes:
    """`write` receives each outcome of a job whose lease is still held, to be written again. `lose` receives those
    of jobs whose lease was lost. `on_locked` is called for each job that is locked."""

    def __init__(
        self,
        store: AsyncStore,
        statements: WorkerStatements,
        lines: RepeatedLines,
        write: Callable[[Run, Acknowledgement], None],
        lose: Callable[[list[tuple[Run, Outcome]]], None],
        on_locked: Callable[[Run], None],
    ) -> None:
        self._store = store
        self._statements = statements
        self._lines = lines
        self._write = write
        self._lose = lose
        self._on_locked = on_locked
        self._outcomes: dict[Run, Acknowledgement] = {}  # until it is known why they were rejected
        self._locked: dict[Run, Acknowledgement] = {}  # until they are written again
        self._arrived = asyncio.Event()

    def __contains__(self, run: object) -> bool:
        return run in self._outcomes or run in self._locked

    def put(self, group: list[Rejected]) -> None:
        """Add outcomes that were rejected."""
        if group:
            self._outcomes.update(group)
            self._arrived.set()

    async def run(self) -> None:
        """Settle rejected outcomes until cancelled."""
        while True:
            await self._arrived.wait()
            batch = list(self._outcomes.items())
            held = await self._ask([run for run, _ in batch])
            for run, _ in batch:
                del self._outcomes[run]
            if not self._outcomes:
                self._arrived.clear()
            gone = [
                each for each in batch if _fence(each[0]) not in held and not self._send_again(each)
            ]
            self._lose(await self._check_handlers(gone))
            self._write_later([each for each in batch if _fence(each[0]) in held])

    async def _check_handlers(self, gone: list[Rejected]) -> list[tuple[Run, Outcome]]:
        """A handler that completed its job in its own transaction has nothing left to write, so its outcome is rejected,
        unless the transaction rolled back. Then the lease was lost, or the job has ended in another way. A job that is
        no longer there was completed with `keep=0`."""
        ids = [run.id for run, outcome in gone if isinstance(outcome, CompletedByHandler)]
        if not ids:
            return list(gone)
        found = {job.id: job for job in await self._read(self._statements.get_many(ids))}

        def is_completed(run: Run) -> bool:
            job = found.get(run.id)
            return job is None or (job.status == "completed" and job.lease_id == run.lease_id)

        return [
            (run, Lost())
            if isinstance(outcome, CompletedByHandler) and not is_completed(run)
            else (run, outcome)
            for run, outcome in gone
        ]

    def _send_again(self, rejected: Rejected) -> bool:
        """Write an outcome again, once, that an earlier send without an answer may have written."""
        run, outcome = rejected
        if not run.in_doubt or run.sent_again:
            return False
        run.sent_again = True
        self._write(run, outcome)
        return True

    def _write_later(self, group: list[Rejected]) -> None:
        """Write outcomes of locked jobs again, each after its own delay: one that a heartbeat has locked does not wait as
        long as one that an operator has."""
        if any(run.rejections >= LOGGED_REJECTIONS for run, _ in group):
            self._lines.log(
                logger, logging.WARNING, "another transaction has locked jobs that have ended; retrying",
                kind="locked", fields={"jobs": len(group), "job_id": str(group[0][0].id)},
            )  # fmt: skip
        self._locked.update(group)
        delays: dict[float, list[Run]] = defaultdict(list)
        for run, _ in group:
            self._on_locked(run)
            delays[LOCKED_SECONDS * 2 ** min(run.rejections, LOCKED_DOUBLINGS)].append(run)
            run.rejections += 1
        for seconds, runs in delays.items():
            asyncio.get_running_loop().call_later(jittered(seconds), self._write_again, runs)

    def _write_again(self, runs: list[Run]) -> None:
        for run in runs:
            outcome = self._locked.pop(run, None)
            if outcome is not None:
                self._write(run, outcome)

    async def _ask(self, runs: list[Run]) -> set[tuple[UUID, UUID]]:
        """The fences of the runs whose lease was not lost."""
        return set(
            await self._read(
                self._statements.held_jobs([run.id for run in runs], [run.lease_id for run in runs])
            )
        )

    async def _read(self, statement: Statement[list[T]]) -> list[T]:
        backoff = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS)
        while True:
            try:
                return await self._store.run(statement)
            except Exception as error:
                self._lines.log(
                    logger, logging.WARNING, "jobs of rejected outcomes could not be read; retrying",
                    kind=("held", type(error)), fields={"error": str(error)},
                )  # fmt: skip
                await asyncio.sleep(backoff.next())


def _fence(run: Run) -> tuple[UUID, UUID]:
    return run.id, run.lease_id
