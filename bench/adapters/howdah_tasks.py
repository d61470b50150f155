"""The tasks of the Howdah adapter, in a separate module so that process executors can import them."""

from __future__ import annotations

import asyncio
import functools
import os

from bench.adapters.driver import spin
from bench.ledger import Ledger
from howdah import App, Context

app = App()


@functools.cache
def ledger() -> Ledger:
    return Ledger(os.environ["BENCH_LEDGER"])


@app.task(name="async")
async def no_op(number: int, pad: str) -> None:
    ledger().mark(number)


@app.task(name="io")
async def wait(number: int, pad: str) -> None:
    ledger().mark(number)
    await asyncio.sleep(0.001)


@app.task(name="thread")
def no_op_in_a_thread(number: int, pad: str) -> None:
    ledger().mark(number)


@app.task(name="process", run_in="process")
def compute(number: int, pad: str) -> None:
    ledger().mark(number)
    spin()


@app.task(name="progress")
async def report(number: int, pad: str, ctx: Context) -> None:
    ledger().mark(number)
    for percent in range(100):
        ctx.progress(percent, stage="working")
        await asyncio.sleep(0)
