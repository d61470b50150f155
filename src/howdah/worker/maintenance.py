"""Runs the maintenance duties that are due. There is no leader: the worker that moves a duty's due time forward
runs it."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from howdah.database.backend import log_failed_duties
from howdah.execution import fault_points

if TYPE_CHECKING:
    from howdah.database.async_store import AsyncStore
    from howdah.protocol.worker_statements import WorkerStatements

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
PENDING_LIMIT = 4  # statements without an answer
ANSWER_TIMEOUT_SECONDS = 2.0


async def maintain(store: AsyncStore, statements: WorkerStatements) -> None:
    """Run the duties that are due, every second or two, until cancelled.

    A duty may take long, and a dead connection looks the same. So a statement without an answer does not delay
    the next one; while the first still runs its duties, the next finds none due."""
    pending: list[asyncio.Task[None]] = []
    try:
        while True:
            await asyncio.sleep(TICK_SECONDS * random.uniform(0.75, 2))  # noqa: S311 - workers take turns
            fault_points.reach("before-maintenance")
            if len(pending) == PENDING_LIMIT:
                pending[0].cancel()  # so many cannot all be running duties
            pending.append(asyncio.create_task(_run_due(store, statements)))
            await asyncio.wait(
                pending, timeout=ANSWER_TIMEOUT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            pending = [task for task in pending if not task.done()]
    finally:
        for task in pending:
            task.cancel()


async def _run_due(store: AsyncStore, statements: WorkerStatements) -> None:
    try:
        log_failed_duties(await store.run(statements.run_maintenance()))
    except Exception as error:
        logger.warning("maintenance failed", extra={"error": str(error)})
