"""Tasks at the top level of a module, where a new process can import them. Most exist three times, as
`async:NAME`, `thread:NAME` and `process:NAME`."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import signal
import time
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from howdah import App, Cancel, Context, Fail, Retry, Snooze, Task, current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

app = App()  # has a middleware and a lifespan
plain = App()  # has none

LONG_SECONDS = 300.0


def in_each_executor(**options: Any) -> Callable[[Callable[..., Any]], Task[..., Any]]:
    """Register a function three times. The module attribute is the task that runs in a process."""

    def register(function: Callable[..., Any]) -> Task[..., Any]:
        @functools.wraps(function)
        async def in_loop(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        name = function.__name__
        plain.task(name=f"async:{name}", **options)(in_loop)
        plain.task(name=f"thread:{name}", **options)(function)
        return plain.task(name=f"process:{name}", run_in="process", **options)(function)

    return register


def note(path: str, text: object = "ran") -> int:
    """Append a line to a file; returns the number of lines."""
    with open(path, "a") as file:
        file.write(f"{text}\n")
    return len(Path(path).read_text().splitlines())


QUICK = Retry.fixed(0)


@in_each_executor()
def ok(x: int, ctx: Context) -> dict[str, Any]:
    return {"x": x, "attempt": ctx.attempt}


@in_each_executor(max_attempts=1)
def flood(count: int, ctx: Context) -> None:
    for number in range(count):
        ctx.event("number", {"n": number})


TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")


@in_each_executor()
def of_tenant(name: str) -> str:
    """Returns the tenant that an earlier job has set."""
    before = TENANT.get()
    TENANT.set(name)
    return before


@in_each_executor(retry=QUICK, max_attempts=3)
def flaky(path: str, ctx: Context) -> int:
    if note(path) < 3:
        raise OSError(f"not yet, {ctx.attempt}")
    return ctx.attempt


@in_each_executor(max_attempts=1)
def snoozing(path: str) -> str:
    if note(path, time.time()) == 1:
        raise Snooze(0.4)
    return "awake"


@in_each_executor(retry=QUICK, max_attempts=2)
def hopeless(path: str) -> None:
    note(path)
    raise ValueError("\x00 no \ud800 way")


@in_each_executor(retry=QUICK, max_attempts=5)
def raises_fail(path: str) -> None:
    note(path)
    raise Fail("of no use")


@in_each_executor(retry=Retry.fixed(0, never_on=KeyError), max_attempts=5)
def never_on(path: str) -> None:
    note(path)
    raise KeyError("k")


@in_each_executor(max_attempts=5)
def cancels_itself(path: str) -> None:
    note(path)
    raise Cancel("not needed any more")


class Silent(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Rude(BaseException):
    pass


RAISED: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "Rude": Rude,
    "Silent": Silent,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
}


@in_each_executor(max_attempts=1)
def raises(name: str) -> None:
    raise RAISED[name]()


class Unstorable:
    pass


RESULTS: dict[str, Callable[[], Any]] = {
    "object": Unstorable,
    "nan": lambda: float("nan"),
    "nul": lambda: "\x00",
    "large": lambda: "x" * 100_000,
    "deep": lambda: functools.reduce(lambda inner, _: [inner], range(200), []),
}


@in_each_executor(retry=QUICK, max_attempts=3)
def returns(path: str, name: str) -> Any:
    note(path)
    return RESULTS[name]()


# ── long runs ─────────────────────────────────────────────────────────────────────────────────────


def _wait(ctx: Context) -> None:
    end = time.monotonic() + LONG_SECONDS
    while time.monotonic() < end:
        ctx.check()
        time.sleep(0.01)


def _long(options: dict[str, Any], name: str) -> None:
    """`async:NAME` and `thread:NAME`: the first run waits until it is aborted, the second returns."""

    async def in_loop(path: str) -> str:
        if note(path) > 1:
            return "second"
        try:
            await asyncio.sleep(LONG_SECONDS)
        finally:
            note(path, "stopped")
        return "first"

    def in_thread(path: str, ctx: Context) -> str:
        if note(path) > 1:
            return "second"
        try:
            _wait(ctx)
        finally:
            note(path, "stopped")
        return "first"

    plain.task(name=f"async:{name}", **options)(in_loop)
    plain.task(name=f"thread:{name}", **options)(in_thread)


_long({}, "long")
_long({"timeout": 0.3, "retry": Retry.never()}, "limited")


@plain.task(name="process:long", run_in="process")
def long(path: str) -> str:
    if note(path) > 1:
        return "second"
    try:
        time.sleep(LONG_SECONDS)
    finally:
        note(path, "stopped")
    return "first"


@plain.task(name="process:limited", run_in="process", timeout=0.3, retry=Retry.never())
def limited(path: str) -> None:
    note(path)
    try:
        time.sleep(LONG_SECONDS)
    finally:
        note(path, "stopped")


@plain.task(run_in="process")
def pid() -> int:
    return os.getpid()


@plain.task(run_in="process")
def stubborn(path: str) -> None:
    _ignore_sigterm(path)


@plain.task(run_in="process", timeout=0.3, retry=Retry.never())
def stubborn_limited(path: str) -> None:
    _ignore_sigterm(path)


def _ignore_sigterm(path: str) -> None:
    note(path, os.getpid())
    while True:
        try:
            time.sleep(LONG_SECONDS)
        except BaseException:
            note(path, "ignored")


@in_each_executor()
def ignores_context(path: str, release: str) -> str:
    """Never calls its context."""
    note(path)
    end = time.monotonic() + LONG_SECONDS
    while not Path(release).exists() and time.monotonic() < end:
        time.sleep(0.01)
    return "late"


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────


@plain.task(run_in="process", max_attempts=1)
def crash(how: str) -> None:
    match how:
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


@plain.task(run_in="process", max_attempts=1, memory_limit=2 * 2**30)
def hungry() -> int:
    return len(bytearray(4 * 2**30))


@plain.task(run_in="process")
def neighbour(release: str) -> str:
    end = time.monotonic() + LONG_SECONDS
    while not Path(release).exists() and time.monotonic() < end:
        time.sleep(0.01)
    return "unharmed"


# ── the context ───────────────────────────────────────────────────────────────────────────────────


@in_each_executor(timeout=50, max_attempts=7)
def describes(ctx: Context) -> dict[str, Any]:
    assert current() is ctx
    return {
        "id": ctx.id,
        "job_type": ctx.job_type,
        "queue": ctx.queue,
        "attempt": ctx.attempt,
        "max_attempts": ctx.max_attempts,
        "request_id": ctx.request_id,
        "idempotency_key": ctx.idempotency_key,
        "deadline": ctx.deadline,
        "cancelled": ctx.cancelled,
    }


@in_each_executor()
def reports(count: int, ctx: Context) -> None:
    for n in range(count):
        ctx.event("step", {"n": n})
    ctx.log("done \x00 \ud800")
    ctx.progress(70, stage="last")


@in_each_executor(max_attempts=1)
def fails_at_a_stage(ctx: Context) -> None:
    ctx.progress(40, stage="packing")
    ctx.event("about to fail")
    raise RuntimeError("torn")


@in_each_executor()
def goes_back(ctx: Context, release: str) -> None:
    ctx.progress(60, stage="one")
    ctx.progress(20)
    ctx.progress(float("nan"))
    ctx.progress(stage="two")
    end = time.monotonic() + LONG_SECONDS
    while not Path(release).exists() and time.monotonic() < end:
        time.sleep(0.01)


@plain.task(name="process:charge", run_in="process", retry=QUICK)
def charge(ctx: Context) -> None:
    ctx.event("before", {"attempt": ctx.attempt})
    with psycopg.connect(os.environ["HOWDAH_DATABASE_URL"]) as conn:
        conn.execute("INSERT INTO charges VALUES (%s, %s)", [ctx.id, ctx.attempt])
        plain.queue.complete(ctx.completion(), {"charged": ctx.attempt}, conn=conn)
        if ctx.attempt == 1:
            raise OSError("torn before the commit")


@in_each_executor()
def enqueues_another() -> str:
    return str(CHILD.enqueue(1).id)


CHILD = plain.task(name="child")(lambda x: x)


# ── middleware and lifespan ───────────────────────────────────────────────────────────────────────


@app.middleware
def around(ctx: Context) -> Iterator[None]:
    path = ctx.data.get("path") if isinstance(ctx.data, dict) else None
    if path is None:
        yield
        return
    note(path, f"before {ctx.resources.get('colour')}")
    try:
        yield
    except OSError as error:
        note(path, f"raised {error}")
        if ctx.data.get("swallow"):
            return
        raise
    note(path, "after")


@app.lifespan
def colours() -> Iterator[dict[str, str]]:
    yield {"colour": "grey"}


@app.task(run_in="process", max_attempts=1)
def surrounded(path: str, swallow: bool = False, fail: bool = False) -> str | None:
    note(path, "inside")
    if fail:
        raise OSError("torn")
    return "returned"


# ── runs that report until they are stopped ───────────────────────────────────────────────────────


def _steps(path: str, ctx: Context) -> Iterator[int]:
    """The first run reports until it is stopped; the second reports for a second and returns."""
    run = 1 if not Path(path).exists() else 2
    note(path, f"{run} entered")
    end = time.monotonic() + (LONG_SECONDS if run == 1 else 1)
    try:
        while time.monotonic() < end:
            ctx.event("step", {"run": run})
            yield run
    finally:
        note(path, f"{run} stopped")


def reporting_in_thread(path: str, ctx: Context) -> int:
    run = 0
    for number in _steps(path, ctx):
        run = number
        time.sleep(0.02)
    return run


async def reporting_in_loop(path: str, ctx: Context) -> int:
    run = 0
    for number in _steps(path, ctx):
        run = number
        await asyncio.sleep(0.02)
    return run


plain.task(name="async:reporting")(reporting_in_loop)
plain.task(name="thread:reporting")(reporting_in_thread)


@plain.task(name="process:reporting", run_in="process")
def reporting(path: str, ctx: Context) -> int:
    return reporting_in_thread(path, ctx)


@plain.task(name="process:surroundings", run_in="process")
def surroundings() -> list[Any]:
    """What it finds; it leaves something else."""
    umask = os.umask(0o007)
    found = [os.getcwd(), os.environ.get("LEFT_BEHIND"), os.environ.get("HOME"), umask]
    os.chdir("/")
    os.environ["LEFT_BEHIND"] = "yes"
    os.environ.pop("HOME", None)
    return found
