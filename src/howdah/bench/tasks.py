"""What the worker of `howdah bench` runs. It reports through a pipe to the process that started it:
asking the database would be part of what is measured."""

from __future__ import annotations

import os
import struct
import time

from howdah.app import App

SCHEMA = "HOWDAH_BENCH_SCHEMA"
PIPE = "HOWDAH_BENCH_PIPE"
REPORT = struct.Struct("ddq")  # the moment, this process's CPU time, jobs so far
EVERY = 64

app = App(schema=os.environ.get(SCHEMA, "howdah_bench"), create=False)
_pipe = int(os.environ.get(PIPE, "1"))
_jobs = 0


def _report() -> None:
    os.write(_pipe, REPORT.pack(time.monotonic(), time.process_time(), _jobs))


@app.task
async def ping() -> None:
    """Says at once that it has started."""
    _report()


@app.task
async def work(note: str) -> None:
    """Does nothing with what it is given, and says so now and then."""
    global _jobs
    _jobs += 1
    if _jobs % EVERY == 0:
        _report()
