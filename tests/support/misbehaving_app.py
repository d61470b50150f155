"""Handlers that misbehave, each as `async:NAME`, `thread:NAME` and `process:NAME`, and one well-behaved neighbour in
each executor. Every run of a handler writes a line into the file MISBEHAVING_LEDGER."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import inspect
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg

from howdah import App, Retry, Task, current

if TYPE_CHECKING:
    from collections.abc import Callable

app = App(lease=5)
MISBEHAVIOURS: list[str] = []
LEFTOVER_SECONDS = 90.0  # of what a handler leaves behind: longer than the test runs
VARIABLE: ContextVar[Any] = ContextVar("variable", default=None)


def write(name: str) -> None:
    """Note a run: its name, and the job."""
    ledger = os.open(
        os.environ["MISBEHAVING_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
    )
    os.write(ledger, f"{name} {current().id}\n".encode())
    os.close(ledger)


def _in_each_executor(name: str, function: Callable[[], Any], **options: Any) -> Task[..., Any]:
    """Three tasks of one function. A coroutine function runs in a new event loop in a thread or a process."""
    is_async = inspect.iscoroutinefunction(function)

    @functools.wraps(function)
    async def in_loop() -> Any:
        write(name)
        answer = function()
        return await answer if is_async else answer

    @functools.wraps(function)
    def blocking() -> Any:
        write(name)
        return asyncio.run(function()) if is_async else function()

    app.task(name=f"async:{name}", **options)(in_loop)
    app.task(name=f"thread:{name}", **options)(blocking)
    return app.task(name=f"process:{name}", run_in="process", **options)(blocking)


def neighbour() -> list[Any]:
    """What it sees of the jobs before it: nothing."""
    time.sleep(0.01)
    return [VARIABLE.get() is None, threading.current_thread().is_alive()]


NEIGHBOUR = _in_each_executor("neighbour", neighbour, max_attempts=1)


def misbehaves(function: Callable[[], Any]) -> Task[..., Any]:
    """Register a handler that misbehaves."""
    MISBEHAVIOURS.append(function.__name__)
    return _in_each_executor(
        function.__name__, function, max_attempts=2, retry=Retry.fixed(0.05), timeout=4
    )


# ── exceptions ────────────────────────────────────────────────────────────────────────────────────


class Evil(BaseException):
    """Neither its text nor its pickle can be made."""

    def __str__(self) -> str:
        raise SystemExit(1)

    def __repr__(self) -> str:
        raise KeyboardInterrupt

    def __reduce__(self) -> Any:
        raise MemoryError


class Finalized:
    """Raises from `__del__`."""

    def __del__(self) -> None:
        raise SystemExit("from __del__")


class Incomparable:
    """Like a numpy array."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


@misbehaves
def raises_evil() -> None:
    raise Evil


@misbehaves
def exits() -> None:
    sys.exit(3)


@misbehaves
def raises_from_del() -> None:
    first, second = Finalized(), Finalized()
    first.other, second.other = second, first  # type: ignore[attr-defined]
    del first, second
    gc.collect()
    Finalized()


@misbehaves
def recurses() -> None:
    def deeper() -> None:
        deeper()

    deeper()


@misbehaves
def leaks_context() -> None:
    VARIABLE.set(Incomparable())


# ── threads and processes ─────────────────────────────────────────────────────────────────────────


@misbehaves
def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(LEFTOVER_SECONDS,)).start()


@misbehaves
def leaves_a_pool() -> None:
    pool = concurrent.futures.ThreadPoolExecutor(4)
    for _ in range(8):
        pool.submit(time.sleep, LEFTOVER_SECONDS)


@misbehaves
def leaves_threads_that_raise() -> None:
    for _ in range(5):
        threading.Thread(target=sys.exit).start()
    threading.Thread(target=lambda: 1 / 0).start()


@misbehaves
def forks_and_returns() -> None:
    os.fork()


@misbehaves
def forks_and_raises() -> None:
    if os.fork() == 0:
        raise OSError("in the child")


@misbehaves
async def forks_and_awaits() -> None:
    os.fork()
    await asyncio.sleep(0.05)


@misbehaves
def daemonizes() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.chdir("/")
        return


@misbehaves
def leaves_a_child_process() -> None:
    context = multiprocessing.get_context("fork")
    context.Process(target=time.sleep, args=(LEFTOVER_SECONDS,)).start()


@misbehaves
def reaps_all_children() -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@misbehaves
def changes_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


@misbehaves
def blocks() -> None:
    time.sleep(1.5)


@misbehaves
def floods() -> None:
    for number in range(2000):
        current().progress(number / 20, f"stage {number}")
        current().event("flood", {"number": number})


# ── our connections ───────────────────────────────────────────────────────────────────────────────


@misbehaves
def closes_connections() -> None:
    """Those of asyncpg. To close one of libpq in another thread is undefined, and may crash any process."""
    for thing in gc.get_objects():
        with contextlib.suppress(Exception):
            if isinstance(thing, asyncpg.Connection):
                thing._loop.call_soon_threadsafe(thing.terminate)


@misbehaves
def shuts_down_sockets() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if "PGSQL" in str(one.getpeername()):
                one.shutdown(socket.SHUT_RDWR)


# ── asyncio ───────────────────────────────────────────────────────────────────────────────────────


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def cancel_all() -> None:
    for task in asyncio.all_tasks(asyncio.get_running_loop()):
        task.cancel()


@misbehaves
async def cancels_itself_and_returns() -> None:
    this_task().cancel()


@misbehaves
async def cancels_itself_and_awaits() -> None:
    this_task().cancel()
    await asyncio.sleep(60)


@misbehaves
async def swallows_a_cancellation() -> None:
    this_task().cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)


@misbehaves
async def swallows_its_timeout() -> None:
    end = time.monotonic() + 4.5
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)


@misbehaves
async def breaks_a_task_group() -> None:
    async def fail() -> None:
        raise OSError("torn")

    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        this_task().cancel()


@misbehaves
async def leaves_a_cancel_scope() -> None:
    scope = anyio.CancelScope()
    scope.__enter__()
    scope.cancel()
    with contextlib.suppress(BaseException):
        await anyio.sleep(60)


@misbehaves
async def swallows_in_a_cancel_scope() -> None:
    with anyio.move_on_after(0.05):
        with contextlib.suppress(asyncio.CancelledError):
            await anyio.sleep(60)
        await asyncio.sleep(0.05)


@misbehaves
async def cancels_all_tasks() -> None:
    cancel_all()
    await asyncio.sleep(0.05)


@misbehaves
async def cancels_all_tasks_later() -> None:
    asyncio.get_running_loop().call_later(0.2, cancel_all)


@misbehaves
async def cancels_all_tasks_from_a_thread() -> None:
    loop = asyncio.get_running_loop()
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(cancel_all,))
    thread.start()
    thread.join()
    await asyncio.sleep(0.05)


@misbehaves
async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.05)


@misbehaves
async def exits_in_a_task() -> None:
    async def leave() -> None:
        sys.exit(5)

    left = asyncio.create_task(leave())
    await asyncio.sleep(0.05)
    del left


@misbehaves
async def interrupts_in_a_callback() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    asyncio.get_running_loop().call_soon(interrupt)
    await asyncio.sleep(0.05)


@misbehaves
async def fills_the_default_executor() -> None:
    loop = asyncio.get_running_loop()
    if in_worker():
        FILLED.append(loop)
    for _ in range(50):
        loop.run_in_executor(None, time.sleep, LEFTOVER_SECONDS if in_worker() else 0.01)
    current().progress(50)


FILLED: list[asyncio.AbstractEventLoop] = []


@misbehaves
async def shuts_the_default_executor_down() -> None:
    if not FILLED:  # it would block the loop until the executor is empty
        await asyncio.get_running_loop().shutdown_default_executor()


@misbehaves
async def leaves_tasks_and_generators() -> None:
    async def endless() -> Any:
        while True:
            yield await asyncio.sleep(0.01)

    async def deaf() -> None:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            with contextlib.suppress(asyncio.CancelledError):
                async for _ in endless():
                    if time.monotonic() > end:
                        break

    LEFT.append(asyncio.create_task(deaf()))
    await asyncio.sleep(0.02)


LEFT: list[asyncio.Task[None]] = []


def in_worker() -> bool:
    """Whether this event loop is that of the worker, which does not wait for its default executor."""
    return threading.current_thread() is threading.main_thread() and (
        multiprocessing.current_process().name != "howdah-task"
    )
