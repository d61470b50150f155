"""Reports from a task process: any thread may send them, and so may a process that the handler has forked. Neither
takes messages that are for the process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from howdah import Status
from howdah.execution import event_buffer
from howdah.execution.heartbeat import Heartbeat
from waiting import ended, lines

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunWorker
    from howdah import App


async def test_events_from_several_threads_of_a_handler_are_all_written(
    process_app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_buffer, "FULL_EVENTS", 200)  # the handler has to wait, often
    handle = await process_app.tasks["reports_from_threads"].aenqueue(4, 600)
    async with running_worker(process_app):
        job = await ended(handle)
    assert (job.status, job.last_error) == (Status.COMPLETED, None)
    assert len(await process_app.aqueue.events(handle)) == 2400


@pytest.mark.parametrize("left", ["leaves_a_reporting_thread", "leaves_a_reporting_fork"])
async def test_a_reporter_that_outlives_its_run_disturbs_no_later_job(
    process_app: App, running_worker: RunWorker, tmp_path: Path, left: str
) -> None:
    release, task = tmp_path / "release", process_app.tasks["attempt"]
    async with running_worker(process_app, processes=1):
        for _ in range(4):
            leaving = await process_app.tasks[left].aenqueue(str(release))
            handles = [await task.aenqueue() for _ in range(10)]
            await leaving.aresult(60)
            for handle in handles:
                job = await ended(handle)
                assert (job.status, job.attempts) == (Status.COMPLETED, 1), job.last_error
        release.touch()


async def test_events_of_a_forked_process_are_written(
    process_app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_buffer, "FULL_EVENTS", 200)
    handle = await process_app.tasks["reports_from_a_fork"].aenqueue(1200)
    async with running_worker(process_app):
        assert await handle.aresult(60) == 0
    assert len(await process_app.aqueue.events(handle)) == 1200


async def test_a_handler_is_aborted_although_a_thread_of_it_waits_to_report(
    process_app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_full = asyncio.Event()

    def has_room(_heartbeat: object, _run: object) -> bool:
        is_full.set()
        return False

    monkeypatch.setattr(Heartbeat, "has_room", has_room)
    async with running_worker(process_app, processes=1):
        for number in range(8):
            path = tmp_path / str(number)
            is_full.clear()
            handle = await process_app.tasks["waits_beside_a_reporting_thread"].aenqueue(str(path))
            await is_full.wait()
            await handle.acancel()
            assert (await ended(handle)).status == Status.CANCELLED
            assert lines(path) == ["cancelled"]
