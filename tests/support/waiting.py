"""Waits for something that must happen. Only a failing test reaches the deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from howdah import Job, TaskHandle

DEADLINE_SECONDS = 120.0
POLL_SECONDS = 0.01


def until(condition: Callable[[], Any], what: str, deadline: float = DEADLINE_SECONDS) -> Any:
    """Wait in a sync test until the condition is true; returns its value. `what` describes it in a failure."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline:g} s: {what}"
        time.sleep(POLL_SECONDS)
    return value


async def eventually(
    condition: Callable[[], Any], what: str = "", deadline: float = DEADLINE_SECONDS
) -> Any:
    """`until` for async tests. The condition may be a coroutine function."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < end, (
            f"not within {deadline:g} s: {what or inspect.getsource(condition)}"
        )
        await asyncio.sleep(POLL_SECONDS)


async def ended(handle: TaskHandle[Any]) -> Job:
    """The job, after it was completed, failed or cancelled."""

    async def final() -> Job | None:
        job = await handle.ajob()
        return job if job.status.is_final else None

    job: Job = await eventually(final, f"job {handle.id} ended")
    return job


async def failed_once(handle: TaskHandle[Any]) -> Job:
    """The job, after its first attempt has failed."""

    async def failed() -> Job | None:
        job = await handle.ajob()
        return None if job.last_error is None else job

    job: Job = await eventually(failed, f"job {handle.id} failed once")
    return job


def lines(path: Path | str) -> list[str]:
    """The lines that handlers have written to a file."""
    try:
        with open(path) as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []
