"""Tasks for a worker that has only the privileges of the worker role."""

from __future__ import annotations

import os

from howdah import App, Context, Retry, current

app = App()


@app.task
async def add(x: int, y: int) -> int:
    return x + y


@app.task
def steps(n: int, ctx: Context) -> int:
    for i in range(n):
        ctx.progress(100 * i // n, stage=f"step {i}")
        ctx.event("step", {"i": i})
    return n


@app.task(run_in="process")
def pid() -> int:
    current().progress(50)
    return os.getpid()


@app.task(retry=Retry.fixed(0))
def fail() -> None:
    raise ValueError("no luck")


@app.task
def chain(n: int) -> int:
    """Enqueues another job and waits for its result, as a handler may do."""
    inner = add.using(ordering_key="chain").enqueue(n, 1)
    return inner.result(timeout=60)


@app.task(max_attempts=1)
def connect() -> None:
    """Opens its own connection and fails, as a handler may do."""
    import psycopg

    psycopg.connect(os.environ["HOWDAH_DATABASE_URL"].replace("/test_", "/missing_"))
