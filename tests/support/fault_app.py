"""An app for worker processes that tests kill, stop and disconnect.

Handlers write to a ledger outside the database: a file opened with O_APPEND, one JSON object per line. Environment
variables: FAULT_APP_LEDGER is the path of the ledger, FAULT_APP_LEASE the lease in seconds, FAULT_APP_POLL the
seconds between polls (long, if only notifications should wake the worker), FAULT_APP_STOP_TIMEOUT the seconds
that the process may take to exit after the second signal, FAULT_APP_BLOCKED_EXIT those after the grace period with a
blocked event loop, and FAULT_APP_PROCESSES the number of task processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import time
from typing import TYPE_CHECKING

from howdah import App, Context, Retry, StateChange
from howdah.cli.commands import worker as cli
from howdah.worker import fetcher

if TYPE_CHECKING:
    from types import ModuleType

if "FAULT_APP_PROCESSES" in os.environ:
    os.cpu_count = lambda: int(os.environ["FAULT_APP_PROCESSES"])

app = App(lease=float(os.environ.get("FAULT_APP_LEASE", "30")))


def replace_seconds(module: ModuleType, name: str, variable: str) -> None:
    """Set a constant of a module, which must have it: a constant that was renamed would change nothing."""
    assert isinstance(getattr(module, name), float)
    setattr(module, name, float(os.environ[variable]))


if "FAULT_APP_POLL" in os.environ:
    replace_seconds(fetcher, "POLL_SECONDS", "FAULT_APP_POLL")
    replace_seconds(fetcher, "POLL_SECONDS_LISTENING", "FAULT_APP_POLL")

if "FAULT_APP_STOP_TIMEOUT" in os.environ:
    replace_seconds(cli, "FORCED_EXIT_SECONDS", "FAULT_APP_STOP_TIMEOUT")

if "FAULT_APP_BLOCKED_EXIT" in os.environ:
    replace_seconds(cli, "BLOCKED_EXIT_SECONDS", "FAULT_APP_BLOCKED_EXIT")


def write(kind: str, job_id: object, attempt: int, **more: object) -> None:
    """Append a line to the ledger."""
    path = os.environ.get("FAULT_APP_LEDGER")
    if path is None:
        return
    entry = {"kind": kind, "pid": os.getpid(), "job": str(job_id), "attempt": attempt, **more}
    ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(ledger, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(ledger)


@app.on_state_change
def record(change: StateChange) -> None:
    if change.state == "completed":
        write("accepted", change.id, change.attempt)


@app.task(max_attempts=5)
async def nap(ctx: Context, seconds: float = 0.0) -> None:
    write("start", ctx.id, ctx.attempt)
    await asyncio.sleep(seconds)
    write("effect", ctx.id, ctx.attempt)


@app.task
async def collector() -> list[int]:
    """The thresholds of the garbage collector, and how many objects it never visits."""
    return [*gc.get_threshold(), gc.get_freeze_count()]


@app.task(max_attempts=5)
async def gated(ctx: Context, gate: str) -> None:
    """Ends when a file of this name exists."""
    write("start", ctx.id, ctx.attempt)
    while not os.path.exists(gate):  # noqa: ASYNC110, ASYNC240 - the test process creates it
        await asyncio.sleep(0.01)
    write("effect", ctx.id, ctx.attempt)


@app.task
async def noop() -> None:
    pass


@app.task
def thread_nap(ctx: Context, seconds: float) -> None:
    """A thread that calls its context, and so can be aborted."""
    write("start", ctx.id, ctx.attempt)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
        ctx.check()
    write("effect", ctx.id, ctx.attempt)


@app.task
def unabortable_nap(ctx: Context, seconds: float) -> None:
    """A thread that does not call its context."""
    write("start", ctx.id, ctx.attempt)
    time.sleep(seconds)
    write("effect", ctx.id, ctx.attempt)


@app.task(run_in="process")
def process_nap(ctx: Context, seconds: float) -> None:
    write("start", ctx.id, ctx.attempt)
    time.sleep(seconds)
    write("effect", ctx.id, ctx.attempt)


@app.task(run_in="process", max_attempts=1)
def leave(status: int) -> None:
    os._exit(status)


@app.task
async def block(ctx: Context, seconds: float) -> None:
    """Blocks the event loop."""
    write("start", ctx.id, ctx.attempt)
    time.sleep(seconds)  # noqa: ASYNC251


@app.task
async def uncancellable_nap(ctx: Context, seconds: float) -> None:
    """A coroutine that ignores cancellation."""
    write("start", ctx.id, ctx.attempt)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(end - time.monotonic())
    write("effect", ctx.id, ctx.attempt)


@app.task(max_attempts=2)
async def killer(ctx: Context) -> None:
    write("start", ctx.id, ctx.attempt)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(max_attempts=5, retry=Retry.fixed(0.02))
async def flaky(ctx: Context, key: str, n: int) -> None:
    """Every third job fails at its first attempt."""
    write("start", ctx.id, ctx.attempt, key=key, n=n)
    await asyncio.sleep(0.005)
    write("end", ctx.id, ctx.attempt, key=key, n=n)
    if n % 3 == 0 and ctx.attempt == 1:
        raise OSError("not yet")


@app.task
async def executor_nap(ctx: Context, seconds: float) -> None:
    """Occupies a thread of the event loop's default executor."""
    write("start", ctx.id, ctx.attempt)
    await asyncio.to_thread(time.sleep, seconds)


@app.task
async def reporting(ctx: Context) -> None:
    ctx.progress(50, stage="half")
