"""Runs the maintenance duties that are due. Every worker tries; the worker that moves a duty's due time forward
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
RUNS_LIMIT = 4  # unanswered runs of maintenance at a time
ANSWER_SECONDS = 2.0


async def maintain(store: AsyncStore, statements: WorkerStatements) -> None:
    """Run what is due, about every second, for as long as the worker lives.

    Duties may take long, and a dead connection looks just like that. So a run without an answer does not
    delay the next one; where the first is still at work, the next finds nothing due."""
    running: list[asyncio.Task[None]] = []
    try:
        while True:
            await asyncio.sleep(TICK_SECONDS * random.uniform(0.75, 2))  # noqa: S311 - spreads workers
            fault_points.reach("before-maintenance")
            if len(running) == RUNS_LIMIT:
                running[0].cancel()  # so many cannot all be at work
            running.append(asyncio.create_task(_run_due(store, statements)))
            await asyncio.wait(running, timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            running = [run for run in running if not run.done()]
    finally:
        for run in running:
            run.cancel()


async def _run_due(store: AsyncStore, statements: WorkerStatements) -> None:
    try:
        log_failed_duties(await store.run(statements.run_maintenance()))
    except Exception as error:
        logger.warning("maintenance failed", extra={"error": str(error)})
