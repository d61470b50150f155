"""Single enqueues that are awaited at the same time are batched, and each has its own result."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from howdah import AsyncJobQueue, DatabaseUnreachable, Handle, InvalidJob, PayloadTooLarge
from howdah.database.service_task import ServiceTask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import psycopg


@pytest.fixture
def observer(connect: Callable[[], psycopg.Connection]) -> psycopg.Connection:
    """A second connection, with statistics of all statements, including those inside functions."""
    conn = connect()
    conn.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    conn.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET pg_stat_statements.track = ''all''', "
        "current_database()); END $$"
    )
    return conn


@pytest.fixture
async def counted(observer: psycopg.Connection, database: str) -> AsyncIterator[AsyncJobQueue]:
    queue = AsyncJobQueue(database, payload_limit=200_000)  # more than the database accepts
    await queue.pending()
    observer.execute("SELECT pg_stat_statements_reset()")
    yield queue
    await queue.close()


def inserts(observer: psycopg.Connection) -> int:
    row = observer.execute(
        "SELECT coalesce(sum(calls), 0)::int "
        "FROM pg_stat_statements JOIN pg_database ON oid = dbid "
        "WHERE datname = current_database() AND query LIKE '%INSERT INTO live_jobs%'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def is_visible(observer: psycopg.Connection, handle: Handle) -> bool:
    return observer.execute(
        "SELECT FROM howdah.live_jobs WHERE id = %s", (handle.id,)
    ).fetchone() is not None  # fmt: skip


async def test_sixty_four_enqueues_at_once_are_sent_in_at_most_four_inserts(
    counted: AsyncJobQueue, observer: psycopg.Connection
) -> None:
    async def enqueue(n: int) -> Handle:
        handle = await counted.enqueue("a", n)
        assert is_visible(observer, handle)  # as soon as its await returns
        return handle

    handles = await asyncio.gather(*(enqueue(n) for n in range(64)))
    assert 1 <= inserts(observer) <= 4
    jobs = {job.id: job.data for job in await counted.find(limit=100)}
    assert [jobs[each.id] for each in handles] == list(range(64))
    assert all(each.is_new for each in handles)


async def test_many_callers_are_served_by_two_statements_at_a_time(
    aqueue: AsyncJobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight, most, sizes = 0, 0, []
    send = aqueue._backend._send

    async def watched(jobs: list[dict[str, Any]]) -> list[Handle]:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        sizes.append(len(jobs))
        try:
            return await send(jobs)
        finally:
            in_flight -= 1

    monkeypatch.setattr(aqueue._backend._batcher, "_send", watched)

    async def caller(n: int) -> None:
        for m in range(10):
            await aqueue.enqueue("a", [n, m])

    await asyncio.gather(*(caller(n) for n in range(64)))
    assert most == 2
    assert sum(sizes) == 640
    assert len(sizes) <= 60  # 32 at a time, and not one by one
    found = [tuple(job.data) for job in await aqueue.find(limit=1000)]
    assert sorted(found) == [(n, m) for n in range(64) for m in range(10)]


async def test_jobs_with_an_ordering_key_keep_the_order_of_their_enqueues(
    aqueue: AsyncJobQueue,
) -> None:
    async def plain() -> None:
        for _ in range(20):
            await aqueue.enqueue("plain")

    others = [asyncio.create_task(plain()) for _ in range(40)]
    ordered = []
    for n in range(300):
        ordered.append(asyncio.create_task(aqueue.enqueue("a", n, ordering_key="k")))
        if n % 7 == 0:
            await asyncio.sleep(0.001)
    await asyncio.gather(*ordered, *others)
    jobs = await aqueue.find(job_type="a", limit=1000)
    assert [job.data for job in sorted(jobs, key=lambda job: job.seq)] == list(range(300))


async def test_a_lone_enqueue_is_sent_at_once(
    counted: AsyncJobQueue, observer: psycopg.Connection
) -> None:
    for n in range(3):
        assert is_visible(observer, await counted.enqueue("a", n))
    assert inserts(observer) == 3


async def test_a_job_that_the_database_refuses_fails_alone(
    counted: AsyncJobQueue, observer: psycopg.Connection
) -> None:
    answers = await asyncio.gather(
        *(counted.enqueue("a", "x" * 100_000 if n == 17 else n) for n in range(64)),
        return_exceptions=True,
    )
    refused = answers.pop(17)
    assert isinstance(refused, PayloadTooLarge)
    assert str(refused).startswith("the database refused data: ")
    assert all(isinstance(each, Handle) for each in answers)
    assert await counted.pending() == 63
    assert inserts(observer) < 20


async def test_a_job_that_a_users_trigger_refuses_fails_alone(
    counted: AsyncJobQueue, observer: psycopg.Connection
) -> None:
    observer.execute(
        "CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'not on my watch'; END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON howdah.live_jobs "
        "FOR EACH ROW WHEN (NEW.data = '3') EXECUTE FUNCTION pg_temp.refuse()"
    )
    answers = await asyncio.gather(
        *(counted.enqueue("a", n) for n in range(8)), return_exceptions=True
    )
    observer.execute("DROP FUNCTION pg_temp.refuse() CASCADE")
    assert [n for n, each in enumerate(answers) if isinstance(each, BaseException)] == [3]
    assert "not on my watch" in str(answers[3])


async def test_an_invalid_job_does_not_fail_the_others(aqueue: AsyncJobQueue) -> None:
    answers = await asyncio.gather(
        *(aqueue.enqueue("a", {1} if n == 3 else n) for n in range(8)), return_exceptions=True
    )
    assert [n for n, each in enumerate(answers) if isinstance(each, InvalidJob)] == [3]
    assert await aqueue.pending() == 7


async def test_an_error_that_no_job_causes_is_raised_for_all_without_splitting_the_batch(
    counted: AsyncJobQueue, observer: psycopg.Connection
) -> None:
    observer.execute("ALTER TABLE howdah.live_jobs RENAME TO hidden")
    answers = await asyncio.gather(
        *(counted.enqueue("a", n) for n in range(32)), return_exceptions=True
    )
    observer.execute("ALTER TABLE howdah.hidden RENAME TO live_jobs")
    assert {type(each).__name__ for each in answers} == {"SchemaMissing"}
    row = observer.execute(
        "SELECT calls FROM pg_stat_statements WHERE query LIKE '%enqueue_jobs(%' AND toplevel"
    ).fetchone()
    assert row is None or row[0] <= 2


async def test_a_cancelled_caller_does_not_affect_the_others(aqueue: AsyncJobQueue) -> None:
    tasks = [asyncio.create_task(aqueue.enqueue("a", n)) for n in range(20)]
    tasks[0].cancel()  # before it began
    await asyncio.sleep(0)
    tasks[1].cancel()  # while it waits to be sent
    while not any(task.done() for task in tasks[2:]):
        await asyncio.sleep(0)
        tasks[2].cancel()  # while it is sent
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [n for n, each in enumerate(answers) if not isinstance(each, Handle)] == [0, 1, 2]
    found = {job.data for job in await aqueue.find(limit=100)}
    assert found >= set(range(3, 20))
    assert (await aqueue.enqueue("a")).is_new


async def test_callers_are_cancelled_if_the_sender_is_cancelled(aqueue: AsyncJobQueue) -> None:
    await aqueue.pending()
    tasks = [asyncio.create_task(aqueue.enqueue("a", n)) for n in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = asyncio.create_task(aqueue.enqueue("a", 3))
    await asyncio.sleep(0)
    (sender,) = [
        task for task in asyncio.all_tasks() if task.get_name() == "howdah-enqueue-batcher"
    ]
    assert isinstance(sender, ServiceTask)
    sender.end()
    answers = await asyncio.gather(*tasks, late, return_exceptions=True)
    assert {type(each) for each in answers} == {asyncio.CancelledError}
    assert (await aqueue.enqueue("a")).is_new


async def test_callers_are_cancelled_if_the_sender_is_cancelled_before_it_starts(
    aqueue: AsyncJobQueue,
) -> None:
    await aqueue.pending()
    task = asyncio.create_task(aqueue.enqueue("a"))
    await asyncio.sleep(0)
    (sender,) = [
        task for task in asyncio.all_tasks() if task.get_name() == "howdah-enqueue-batcher"
    ]
    assert isinstance(sender, ServiceTask)
    sender.end()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await aqueue.enqueue("a")).is_new


async def test_an_unreachable_database_is_reported_to_all_callers() -> None:
    queue = AsyncJobQueue("postgresql://u@127.0.0.1:1/db", timeout=0.1)
    answers = await asyncio.gather(*(queue.enqueue("a") for _ in range(5)), return_exceptions=True)
    assert {type(each) for each in answers} == {DatabaseUnreachable}


def test_enqueues_are_batched_in_every_event_loop(database: str) -> None:
    queue = AsyncJobQueue(database)

    async def use() -> int:
        await asyncio.gather(*(queue.enqueue("a") for _ in range(10)))
        count = await queue.pending()
        await queue.close()
        return count

    assert [asyncio.run(use()), asyncio.run(use())] == [10, 20]
