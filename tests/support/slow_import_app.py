"""An app whose module takes long to import in a task process: until the file SLOW_IMPORT_GATE exists."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

from fault_app import write
from howdah import App, Context

app = App(lease=float(os.environ.get("FAULT_APP_LEASE", "30")))

if multiprocessing.current_process().name == "howdah-task":
    Path(os.environ["SLOW_IMPORT_REACHED"]).touch()
    while not Path(os.environ["SLOW_IMPORT_GATE"]).exists():
        time.sleep(0.02)


@app.task(run_in="process", timeout=2)
def slow_import(ctx: Context) -> None:
    write("start", ctx.id, ctx.attempt)
