"""Suspects: jobs that may kill workers. At least two claims of a suspect expired before its start was written. A
suspect runs only after its start was written, and suspects run one at a time (decision 0020)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from howdah.database.backoff import Backoff
from howdah.database.driver_errors import DATABASE_ERRORS
from howdah.execution import fault_points
from howdah.execution.heartbeat import SUSPECT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from howdah.database.async_store import AsyncStore
    from howdah.execution.run import Run
    from howdah.protocol.statements import Statement
    from howdah.protocol.worker_statements import WorkerStatements


START_TRIES = 3
"""How often the start of a locked job is written. Then the job is released: it would keep its slot from others."""


class StartNotWritten(Exception):
    """The database did not record that a suspect is about to start."""


def is_suspect(run: Run) -> bool:
    """Whether at least two earlier claims of this job expired without using an attempt."""
    return run.job.claims - run.job.attempts > 1


class Suspects:
    """Starts suspects one at a time."""

    def __init__(self, store: AsyncStore, statements: WorkerStatements) -> None:
        self._store = store
        self._statements = statements
        self._one_at_a_time = asyncio.Lock()

    async def start(self, run: Run) -> bool:
        """Write started_at before a suspect runs: if it kills this process too, the attempt counts. Returns
        whether the job is still claimed by this worker.

        A suspect may have killed its workers, or may only have been claimed together with the job that did.
        So the next suspect starts only after this one was acknowledged or has run for `SUSPECT_SECONDS`: if
        this one kills the process, no other suspect loses an attempt. A single crash makes no job a suspect:
        a worker may have thousands of jobs in flight when it crashes, and nearly all are harmless."""
        backoff = Backoff()
        for _ in range(START_TRIES):
            await self._one_at_a_time.acquire()
            run.on_acknowledged = _once(self._one_at_a_time.release)
            if await self._run(self._statements.start_jobs, run):
                fault_points.reach("after-start")
                asyncio.get_running_loop().call_later(SUSPECT_SECONDS, _clear, run)
                return True
            if not await self._run(self._statements.held_jobs, run):
                return False
            # Another transaction has locked the job. Other suspects may start meanwhile.
            run.on_acknowledged()
            await asyncio.sleep(backoff.next())
        raise StartNotWritten("another transaction has locked the job")

    async def _run(
        self, statement: Callable[[list[UUID], list[UUID]], Statement[list[Any]]], run: Run
    ) -> bool:
        try:
            return bool(await self._store.run(statement([run.id], [run.lease_id])))
        except DATABASE_ERRORS as error:
            raise StartNotWritten(str(error)) from error


def _clear(run: Run) -> None:
    """Let the next suspect start, unless this one has ended: then its acknowledgement does, which may take long."""
    if not run.finishing and run.on_acknowledged is not None:
        run.on_acknowledged()


def _once(release: Callable[[], None]) -> Callable[[], None]:
    done = False

    def call() -> None:
        nonlocal done
        if not done:
            done = True
            release()

    return call
