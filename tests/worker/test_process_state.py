"""A process job inherits nothing from the job before it that can be compared cheaply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import process_tasks
from howdah import Status
from waiting import ended, until

if TYPE_CHECKING:
    from pathlib import Path

    from children import Children
    from conftest import RunWorker
    from howdah import App, JobQueue


async def test_what_a_job_has_changed_in_its_process_is_restored_or_the_process_is_replaced(
    process_app: App, running_worker: RunWorker
) -> None:
    tasks = process_app.tasks
    async with running_worker(process_app, processes=1):
        _, clean = await (await tasks["observes"].aenqueue()).aresult(60)
        for what in process_tasks.CHANGES:
            changed = await (await tasks["changes"].aenqueue(what)).aresult(60)
            process, found = await (await tasks["observes"].aenqueue()).aresult(60)
            assert found == clean, what
            assert (process != changed) == (what in process_tasks.LASTING), what


async def test_a_job_with_a_memory_limit_gets_a_process_in_which_no_other_has_kept_memory(
    process_app: App, running_worker: RunWorker
) -> None:
    tasks = process_app.tasks
    async with running_worker(process_app, processes=1):
        first = await (await tasks["needs"].aenqueue(1 << 30)).aresult(60)
        await (await tasks["keeps"].aenqueue(1 << 30)).aresult(60)
        job = await ended(await tasks["needs"].aenqueue(1 << 30))
    assert (job.status, job.result, job.attempts) == (Status.COMPLETED, first, 1), job.last_error


MODULE = """
import resource
from howdah import App

app = App()
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

@app.task(run_in="process", memory_limit=16 << 30, max_attempts=1)
def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_AS)[0]
"""


def test_a_memory_limit_above_the_hard_limit_of_the_process_is_lowered_to_it(
    children: Children, queue: JobQueue, tmp_path: Path
) -> None:
    (tmp_path / "limited.py").write_text(MODULE)
    children.start(app="limited:app", cwd=tmp_path)
    handle = queue.enqueue("limit")
    until(lambda: queue.get(handle).status.is_final, "the job ended")
    job = queue.get(handle)
    assert (job.status, job.result) == (Status.COMPLETED, 8 << 30), job.last_error


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_process_that_a_handler_has_forked_ends_when_it_is_terminated(
    children: Children, queue: JobQueue, executor: str
) -> None:
    children.start(app="process_tasks:app")
    handle = queue.enqueue(f"{executor}:terminates_a_fork")
    until(lambda: queue.get(handle).status.is_final, "the job ended")
    assert queue.get(handle).result == [-15, -1]


async def test_a_program_that_a_handler_starts_does_not_ignore_ctrl_c(
    process_app: App, running_worker: RunWorker
) -> None:
    async with running_worker(process_app, processes=1):
        assert await (await process_app.tasks["interrupts_a_program"].aenqueue()).aresult(60) == -2
