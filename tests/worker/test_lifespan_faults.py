"""Lifespans that raise, wait forever or block the event loop: the worker still stops, and says which one it was."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from waiting import until

if TYPE_CHECKING:
    from children import Children

STOP_SECONDS = 40.0  # the exit of lifespans has 10, and this machine may be slow


@pytest.mark.parametrize("fault", ["exit waits", "exit blocks", "exit is deaf"])
def test_a_lifespan_that_does_not_exit_is_named_and_the_process_ends(
    children: Children, fault: str
) -> None:
    worker = children.start("--grace", "1", app="lifespan_app:app", log_json=False, LIFESPAN=fault)
    until(lambda: "worker started" in worker.log.read_text(), "the worker started")
    worker.send(signal.SIGTERM)
    assert worker.wait(STOP_SECONDS) == 1
    log = worker.log.read_text()
    assert "lifespan did not exit in time  lifespan=cache" in log
    assert "Traceback" not in log


def test_a_worker_can_be_stopped_while_a_lifespan_starts(children: Children) -> None:
    worker = children.start(app="lifespan_app:app", log_json=False, LIFESPAN="start waits")
    until(lambda: "waiting" in worker.log.read_text(), "the lifespan started")
    worker.send(signal.SIGTERM)
    assert worker.wait(STOP_SECONDS) == 0
    assert "Traceback" not in worker.log.read_text()


def test_a_lifespan_that_fails_to_start_is_named_in_one_traceback(children: Children) -> None:
    worker = children.start(app="lifespan_app:app", log_json=False, LIFESPAN="start raises")
    assert worker.wait(STOP_SECONDS) == 1
    log = worker.log.read_text()
    assert "in the lifespan cache" in log
    assert log.count("Traceback") == 1
    assert "Event loop stopped" not in log
