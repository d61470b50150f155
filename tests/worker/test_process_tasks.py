"""Tasks in processes: a run starts when its handler is entered, and a worker claims no more than its processes can
run."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from children import Children, all_ended
from howdah import NewJob, Status
from howdah.worker.processes import ProcessExecutor
from howdah.worker.suspects import Suspects
from howdah.worker.task_process import PARENT_CHECK_SECONDS
from waiting import ended, eventually, until

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg
    import pytest

    from conftest import RunWorker
    from howdah import App, JobQueue


def test_process_jobs_that_never_began_are_not_charged_when_their_worker_is_killed(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    jobs = [{"job_type": "process_nap", "data": {"seconds": 3600}, "max_attempts": 2}] * 20
    queue.enqueue_many(jobs)
    for kill in range(1, 4):
        worker = children.start("--concurrency", "32", FAULT_APP_LEASE="1", FAULT_APP_PROCESSES="2")
        until(lambda kill=kill: len(children.ledger("start")) >= 2 * kill, "two jobs began")
        worker.send(signal.SIGKILL)
        worker.wait()
        until(
            lambda: conn.execute("SELECT howdah.recover_stale_jobs()") and not claimed(conn),
            "recovery",
        )
    began = set(children.counted("start"))
    charged = {
        str(job_id)
        for (job_id,) in conn.execute("SELECT id FROM howdah.jobs WHERE attempts > 0").fetchall()
    }
    assert charged <= began
    assert len(began) <= 6


def claimed(conn: psycopg.Connection[Any]) -> bool:
    return conn.execute("SELECT count(*) FROM howdah.live_jobs WHERE status = 'claimed'").fetchone() != (0,)  # fmt: skip


def test_a_suspect_whose_worker_is_killed_during_the_import_of_its_module_is_not_charged(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """The process never enters the handler: it waits in the import."""
    handle = queue.enqueue("slow_import", max_attempts=2)
    gate, reached = tmp_path / "gate", tmp_path / "reached"
    environment = {"SLOW_IMPORT_GATE": str(gate), "SLOW_IMPORT_REACHED": str(reached)}
    for _ in range(3):  # at its third claim it is a suspect, whose start is written first
        reached.unlink(missing_ok=True)
        worker = children.start(app="slow_import_app:app", FAULT_APP_LEASE="1", **environment)
        until(reached.exists, "a process imports the module")
        time.sleep(1.5)  # several heartbeats
        worker.send(signal.SIGKILL)
        worker.wait()
        until(
            lambda: conn.execute("SELECT howdah.recover_stale_jobs()") and not claimed(conn),
            "recovery",
        )
        job = queue.get(handle.id)
        assert (job.attempts, job.started_at, job.status) == (0, None, Status.PENDING)
    gate.touch()
    children.start(app="slow_import_app:app", FAULT_APP_LEASE="30", **environment)
    until(lambda: all_ended(conn), "the job ended")
    job = queue.get(handle.id)
    # Its timeout is two seconds, and began after the import.
    assert (job.status, job.attempts) == (Status.COMPLETED, 1)


def test_the_timeout_of_a_process_job_begins_after_the_import_of_its_module(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    handle = queue.enqueue("slow_import", max_attempts=1)
    gate, reached = tmp_path / "gate", tmp_path / "reached"
    children.start(
        app="slow_import_app:app", SLOW_IMPORT_GATE=str(gate), SLOW_IMPORT_REACHED=str(reached)
    )
    until(reached.exists, "a process imports the module")
    time.sleep(3)  # longer than the timeout of two seconds
    gate.touch()
    until(lambda: all_ended(conn), "the job ended")
    assert queue.get(handle.id).status == Status.COMPLETED


async def test_an_idle_second_worker_receives_its_share_of_process_jobs(
    module_app: App, running_worker: RunWorker, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    release = tmp_path / "release"
    jobs = [NewJob(job_type="neighbour", data={"release": str(release)})] * 32
    await module_app.aqueue.enqueue_many(jobs)
    async with (
        running_worker(module_app, concurrency=32, processes=2) as one,
        running_worker(module_app, concurrency=32, processes=2) as other,
    ):
        for worker in (one, other):
            await eventually(lambda worker=worker: worker.health()["running"] == 2)
        counts = Counter(
            dict(
                conn.execute(
                    "SELECT worker_id, count(*) FROM howdah.live_jobs WHERE status = 'claimed' GROUP BY 1"
                ).fetchall()
            )
        )
        assert counts == {one.worker_id: 2, other.worker_id: 2}
        # An async job behind them starts at once.
        job = await ended(await module_app.tasks["async:ok"].aenqueue(1))
        assert job.status == Status.COMPLETED
        release.touch()
        await eventually(
            lambda: conn.execute("SELECT count(*) FROM howdah.live_jobs").fetchone() == (0,)
        )


async def test_a_pool_that_cannot_be_started_uses_no_attempt(
    module_app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = ProcessExecutor._start, []

    def fail_once(executor: ProcessExecutor) -> Any:
        if not failures:
            failures.append(OSError(24, "Too many open files"))
            raise failures[0]
        return start(executor)

    monkeypatch.setattr(ProcessExecutor, "_start", fail_once)
    handle = await module_app.tasks["process:ok"].aenqueue(1)
    async with running_worker(module_app):
        assert await handle.aresult(60) == {"x": 1, "attempt": 1}
    assert failures


async def test_a_job_does_not_inherit_what_the_one_before_has_changed_in_its_process(
    module_app: App, running_worker: RunWorker
) -> None:
    async with running_worker(module_app, processes=1):
        task = module_app.tasks["process:surroundings"]
        found = [await (await task.aenqueue()).aresult(60) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0][1] is None


async def test_a_suspect_is_not_charged_for_the_time_that_it_waits_to_be_started(
    module_app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = Suspects.start

    async def start_late(suspects: Suspects, run: Any) -> bool:
        await asyncio.sleep(2.5 * PARENT_CHECK_SECONDS)
        return await start(suspects, run)

    monkeypatch.setattr(Suspects, "start", start_late)
    handle = await module_app.tasks["process:ok"].using(max_attempts=1).aenqueue(1)
    conn.execute("UPDATE howdah.live_jobs SET claims = 5 WHERE id = %s", [handle.id])
    async with running_worker(module_app):
        assert await handle.aresult(60) == {"x": 1, "attempt": 1}
