"""Tasks that change, fork, flood or break the task process that they run in."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howdah import Aborted, App, Context, Retry

if TYPE_CHECKING:
    from collections.abc import Iterator

app = App()

FORK = multiprocessing.get_context("fork")
LONG_SECONDS = 300.0
QUICK = Retry.fixed(0)


@app.lifespan
def pool() -> Iterator[dict[str, Any]]:
    """A resource that is closed when its lifespan ends."""
    opened = {"open": True}
    try:
        yield {"pool": opened}
    finally:
        opened["open"] = False


@app.task(run_in="process", max_attempts=1)
def pool_is_open(ctx: Context) -> bool:
    return bool(ctx.resources["pool"]["open"])


@app.task(run_in="process", max_attempts=1)
def process_id() -> int:
    return os.getpid()


@app.task(run_in="process", max_attempts=2, retry=QUICK)
def attempt(ctx: Context) -> int:
    return ctx.attempt


# ── reports ───────────────────────────────────────────────────────────────────────────────────────


def _report(ctx: Context, count: int) -> None:
    for number in range(count):
        ctx.event("number", {"n": number})


def _report_until(ctx: Context, release: str) -> None:
    end = time.monotonic() + LONG_SECONDS
    with contextlib.suppress(Aborted, OSError):
        while not Path(release).exists() and time.monotonic() < end:
            ctx.event("number", {"text": "x" * 500})


@app.task(run_in="process", max_attempts=1)
def reports_from_threads(ctx: Context, threads: int, count: int) -> None:
    started = [threading.Thread(target=_report, args=(ctx, count)) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


@app.task(run_in="process", max_attempts=1)
def leaves_a_reporting_thread(ctx: Context, release: str) -> None:
    threading.Thread(target=_report_until, args=(ctx, release), daemon=True).start()


@app.task(run_in="process", max_attempts=1)
def waits_beside_a_reporting_thread(ctx: Context, path: str) -> None:
    try:
        threading.Thread(target=_report_until, args=(ctx, path), daemon=True).start()
        time.sleep(LONG_SECONDS)
    except Aborted as error:
        Path(path).write_text(error.why)
        raise


@app.task(run_in="process", max_attempts=1)
def reports_from_a_fork(ctx: Context, count: int) -> int | None:
    child = FORK.Process(target=_report, args=(ctx, count))
    child.start()
    child.join()
    return child.exitcode


@app.task(run_in="process", max_attempts=1)
def leaves_a_reporting_fork(ctx: Context, release: str) -> None:
    FORK.Process(target=_report_until, args=(ctx, release), daemon=True).start()


# ── forks and signals ─────────────────────────────────────────────────────────────────────────────


def _sleep(started: Any) -> None:
    started.send(None)
    time.sleep(LONG_SECONDS)


def terminates_a_fork() -> list[int | None]:
    """The exit codes of children after SIGTERM and SIGHUP."""
    codes = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        mine, theirs = FORK.Pipe()
        child = FORK.Process(target=_sleep, args=(theirs,))
        child.start()
        mine.recv()
        os.kill(child.pid or 0, number)
        child.join(10)
        codes.append(child.exitcode)
        child.kill()
    return codes


app.task(name="thread:terminates_a_fork", max_attempts=1)(terminates_a_fork)
in_process = app.task(name="process:terminates_a_fork", run_in="process", max_attempts=1)(
    terminates_a_fork
)


@app.task(run_in="process", max_attempts=1)
def interrupts_a_program() -> int:
    with subprocess.Popen(["sleep", str(LONG_SECONDS)]) as program:
        program.send_signal(signal.SIGINT)
        try:
            return program.wait(10)
        finally:
            program.kill()


@app.task(run_in="process", max_attempts=1)
def finishes_when_it_is_interrupted(path: str) -> str:
    try:
        Path(path).touch()
        time.sleep(LONG_SECONDS)
    except Aborted as error:
        return error.why
    return "not interrupted"


# ── what a run leaves behind ──────────────────────────────────────────────────────────────────────


def _handle(_number: int, _frame: object) -> None:
    pass


CHANGES: dict[str, Any] = {
    "cpu limit": lambda: _set_soft_limit(resource.RLIMIT_CPU, 10_000),
    "address space": lambda: _set_soft_limit(resource.RLIMIT_AS, 64 << 30),
    "ignored signal": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "signal handler": lambda: signal.signal(signal.SIGUSR1, _handle),
    "signal of the worker": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "signal mask": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]),
    "timer": lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 3600),
    "socket timeout": lambda: socket.setdefaulttimeout(0.01),
    "recursion limit": lambda: sys.setrecursionlimit(500),
    "replaced stream": lambda: setattr(sys, "stdout", None),
    "module path": lambda: sys.path.insert(0, "/plugins"),
    "replaced module path": lambda: setattr(sys, "path", []),
    "environment": lambda: os.environ.update(CHANGED="yes"),
    "replaced environment": lambda: setattr(os, "environ", {}),
    "closed stream": lambda: sys.stdout.close(),
    "closed file": lambda: os.close(1),
}
# They cannot be undone: the next job gets another process.
LASTING = {"closed stream", "closed file"}


def _set_soft_limit(which: int, limit: int) -> None:
    resource.setrlimit(which, (limit, resource.getrlimit(which)[1]))


@app.task(run_in="process", max_attempts=1)
def changes(what: str) -> int:
    CHANGES[what]()
    return os.getpid()


@app.task(run_in="process", max_attempts=1)
def observes() -> tuple[int, list[Any]]:
    """Its process, and what jobs may have changed in it."""
    try:
        os.fstat(1)
        is_open = not sys.stdout.closed
    except (OSError, AttributeError):
        is_open = False
    signals = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM)
    return os.getpid(), [
        resource.getrlimit(resource.RLIMIT_CPU),
        resource.getrlimit(resource.RLIMIT_AS),
        [getattr(signal.getsignal(each), "__name__", None) for each in signals],
        [int(signal.getsignal(each) == signal.SIG_DFL) for each in signals],
        sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        signal.getitimer(signal.ITIMER_VIRTUAL),
        socket.getdefaulttimeout(),
        sys.getrecursionlimit(),
        sys.path[:3],
        sorted(os.environ),
        is_open,
    ]


KEPT: list[bytearray] = []


@app.task(run_in="process", max_attempts=1)
def keeps(size: int) -> int:
    KEPT.append(bytearray(size))
    return os.getpid()


@app.task(run_in="process", max_attempts=1, memory_limit=2 << 30)
def needs(size: int) -> int:
    return len(bytearray(size))


# ── broken processes ──────────────────────────────────────────────────────────────────────────────


@app.task(run_in="process", max_attempts=1)
def writes_garbage(then_exits: bool) -> None:
    from howdah.worker import task_process

    assert task_process._channel is not None
    for _ in range(50):
        os.write(task_process._channel._socket.fileno(), b"garbage")
    if then_exits:
        os._exit(0)
    time.sleep(LONG_SECONDS)


@app.task(run_in="process", max_attempts=1)
def exits() -> None:
    os._exit(3)
