"""Silent connections: a proxy accepts every byte, and no answer comes. No caller waits forever, a statement
that may have been executed is not executed twice, and a statement that takes long is not interrupted."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg_pool
import pytest

from blocking import BlockingAsyncJobQueue
from howdah import AsyncJobQueue, DatabaseUnreachable, InvalidOption, JobQueue
from howdah.database.async_store import AsyncStore
from howdah.database.retry_loop import COMMAND_TIMEOUT_SECONDS, TIMEOUT_SECONDS
from howdah.database.store import Store
from howdah.protocol.statements import LONG_TIMEOUT_SECONDS, Statement, Statements

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy import Proxy


# Seconds. As by default, the timeout of an answer is longer than that of a connection. A busy machine needs up to
# half a second for a connection.
SHORT: dict[str, Any] = {"timeout": 1.5, "command_timeout": 2.0}
executions = pytest.mark.parametrize("executed", [True, False], ids=["executed", "not executed"])


@pytest.fixture
def url(proxy: Proxy, database: str) -> str:
    return proxy.url(database.partition("?")[0].rpartition("/")[2])


@pytest.fixture(params=[JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"])
def far(request: pytest.FixtureRequest, url: str, queue: JobQueue) -> Iterator[JobQueue]:
    """A sync or async queue behind the proxy. `queue` connects to the server directly."""
    far = request.param(url, **SHORT)
    far.pending()
    yield far
    far.close()


def test_the_timeout_of_a_connection_is_shorter_than_that_of_an_answer() -> None:
    assert TIMEOUT_SECONDS < COMMAND_TIMEOUT_SECONDS < LONG_TIMEOUT_SECONDS
    assert JobQueue()._backend.store._settings.command_timeout == COMMAND_TIMEOUT_SECONDS
    assert AsyncJobQueue()._backend.store._settings.command_timeout == COMMAND_TIMEOUT_SECONDS


# ── no caller waits forever, and nothing is executed twice ──────────────────────────────────────────────


@executions
def test_an_enqueue_on_a_silent_connection_makes_one_job(
    proxy: Proxy, queue: JobQueue, far: JobQueue, executed: bool
) -> None:
    proxy.cut(b"cut-here", executed=executed, silently=True)
    handle = far.enqueue("cut-here")
    assert handle.is_new
    assert proxy.cuts == 1
    assert [job.id for job in queue.find()] == [handle.id]


@executions
def test_a_bulk_enqueue_whose_commit_is_not_answered_makes_each_job_once(
    proxy: Proxy, queue: JobQueue, far: JobQueue, executed: bool
) -> None:
    proxy.cut(b"COMMIT", executed=executed, silently=True)
    handles = far.enqueue_many([("bulk", n) for n in range(300)])
    assert proxy.cuts == 1
    assert all(each.is_new for each in handles)
    assert queue.pending() == len(handles) == 300


def test_a_claim_whose_maintenance_is_not_answered_returns_its_jobs(
    proxy: Proxy, queue: JobQueue, far: JobQueue
) -> None:
    queue.enqueue("a")
    proxy.cut(b"run_due_duty", executed=False, silently=True)
    assert [job.job_type for job in far.claim()] == ["a"]
    assert proxy.cuts == 1


def test_one_silent_connection_does_not_fail_other_threads(
    proxy: Proxy, queue: JobQueue, far: JobQueue
) -> None:
    proxy.cut(b"cut-here", executed=True, silently=True)
    with ThreadPoolExecutor(8) as threads:
        handles = list(threads.map(far.enqueue, ["cut-here", *["a"] * 63]))
    assert proxy.cuts == 1
    assert sorted(job.id for job in queue.find(limit=100)) == sorted(each.id for each in handles)


def test_a_forked_child_does_not_wait_forever_either(
    proxy: Proxy, queue: JobQueue, url: str
) -> None:
    far = JobQueue(url, **SHORT)
    far.pending()
    proxy.cut(b"cut-here", executed=False, silently=True)
    child = os.fork()
    if child == 0:
        try:
            far.enqueue("cut-here")
        finally:
            os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    far.close()
    assert proxy.cuts == 1
    assert [job.job_type for job in queue.find()] == ["cut-here"]


@pytest.mark.parametrize("marker", [b"relname = 'migrations'", b"'functions_hash')::text"])
def test_a_first_call_whose_schema_check_is_not_answered_is_retried(
    proxy: Proxy, url: str, marker: bytes
) -> None:
    proxy.cut(marker, executed=True, silently=True)
    far = JobQueue(url, **SHORT)
    assert far.pending() == 0
    assert proxy.cuts == 1
    far.close()


@pytest.mark.parametrize(
    "marker", [b"pg_backend_pid", b"relname = 'migrations'", b"'functions_hash')::text"]
)
async def test_a_first_async_call_whose_server_check_is_not_answered_is_retried(
    proxy: Proxy, url: str, marker: bytes
) -> None:
    proxy.cut(marker, executed=True, silently=True)
    afar = AsyncJobQueue(url, timeout=5, command_timeout=2.0)
    assert await afar.pending() == 0
    assert proxy.cuts == 1
    await afar.close()


# ── pools of the caller ─────────────────────────────────────────────────────────────────────


@executions
@pytest.mark.parametrize("autocommit", [True, False])
def test_a_callers_pool_whose_connections_are_all_silent_enqueues_once(
    proxy: Proxy, url: str, queue: JobQueue, autocommit: bool, executed: bool
) -> None:
    with psycopg_pool.ConnectionPool(
        url, min_size=3, max_size=3, kwargs={"autocommit": autocommit}
    ) as pool:
        pool.wait()
        far = JobQueue(pool, timeout=5, command_timeout=2.0)
        assert far.pending() == 0
        proxy.cut(b"COMMIT" if not autocommit else b"cut-here", executed=executed, silently=True,
                  then=proxy.swallow)  # fmt: skip
        handle = far.enqueue("cut-here")
        assert proxy.cuts == 1
        assert [job.id for job in queue.find()] == [handle.id]


@executions
@pytest.mark.parametrize("marker", [b"cut-here", b"COMMIT"])
async def test_a_callers_asyncpg_pool_without_timeouts_enqueues_once(
    proxy: Proxy, url: str, queue: JobQueue, marker: bytes, executed: bool
) -> None:
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
        afar = AsyncJobQueue(pool, **SHORT)
        assert await afar.pending() == 0
        proxy.cut(marker, executed=executed, silently=True)
        handles = await afar.enqueue_many([("cut-here", n) for n in range(300)])
        assert proxy.cuts == 1
        assert queue.pending() == len(handles)


async def test_a_callers_asyncpg_pool_that_is_silent_at_the_schema_check_is_retried(
    proxy: Proxy, url: str
) -> None:
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
        proxy.cut(b"relname = 'migrations'", executed=True, silently=True)
        assert await AsyncJobQueue(pool, timeout=5, command_timeout=2.0).pending() == 0
        assert proxy.cuts == 1


# ── statements that take long ───────────────────────────────────────────────────────────────────────────────


async def test_a_statement_with_a_longer_timeout_is_not_interrupted(database: str) -> None:
    sleep = Statement(
        "test", "SELECT pg_sleep(0.6)::text, 7", (), lambda rows: rows[0][1], timeout=60.0
    )
    store, astore = Store(database, "howdah"), AsyncStore(database, "howdah")
    await asyncio.to_thread(store.run, sleep)  # connects
    await astore.run(sleep)
    for each in (store, astore):
        each._settings.timeout = each._settings.command_timeout = 0.2
    assert await asyncio.to_thread(store.run, sleep) == 7
    assert await astore.run(sleep) == 7
    await asyncio.to_thread(store.close)
    await astore.close()


async def test_each_statement_of_a_transaction_has_its_own_timeout(database: str) -> None:
    sleep = Statement("test", "SELECT pg_sleep(0.6)::text, 7", (), lambda rows: rows[0][1])
    store = Store(database, "howdah", command_timeout=2.2)
    astore = AsyncStore(database, "howdah", command_timeout=2.2)
    answers = await asyncio.gather(
        asyncio.to_thread(store.run_all, [sleep] * 4), astore.run_all([sleep] * 4)
    )
    assert answers == [[7] * 4] * 2
    await asyncio.to_thread(store.close)
    await astore.close()


def test_clearing_the_history_has_the_long_timeout() -> None:
    statements = Statements("howdah")
    assert statements.clear_finished(timedelta(0), ["failed"]).timeout == LONG_TIMEOUT_SECONDS


async def test_the_error_for_a_statement_without_an_answer_names_the_timeout(url: str) -> None:
    endless = Statement("test", "SELECT pg_sleep(3600)::text", (), len)
    message = r'^database "\w+" at 127\.0\.0\.1:\d+ did not answer a statement in time: no answer within 2 s\. '
    store, astore = Store(url, "howdah", **SHORT), AsyncStore(url, "howdah", **SHORT)
    with pytest.raises(DatabaseUnreachable, match=message):
        await asyncio.to_thread(store.run, endless)
    with pytest.raises(DatabaseUnreachable, match=message):
        await astore.run(endless)
    store.close()
    await astore.close()


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (0, "command_timeout is 0; it must be at least 0.001 seconds and below a century."),
        (-1, "command_timeout is -1; it must be at least 0.001 seconds and below a century."),
        ("soon", "command_timeout must be a timedelta or a number of seconds, not str."),
    ],
)
def test_an_invalid_command_timeout_is_refused(seconds: Any, message: str) -> None:
    for kind in (JobQueue, AsyncJobQueue):
        with pytest.raises(InvalidOption) as caught:
            kind(command_timeout=seconds)
        assert str(caught.value) == message


async def test_a_call_that_is_cancelled_while_its_session_is_set_up_ends_at_once(
    proxy: Proxy, url: str
) -> None:
    """The pool would close the new connection politely, for which the server has to answer."""
    store = AsyncStore(url, "howdah", command_timeout=30.0)
    is_silent = asyncio.Event()
    loop = asyncio.get_running_loop()
    proxy.cut(
        b"client_connection_check_interval", executed=False, silently=True,
        then=lambda: loop.call_soon_threadsafe(is_silent.set),
    )  # fmt: skip
    call = asyncio.create_task(store.run(Statements("howdah").has_schema()))
    await is_silent.wait()
    call.cancel()
    ended, _ = await asyncio.wait([call], timeout=5.0)
    assert ended
    with pytest.raises(asyncio.CancelledError):
        await call
    await store.close()
