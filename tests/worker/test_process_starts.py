"""How task processes are started, and what a worker does if they cannot be."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from howdah import HowdahError, Status
from howdah.worker import process_handle, processes
from howdah.worker.process_handle import TaskProcess
from waiting import ended, eventually, until

if TYPE_CHECKING:
    from children import Children
    from conftest import RunWorker
    from howdah import App, JobQueue

CANNOT_START = "task process cannot be started; releasing the job"


async def test_a_sync_lifespan_stays_open_in_a_task_process(
    process_app: App, running_worker: RunWorker
) -> None:
    async with running_worker(process_app):
        for _ in range(2):
            assert await (await process_app.tasks["pool_is_open"].aenqueue()).aresult(60) is True


async def test_a_task_process_is_none_of_the_programs_own_children(
    process_app: App, running_worker: RunWorker
) -> None:
    async with running_worker(process_app):
        await (await process_app.tasks["process_id"].aenqueue()).aresult(60)
        assert multiprocessing.active_children() == []


async def test_a_process_starts_although_the_directory_of_the_worker_was_removed(
    process_app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    removed = tmp_path / "removed"
    removed.mkdir()
    async with running_worker(process_app) as worker:
        monkeypatch.chdir(removed)
        removed.rmdir()
        await (await process_app.tasks["process_id"].aenqueue()).aresult(60)
        assert worker.health()["ready"]


async def test_a_worker_whose_processes_end_before_they_take_a_job_waits_and_is_not_ready(
    process_app: App,
    running_worker: RunWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program, started = process_handle._PROGRAM, 0
    start = process_handle.Launcher.start

    def count(launcher: Any, end: Any) -> Any:
        nonlocal started
        started += 1
        return start(launcher, end)

    monkeypatch.setattr(process_handle.Launcher, "start", count)
    monkeypatch.setattr(process_handle, "_PROGRAM", "raise SystemExit(3)")
    handle = await process_app.tasks["attempt"].aenqueue()
    async with running_worker(process_app, processes=1) as worker:
        await eventually(lambda: caplog.messages.count(CANNOT_START) == 2)
        assert not worker.health()["ready"]
        assert started == 2
        monkeypatch.setattr(process_handle, "_PROGRAM", program)
        assert await handle.aresult(60) == 1
        assert worker.health()["ready"]


async def test_a_job_that_is_lost_on_its_way_to_its_process_is_noticed(
    process_app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, lost = TaskProcess._send, []

    def lose_one(process: TaskProcess, datagrams: list[bytes]) -> None:
        if process.runs == 2 and not lost:
            lost.append(datagrams)
        else:
            send(process, datagrams)

    monkeypatch.setattr(TaskProcess, "_send", lose_one)
    task = process_app.tasks["attempt"]
    async with running_worker(process_app, processes=1):
        assert await (await task.aenqueue()).aresult(60) == 1
        monkeypatch.setattr(processes, "IMPORT_TIMEOUT_SECONDS", 5.0)
        assert await (await task.aenqueue()).aresult(60) == 2
    assert lost


async def test_garbage_on_the_socket_of_a_process_fails_its_own_job_alone(
    process_app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = process_app.tasks
    async with running_worker(process_app, processes=1):
        for then_exits in (True, False):
            caplog.clear()
            job = await ended(await tasks["writes_garbage"].aenqueue(then_exits))
            assert job.status == Status.FAILED
            assert str(job.last_error).startswith("ProcessDied: the task's process ")
            reported = "killing a task process: a message of it cannot be read"
            assert caplog.messages.count(reported) == 1
            assert await (await tasks["attempt"].aenqueue()).aresult(60) == 1


async def test_a_process_that_ends_does_not_block_a_worker_with_a_default_socket_timeout(
    process_app: App, running_worker: RunWorker
) -> None:
    timeout = socket.getdefaulttimeout()
    async with running_worker(process_app, processes=1):
        await (await process_app.tasks["process_id"].aenqueue()).aresult(60)
        socket.setdefaulttimeout(40)
        try:
            handle = await process_app.tasks["exits"].aenqueue()
            async with asyncio.timeout(30):
                assert (await ended(handle)).last_error == (
                    "ProcessDied: the task's process ended with status 3 before the task did"
                )
        finally:
            socket.setdefaulttimeout(timeout)


SCRIPT = """
import asyncio, signal, socket
from howdah import App, Worker

socket.setdefaulttimeout(0.05)
app = App()

@app.task(run_in="process", max_attempts=1)
def step() -> str:
    return __name__

async def main() -> None:
    worker = Worker(app, processes=1, grace=5)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_tasks_of_a_script_with_a_default_socket_timeout_run_in_processes(
    children: Children, queue: JobQueue, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    worker = subprocess.Popen([sys.executable, str(script)], env=children.environment())
    try:
        for _ in range(3):
            handle = queue.enqueue("step")
            until(lambda handle=handle: queue.get(handle).status.is_final, "the job ended")
            assert queue.get(handle).result == "__mp_main__", queue.get(handle).last_error
    finally:
        worker.terminate()
        assert worker.wait(60) == 0


PLUGINS = """
import sys
from howdah import App

app = App()

@app.task(run_in="process", max_attempts=1)
def load_plugin() -> None:
    sys.modules["billing"] = sys.modules["sys"]
"""
BILLING = """
from plugins import app

@app.task(run_in="process", max_attempts=1)
def bill() -> str:
    return "billed"
"""


def test_a_module_that_an_earlier_handler_has_replaced_is_imported_in_another_process(
    children: Children, queue: JobQueue, tmp_path: Path
) -> None:
    (tmp_path / "plugins.py").write_text(PLUGINS)
    (tmp_path / "billing.py").write_text(BILLING)
    children.start("--processes", "1", app="billing:app", cwd=tmp_path)
    first = queue.enqueue("load_plugin")
    until(lambda: queue.get(first).status.is_final, "the first job ended")
    handle = queue.enqueue("bill")
    until(lambda: queue.get(handle).status.is_final, "the job ended")
    assert queue.get(handle).result == "billed", queue.get(handle).last_error


@pytest.mark.parametrize("name", ["json.py", "queue.py", "struct.py"])
def test_a_file_with_the_name_of_a_standard_module_stops_no_process(
    children: Children, queue: JobQueue, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("")
    (tmp_path / "shadowed.py").write_text(
        "from howdah import App\n"
        "app = App()\n"
        "@app.task(run_in='process', max_attempts=1)\n"
        "def step() -> int:\n"
        "    return 1\n"
    )
    # Not with `-m`, which puts the directory first for the worker as well.
    command = [Path(sys.executable).with_name("howdah"), "worker", "shadowed:app"]
    worker = subprocess.Popen(command, cwd=tmp_path, env=children.environment())
    try:
        handle = queue.enqueue("step")
        until(lambda: queue.get(handle).status.is_final, "the job ended")
        assert queue.get(handle).result == 1, queue.get(handle).last_error
    finally:
        worker.terminate()
        assert worker.wait(60) == 0


# ── stopping ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_handler_that_finishes_when_it_is_interrupted_completes_its_job(
    process_app: App, running_worker: RunWorker, tmp_path: Path
) -> None:
    path = tmp_path / "entered"
    handle = await process_app.tasks["finishes_when_it_is_interrupted"].aenqueue(str(path))
    async with running_worker(process_app, processes=1, grace=0):
        await eventually(path.exists)
    job = await handle.ajob()
    assert (job.status, job.result, job.attempts) == (Status.COMPLETED, "shutdown", 1)


async def test_a_process_that_ends_while_its_start_is_interrupted_leaves_no_unread_error(
    process_app: App,
    running_worker: RunWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    path = tmp_path / "started"
    program = (
        "import signal, sys, time; signal.pthread_sigmask(signal.SIG_SETMASK, []); "
        f"open({str(path)!r}, 'w').close(); time.sleep(300)"
    )
    monkeypatch.setattr(process_handle, "_PROGRAM", program)
    handle = await process_app.tasks["attempt"].aenqueue()
    async with running_worker(process_app, processes=1, grace=0):
        await eventually(path.exists)
    gc.collect()
    assert (await handle.ajob()).attempts == 0
    assert not [line for line in caplog.messages if "never retrieved" in line]


async def test_a_starting_process_does_not_end_by_a_signal_to_the_whole_process_group(
    process_app: App,
    running_worker: RunWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = process_handle.Launcher.start

    def start_and_signal(launcher: Any, end: Any) -> Any:
        process = start(launcher, end)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(process.pid, number)
        return process

    monkeypatch.setattr(process_handle.Launcher, "start", start_and_signal)
    async with running_worker(process_app, processes=1):
        assert await (await process_app.tasks["attempt"].aenqueue()).aresult(60) == 1
    assert CANNOT_START not in caplog.messages


def test_a_worker_that_the_import_of_the_main_module_starts_in_a_task_process_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would start that program again, and so on."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(HowdahError) as caught:
        process_handle.Launcher(None)
    assert str(caught.value) == (
        "a worker was started while a task process imported the main module; "
        'start it below `if __name__ == "__main__":`.'
    )
