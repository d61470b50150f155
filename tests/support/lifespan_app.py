"""An app with one lifespan, which misbehaves as the variable LIFESPAN says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from howdah import App

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

app = App()
FAULT = os.environ.get("LIFESPAN", "")


@app.task
async def fine() -> None: ...


async def misbehave(when: str) -> None:
    if f"{when} raises" == FAULT:
        raise ConnectionError("no cache server")
    if f"{when} waits" == FAULT:
        print("waiting", flush=True)  # noqa: T201
        await asyncio.sleep(3600)
    if f"{when} blocks" == FAULT:
        time.sleep(3600)  # noqa: ASYNC251
    while f"{when} is deaf" == FAULT:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@app.lifespan
async def cache() -> AsyncIterator[dict[str, Any]]:
    await misbehave("start")
    yield {}
    await misbehave("exit")
