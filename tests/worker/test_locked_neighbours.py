"""An operator's open transaction on some running jobs: the other jobs of their worker are not delayed."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from howdah.database.async_store import AsyncStore
from howdah.worker import completer, reporting_outcomes
from waiting import ended, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from conftest import RunWorker
    from howdah import App, Context, Handle
    from howdah.protocol.statements import Statement

    Connect = Callable[..., psycopg.Connection[Any]]

LOCK_WAITS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND wait_event_type = 'Lock'"
)


def lock(connect: Connect, handles: list[Handle]) -> psycopg.Connection[Any]:
    """An open transaction that has locked jobs."""
    operator = connect(autocommit=False)
    ids = [handle.id for handle in handles]
    operator.execute("SELECT FROM howdah.live_jobs WHERE id = ANY (%s) FOR UPDATE", (ids,))
    return operator


async def test_a_worker_waits_for_no_lock_while_an_operator_holds_jobs_that_report_and_end(
    app: App, running_worker: RunWorker, connect: Connect, sent: list[str]
) -> None:
    """Their events are kept, and neither these nor their outcomes delay the reports and outcomes of the others."""
    may_end = asyncio.Event()
    started: list[int] = []

    @app.task(max_attempts=1)
    async def work(ctx: Context, n: int, held: bool) -> int:
        started.append(n)
        if held:
            await may_end.wait()
        ctx.event("ended", {"n": n})
        return n

    conn, waits = connect(), 0
    async with running_worker(app, concurrency=10):
        held = [await work.aenqueue(n, True) for n in range(5)]
        await eventually(lambda: len(started) == 5, "they run")
        operator = lock(connect, held)
        may_end.set()
        await eventually(lambda: sent.count("held_jobs") >= 2, "they were rejected")
        for n in range(10):
            handle = await work.aenqueue(5 + n, False)
            while (await handle.ajob()).status != "completed":
                waits += (conn.execute(LOCK_WAITS).fetchone() or (0,))[0]
        operator.rollback()
        jobs = [await ended(each) for each in held]
    assert waits == 0
    assert [job.result for job in jobs] == list(range(5))
    assert [job.events_count for job in jobs] == [1] * 5


async def test_a_suspect_that_an_operator_has_locked_starts_later_and_delays_no_other(
    app: App, running_worker: RunWorker, connect: Connect, sent: list[str]
) -> None:
    ran: list[int] = []

    @app.task(max_attempts=1)
    async def work(n: int) -> int:
        ran.append(n)
        return n

    conn = connect()
    handles = [await work.aenqueue(n) for n in range(2)]
    conn.execute("UPDATE howdah.live_jobs SET claims = 3")
    operator = connect(autocommit=False)
    locked = threading.Event()

    def lock_first(statement: Statement[Any]) -> None:
        """Between the claim of the first suspect and the write of its start."""
        if statement.operation == "start_jobs" and not locked.is_set():
            operator.execute(
                "SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (handles[0].id,)
            )
            locked.set()

    run_async = AsyncStore.run

    async def run(self: AsyncStore, statement: Statement[Any], conn: Any = None) -> Any:
        lock_first(statement)
        return await run_async(self, statement, conn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncStore, "run", run)
        async with running_worker(app):
            assert (await ended(handles[1])).status == "completed"
            await eventually(lambda: sent.count("held_jobs") >= 2, "the first was rejected")
            assert ran == [1]
            operator.rollback()
            assert (await ended(handles[0])).status == "completed"
    assert ran == [1, 0]


@pytest.mark.parametrize("jobs", [1, 4])
async def test_locked_suspects_free_their_slots(
    app: App, running_worker: RunWorker, connect: Connect, jobs: int
) -> None:
    """As many as there are slots: before their start, or after their end."""
    ran: list[int] = []
    operators: list[psycopg.Connection[Any]] = []

    @app.task(max_attempts=1)
    async def suspect(n: int) -> None:
        ran.append(n)
        if n == 0 and jobs == 1:
            operators.append(lock(connect, suspects[:1]))

    @app.task
    async def plain() -> None:
        pass

    suspects = [await suspect.aenqueue(n) for n in range(5)]
    connect().execute("UPDATE howdah.live_jobs SET claims = 3")
    run_async = AsyncStore.run

    async def run(self: AsyncStore, statement: Statement[Any], conn: Any = None) -> Any:
        if statement.operation == "start_jobs" and jobs == 4 and not operators:
            operators.append(lock(connect, suspects[:4]))
        return await run_async(self, statement, conn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncStore, "run", run)
        async with running_worker(app, concurrency=4):
            await eventually(lambda: bool(operators), "the lock is held")
            assert (await ended(await plain.aenqueue())).status == "completed"
            await eventually(lambda: 4 in ran, "the suspect that is not locked ran")
            operators[0].rollback()
            assert {(await ended(each)).status for each in suspects} == {"completed"}
    assert sorted(ran) == [0, 1, 2, 3, 4]


async def test_locked_jobs_with_many_events_do_not_delay_the_events_of_others(
    app: App, running_worker: RunWorker, connect: Connect, sent: list[str]
) -> None:
    """A few of their events fill a statement."""
    may_report = asyncio.Event()
    started: list[int] = []

    @app.task
    async def noisy(n: int, ctx: Context) -> None:
        started.append(n)
        await may_report.wait()
        for _ in range(250):
            ctx.event("note", {"text": "x" * 5000})
        await may_end.wait()

    @app.task
    async def quiet(ctx: Context) -> None:
        ctx.event("note")

    may_end = asyncio.Event()
    async with running_worker(app, concurrency=40):
        handles = [await noisy.aenqueue(n) for n in range(20)]
        await eventually(lambda: len(started) == 20, "they run")
        operator = lock(connect, handles)
        may_report.set()
        await eventually(lambda: sent.count("add_events") >= 5, "events were rejected")
        for _ in range(3):
            before = sent.count("add_events")
            job = await ended(await quiet.aenqueue())
            assert job.events_count == 1
            # 20 statements are filled by the events of the others.
            assert sent.count("add_events") - before < 10
        operator.rollback()
        may_end.set()
        jobs = [await ended(each) for each in handles]
    assert [job.events_count for job in jobs] == [250] * 20


async def test_locked_outcomes_do_not_stop_the_worker_from_claiming(
    app: App,
    running_worker: RunWorker,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(completer, "FULL_OUTCOMES", 5)
    may_end = asyncio.Event()
    started: list[int] = []

    @app.task
    async def work(n: int) -> None:
        started.append(n)
        if n < 10:
            await may_end.wait()

    async with running_worker(app, concurrency=20):
        handles = [await work.aenqueue(n) for n in range(10)]
        await eventually(lambda: len(started) == 10, "they run")
        operator = lock(connect, handles)
        may_end.set()
        for n in range(20):
            assert (await ended(await work.aenqueue(10 + n))).status == "completed"
        operator.rollback()
        assert {(await ended(each)).status for each in handles} == {"completed"}


async def test_events_of_jobs_that_are_locked_for_long_are_written(
    app: App,
    running_worker: RunWorker,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    sent: list[str],
) -> None:
    """For longer than an outcome waits for the events of its run."""
    monkeypatch.setattr(reporting_outcomes, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(reporting_outcomes, "CHECK_SECONDS", 0.1)
    may_end = asyncio.Event()
    started: list[int] = []

    @app.task
    async def work(n: int, ctx: Context) -> None:
        started.append(n)
        await may_end.wait()
        ctx.event("ended")

    async with running_worker(app, concurrency=20):
        handles = [await work.aenqueue(n) for n in range(12)]
        await eventually(lambda: len(started) == 12, "they run")
        operator = lock(connect, handles)
        may_end.set()
        await eventually(lambda: sent.count("add_events") >= 6, "the timeout has passed")
        operator.rollback()
        jobs = [await ended(each) for each in handles]
    assert [job.events_count for job in jobs] == [1] * 12
