# ruff: noqa: T201, S603
"""A short demo of Howdah: enqueue jobs, run a worker, and query the jobs with SQL.

    python quick_demo.py [--seconds 20]

Uses the database that Howdah finds (DATABASE_URL, or the embedded server of this directory). The jobs
are in a separate queue, `skill-demo`, so other jobs are not touched.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from howdah import BACKFILL, EXPLICIT, App, Context, Retry

QUEUE = "skill-demo"
QUERY = """\
SELECT job_type, priority, status, progress, attempts, coalesce(result #>> '{}', last_error)
FROM howdah.jobs
WHERE queue = 'skill-demo' AND request_id = %s
ORDER BY priority DESC, seq"""

app = App(keep=3600)


@app.task(name="demo-report", queue=QUEUE)
def report(ctx: Context, pages: int) -> str:
    """A job that reports progress."""
    for page in range(pages):
        ctx.progress(100 * page / pages, stage=f"page {page + 1} of {pages}")
        time.sleep(0.05)
    return f"{pages} pages"


@app.task(name="demo-call", queue=QUEUE, retry=Retry.fixed(0.5))
def call(ctx: Context) -> str:
    """A job whose first attempt fails."""
    if ctx.attempt == 1:
        raise ConnectionError("503 Service Unavailable")
    return "answered at the second try"


def main() -> int:
    parser = argparse.ArgumentParser(description="Enqueue jobs, run a worker, show the results.")
    parser.add_argument("--seconds", type=float, default=20, help="maximum time to wait")
    seconds = parser.parse_args().seconds
    run_id = f"demo-{time.time_ns()}"
    handles = [
        report.using(priority=BACKFILL, request_id=run_id).enqueue(3),
        call.using(request_id=run_id).enqueue(),
        report.using(priority=EXPLICIT, request_id=run_id).enqueue(10),
    ]
    print(f"Enqueued {len(handles)} jobs. Starting a worker ...")
    worker = start_worker()
    deadline = time.monotonic() + seconds
    try:
        results = [handle.result(timeout=deadline - time.monotonic()) for handle in handles]
    finally:
        worker.terminate()
        worker.wait()
    print(f"Results: {results}\n\n{QUERY % repr(run_id)};\n")
    show(run_id)
    app.close()
    return 0


def start_worker() -> subprocess.Popen[bytes]:
    """Start `howdah worker quick_demo:app` in the current directory, with this file on the path."""
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "howdah", "worker", "quick_demo:app", "--log-level", "error"]
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(command, env=variables)


def show(run_id: str) -> None:
    """Query the jobs with SQL and print them as a table."""
    import psycopg

    from howdah.embedded import resolve_url

    with psycopg.connect(resolve_url()) as conn:
        cursor = conn.execute(QUERY, [run_id])
        rows = [tuple(map(str, row)) for row in cursor]
    heads = ("job_type", "priority", "status", "progress", "attempts", "result or error")
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    sys.exit(main())
