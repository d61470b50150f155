"""The tasks of the soak, one per kind of job."""

from __future__ import annotations

import asyncio

from bench.soak.load import BRIEF_SECONDS, KEY_SECONDS
from howdah import App, Context, Retry

app = App(idempotency_ttl=KEY_SECONDS)
SOON = Retry.fixed(0.2)


@app.task(name="soak.no_op")
async def no_op(number: int) -> None:
    """Returns immediately."""


@app.task(name="soak.gone", keep=0)
async def gone(number: int) -> None:
    """Leaves no row."""


@app.task(name="soak.brief", keep=BRIEF_SECONDS)
async def brief(number: int) -> None:
    """Is kept for a minute."""


@app.task(name="soak.threaded")
def threaded(number: int) -> int:
    """Runs in a thread."""
    return number


@app.task(name="soak.in_process", run_in="process")
def in_process(number: int) -> int:
    """Runs in a task process."""
    return number


@app.task(name="soak.ordered")
async def ordered(number: int) -> None:
    """One of several with the same ordering key."""


@app.task(name="soak.delayed")
async def delayed(number: int) -> None:
    """Is due some seconds after its enqueue."""


@app.task(name="soak.reporting")
async def reporting(number: int, ctx: Context) -> None:
    """Reports progress and two events."""
    ctx.event("begun", {"number": number})
    ctx.progress(50, stage="half")
    await asyncio.sleep(0.01)
    ctx.event("ended", {"number": number})


@app.task(name="soak.keyed")
async def keyed(number: int) -> int:
    """Is enqueued twice with one idempotency key."""
    return number


@app.task(name="soak.flaky", retry=SOON, max_attempts=3)
async def flaky(number: int, ctx: Context) -> None:
    """Fails in its first attempt."""
    if ctx.attempt == 1:
        raise OSError("the first attempt fails")


@app.task(name="soak.gone_flaky", retry=SOON, max_attempts=3, keep=0)
async def gone_flaky(number: int, ctx: Context) -> None:
    """Fails in its first attempt, and leaves no row."""
    if ctx.attempt == 1:
        raise OSError("the first attempt fails")


@app.task(name="soak.doomed", retry=SOON, max_attempts=2)
async def doomed(number: int) -> None:
    """Fails in every attempt."""
    raise ValueError(f"number {number} cannot succeed")


@app.task(name="soak.awaited")
async def awaited(number: int) -> int:
    """Its producer waits for the result."""
    return number


@app.task(name="soak.cancelled")
async def cancelled(number: int) -> None:
    """Is cancelled before it is due."""
