"""The app for `celery worker`. See `celery.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery  # type: ignore[import-not-found,unused-ignore]
from celery.signals import worker_ready  # type: ignore[import-not-found,unused-ignore]

from bench.adapters.driver import spin
from bench.ledger import Ledger

app = Celery("bench", broker=f"redis+socket://{os.environ['BENCH_REDIS']}")
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=128,
    worker_disable_rate_limits=True,
    broker_connection_retry_on_startup=True,
)
_path = os.environ.get("BENCH_LEDGER")
ledger = Ledger(_path) if _path else None


@app.task(name="job")  # type: ignore[untyped-decorator,unused-ignore]
def handle(number: int, pad: str) -> None:
    if ledger is not None:
        ledger.mark(number)
    match os.environ.get("BENCH_HANDLER"):
        case "io":
            time.sleep(0.001)
        case "process":
            spin()


@worker_ready.connect  # type: ignore[untyped-decorator,unused-ignore]
def _report_ready(**_: Any) -> None:
    Path(os.environ["BENCH_READY"]).touch()
