"""Jobs that are suspected of killing workers: two claims of each ended without a trace."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from howdah.database.driver_errors import DATABASE_ERRORS
from howdah.execution import fault_points
from howdah.execution.heartbeat import SUSPICION

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.database.async_store import AsyncStore
    from howdah.execution.run import Run
    from howdah.protocol.worker_statements import WorkerStatements


class Suspects:
    """Runs suspects one by one."""

    def __init__(self, store: AsyncStore, statements: WorkerStatements) -> None:
        self._store = store
        self._statements = statements
        self._one = asyncio.Lock()

    async def start(self, run: Run) -> bool:
        """Write started_at before a job runs of which two claims have ended without a trace: if it kills
        this process too, the attempt counts. Gives whether the job is still ours.

        Such a job may be what killed its workers, or only have been near, twice. So they go one by one,
        until each is acknowledged or has run for a while: no other is announced, and so none pays, while
        one may be about to kill us. After a single death all go on as if nothing had been: nearly all
        that a worker has when it dies is innocent, and it may have thousands at hand."""
        await self._one.acquire()
        run.on_acknowledged = _once(self._one.release)
        mine = await self._announce(run)
        asyncio.get_running_loop().call_later(SUSPICION, self._acquit, run)
        return mine

    def _acquit(self, run: Run) -> None:
        # One that has ended is acquitted when its outcome is written, which also may take its time.
        if not run.finishing and run.on_acknowledged is not None:
            run.on_acknowledged()

    async def _announce(self, run: Run) -> bool:
        try:
            accepted = await self._store.run(self._statements.start_jobs([run.id], [run.lease_id]))
        except DATABASE_ERRORS as error:
            raise StartNotWritten(f"its start could not be written: {error}") from error
        fault_points.reach("after-start")
        return bool(accepted)


class StartNotWritten(Exception):
    """The database did not take down that a job was about to start."""


def _once(release: Callable[[], None]) -> Callable[[], None]:
    done = False

    def call() -> None:
        nonlocal done
        if not done:
            done = True
            release()

    return call
