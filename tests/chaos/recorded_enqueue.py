"""Jobs that a scenario enqueues itself: the checker knows only jobs of the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from howdah import EXPLICIT

if TYPE_CHECKING:
    from uuid import UUID

    from howdah import JobQueue
    from howdah.chaos.scenario import RunContext


def enqueue_recorded(
    run: RunContext, queue: JobQueue, job_type: str, tag: str, max_attempts: int, **data: Any
) -> UUID:
    """Enqueue a job of the highest priority, with its lines in the ledger."""
    described = {
        "tag": tag, "type": job_type, "queue": "default", "priority": EXPLICIT, "key": None,
        "n": None, "delay": None, "max_attempts": max_attempts, "unique": None,
    }  # fmt: skip
    run.ledger.write("enqueue-invoked", call=tag, jobs=[described])
    handle = queue.enqueue(
        job_type, {"tag": tag, **data}, priority=EXPLICIT, max_attempts=max_attempts
    )
    run.ledger.write("enqueue-acknowledged", call=tag, ids=[str(handle.id)])
    return handle.id
