"""Outcomes near their limits: many at once, and single ones that take long to write."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from howdah.database.async_store import AsyncStore
from howdah.database.store import Store
from howdah.execution.heartbeat import EXTENDED_RUNS, Heartbeat
from howdah.execution.run import Run
from howdah.hooks import Hooks
from howdah.outcome import Completed
from howdah.protocol.worker_statements import WorkerStatements
from howdah.worker import completer as completing
from howdah.worker import outcome_queue
from howdah.worker.completer import Completer
from howdah.worker.outcome_queue import MAX_BYTES
from howdah.worker.slots import Slots
from howdah.worker.throughput import Throughput
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import psycopg
    import pytest

    from conftest import RunWorker
    from howdah import App, JobQueue
    from howdah.protocol.statements import Statement

LEASE = timedelta(seconds=30)
RESULT = "x" * 60_000


class Sent:
    """Counts the outcomes and the bytes of each acknowledgement that a store sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        self.bytes: list[int] = []
        run_all = AsyncStore.run_all

        async def note(store: AsyncStore, statements: Any) -> Any:
            for each in statements if isinstance(statements, list) else []:
                if each.operation in ("complete_runs", "complete_jobs"):
                    self.counts.append(len(each.parameters[0]))
                    self.bytes.append(sum(len(result or "") for result in each.parameters[2] or []))
            return await run_all(store, statements)

        monkeypatch.setattr(AsyncStore, "run_all", note)


@contextlib.asynccontextmanager
async def completing_jobs(
    database: str, queue: JobQueue, count: int, *, batch_size: int | None = None
) -> AsyncIterator[Any]:
    """A completer, and the claimed runs of so many jobs."""
    statements = WorkerStatements("howdah")
    store, heartbeat_store = AsyncStore(database, "howdah"), Store(database, "howdah")
    heartbeat = Heartbeat(heartbeat_store, statements, LEASE, lambda run: None)
    completer = Completer(store, statements, heartbeat, Hooks([]), Throughput())
    queue.enqueue_many([("work", {})] * count)
    runs: list[Run] = []
    while len(runs) < count:
        claim = statements.claim("me", ["work"], batch_size or count, LEASE, ["default"], False)
        jobs = await store.run(claim)
        runs += [Run(job.id, job.lease_id, job, None) for job in jobs]  # type: ignore[arg-type]
    heartbeat.add(runs)
    parts = (completer.run, completer.run_large, completer.run_rejected)
    writing = [asyncio.create_task(work()) for work in parts]
    try:
        yield completer, runs, heartbeat
    finally:
        for task in writing:
            task.cancel()
        await asyncio.wait(writing)
        await store.close()
        await asyncio.to_thread(heartbeat_store.close)


async def test_outcomes_that_are_large_together_are_written_in_several_statements(
    database: str, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(monkeypatch)
    async with completing_jobs(database, queue, 200) as (completer, runs, _):
        for run in runs:
            completer.put(run, Completed(f'"{RESULT}"'))
        async with asyncio.timeout(120):
            await completer.drain()
    assert sum(sent.counts) == 200
    assert max(sent.bytes) <= MAX_BYTES


async def test_a_statement_that_takes_too_long_is_divided_and_each_outcome_counts_once(
    database: str,
    queue: JobQueue,
    connect: Callable[..., psycopg.Connection[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server writes an outcome in 20 ms, and a statement may take half a second."""
    monkeypatch.setattr(outcome_queue, "STATEMENT_TIMEOUT_SECONDS", 0.5)
    connect().execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END';"
        "CREATE TRIGGER slow BEFORE INSERT ON howdah.finished_jobs FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    sent = Sent(monkeypatch)
    async with completing_jobs(database, queue, 100) as (completer, runs, _):
        for run in runs:
            completer.put(run, Completed("1"))
        async with asyncio.timeout(240):
            await completer.drain()
        # The server may not receive the cancellation of the first statement: then it executes that one to its end.
        assert sent.counts[:2] == [100, 50]
        completed = connect().execute(
            "SELECT count(*), count(DISTINCT id) FROM howdah.jobs WHERE status = 'completed'"
        )
        assert completed.fetchone() == (100, 100)


async def test_an_outcome_that_is_slow_to_write_does_not_delay_the_others(
    database: str, queue: JobQueue, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    connect().execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END';"
        "CREATE TRIGGER wait BEFORE INSERT ON howdah.finished_jobs FOR EACH ROW "
        "WHEN (NEW.result IS NOT NULL) EXECUTE FUNCTION wait()"
    )
    holder = connect(autocommit=False)
    holder.execute("SELECT pg_advisory_xact_lock(1)")
    async with completing_jobs(database, queue, 3) as (completer, runs, _):
        large, *small = runs
        completer.put(large, Completed('"' + "x" * (MAX_BYTES + 1) + '"'))
        for run in small:
            completer.put(run, Completed(None))
        await eventually(lambda: completer.written == 2, "the small outcomes are written")
        holder.rollback()
        await eventually(lambda: completer.written == 3, "the large outcome is written")


async def test_an_outcome_that_cannot_be_written_in_time_is_tried_beside_the_others(
    database: str,
    queue: JobQueue,
    connect: Callable[..., psycopg.Connection[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcome_queue, "STATEMENT_TIMEOUT_SECONDS", 0.5)
    connect().execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_sleep(2); RETURN NEW; END';"
        "CREATE TRIGGER wait BEFORE INSERT ON howdah.finished_jobs FOR EACH ROW "
        "WHEN (NEW.result IS NOT NULL) EXECUTE FUNCTION wait()"
    )
    async with completing_jobs(database, queue, 3) as (completer, runs, _):
        slow, *others = runs
        completer.put(slow, Completed("1"))
        for run in others:
            completer.put(run, Completed(None))
        async with asyncio.timeout(120):
            await completer.drain()
        assert completer.written == 3


async def test_unwritten_outcomes_stop_the_worker_from_claiming(
    app: App, running_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one worker would claim the whole backlog, and keep it in memory."""
    monkeypatch.setattr(completing, "FULL_OUTCOMES", 20)
    may_write = asyncio.Event()
    run_all = AsyncStore.run_all

    async def hold(store: AsyncStore, statements: list[Statement[Any]]) -> Any:
        if isinstance(statements, list) and statements[0].operation in (
            "complete_runs",
            "complete_jobs",
        ):
            await may_write.wait()
        return await run_all(store, statements)

    monkeypatch.setattr(AsyncStore, "run_all", hold)
    waits: list[Slots] = []
    wait_for_demand = Slots.wait_for_demand

    async def count(slots: Slots) -> None:
        waits.append(slots)
        await wait_for_demand(slots)

    monkeypatch.setattr(Slots, "wait_for_demand", count)
    ran: list[int] = []

    @app.task
    async def quick(number: int) -> int:
        ran.append(number)
        return number

    await quick.aenqueue_many([(number,) for number in range(1000)])
    async with running_worker(app, concurrency=8) as worker:
        await eventually(lambda: worker._slots._all[0]._with.completer.is_full, "it is full")

        async def look_for_demand() -> None:
            rounds = len(waits)
            await eventually(lambda: len(waits) >= rounds + 2, "the fetcher has looked for demand")

        await look_for_demand()  # a claim that was under way has ended
        pending = await app.aqueue.pending()
        await look_for_demand()
        assert await app.aqueue.pending() == pending > 500
        assert len(ran) <= 20 + 8
        may_write.set()
        await eventually(lambda: len(set(ran)) == 1000, "all ran")
    assert len(ran) == 1000


async def test_many_runs_of_a_lease_are_sent_in_several_statements(
    database: str, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with completing_jobs(database, queue, EXTENDED_RUNS + 1) as (_, _, heartbeat):
        counts = await counts_of_a_beat(heartbeat, monkeypatch)
    assert counts == [(EXTENDED_RUNS, 1), (1, 0)]
    assert heartbeat.can_extend


async def test_many_leases_are_extended_in_several_statements(
    database: str,
    queue: JobQueue,
    connect: Callable[..., psycopg.Connection[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("howdah.execution.heartbeat.EXTENDED_RUNS", 20)
    async with completing_jobs(database, queue, 41, batch_size=1) as (_, _, heartbeat):
        conn = connect()
        conn.execute("UPDATE howdah.leases SET expires_at = clock_timestamp()")
        counts = await counts_of_a_beat(heartbeat, monkeypatch)
        query = "SELECT count(*) FROM howdah.leases WHERE expires_at > clock_timestamp()"
        assert conn.execute(query).fetchone() == (41,)
    assert counts == [(20, 20), (20, 20), (1, 1)]
    assert heartbeat.can_extend


async def counts_of_a_beat(
    heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int]]:
    """How many runs and leases each statement of a beat has."""
    counts: list[tuple[int, int]] = []
    run = heartbeat._store.run

    def note(statement: Statement[Any]) -> Any:
        assert statement.operation == "extend_jobs"
        counts.append((len(statement.parameters[0]), len(statement.parameters[4])))
        return run(statement)

    monkeypatch.setattr(heartbeat._store, "run", note)
    await asyncio.to_thread(heartbeat.beat)
    return counts
