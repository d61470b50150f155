"""The tasks of the worker of `howdah bench`. The worker reports through a pipe to the process that started it, since
queries would change what is measured."""

from __future__ import annotations

import os
import struct
import time

from howdah.app import App

SCHEMA_VARIABLE = "HOWDAH_BENCH_SCHEMA"
PIPE_VARIABLE = "HOWDAH_BENCH_PIPE"
REPORT = struct.Struct("ddq")  # the time, the CPU time of this process, the number of jobs so far
REPORT_JOBS = 64

app = App(schema=os.environ.get(SCHEMA_VARIABLE, "howdah_bench"), create=False)
_pipe = int(os.environ.get(PIPE_VARIABLE, "1"))
_jobs = 0


def _report() -> None:
    os.write(_pipe, REPORT.pack(time.monotonic(), time.process_time(), _jobs))


@app.task
async def ping() -> None:
    """Reports that it started."""
    _report()


@app.task
async def work(note: str) -> None:
    """Does nothing; every 64th job reports."""
    global _jobs
    _jobs += 1
    if _jobs % REPORT_JOBS == 0:
        _report()
