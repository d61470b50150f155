"""Lines that have gone dead without a word: somebody in between still takes every byte, and no answer
comes. Nobody waits for ever, what may have been done is not done twice, and what takes long is let be."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg_pool
import pytest

from howdah import AsyncJobQueue, DatabaseUnreachable, JobQueue
from howdah.database.async_store import AsyncStore
from howdah.database.retry_loop import COMMAND_TIMEOUT_SECONDS, TIMEOUT_SECONDS
from howdah.database.store import Store
from howdah.protocol.statements import LONG_TIMEOUT_SECONDS, Statement, Statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from proxy import Proxy


# As by default, an answer is waited for longer than a connection.
SHORT: dict[str, Any] = {"timeout": 0.5, "command_timeout": 0.8}
executions = pytest.mark.parametrize("executed", [True, False], ids=["executed", "not executed"])


@pytest.fixture
def url(proxy: Proxy, database: str) -> str:
    return proxy.url(database.partition("?")[0].rpartition("/")[2])


@pytest.fixture
def far(url: str, queue: JobQueue) -> Iterator[JobQueue]:
    """A queue behind the proxy; `queue` goes past it."""
    far = JobQueue(url, **SHORT)
    far.pending()
    yield far
    far.close()


@pytest.fixture
async def afar(url: str, queue: JobQueue) -> AsyncIterator[AsyncJobQueue]:
    afar = AsyncJobQueue(url, **SHORT)
    await afar.pending()
    yield afar
    await afar.close()


def test_a_connection_is_waited_for_less_long_than_an_answer() -> None:
    assert TIMEOUT_SECONDS < COMMAND_TIMEOUT_SECONDS < LONG_TIMEOUT_SECONDS
    assert JobQueue()._backend.store._settings.command_timeout == COMMAND_TIMEOUT_SECONDS
    assert AsyncJobQueue()._backend.store._settings.command_timeout == COMMAND_TIMEOUT_SECONDS


# ── nobody waits for ever, and nothing is done twice ──────────────────────────────────────────────


@executions
def test_an_enqueue_into_silence_makes_one_job(
    proxy: Proxy, queue: JobQueue, far: JobQueue, executed: bool
) -> None:
    proxy.cut(b"cut-here", executed=executed, silently=True)
    handle = far.enqueue("cut-here")
    assert handle.is_new
    assert proxy.cuts == 1
    assert [job.id for job in queue.find()] == [handle.id]


@executions
async def test_an_awaited_enqueue_into_silence_makes_one_job(
    proxy: Proxy, queue: JobQueue, afar: AsyncJobQueue, executed: bool
) -> None:
    proxy.cut(b"cut-here", executed=executed, silently=True)
    handle = await afar.enqueue("cut-here")
    assert handle.is_new
    assert proxy.cuts == 1
    assert [job.id for job in queue.find()] == [handle.id]


@executions
def test_a_bulk_enqueue_whose_commit_goes_into_silence_is_made_once(
    proxy: Proxy, queue: JobQueue, far: JobQueue, executed: bool
) -> None:
    proxy.cut(b"COMMIT", executed=executed, silently=True)
    handles = far.enqueue_many([("bulk", n) for n in range(300)])
    assert proxy.cuts == 1
    assert all(each.is_new for each in handles)
    assert queue.pending() == len(handles) == 300


@executions
async def test_an_awaited_bulk_enqueue_whose_commit_goes_into_silence_is_made_once(
    proxy: Proxy, queue: JobQueue, afar: AsyncJobQueue, executed: bool
) -> None:
    proxy.cut(b"COMMIT", executed=executed, silently=True)
    handles = await afar.enqueue_many([("bulk", n) for n in range(300)])
    assert proxy.cuts == 1
    assert all(each.is_new for each in handles)
    assert queue.pending() == len(handles) == 300


def test_a_claim_whose_maintenance_goes_into_silence_is_made(
    proxy: Proxy, queue: JobQueue, far: JobQueue
) -> None:
    queue.enqueue("a")
    proxy.cut(b"run_maintenance", executed=False, silently=True)
    assert [job.job_type for job in far.claim()] == ["a"]
    assert proxy.cuts == 1


def test_one_thread_is_given_up_on_and_its_neighbours_are_not(
    proxy: Proxy, queue: JobQueue, far: JobQueue
) -> None:
    proxy.cut(b"cut-here", executed=True, silently=True)
    with ThreadPoolExecutor(8) as threads:
        handles = list(threads.map(far.enqueue, ["cut-here", *["a"] * 63]))
    assert proxy.cuts == 1
    assert sorted(job.id for job in queue.find(limit=100)) == sorted(each.id for each in handles)


def test_a_child_that_was_forked_does_not_wait_for_ever_either(
    proxy: Proxy, queue: JobQueue, far: JobQueue
) -> None:
    proxy.cut(b"cut-here", executed=False, silently=True)
    child = os.fork()
    if child == 0:
        try:
            far.enqueue("cut-here")
        finally:
            os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert proxy.cuts == 1
    assert [job.job_type for job in queue.find()] == ["cut-here"]


@pytest.mark.parametrize("marker", [b"to_regclass", b"oldest_code FROM"])
def test_a_first_call_whose_look_at_the_schema_goes_into_silence(
    proxy: Proxy, url: str, marker: bytes
) -> None:
    proxy.cut(marker, executed=True, silently=True)
    far = JobQueue(url, **SHORT)
    assert far.pending() == 0
    assert proxy.cuts == 1
    far.close()


@pytest.mark.parametrize("marker", [b"pg_backend_pid", b"to_regclass", b"oldest_code FROM"])
async def test_a_first_awaited_call_whose_look_at_the_server_goes_into_silence(
    proxy: Proxy, url: str, marker: bytes
) -> None:
    proxy.cut(marker, executed=True, silently=True)
    afar = AsyncJobQueue(url, timeout=5, command_timeout=0.8)
    assert await afar.pending() == 0
    assert proxy.cuts == 1
    await afar.close()


# ── pools of the caller's own ─────────────────────────────────────────────────────────────────────


@executions
@pytest.mark.parametrize("autocommit", [True, False])
def test_a_pool_of_the_callers_whose_lines_have_all_gone_silent(
    proxy: Proxy, url: str, queue: JobQueue, autocommit: bool, executed: bool
) -> None:
    with psycopg_pool.ConnectionPool(
        url, min_size=3, max_size=3, kwargs={"autocommit": autocommit}
    ) as pool:
        pool.wait()
        far = JobQueue(pool, timeout=5, command_timeout=0.8)
        assert far.pending() == 0
        proxy.cut(b"COMMIT" if not autocommit else b"cut-here", executed=executed, silently=True,
                  then=proxy.swallow)  # fmt: skip
        handle = far.enqueue("cut-here")
        assert proxy.cuts == 1
        assert [job.id for job in queue.find()] == [handle.id]


@executions
@pytest.mark.parametrize("marker", [b"cut-here", b"COMMIT"])
async def test_an_asyncpg_pool_of_the_callers_that_knows_no_limit(
    proxy: Proxy, url: str, queue: JobQueue, marker: bytes, executed: bool
) -> None:
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
        afar = AsyncJobQueue(pool, **SHORT)
        assert await afar.pending() == 0
        proxy.cut(marker, executed=executed, silently=True)
        handles = await afar.enqueue_many([("cut-here", n) for n in range(300)])
        assert proxy.cuts == 1
        assert queue.pending() == len(handles)


async def test_an_asyncpg_pool_of_the_callers_that_is_silent_from_the_first_look_on(
    proxy: Proxy, url: str
) -> None:
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
        proxy.cut(b"to_regclass", executed=True, silently=True)
        assert await AsyncJobQueue(pool, timeout=5, command_timeout=0.8).pending() == 0
        assert proxy.cuts == 1


# ── what takes long ───────────────────────────────────────────────────────────────────────────────


async def test_a_statement_with_more_time_than_others_is_not_cut_short(database: str) -> None:
    sleep = Statement(
        "test", "SELECT pg_sleep(0.6)::text, 7", (), lambda rows: rows[0][1], timeout=60.0
    )
    store = Store(database, "howdah", timeout=0.2, command_timeout=0.2)
    assert await asyncio.to_thread(store.run, sleep) == 7
    store.close()
    astore = AsyncStore(database, "howdah", timeout=0.2, command_timeout=0.2)
    assert await astore.run(sleep) == 7
    await astore.close()


async def test_statements_in_one_transaction_have_their_time_each(database: str) -> None:
    sleep = Statement("test", "SELECT pg_sleep(0.3)::text, 7", (), lambda rows: rows[0][1])
    store = Store(database, "howdah", timeout=0.2, command_timeout=0.9)
    assert await asyncio.to_thread(store.run_all, [sleep] * 4) == [7] * 4
    store.close()
    astore = AsyncStore(database, "howdah", timeout=0.2, command_timeout=0.9)
    assert await astore.run_all([sleep] * 4) == [7] * 4
    await astore.close()


def test_clearing_the_history_has_more_time_than_others() -> None:
    statements = Statements("howdah")
    assert statements.clear_finished(timedelta(0), ["failed"]).timeout == LONG_TIMEOUT_SECONDS


async def test_a_statement_that_never_ends_is_told_of_in_words(url: str) -> None:
    for_ever = Statement("test", "SELECT pg_sleep(3600)::text", (), len)
    said = r'^cannot reach database "\w+" at 127\.0\.0\.1:\d+: no answer within 0\.8 s\. Check '
    store, astore = Store(url, "howdah", **SHORT), AsyncStore(url, "howdah", **SHORT)
    with pytest.raises(DatabaseUnreachable, match=said):
        await asyncio.to_thread(store.run, for_ever)
    with pytest.raises(DatabaseUnreachable, match=said):
        await astore.run(for_ever)
    store.close()
    await astore.close()


@pytest.mark.parametrize("seconds", [0, -1, "soon"])
def test_a_limit_that_is_none(seconds: Any) -> None:
    for kind in (JobQueue, AsyncJobQueue):
        with pytest.raises(ValueError, match="command_timeout"):
            kind(command_timeout=seconds)
