"""Workers that do not keep their promises: HOWDAH_BROKEN says in which way. Each says so in the ledger."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import asyncpg

from howdah.chaos.processes import app as chaos
from howdah.chaos.processes.app import app
from howdah.chaos.processes.supervisor import EFFECTS
from howdah.context import Context, current
from howdah.execution.handler import aexecute
from howdah.outcome import Completed, Outcome
from howdah.worker import runner

if TYPE_CHECKING:
    from howdah.task import Task

BROKEN = os.environ["HOWDAH_BROKEN"]
_later: set[asyncio.Task[Outcome]] = set()


async def acknowledge_first(task: Task[..., Any], context: Context) -> Outcome:
    """The outcome first, the work later."""

    async def work() -> Outcome:
        await asyncio.sleep(0.05)
        return await aexecute(task, context)

    doing = asyncio.create_task(work())
    _later.add(doing)
    doing.add_done_callback(_later.discard)
    return Completed("null")


async def twice(tag: str) -> None:
    """The row in a transaction, the completion in another; and the way between them is long."""
    context = current()
    conn = await asyncpg.connect(os.environ["HOWDAH_DATABASE_URL"])
    try:
        await conn.execute(
            f"INSERT INTO {chaos.SCHEMA}.{EFFECTS} (job_id, tag) VALUES ($1, $2)",
            context.id,
            tag,
        )
        chaos.note("effect", context)
        if context.attempt == 1:
            raise OSError("the completion did not get through")
        await app.aqueue.complete(context.completion(), conn=conn)
    finally:
        conn.terminate()


match BROKEN:
    case "acknowledge first":
        runner.aexecute = acknowledge_first  # type: ignore[attr-defined]
    case "two transactions":
        app.tasks["chaos.once"].function = twice

assert chaos._ledger is not None
chaos._ledger.write("note", text=f"broken: {BROKEN}")
