"""The app whose workers a chaos run kills: quick jobs, slow jobs, jobs that fail, and jobs that harm their worker.
Every run of a handler is recorded in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from howdah.app import App
from howdah.chaos import ledger
from howdah.chaos.processes import recording_stores
from howdah.chaos.processes.environment import (
    EFFECTS,
    LEASE_VARIABLE,
    REPORT,
    SCHEMA_VARIABLE,
)
from howdah.context import Context, current
from howdah.database import connection
from howdah.protocol.schema_name import quote_schema
from howdah.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = os.environ.get(SCHEMA_VARIABLE, "howdah")
LEASE = float(os.environ.get(LEASE_VARIABLE, "2"))
QUICK_RETRY = Retry.fixed(0.05)
WAITING_RETRY = Retry.fixed(1.0)
"""So long that at any time some jobs wait for their retry: a jump of the server's clock must not hide them."""

_ledger = ledger.from_environment()
if _ledger is not None:
    recording_stores.install(_ledger, LEASE)

app = App(schema=SCHEMA, lease=LEASE)


def record(kind: str, context: Context, **more: Any) -> None:
    """Write a ledger line about this run of a handler."""
    if _ledger is not None:
        _ledger.write(kind, job=context.id, fence=context.lease_id, attempt=context.attempt, **more)


@app.middleware
def record_run(context: Context) -> Iterator[None]:
    """Record that a handler started, and that it did its work."""
    record("start", context)
    yield
    record("effect", context)


# ── plain jobs ────────────────────────────────────────────────────────────────────────────────────


@app.task(name="chaos.quick", max_attempts=5)
async def quick(tag: str) -> None:
    """Returns immediately."""


@app.task(name="chaos.nap", max_attempts=5)
async def nap(tag: str, seconds: float = 0.05) -> str:
    """Sleeps, reports an event with its fence, and returns a result."""
    await asyncio.sleep(seconds)
    context = current()
    record("report", context)
    context.event(REPORT, {"fence": str(context.lease_id)})
    return tag


@app.task(name="chaos.thread", max_attempts=5)
def thread(tag: str, seconds: float = 0.02) -> None:
    """Runs in a thread."""
    time.sleep(seconds)


@app.task(name="chaos.ordered", max_attempts=5, retry=QUICK_RETRY)
async def ordered(tag: str, n: int) -> None:
    """One of several with the same ordering key; every seventh fails in its first attempt."""
    await asyncio.sleep(0.005)
    if n % 7 == 0 and current().attempt == 1:
        raise OSError("not yet")


@app.task(name="chaos.flaky", max_attempts=4, retry=WAITING_RETRY)
async def flaky(tag: str, failures: int = 1) -> None:
    """Fails in its first attempts."""
    if current().attempt <= failures:
        raise OSError(f"failure {current().attempt} of {failures}")


@app.task(name="chaos.once", max_attempts=5, retry=QUICK_RETRY)
async def once(tag: str) -> None:
    """Commits its row and its completion in one transaction: exactly once, even if the worker is killed."""
    context, asked = current(), time.monotonic()
    # A dead connection inside the transaction would keep the job locked until the timeout.
    conn = await connection.connect_async(
        os.environ["HOWDAH_DATABASE_URL"], timeout=3, command_timeout=3
    )
    try:
        async with conn.transaction():
            await conn.execute(
                f"INSERT INTO {quote_schema(SCHEMA)}.{EFFECTS} (job_id, tag) VALUES ($1, $2)",
                context.id,
                tag,
            )
            record("effect", context)
            await app.aqueue.complete(context.completion(), conn=conn)
    finally:
        conn.terminate()
    record("ack-accepted", context, what="complete", final=True, asked=asked)


# ── results and exceptions that cannot be stored ──────────────────────────────────────────────────


class UnprintableError(Exception):
    """An exception without a text: its `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("this exception has no text")


@app.task(name="chaos.poison", max_attempts=2, retry=QUICK_RETRY)
async def poison(tag: str, kind: str) -> Any:
    """Results and exceptions that the database cannot store."""
    match kind:
        case "nul":
            raise ValueError("a NUL \x00 and a surrogate \ud800 in an exception")
        case "unprintable":
            raise UnprintableError
        case "nan":
            return float("nan")
        case "huge":
            return "x" * 10_000_000
        case "object":
            return object()
        case _:
            return "\x00\ud800"


# ── handlers that harm their worker ───────────────────────────────────────────────────────────────


@app.task(name="chaos.killer", max_attempts=2)
async def killer(tag: str) -> None:
    """Kills its worker."""
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="chaos.staller", max_attempts=3)
async def staller(tag: str, seconds: float = 1.0) -> None:
    """Blocks the event loop."""
    time.sleep(seconds)  # noqa: ASYNC251


@app.task(name="chaos.deaf", max_attempts=3)
async def deaf(tag: str, seconds: float = 0.5) -> None:
    """Ignores every cancellation."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)


@app.task(name="chaos.forker", max_attempts=3)
def forker(tag: str) -> None:
    """Forks; the child exits with a code of 7."""
    child = os.fork()
    if child == 0:
        os._exit(7)
    os.waitpid(child, 0)


@app.task(name="chaos.canceller", max_attempts=2, retry=QUICK_RETRY)
async def canceller(tag: str) -> None:
    """Cancels every task of the event loop."""
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


@app.task(name="chaos.swallower", max_attempts=2, retry=QUICK_RETRY)
async def swallower(tag: str) -> None:
    """Cancels its own task, and swallows that."""
    task = asyncio.current_task()
    if task is not None:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(1)


@app.task(name="chaos.stopper", max_attempts=2, retry=QUICK_RETRY)
async def stopper(tag: str) -> None:
    """Stops the event loop."""
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


@app.task(name="chaos.quitter", max_attempts=2, retry=QUICK_RETRY)
async def quitter(tag: str) -> None:
    """Exits, in a callback of the event loop."""
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(0)


@app.task(name="chaos.filler", max_attempts=2, retry=QUICK_RETRY)
async def filler(tag: str, seconds: float = 1.0) -> None:
    """Fills the default executor of the event loop."""
    loop = asyncio.get_running_loop()
    for _ in range(40):
        loop.run_in_executor(None, time.sleep, seconds)
    current().progress(50)


class Incomparable:
    """Like a numpy array: `==` has no truth value."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")


_LEAKED: ContextVar[Any] = ContextVar("howdah_chaos_leaked", default=None)


@app.task(name="chaos.leaker", max_attempts=2, retry=QUICK_RETRY)
async def leaker(tag: str) -> None:
    """Leaves a context variable that cannot be compared. No later job may see it."""
    if _LEAKED.get() is not None:
        raise AssertionError("the context variable of another job is visible")
    _LEAKED.set(Incomparable())


@app.task(name="chaos.segfault", max_attempts=2, retry=QUICK_RETRY, run_in="process")
def segfault(tag: str) -> None:
    """Crashes its process."""
    ctypes.string_at(0)


@app.task(
    name="chaos.glutton", max_attempts=2, retry=QUICK_RETRY, run_in="process",
    memory_limit=512 * 1024 * 1024,
)  # fmt: skip
def glutton(tag: str) -> None:
    """Allocates memory until it is stopped at its limit."""
    blocks = []
    while True:
        blocks.append(bytearray(64 * 1024 * 1024))


@app.task(name="chaos.process", max_attempts=5, run_in="process")
def process(tag: str, seconds: float = 0.02) -> None:
    """Runs in a separate process."""
    time.sleep(seconds)
