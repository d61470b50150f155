"""Signals and standard streams of a worker process, as service managers and terminals leave them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from children import HERE, Children, is_alive, offspring
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

    from howdah import JobQueue


def test_a_closed_terminal_stops_a_worker_gracefully(
    children: Children, queue: JobQueue, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    worker = children.start().ready()
    handle = queue.enqueue("nap", {"seconds": 0.5})
    until(lambda: children.ledger("start"), "the job started")
    worker.send(signal.SIGHUP)
    assert worker.wait() == 0
    assert queue.get(handle).status == "completed"
    assert connect().execute("SELECT count(*) FROM howdah.workers").fetchone() == (0,)


def test_a_closed_terminal_stops_the_processes_of_a_supervisor(children: Children) -> None:
    supervisor = children.start("--processes", "2").ready(2)
    processes = offspring(supervisor.pid)
    supervisor.send(signal.SIGHUP)
    assert supervisor.wait() == 0
    assert not any(map(is_alive, processes))


def test_a_worker_that_ignores_sighup_keeps_running(children: Children) -> None:
    """As under nohup: a process inherits signals that are ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        worker = children.start().ready()
    finally:
        signal.signal(signal.SIGHUP, before)
    worker.send(signal.SIGHUP)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert len(worker.logged("worker stopping")) == 1


@pytest.mark.parametrize("closed", [(0,), (0, 1), (0, 1, 2)], ids=str)
def test_a_worker_with_closed_standard_streams_stops_cleanly(
    children: Children,
    connect: Callable[..., psycopg.Connection[Any]],
    tmp_path: Path,
    closed: tuple[int, ...],
) -> None:
    log = tmp_path / "errors"
    shell = " ".join(f"{n}{'<' if n == 0 else '>'}&-" for n in closed)
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$0" -m howdah worker fault_app:app {shell}', sys.executable],
            cwd=HERE, env=children.environment(), stderr=errors,
        )  # fmt: skip
    conn = connect()

    def is_registered() -> bool:
        return conn.execute("SELECT pid FROM howdah.workers").fetchall() == [(process.pid,)]

    try:
        until(is_registered, "the worker started")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Assertion" not in log.read_text()
