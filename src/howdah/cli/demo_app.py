"""The tasks of `howdah demo`; its worker processes import this module."""

from __future__ import annotations

import asyncio
import random

from howdah.app import App
from howdah.context import Context  # noqa: TC001 - a task's annotations are read at run time
from howdah.retry import Retry

app = App(lease=2)

STAGES = ("download", "decode", "resize", "upload")


@app.task
async def thumbnail(picture: int) -> str:
    """A short job: it waits for a millisecond, as for a disk or a service."""
    await asyncio.sleep(0.001)
    return f"thumbnails/{picture}.png"


@app.task(retry=Retry.fixed(0.5))
async def notify(ctx: Context, user: int) -> str:
    """A job that calls a service, which fails the first time."""
    if ctx.attempt == 1:
        raise ConnectionError("503 Service Unavailable")
    return f"notified user {user}"


@app.task(priority=150)
async def encode_video(ctx: Context, name: str, seconds: float = 5.0) -> str:
    """A long job that reports its progress."""
    steps = 60
    for step in range(steps):
        ctx.progress(100 * step / steps, stage=STAGES[step * len(STAGES) // steps])
        await asyncio.sleep(seconds / steps * random.uniform(0.7, 1.3))  # noqa: S311
    ctx.event("encoded", {"name": name})
    return f"{name}.mp4"
