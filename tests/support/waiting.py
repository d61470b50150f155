"""Waiting for what must happen, with a deadline that only a failure reaches."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from howdah import Job, TaskHandle

DEADLINE = 120.0


async def eventually(condition: Callable[[], Any], what: str = "") -> Any:
    """The condition's value, or that of its coroutine, once it is true."""
    give_up = time.monotonic() + DEADLINE
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < give_up, what or f"never true: {inspect.getsource(condition)}"
        await asyncio.sleep(0.01)


async def ended(handle: TaskHandle[Any]) -> Job:
    """The job, once it is completed, failed or cancelled."""
    give_up = time.monotonic() + DEADLINE
    while not (job := await handle.ajob()).status.is_final:
        assert time.monotonic() < give_up, f"it never ended: {job}"
        await asyncio.sleep(0.01)
    return job


async def failed_once(handle: TaskHandle[Any]) -> Job:
    """The job, once its first attempt has failed and it waits for the next."""
    await eventually(lambda: _errors(handle))
    return await handle.ajob()


async def _errors(handle: TaskHandle[Any]) -> bool:
    return (await handle.ajob()).last_error is not None


def lines(path: Path | str) -> list[str]:
    """What runs have written into a file, line by line."""
    try:
        with open(path) as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []
