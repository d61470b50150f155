"""Runs the maintenance duties that are due, step by step, each in its own transaction, recovery first. There is no
leader: the worker that moves a duty's due time forward runs it."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from howdah.encoding.safe_logger import get_logger
from howdah.execution import fault_points
from howdah.protocol.duties import DueDuties

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.database.async_store import AsyncStore
    from howdah.encoding.safe_logger import SafeLogger
    from howdah.protocol.worker_statements import WorkerStatements

logger = get_logger(__name__)

TICK_SECONDS = 1.0
PENDING_LIMIT = 4  # statements without an answer
ANSWER_TIMEOUT_SECONDS = 2.0
RUN_SECONDS = 10.0  # how long one run goes on while there is more to do
STATEMENT_TIMEOUT_SECONDS = 60.0


async def maintain(
    store: AsyncStore,
    statements: WorkerStatements,
    report: Callable[[SafeLogger, str, BaseException], None],
) -> None:
    """Run the duties that are due, every second or two, until cancelled.

    A step may take long, and a dead connection looks the same. So a run without an answer does not delay the
    next one, which finds what is due meanwhile: recovery first. `report` logs failures."""
    pending: list[asyncio.Task[None]] = []
    try:
        while True:
            await asyncio.sleep(TICK_SECONDS * random.uniform(0.75, 2))  # noqa: S311 - workers take turns
            fault_points.reach("before-maintenance")
            if pending and store.is_failing:
                # It is retried there; another one would only connect.
                pending = await _wait(pending)
                continue
            if len(pending) == PENDING_LIMIT:
                pending[0].cancel()  # so many cannot all be running duties
            pending.append(asyncio.create_task(_run_due(store, statements, report)))
            pending = await _wait(pending)
    finally:
        for task in pending:
            task.cancel()


async def _wait(pending: list[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    """Wait for one of the tasks, for a while. Returns those that have not ended."""
    await asyncio.wait(pending, timeout=ANSWER_TIMEOUT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    return [task for task in pending if not task.done()]


async def _run_due(
    store: AsyncStore,
    statements: WorkerStatements,
    report: Callable[[SafeLogger, str, BaseException], None],
) -> None:
    duties = DueDuties(statements, seconds=RUN_SECONDS, timeout=STATEMENT_TIMEOUT_SECONDS)
    try:
        while (statement := duties.next_statement()) is not None:
            duties.record(await store.run(statement))
    except Exception as error:
        report(logger, "maintenance failed", error)
