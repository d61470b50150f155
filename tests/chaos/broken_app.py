"""Workers that break a promise: HOWDAH_BROKEN selects which one. They record it in the ledger."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import asyncpg

from howdah.chaos.processes import app as chaos
from howdah.chaos.processes.app import app
from howdah.chaos.processes.environment import EFFECTS
from howdah.context import Context, current
from howdah.execution.handler import aexecute
from howdah.execution.heartbeat import Heartbeat
from howdah.outcome import Completed, Outcome
from howdah.worker import runner

if TYPE_CHECKING:
    from howdah.task import Task

BROKEN = os.environ["HOWDAH_BROKEN"]
_running: set[asyncio.Task[Outcome]] = set()


async def acknowledge_first(task: Task[..., Any], context: Context) -> Outcome:
    """Return the outcome before the work is done."""

    async def work() -> Outcome:
        await asyncio.sleep(0.05)
        return await aexecute(task, context)

    running = asyncio.create_task(work())
    _running.add(running)
    running.add_done_callback(_running.discard)
    return Completed("null")


async def two_transactions(tag: str) -> None:
    """Commit the row and the completion in two transactions, and fail between them."""
    context = current()
    conn = await asyncpg.connect(os.environ["HOWDAH_DATABASE_URL"])
    try:
        await conn.execute(
            f"INSERT INTO {chaos.SCHEMA}.{EFFECTS} (job_id, tag) VALUES ($1, $2)",
            context.id,
            tag,
        )
        chaos.record("effect", context)
        if context.attempt == 1:
            raise OSError("the completion was not sent")
        await app.aqueue.complete(context.completion(), conn=conn)
    finally:
        conn.terminate()


match BROKEN:
    case "acknowledge first":
        runner.aexecute = acknowledge_first  # type: ignore[attr-defined]
    case "two transactions":
        app.tasks["chaos.once"].function = two_transactions
    case "keep lost runs":
        # Otherwise the heartbeat mostly aborts a lost run before it can report.
        Heartbeat._abort_lost_and_cancelled = lambda *_: None  # type: ignore[method-assign]

assert chaos._ledger is not None
chaos._ledger.write("note", text=f"broken: {BROKEN}")
