"""How runs end: every outcome, in the event loop, in a thread and in a process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from howdah import JobCancelled, JobFailed, Retry, Status
from howdah.execution.handler import CANCELLED_BY_ITSELF
from howdah.worker import processes
from howdah.worker.process_handle import TaskProcess
from tasks_module import note
from waiting import DEADLINE_SECONDS, ended, eventually, lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

    from conftest import RunWorker
    from howdah import App, Context

EXECUTORS = ("async", "thread", "process")


in_each_executor = pytest.mark.parametrize("executor", EXECUTORS)


def is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


# ── ok, retried, snoozed ──────────────────────────────────────────────────────────────────────────


@in_each_executor
async def test_a_handler_that_returns_completes_its_job(
    module_app: App, running_worker: RunWorker, executor: str
) -> None:
    handle = await module_app.tasks[f"{executor}:ok"].aenqueue(7)
    async with running_worker(module_app) as worker:
        assert await handle.aresult(120) == {"x": 7, "attempt": 1}
    job = await handle.ajob()
    assert (job.status, job.progress, job.attempts) == (Status.COMPLETED, 100, 1)
    assert job.worker_id == worker.worker_id
    assert job.started_at is not None
    assert job.completed_at is not None
    assert job.started_at <= job.completed_at


@in_each_executor
async def test_a_failed_attempt_is_retried(
    module_app: App, running_worker: RunWorker, tmp_path: Path, executor: str
) -> None:
    handle = await module_app.tasks[f"{executor}:flaky"].aenqueue(str(tmp_path / "ran"))
    async with running_worker(module_app):
        assert await handle.aresult(120) == 3
    assert len(lines(tmp_path / "ran")) == 3
    assert (await handle.ajob()).attempts == 3
    errors = await module_app.aqueue.events(handle)
    assert [(event.kind, event.attempt) for event in errors] == [("error", 1), ("error", 2)]
    assert errors[0].data["error"] == "OSError: not yet, 1"
    assert "Traceback" in errors[0].data["traceback"]


@in_each_executor
async def test_a_snoozed_job_runs_again_after_the_delay_and_no_attempt_is_used(
    module_app: App, running_worker: RunWorker, tmp_path: Path, executor: str
) -> None:
    handle = await module_app.tasks[f"{executor}:snoozing"].aenqueue(str(tmp_path / "ran"))
    async with running_worker(module_app):
        assert await handle.aresult(120) == "awake"
    first, second = map(float, lines(tmp_path / "ran"))
    assert second - first >= 0.4
    job = await handle.ajob()
    assert (job.attempts, job.last_error, job.events_count) == (1, None, 0)


# ── failed permanently ───────────────────────────────────────────────────────────────────────────────


@in_each_executor
async def test_a_job_without_attempts_left_fails_permanently(
    module_app: App, running_worker: RunWorker, tmp_path: Path, executor: str
) -> None:
    handle = await module_app.tasks[f"{executor}:hopeless"].aenqueue(str(tmp_path / "ran"))
    async with running_worker(module_app):
        with pytest.raises(JobFailed, match=r"failed after 2 attempts: ValueError") as caught:
            await handle.aresult(120)
    assert len(lines(tmp_path / "ran")) == 2
    assert caught.value.job.last_error == "ValueError: � no ? way"


@in_each_executor
async def test_fail_and_exceptions_excluded_from_retry_are_not_retried(
    module_app: App, running_worker: RunWorker, tmp_path: Path, executor: str
) -> None:
    errors = {"raises_fail": "Fail: of no use", "never_on": "KeyError: 'k'"}
    async with running_worker(module_app):
        for name, error in errors.items():
            task = module_app.tasks[f"{executor}:{name}"]
            job = await ended(await task.aenqueue(str(tmp_path / name)))
            assert len(lines(tmp_path / name)) == 1
            assert (job.status, job.attempts, job.last_error) == (Status.FAILED, 1, error)


@in_each_executor
async def test_a_result_that_cannot_be_stored_fails_its_job_without_a_retry(
    module_app: App, running_worker: RunWorker, tmp_path: Path, executor: str
) -> None:
    task = module_app.tasks[f"{executor}:returns"]
    names = ["object", "nan", "nul", "large", "deep"]
    handles = [await task.aenqueue(str(tmp_path / name), name) for name in names]
    async with running_worker(module_app):
        jobs = [await ended(handle) for handle in handles]
    for name, job in zip(names, jobs, strict=True):
        assert (job.status, job.attempts) == (Status.FAILED, 1), name
        assert len(lines(tmp_path / name)) == 1, name
        assert job.last_error is not None
        assert "returned a value that cannot be stored as its result" in job.last_error, name


@in_each_executor
async def test_any_exception_of_a_handler_fails_its_own_job_and_not_the_worker(
    module_app: App, running_worker: RunWorker, executor: str
) -> None:
    names = ["SystemExit", "KeyboardInterrupt", "Rude", "Silent", "GeneratorExit", "CancelledError"]
    if executor != "async":
        names.append("StopIteration")
    async with running_worker(module_app, concurrency=2):
        task = module_app.tasks[f"{executor}:raises"]
        handles = [await task.aenqueue(name) for name in names]
        jobs = [await ended(handle) for handle in handles]
        for name, job in zip(names, jobs, strict=True):
            assert job.status is Status.FAILED, name
            assert (job.last_error or "").startswith(name), name
        # All slots still run jobs.
        completed = [await module_app.tasks[f"{executor}:ok"].aenqueue(n) for n in range(4)]
        assert [(await handle.aresult(120))["x"] for handle in completed] == [0, 1, 2, 3]


async def test_a_handler_can_cancel_its_own_job(
    module_app: App, running_worker: RunWorker, tmp_path: Path
) -> None:
    handles = [
        await module_app.tasks[f"{executor}:cancels_itself"].aenqueue(str(tmp_path / "ran"))
        for executor in EXECUTORS
    ]
    async with running_worker(module_app):
        for handle in handles:
            with pytest.raises(JobCancelled):
                await handle.aresult(120)
            assert (await handle.ajob()).last_error == "not needed any more"
    assert len(lines(tmp_path / "ran")) == 3


@in_each_executor
async def test_context_variables_of_one_job_are_not_seen_by_the_next(
    module_app: App, running_worker: RunWorker, executor: str
) -> None:
    task = module_app.tasks[f"{executor}:of_tenant"]
    async with running_worker(module_app, concurrency=1):
        handles = [await task.aenqueue(name) for name in ("a", "b", "c")]
        assert [await handle.aresult(120) for handle in handles] == ["nobody"] * 3


# ── timed out, cancelled, taken over, lost ────────────────────────────────────────────────────────


@in_each_executor
async def test_a_run_that_exceeds_its_timeout_is_stopped_and_fails(
    module_app: App, running_worker: RunWorker, tmp_path: Path, executor: str
) -> None:
    ran = tmp_path / "ran"
    async with running_worker(module_app):
        # Importing the modules in a new process would exceed the timeout.
        await (await module_app.tasks[f"{executor}:ok"].aenqueue(1)).aresult(DEADLINE_SECONDS)
        job = await ended(await module_app.tasks[f"{executor}:limited"].aenqueue(str(ran)))
    assert job.status is Status.FAILED
    assert job.last_error == "TimeoutError: timed out after 0.3 s"
    assert lines(ran) == ["ran", "stopped"]


@in_each_executor
async def test_a_running_job_can_be_cancelled(
    module_app: App, running_worker: RunWorker, tmp_path: Path, executor: str
) -> None:
    ran = tmp_path / "ran"
    handle = await module_app.tasks[f"{executor}:long"].aenqueue(str(ran))
    async with running_worker(module_app):
        await eventually(lambda: lines(ran))
        assert await handle.acancel()
        with pytest.raises(JobCancelled):
            await handle.aresult(120)
    assert not await handle.acancel()
    assert lines(ran) == ["ran", "stopped"]


async def test_a_process_whose_handler_stops_on_sigterm_runs_the_next_job(
    module_app: App, running_worker: RunWorker, tmp_path: Path
) -> None:
    async with running_worker(module_app, processes=1):
        pids = []
        for n in range(3):
            ran = tmp_path / str(n)
            handle = await module_app.tasks["process:long"].aenqueue(str(ran))
            await eventually(lambda ran=ran: lines(ran))
            await handle.acancel()
            assert (await ended(handle)).status is Status.CANCELLED
            pid = await (await module_app.tasks["pid"].aenqueue()).aresult(120)
            pids.append(pid)
    assert len(set(pids)) == 1


@pytest.mark.parametrize(
    ("name", "status"), [("stubborn", Status.CANCELLED), ("stubborn_limited", Status.FAILED)]
)
async def test_a_process_whose_handler_ignores_sigterm_is_killed(
    module_app: App, running_worker: RunWorker, tmp_path: Path, name: str, status: Status
) -> None:
    ran = tmp_path / "ran"
    async with running_worker(module_app):
        await (await module_app.tasks["process:ok"].aenqueue(1)).aresult(DEADLINE_SECONDS)
        handle = await module_app.tasks[name].aenqueue(str(ran))
        await eventually(lambda: lines(ran))
        if name == "stubborn":
            await handle.acancel()
        assert (await ended(handle)).status is status
        pid, *signals = lines(ran)
        assert "ignored" in signals  # SIGTERM was sent first
        await eventually(lambda: not is_alive(pid))


@in_each_executor
async def test_a_job_that_is_taken_over_is_completed_by_another_worker(
    module_app: App, running_worker: RunWorker, tmp_path: Path, executor: str
) -> None:
    ran = tmp_path / "ran"
    handle = await module_app.tasks[f"{executor}:long"].aenqueue(str(ran))
    async with running_worker(module_app) as first:
        await eventually(lambda: lines(ran))
        first.stop()  # it claims no more jobs and extends the leases of the running ones
        async with running_worker(module_app) as second:
            assert await module_app.atakeover(handle)
            assert await handle.aresult(120) == "second"
    job = await handle.ajob()
    assert (job.worker_id, job.attempts) == (second.worker_id, 1)
    assert not await module_app.atakeover(handle)


def steal(conn: psycopg.Connection[Any], job_id: object) -> None:
    conn.execute(
        "WITH stolen AS (UPDATE howdah.live_jobs SET lease_id = gen_random_uuid(), worker_id = 'thief' "
        "WHERE id = %s RETURNING *) "
        "INSERT INTO howdah.leases (lease_id, worker_id, claimed_at, written_at, expires_at, job_ids) "
        "SELECT lease_id, worker_id, now(), now(), now() + interval '1 hour', ARRAY[id] FROM stolen",
        [job_id],
    )


@in_each_executor
async def test_a_run_that_lost_its_lease_is_stopped_and_writes_nothing(
    module_app: App,
    running_worker: RunWorker,
    connect: Callable[..., psycopg.Connection[Any]],
    tmp_path: Path,
    executor: str,
) -> None:
    ran = tmp_path / "ran"
    handle = await module_app.tasks[f"{executor}:long"].aenqueue(str(ran))
    async with running_worker(module_app, lease=3) as worker:
        await eventually(lambda: lines(ran))
        steal(connect(), handle.id)
        await eventually(lambda: lines(ran) == ["ran", "stopped"])
        await eventually(lambda: worker.health()["running"] == 0)
    job = await handle.ajob()
    assert (job.status.is_final, job.worker_id) == (False, "thief")
    assert (job.attempts, job.last_error, job.events_count) == (1, None, 0)


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_a_result_after_the_lease_was_lost_is_rejected_and_logged(
    module_app: App,
    running_worker: RunWorker,
    connect: Callable[..., psycopg.Connection[Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    executor: str,
) -> None:
    release = tmp_path / "release"
    task = module_app.tasks[f"{executor}:ignores_context"]
    handle = await task.aenqueue(str(tmp_path / "ran"), str(release))
    async with running_worker(module_app):
        await eventually(lambda: lines(tmp_path / "ran"))
        steal(connect(), handle.id)
        release.touch()
        await eventually(lambda: "acknowledgement rejected: lease lost" in caplog.text)
    (record,) = (r for r in caplog.records if r.message == "acknowledgement rejected: lease lost")
    assert record.levelno == logging.WARNING
    assert record.job_id == str(handle.id)  # type: ignore[attr-defined]
    job = await handle.ajob()
    assert (job.status.is_final, job.worker_id, job.result) == (False, "thief", None)


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_process_that_crashes_fails_its_own_job_and_no_other(
    module_app: App, running_worker: RunWorker, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    async with running_worker(module_app, processes=2):
        beside = await module_app.tasks["neighbour"].aenqueue(str(release))
        for how, error in (
            ("segfault", "ProcessDied: the task's process was killed by SIGSEGV"),
            ("kill", "ProcessDied: the task's process was killed by SIGKILL"),
            ("exit", "ProcessDied: the task's process ended with status 7 before the task did"),
        ):
            job = await ended(await module_app.tasks["crash"].aenqueue(how))
            assert (job.status, job.last_error) == (Status.FAILED, error)
        job = await ended(await module_app.tasks["hungry"].aenqueue())
        assert (job.status, job.last_error) == (Status.FAILED, "MemoryError")
        release.touch()
        assert await beside.aresult(120) == "unharmed"
        assert (await beside.ajob()).attempts == 1


# ── an event loop that is blocked ───────────────────────────────────────────────────────────────


RIVAL = """
import asyncio, pathlib, sys, time
from howdah import App, Worker
app = App(sys.argv[1])
ran, ready = map(pathlib.Path, sys.argv[2:])

@app.task
async def blocks(ran: str, ready: str) -> None:
    with open(ran, "a") as file:
        file.write("again\\n")

async def live() -> None:
    worker = Worker(app, lease=3)
    running = asyncio.create_task(worker.run())
    await worker.ready.wait()
    ready.write_text("ready")
    await running

while not ran.exists():
    time.sleep(0.01)
asyncio.run(live())
"""


async def test_a_handler_that_blocks_the_event_loop_keeps_its_lease(
    app: App, running_worker: RunWorker, database: str, tmp_path: Path
) -> None:
    """It blocks for longer than its lease, while an idle worker could claim the job."""

    @app.task(max_attempts=3)
    async def blocks(ran: str, ready: str) -> bool:
        note(ran)
        end = time.monotonic() + DEADLINE_SECONDS
        while not lines(ready) and time.monotonic() < end:
            time.sleep(0.01)  # noqa: ASYNC251 - blocks the loop on purpose
        time.sleep(4)  # noqa: ASYNC251 - longer than the lease
        return bool(lines(ready))

    paths = str(tmp_path / "ran"), str(tmp_path / "ready")
    rival = await asyncio.create_subprocess_exec(sys.executable, "-c", RIVAL, database, *paths)
    try:
        async with running_worker(app, lease=3):
            job = await ended(await blocks.aenqueue(*paths))
    finally:
        rival.kill()
        await rival.wait()
    assert (job.status, job.result, job.attempts) == (Status.COMPLETED, True, 1)
    assert lines(paths[0]) == ["ran"]


# ── unusual ends ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_cancelled_error_of_the_handlers_own_is_a_failure(
    app: App, running_worker: RunWorker
) -> None:
    @app.task(max_attempts=1)
    async def awaits_cancelled() -> None:
        other = asyncio.create_task(asyncio.sleep(60))
        other.cancel()
        await other

    @app.task
    async def fine() -> str:
        return "fine"

    async with running_worker(app, concurrency=1):
        job = await ended(await awaits_cancelled.aenqueue())
        assert (job.status, job.last_error) == (
            Status.FAILED,
            f"CancelledError: {CANCELLED_BY_ITSELF}",
        )
        assert await (await fine.aenqueue()).aresult(120) == "fine"


async def test_a_job_whose_retry_policy_raises_is_retried_after_ten_seconds(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    def policy(attempt: int, error: BaseException) -> float:
        raise SystemExit("no idea")

    @app.task(retry=policy)
    def fails() -> None:
        raise OSError

    handle = await fails.aenqueue()
    async with running_worker(app):
        await eventually(lambda: "retry policy failed" in caplog.text)
        await eventually(lambda: _is_pending(app, handle))
    job = await handle.ajob()
    assert (job.status, job.attempts, job.last_error) == (Status.PENDING, 1, "OSError")
    assert (job.run_at - job.created_at).total_seconds() > 9


async def _is_pending(app: App, handle: Any) -> bool:
    return (await app.aqueue.get(handle)).last_error is not None


async def test_a_timeout_of_the_handlers_own_is_a_failure(
    app: App, running_worker: RunWorker
) -> None:
    @app.task(timeout=50, max_attempts=1)
    async def limits_itself() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    @app.task(max_attempts=1, retry=Retry.never())
    def says_timeout(ctx: Context) -> None:
        ctx.run.abort("timeout")
        ctx.check()

    async with running_worker(app):
        job = await ended(await limits_itself.aenqueue())
        assert (job.status, job.last_error) == (Status.FAILED, "TimeoutError")
        job = await ended(await says_timeout.aenqueue())
        assert (job.status, job.last_error) == (Status.FAILED, "TimeoutError: timed out after 0 s")


async def test_a_handler_that_raises_when_interrupted_by_a_shutdown_is_released(
    app: App, running_worker: RunWorker, tmp_path: Path
) -> None:
    @app.task
    async def rude() -> None:
        note(str(tmp_path / "ran"))
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError("in its cleanup")

    handle = await rude.aenqueue()
    async with running_worker(app, grace=0):
        await eventually(lambda: lines(tmp_path / "ran"))
    job = await handle.ajob()
    assert (job.status, job.attempts, job.last_error) == (Status.PENDING, 0, None)


async def test_a_job_that_is_given_to_a_process_that_was_just_killed_runs_in_another_and_uses_no_attempt(
    module_app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[TaskProcess] = []

    def start(executor: processes.ProcessExecutor) -> TaskProcess:
        started.append(begin(executor))
        return started[-1]

    begin = processes.ProcessExecutor._start
    monkeypatch.setattr(processes.ProcessExecutor, "_start", start)
    task = module_app.tasks["process:ok"]
    async with running_worker(module_app, processes=1):
        assert await (await task.aenqueue(1)).aresult(120) == {"x": 1, "attempt": 1}
        hand_over = TaskProcess.hand_over

        def kill_first(process: TaskProcess, *values: Any) -> None:
            if process is started[0]:
                os.kill(process.pid, signal.SIGKILL)
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            hand_over(process, *values)

        monkeypatch.setattr(TaskProcess, "hand_over", kill_first)
        assert await (await task.aenqueue(2)).aresult(120) == {"x": 2, "attempt": 1}
    assert len(started) == 2
