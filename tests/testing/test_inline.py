"""Inline mode: tasks run where they are enqueued, without a database, with the checks of production."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from howdah import (
    App,
    Cancel,
    Context,
    Fail,
    HowdahError,
    IdempotencyConflict,
    InvalidJob,
    InvalidOption,
    JobCancelled,
    JobFailed,
    NewJob,
    Retry,
    Snooze,
    Status,
    current,
)
from howdah.testing import assert_enqueued, inline

if TYPE_CHECKING:
    from collections.abc import Iterator

app = App()


@dataclass
class Parcel:
    id: UUID
    sent: datetime
    weight: float


@app.task
def double(number: int) -> int:
    return 2 * number


@app.task
async def triple(number: int) -> int:
    await asyncio.sleep(0)
    return 3 * number


@app.task
def ship(parcel: Parcel, on: date) -> Parcel:
    assert isinstance(parcel, Parcel)
    assert type(on) is date
    return parcel


@app.task(max_attempts=3, retry=Retry.fixed(3600))
def fragile(works_at: int, ctx: Context) -> int:
    if ctx.attempt < works_at:
        raise ValueError(f"attempt {ctx.attempt} broke")
    return ctx.attempt


@app.task
def report(n: int, ctx: Context) -> None:
    for i in range(1, n + 1):
        ctx.progress(100 * i // n, stage=f"tile {i}")
    ctx.event("done", {"tiles": n})


@pytest.fixture(autouse=True)
def no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOWDAH_DATABASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(variable, raising=False)


# ── running ───────────────────────────────────────────────────────────────────────────────────────


def test_a_sync_task_runs_where_it_is_enqueued() -> None:
    with inline(app):
        handle = double.enqueue(21)
        assert handle.job().status == "completed"
        assert handle.result() == 42


def test_an_async_task_runs_from_sync_code() -> None:
    with inline(app):
        assert triple.enqueue(2).result() == 6


async def test_sync_and_async_tasks_run_when_enqueued_from_an_event_loop() -> None:
    with inline(app):
        assert double.enqueue(1).result() == 2
        assert triple.enqueue(1).result() == 3


async def test_sync_and_async_tasks_run_when_the_enqueue_is_awaited() -> None:
    async with inline(app):
        assert await (await double.aenqueue(1)).aresult() == 2
        handles = await triple.aenqueue_many([(1,), {"number": 2}])
        assert [await handle.aresult() for handle in handles] == [3, 6]
        assert (await handles[0].ajob()).attempts == 1


async def test_only_an_awaited_enqueue_runs_an_async_task_in_the_callers_event_loop() -> None:
    other = App()
    loops = []

    @other.task
    async def where() -> None:
        loops.append(asyncio.get_running_loop())

    async with inline(other):
        await where.aenqueue()
        where.enqueue()
    assert loops[0] is asyncio.get_running_loop()
    assert loops[1] is not loops[0]


def test_the_current_event_loop_of_the_thread_does_not_change() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        with inline(app):
            triple.enqueue(1)
        assert asyncio.get_event_loop_policy().get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_jobs_of_enqueue_many_run_in_order() -> None:
    with inline(app) as log:
        handles = double.enqueue_many([(n,) for n in range(5)])
        assert [handle.result() for handle in handles] == [0, 2, 4, 6, 8]
        assert [job.data for job in log.jobs] == [{"number": n} for n in range(5)]


def test_a_task_with_options_bound_before_the_block_runs_inline() -> None:
    urgent = double.using(priority=150, queue="fast")
    with inline(app):
        job = urgent.enqueue(1).job()
        assert (job.priority, job.queue, job.status) == (150, "fast", "completed")


def test_the_bare_queue_runs_jobs_of_tasks_and_leaves_others_pending() -> None:
    with inline(app):
        assert app.queue.get(app.queue.enqueue("double", {"number": 4})).result == 8
        assert app.queue.get(app.queue.enqueue("of another app", [1])).status == "pending"
        assert app.counts(job_type="double")[Status.COMPLETED] == 1
        assert app.counts()[Status.PENDING] == 1


async def test_the_bare_async_queue_runs_jobs_of_tasks() -> None:
    async with inline(app):
        handle = await app.aqueue.enqueue("double", {"number": 4})
        assert (await app.aqueue.get(handle)).result == 8
        assert await app.aqueue.cancel(handle) == {}


def test_run_returns_the_result_or_raises_the_exception_of_the_handler() -> None:
    with inline(app):
        assert double.run(4) == 8
        with pytest.raises(ValueError, match="attempt 3 broke"):
            fragile.run(9)


async def test_arun_returns_the_result_or_raises_the_exception_of_the_handler() -> None:
    async with inline(app):
        assert await triple.arun(4) == 12
        with pytest.raises(ValueError, match="attempt 3 broke"):
            await fragile.arun(9)


def test_middlewares_run_and_handlers_read_the_resources_of_the_block() -> None:
    other = App()
    seen = []

    @other.middleware
    def around(ctx: Context) -> Iterator[None]:
        seen.append("before")
        yield
        seen.append("after")

    @other.task
    def use() -> None:
        seen.append(current().resources["db"])

    with inline(other, resources={"db": "the test's own"}):
        use.enqueue()
    assert seen == ["before", "the test's own", "after"]


# ── what production would reject ──────────────────────────────────────────────────────────────────


def test_arguments_are_encoded_as_json_and_decoded_to_their_types() -> None:
    parcel = Parcel(UUID(int=7), datetime(2026, 1, 2, tzinfo=UTC), 1.5)
    with inline(app) as log:
        handle = ship.enqueue(parcel, date(2026, 1, 3))
        assert handle.result() == parcel
        assert log.jobs[0].data["on"] == "2026-01-03"


def test_a_call_that_does_not_fit_the_signature_is_rejected() -> None:
    with inline(app) as log:
        with pytest.raises(InvalidJob, match="missing a required argument: 'number'"):
            double.enqueue()
        with pytest.raises(InvalidJob, match="job 1: double: argument 'number'"):
            double.enqueue_many([(1,), ("one",)])
        assert log.jobs == []


def test_an_argument_that_json_cannot_represent_is_rejected() -> None:
    other = App()

    @other.task
    def take(anything) -> None:
        pass

    with inline(other), pytest.raises(InvalidJob, match="cannot be stored as JSON"):
        take.enqueue(object())


def test_a_tuple_without_a_type_annotation_arrives_as_a_list() -> None:
    other = App()

    @other.task
    def kind(anything) -> str:
        return type(anything).__name__

    with inline(other):
        assert kind.enqueue((1, 2)).result() == "list"


def test_a_result_that_cannot_be_stored_fails_the_job() -> None:
    other = App()

    @other.task
    def give() -> object:
        return object()

    with inline(other), pytest.raises(JobFailed, match="returned a value that cannot be stored"):
        give.enqueue().result()


# ── failed, pending and cancelled jobs ────────────────────────────────────────────────────────────────────


def test_failed_attempts_are_retried_without_waiting() -> None:
    with inline(app) as log:
        assert fragile.enqueue(3).result() == 3
        assert [event.data["error"] for event in log.events(log.jobs[0])] == [
            "ValueError: attempt 1 broke",
            "ValueError: attempt 2 broke",
        ]


def test_result_raises_for_a_job_that_failed_permanently() -> None:
    with inline(app) as log:
        handle = fragile.enqueue(4)
        with pytest.raises(JobFailed, match=r"fragile\) failed after 3 attempts: ValueError"):
            handle.result()
        assert isinstance(log.error(handle), ValueError)
        assert [job.id for job in log.failed] == [handle.id]


def test_max_attempts_of_the_call_limits_the_attempts() -> None:
    with inline(app):
        assert fragile.using(max_attempts=1).enqueue(2).job().last_error == (
            "ValueError: attempt 1 broke"
        )
        assert fragile.using(max_attempts=5).enqueue(5).result() == 5


def test_the_end_of_the_block_raises_a_failure_that_the_test_did_not_inspect() -> None:
    with pytest.raises(JobFailed, match="attempt 3 broke") as caught, inline(app):
        fragile.enqueue(4)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_exception_of_the_block_is_raised_instead_of_a_failure() -> None:
    def fails() -> None:
        fragile.enqueue(4)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        inline(app)(fails)()


def test_with_raise_errors_the_enqueue_raises_the_exception_of_the_handler() -> None:
    with inline(app, raise_errors=True) as log:
        with pytest.raises(ValueError, match="attempt 3 broke"):
            fragile.enqueue(4)
        assert log.jobs[0].status == "failed"
        assert fragile.enqueue(2).result() == 2


def test_with_raise_errors_a_parent_completes_although_its_child_fails() -> None:
    other = App()
    finished = []

    @other.task
    def parent() -> None:
        child.enqueue()
        finished.append("parent")

    @other.task(retry=Retry.never())
    def child() -> None:
        raise OSError("the child's")

    with inline(other, raise_errors=True) as log:
        with pytest.raises(OSError, match="the child's"):
            parent.enqueue()
        assert [job.status for job in log.jobs] == ["completed", "failed"]
    assert finished == ["parent"]


def test_fail_and_an_exception_outside_the_retry_policy_are_not_retried() -> None:
    other = App()

    @other.task
    def give_up() -> None:
        raise Fail("no use")

    @other.task(retry=Retry.fixed(on=(OSError,)))
    def picky() -> None:
        raise KeyError("not an OSError")

    with inline(other):
        assert give_up.enqueue().job().attempts == 1
        assert picky.enqueue().job().attempts == 1


def test_cancel_ends_a_job_as_cancelled() -> None:
    other = App()

    @other.task
    def stop() -> None:
        raise Cancel("not needed")

    with inline(other), pytest.raises(JobCancelled):
        stop.enqueue().result()


def test_a_snoozed_job_is_pending_until_run_pending() -> None:
    other = App()
    ready = []

    @other.task
    def wait(ctx: Context) -> int:
        if not ready:
            raise Snooze(60)
        return ctx.attempt

    with inline(other) as log:
        handle = wait.enqueue()
        job = handle.job()
        assert (job.status, job.attempts) == ("pending", 0)
        assert job.run_at > datetime.now(UTC) + timedelta(seconds=50)
        with pytest.raises(HowdahError, match=r"is pending and nothing runs it.*run_pending"):
            handle.result()
        ready.append(True)
        assert log.run_pending() == 1
        assert handle.result() == 1


async def test_a_delayed_job_is_pending_until_arun_pending() -> None:
    async with inline(app) as log:
        handle = await triple.using(delay=3600).aenqueue(1)
        assert (await handle.ajob()).status == "pending"
        assert await log.arun_pending() == 1
        assert await handle.aresult() == 3


def test_a_cancelled_pending_job_does_not_run() -> None:
    with inline(app) as log:
        handle = double.using(delay=3600).enqueue(1)
        assert handle.cancel()
        assert not handle.cancel()
        others = double.using(delay=3600).enqueue_many([(2,), (3,)])
        assert app.queue.cancel(others) == {other.id: "cancelled" for other in others}
        assert log.run_pending() == 0
        with pytest.raises(JobCancelled):
            handle.result()


def test_a_job_cancelled_while_it_runs_stops_at_its_next_report() -> None:
    other = App()

    @other.task
    def stubborn(ctx: Context) -> None:
        other.queue.cancel(ctx.id)
        ctx.progress(50)
        raise AssertionError("it went on")

    with inline(other):
        assert stubborn.enqueue().job().status == "cancelled"


def test_ctrl_c_and_pytest_skip_are_raised_and_do_not_fail_the_job() -> None:
    other = App()

    @other.task
    def interrupted() -> None:
        raise KeyboardInterrupt

    @other.task
    async def skipping() -> None:
        pytest.skip("from inside")

    with inline(other) as log:
        with pytest.raises(KeyboardInterrupt):
            interrupted.enqueue()
        with pytest.raises(pytest.skip.Exception):
            skipping.enqueue()
        assert len(log.failed) == 0


# ── inspecting ────────────────────────────────────────────────────────────────────────────────────


def test_progress_and_events_are_recorded() -> None:
    with inline(app) as log:
        handle = report.enqueue(2)
        assert log.progress(handle) == [(50, "tile 1"), (100, "tile 2")]
        assert [(event.kind, event.data) for event in log.events(handle)] == [
            ("done", {"tiles": 2})
        ]
        assert handle.job().current_stage == "tile 2"
        assert handle.job().events_count == 1


def test_watch_yields_all_state_changes_from_the_beginning() -> None:
    with inline(app):
        seen = [(change.status, change.progress) for change in report.enqueue(2).watch()]
    assert seen == [
        ("pending", 0), ("running", 0), ("running", 50), ("running", 100), ("running", 100),
        ("completed", 100),
    ]  # fmt: skip


async def test_awatch_yields_the_events() -> None:
    async with inline(app):
        handle = await report.aenqueue(1)
        events = [event.kind async for change in handle.awatch() for event in change.events]
    assert events == ["done"]


def test_an_idempotency_key_gives_the_first_job_within_the_block() -> None:
    with inline(app) as log:
        first = double.using(idempotency_key="once").enqueue(1)
        second = double.using(idempotency_key="once").enqueue(1)
        with pytest.raises(IdempotencyConflict, match=str(first.id)):
            double.using(idempotency_key="once").enqueue(2)
        assert (first.is_new, second.is_new, second.id) == (True, False, first.id)
        assert second.result() == 2
        assert len(log.jobs) == 1
    with inline(app):
        assert double.using(idempotency_key="once").enqueue(3).is_new


def test_a_bulk_enqueue_with_an_idempotency_conflict_adds_no_job() -> None:
    with inline(app) as log:
        first = double.using(idempotency_key="once").enqueue(1)
        jobs = [
            NewJob(job_type="double", data={"number": 5}),
            NewJob(job_type="double", data={"number": 6}, idempotency_key="other"),
            NewJob(job_type="double", data={"number": 7}, idempotency_key="once"),
        ]
        with pytest.raises(IdempotencyConflict, match=str(first.id)) as caught:
            app.queue.enqueue_many(jobs)
        assert caught.value.index == 2
        assert [job.id for job in log.jobs] == [first.id]
        assert double.using(idempotency_key="other").enqueue(8).is_new


def test_jobs_of_one_bulk_enqueue_share_an_idempotency_key() -> None:
    with inline(app) as log:
        job = NewJob(job_type="double", data={"number": 5}, idempotency_key="once")
        first, second = app.queue.enqueue_many([job, job])
        assert (first.is_new, second.is_new, second.id) == (True, False, first.id)
        assert len(log.jobs) == 1


def test_handle_and_find_find_a_job() -> None:
    with inline(app):
        job_id = str(double.enqueue(3).id)
        assert app.handle(job_id).result() == 6
        assert [str(job.id) for job in app.find(job_type="double", data={"number": 3})] == [job_id]
        assert app.find(job_type="triple") == []
        assert app.find(status=["failed", "pending"], before=job_id) == []
        with pytest.raises(InvalidOption, match='unknown filter "job_typ"'):
            app.find(job_typ="double")


def test_a_handler_can_complete_its_job_in_its_own_transaction() -> None:
    other = App()

    @other.task(max_attempts=1)
    def pay(complete: bool, ctx: Context) -> None:
        claim = ctx.completion()
        if complete:
            other.queue.complete(claim, {"rows": 3}, conn="a connection")

    with inline(other):
        assert pay.enqueue(True).job().result == {"rows": 3}
        assert "did not commit" in (pay.enqueue(False).job().last_error or "")


def test_pending_and_events_of_the_bare_queue() -> None:
    other = App()

    @other.task
    def report(ctx: Context) -> None:
        ctx.event("step", {"n": 1})

    with inline(other):
        report.using(delay=60).enqueue()
        job = report.enqueue()
        assert (other.queue.pending(), other.queue.pending(job_type="other")) == (1, 0)
        assert [(event.kind, event.data) for event in other.queue.events(job)] == [
            ("step", {"n": 1})
        ]


async def test_methods_that_need_a_database_raise_an_error_that_names_them() -> None:
    with inline(app):
        for name, call in {
            "claim": lambda: app.queue.claim("double"),
            "extend": lambda: app.queue.extend(UUID(int=1)),
            "takeover_jobs": lambda: app.takeover(UUID(int=1)),
        }.items():
            with pytest.raises(HowdahError, match=f"inline mode has no {name}: there is no data"):
                call()
        with pytest.raises(HowdahError, match="inline mode has no retry: there is no data"):
            await app.aqueue.retry(UUID(int=1))


# ── tasks that enqueue tasks ──────────────────────────────────────────────────────────────────────


def test_a_chain_of_200_jobs_does_not_reach_the_recursion_limit() -> None:
    other = App()

    @other.task
    def crawl(page: int) -> None:
        if page:
            crawl.enqueue(page - 1)

    with inline(other) as log:
        crawl.enqueue(200)
        assert len(log.jobs) == 201
        assert {job.status for job in log.jobs} == {"completed"}


def test_a_task_that_enqueues_itself_without_end_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howdah.testing.inline_jobs.MAX_RUNS", 50)
    other = App()

    @other.task
    def forever() -> None:
        forever.enqueue()

    with (
        inline(other),
        pytest.raises(HowdahError, match="a task seems to enqueue itself without end"),
    ):
        forever.enqueue()


def test_a_delayed_successor_runs_only_in_run_pending() -> None:
    other = App()

    @other.task
    def tick() -> None:
        tick.using(delay=60).enqueue()

    with inline(other) as log:
        tick.enqueue()
        assert [job.status for job in log.jobs] == ["completed", "pending"]
        assert log.run_pending() == 1
        assert len(log.jobs) == 3


async def test_a_parent_can_await_the_result_of_its_child() -> None:
    other = App()

    @other.task
    async def parent() -> int:
        handle = await child.aenqueue(4)
        return await handle.aresult()

    @other.task
    def child(number: int) -> int:
        return number + 1

    async with inline(other):
        assert await (await parent.aenqueue()).aresult() == 5


# ── the block ─────────────────────────────────────────────────────────────────────────────────────


def test_the_app_has_its_own_attributes_again_after_the_block() -> None:
    before = dict(vars(app))
    with inline(app):
        double.enqueue(1)
        assert vars(app) != before
    assert vars(app) == before
    with pytest.raises(RuntimeError, match="mine"), inline(app):
        raise RuntimeError("mine")
    assert vars(app) == before


def test_handles_work_after_the_block() -> None:
    with inline(app):
        handle = double.enqueue(4)
    assert handle.result() == 8
    assert handle.job().attempts == 1
    assert [change.status for change in handle.watch()][-1] == "completed"


def test_nested_blocks_have_separate_logs() -> None:
    with inline(app) as outer:
        double.enqueue(1)
        with inline(app) as inner:
            double.enqueue(2)
        double.enqueue(3)
    assert [job.data["number"] for job in outer.jobs] == [1, 3]
    assert [job.data["number"] for job in inner.jobs] == [2]


@inline(app)
def test_inline_decorates_functions() -> None:
    assert double.enqueue(1).result() == 2
    assert len(assert_enqueued(double)) == 1


@inline(app)
async def test_inline_decorates_coroutine_functions() -> None:
    assert await (await triple.aenqueue(1)).aresult() == 3
    assert len(assert_enqueued(triple)) == 1


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Switch threads after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_four_threads_can_enqueue_at_the_same_time() -> None:
    def enqueue() -> None:
        for n in range(20):
            triple.enqueue(n)

    with inline(app) as log:
        threads = [threading.Thread(target=enqueue) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(log.jobs) == 80
        assert {job.status for job in log.jobs} == {"completed"}
