"""What a handler in a task process logs appears as the worker's own lines do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from children import Children
    from howdah import JobQueue

MODULE = """
import logging, sys, threading, warnings
from howdah import App

app = App()

class Unraisable:
    def __del__(self):
        raise ValueError("unraisable " + UNSAFE)

UNSAFE = "\\x1b[2J\\u202eline\\nforged"

def fails():
    raise ValueError("in a thread " + UNSAFE)

@app.task(run_in="{executor}")
def talks() -> None:
    logging.getLogger("shop").warning("low stock %s", UNSAFE, extra={{"item": UNSAFE}})
    logging.getLogger("shop").debug("too much detail")
    warnings.warn("old call " + UNSAFE, stacklevel=1)
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    Unraisable()
    logging.getLogger("shop").info("end")
"""


@pytest.mark.parametrize("executor", ["process", "thread"])
@pytest.mark.parametrize("log_json", [True, False], ids=["json", "human"])
def test_the_lines_of_a_handler_have_the_format_of_the_worker_and_are_cleaned(
    children: Children, queue: JobQueue, tmp_path: Path, executor: str, log_json: bool
) -> None:
    (tmp_path / "shop.py").write_text(MODULE.format(executor=executor))
    worker = children.start(app="shop:app", cwd=tmp_path, log_json=log_json)
    job = queue.enqueue("talks")
    until(lambda: queue.get(job).status.is_final, "the job ended")
    text = worker.log.read_text()
    assert "too much detail" not in text
    if log_json:
        entries = worker.entries()  # every line is JSON
        (stock,) = [entry for entry in entries if entry["logger"] == "shop" and "item" in entry]
        assert stock["message"].startswith("low stock \x1b[2J")
        assert executor == "thread" or stock["job_id"] == str(job.id)
        errors = [entry["exception"] for entry in entries if "exception" in entry]
        assert [error for error in errors if "in a thread" in error]
        assert [error for error in errors if "unraisable" in error]
        assert [entry for entry in entries if "old call" in entry["message"]]
        return
    assert not {"\x1b", "\u202e"} & set(text)
    lines = text.splitlines()
    for expected in ("warning: low stock ", "error: exception in a thread", "warning: "):
        assert [line for line in lines if line[9:].startswith(expected)], expected
    assert not [line for line in lines if line.startswith(("forged", "Traceback", "Exception"))]
