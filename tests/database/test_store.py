"""Pools, broken connections, and the errors if the database does not answer."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import psycopg_pool
import pytest

from blocking import BlockingAsyncJobQueue
from howdah import (
    AsyncJobQueue,
    DatabaseUnreachable,
    Handle,
    InvalidOption,
    JobQueue,
    LeaseLost,
    SchemaMissing,
)
from howdah.database import loop_pool
from howdah.database.async_store import AsyncStore
from howdah.database.loop_pool import KEPT_CONNECTIONS
from howdah.database.retry_loop import POOL_CONNECTIONS, TIMEOUT_SECONDS
from howdah.database.store import Store, _stores
from howdah.embedded import EmbeddedServer
from howdah.protocol.statements import Statement
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from proxy import Proxy


# ── a cut connection ──────────────────────────────────────────────────────────────────────────────


both_queues = pytest.mark.parametrize(
    "queue_class", [JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"]
)


@pytest.fixture(params=[JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"])
def cut_queue(
    request: pytest.FixtureRequest, proxy: Proxy, queue: JobQueue, database: str
) -> Iterator[JobQueue]:
    """A sync or async queue behind the proxy. `queue` connects to the server directly."""
    cut = request.param(proxy.url(database.partition("?")[0].rpartition("/")[2]))
    cut.pending()
    yield cut
    cut.close()


@pytest.mark.parametrize("executed", [True, False], ids=["executed", "not executed"])
def test_an_enqueue_that_was_not_answered_makes_one_job(
    proxy: Proxy, queue: JobQueue, cut_queue: JobQueue, executed: bool
) -> None:
    proxy.cut(b"cut-here", executed=executed)
    handle = cut_queue.enqueue("cut-here")
    assert handle.is_new
    assert proxy.cuts == 1
    assert [job.id for job in queue.find()] == [handle.id]


@pytest.mark.parametrize("executed", [True, False], ids=["executed", "not executed"])
async def test_a_batch_of_enqueues_that_was_not_answered_makes_each_job_once(
    proxy: Proxy, queue: JobQueue, database: str, executed: bool
) -> None:
    cut = AsyncJobQueue(proxy.url(database.partition("?")[0].rpartition("/")[2]))
    await cut.pending()
    proxy.cut(b"cut-here", executed=executed)
    handles = await asyncio.gather(*(cut.enqueue("cut-here", n) for n in range(5)))
    assert all(each.is_new for each in handles)
    assert proxy.cuts == 1
    assert sorted(job.id for job in queue.find()) == sorted(each.id for each in handles)
    await cut.close()


def complete_all(queue: JobQueue) -> None:
    queue.complete(queue.claim(batch_size=100))


def test_an_unanswered_enqueue_whose_job_has_finished_makes_no_second_job(
    proxy: Proxy, queue: JobQueue, cut_queue: JobQueue
) -> None:
    proxy.cut(b"cut-here", executed=True, then=lambda: complete_all(queue))
    handle = cut_queue.enqueue("cut-here")
    assert handle.is_new
    assert queue.counts()["completed"] == 1
    assert queue.pending() == 0
    assert queue.get(handle).status == "completed"


def test_an_unanswered_enqueue_with_an_idempotency_key_is_new_when_it_is_resent(
    proxy: Proxy, queue: JobQueue, cut_queue: JobQueue
) -> None:
    proxy.cut(b"cut-here", executed=True)
    handle = cut_queue.enqueue("cut-here", idempotency_key="k")
    assert handle.is_new
    assert queue.enqueue("cut-here", idempotency_key="k") == Handle(handle.id, False)
    assert queue.pending() == 1


@pytest.mark.parametrize(
    ("marker", "executed"), [(b"COMMIT", True), (b"COMMIT", False), (b"cut-here", False)]
)
def test_a_bulk_enqueue_that_was_cut_makes_each_job_once(
    proxy: Proxy, queue: JobQueue, cut_queue: JobQueue, marker: bytes, executed: bool
) -> None:
    jobs = [("bulk", "cut-here" if n == 3_000 else n) for n in range(6_000)]
    proxy.cut(marker, executed=executed)
    handles = cut_queue.enqueue_many(jobs)
    assert proxy.cuts == 1
    assert all(each.is_new for each in handles)
    assert queue.pending() == len(handles) == 6_000
    assert [job.data for job in queue.claim(batch_size=6_000)] == [data for _, data in jobs]


@pytest.mark.parametrize("executed", [True, False], ids=["executed", "not executed"])
def test_a_completion_that_was_not_answered_is_accepted(
    proxy: Proxy, queue: JobQueue, cut_queue: JobQueue, executed: bool
) -> None:
    cut_queue.enqueue_many([("a", n) for n in range(3)])
    jobs = cut_queue.claim()
    proxy.cut(b"cut-here", executed=executed)
    cut_queue.complete(jobs, ["cut-here", 2, 3])
    assert proxy.cuts == 1
    assert [queue.get(job).result for job in jobs] == ["cut-here", 2, 3]
    with pytest.raises(LeaseLost):
        cut_queue.complete(jobs[0])


def test_a_completion_that_was_not_answered_is_rejected_if_the_lease_was_lost(
    proxy: Proxy, queue: JobQueue, cut_queue: JobQueue
) -> None:
    cut_queue.enqueue("a")
    jobs = cut_queue.claim()
    proxy.cut(b"cut-here", executed=False, then=lambda: queue.recover_stale_jobs(0))
    with pytest.raises(LeaseLost):
        cut_queue.complete(jobs, ["cut-here"])
    assert queue.get(jobs[0]).status == "pending"


# ── a server that is restarted or stopped ───────────────────────────────────────────────────────────────────────


def terminate_all(conn: psycopg.Connection) -> None:
    conn.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def test_threads_continue_after_every_connection_was_terminated(
    queue: JobQueue, connect: Callable[[], psycopg.Connection]
) -> None:
    together = threading.Barrier(6)

    def enqueue(n: int) -> Handle:
        together.wait()
        return queue.enqueue("a", n)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(enqueue, range(6)))
        terminate_all(connect())
        list(threads.map(enqueue, range(6)))
    assert queue.pending() == 12


async def test_tasks_continue_after_every_connection_was_terminated(
    aqueue: AsyncJobQueue, connect: Callable[[], psycopg.Connection]
) -> None:
    await asyncio.gather(*(aqueue.pending() for _ in range(6)))
    terminate_all(connect())
    await asyncio.gather(*(aqueue.enqueue_many([("a", n)]) for n in range(6)))
    assert await aqueue.pending() == 6


@pytest.fixture(scope="module")
def own_server() -> Iterator[EmbeddedServer]:
    """A server to stop and start. Its role `guarded` needs a password: "right"."""
    where = Path(tempfile.mkdtemp(prefix="howdah-store-"))
    where.chmod(0o755)
    server = EmbeddedServer(where / "pg", settings={"fsync": "off"})
    server.start()
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("CREATE ROLE guarded LOGIN SUPERUSER PASSWORD 'right'")
        row = conn.execute("SHOW hba_file").fetchone()
    assert row is not None
    rules = Path(row[0])
    rules.write_text(f"local all guarded scram-sha-256\n{rules.read_text()}")
    server.stop("fast")
    server.start()
    yield server
    server.stop("immediate")
    server.remove()
    where.rmdir()


@both_queues
def test_a_queue_continues_after_a_restart_of_the_server(
    own_server: EmbeddedServer, queue_class: Any
) -> None:
    queue = queue_class(own_server.url, schema=f"restart {queue_class.__name__}", timeout=LONG)
    queue.enqueue("a")
    own_server.stop("fast")
    own_server.start()
    queue.enqueue("a")
    own_server.stop("fast")
    with ThreadPoolExecutor(1) as thread:  # a call that begins while the server is down
        waiting = thread.submit(queue.enqueue, "a")
        own_server.start()
        assert waiting.result().is_new
    assert queue.pending() == 3
    queue.close()


def test_a_server_that_refuses_connections_is_retried_often(proxy: Proxy, database: str) -> None:
    queue = JobQueue(proxy.url(database.partition("?")[0].rpartition("/")[2]), timeout=8)
    queue.pending()
    pool = queue._backend.store._pool
    assert pool is not None
    proxy.refuse()
    with pool.connection() as conn:
        conn.close()  # so that the pool has to connect
    before = proxy.refused
    with pytest.raises(DatabaseUnreachable):
        queue.pending()
    queue.close()
    # The pool's own attempts, which grow further apart, would be six. These are about sixteen.
    assert proxy.refused - before >= 10


def test_a_stopped_server_is_reported_within_the_timeout(own_server: EmbeddedServer) -> None:
    queue = JobQueue(own_server.url, schema="away")
    queue.enqueue("a")
    queue._backend.store._settings.timeout = (
        0.3  # the first call, which creates the schema, needs longer
    )
    own_server.stop("fast")
    began = time.monotonic()
    try:
        with pytest.raises(
            DatabaseUnreachable, match=r"^cannot reach database \"howdah\" at /tmp/"
        ):
            queue.enqueue("a")
        assert time.monotonic() - began < TIMEOUT_SECONDS
    finally:
        own_server.start()
        queue.close()


async def test_a_statement_without_an_answer_fails_after_its_timeout(database: str) -> None:
    sleep = Statement("test", "SELECT pg_sleep(3600)::text", (), len)
    store = Store(database, "howdah", timeout=1, command_timeout=0.2)
    with pytest.raises(DatabaseUnreachable, match=r"no answer within 0\.2 s\. The server is busy"):
        await asyncio.to_thread(store.run, sleep)
    store.close()
    astore = AsyncStore(database, "howdah", timeout=1, command_timeout=0.2)
    with pytest.raises(DatabaseUnreachable, match=r"no answer within 0\.2 s\. The server is busy"):
        await astore.run(sleep)
    await astore.close()


# ── a server that cannot be reached ───────────────────────────────────────────────────────────────

SECRET = "s3cr3t-w0rd"
LONG = 3600.0  # seconds: an error that is raised at once does not wait for the timeout
UNREACHABLE = f"postgresql://alice:{SECRET}@127.0.0.1:1/shop"


def everything_reported(error: BaseException, caplog: pytest.LogCaptureFixture) -> str:
    trace = "".join(traceback.format_exception(error))
    return "\n".join([str(error), repr(error), trace, caplog.text, repr(caplog.records)])


def assert_unreachable(error: DatabaseUnreachable, caplog: pytest.LogCaptureFixture) -> None:
    assert str(error).startswith('cannot reach database "shop" at 127.0.0.1:1: ')
    assert str(error).endswith("Check that the server is up and that the URL is right.")
    assert (error.host, error.database) == ("127.0.0.1:1", "shop")
    assert "refused" in error.reason or "Connect call failed" in error.reason
    assert SECRET not in everything_reported(error, caplog)


def test_the_error_for_an_unreachable_database_does_not_show_the_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    queue = JobQueue(UNREACHABLE, timeout=0.3)
    began = time.monotonic()
    with pytest.raises(DatabaseUnreachable) as caught:
        queue.enqueue("a")
    assert 0.2 < time.monotonic() - began < TIMEOUT_SECONDS
    assert_unreachable(caught.value, caplog)
    assert SECRET not in repr(queue)


async def test_all_awaiting_callers_get_an_error_without_the_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    queue = AsyncJobQueue(UNREACHABLE, timeout=0.3)
    began = time.monotonic()
    answers = await asyncio.gather(
        *(queue.enqueue("a") for _ in range(8)), queue.pending(), return_exceptions=True
    )
    assert 0.2 < time.monotonic() - began < TIMEOUT_SECONDS
    for answer in answers:
        assert isinstance(answer, DatabaseUnreachable)
        assert_unreachable(answer, caplog)


def test_threads_do_not_wait_for_each_others_timeouts() -> None:
    queue = JobQueue(UNREACHABLE, timeout=1)
    began = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        calls = [threads.submit(queue.pending) for _ in range(16)]
        assert {type(call.exception()) for call in calls} == {DatabaseUnreachable}
    assert time.monotonic() - began < 16 / 2  # one after the other would take twice as long


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"postgresql://alice@127.0.0.1:{listening.getsockname()[1]}/shop"


async def test_a_server_that_accepts_connections_and_never_answers_is_unreachable(
    silent: str,
) -> None:
    began = time.monotonic()
    with pytest.raises(DatabaseUnreachable, match="no answer in time"):
        await AsyncJobQueue(silent, timeout=0.2).pending()
    assert time.monotonic() - began < TIMEOUT_SECONDS
    began = time.monotonic()
    with pytest.raises(DatabaseUnreachable, match="connection timeout expired"):
        await asyncio.to_thread(JobQueue(silent, timeout=0.2).pending)
    assert time.monotonic() - began < TIMEOUT_SECONDS


@pytest.mark.parametrize(
    ("user", "database", "reason"),
    [
        (f"guarded:{SECRET}", "howdah", 'password authentication failed for user "guarded"'),
        ("guarded:right", "nowhere", 'database "nowhere" does not exist'),
        ("stranger", "howdah", 'role "stranger" does not exist'),
    ],
)
def test_a_wrong_password_or_name_fails_at_once(
    own_server: EmbeddedServer,
    caplog: pytest.LogCaptureFixture,
    user: str,
    database: str,
    reason: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = own_server.url.replace("howdah@/howdah", f"{user}@/{database}")
    with pytest.raises(DatabaseUnreachable) as sync:
        JobQueue(url, timeout=LONG).pending()
    with pytest.raises(DatabaseUnreachable) as awaited:
        asyncio.run(AsyncJobQueue(url, timeout=LONG).pending())
    for caught in (sync.value, awaited.value):
        assert reason in caught.reason
        assert caught.database == database
        assert SECRET not in everything_reported(caught, caplog)


def test_the_right_password_is_accepted(own_server: EmbeddedServer) -> None:
    queue = JobQueue(own_server.url.replace("howdah@", "guarded:right@"), schema="guarded")
    assert queue.pending() == 0
    queue.close()


@pytest.mark.parametrize("password", ["s3cr3t/w0rd", "s3cr3t:w0rd/%"])
def test_the_error_for_an_unreadable_url_does_not_show_the_password(password: str) -> None:
    url = f"postgresql://alice:{password}@127.0.0.1:nine/shop"
    for call in (JobQueue(url, timeout=0.2).pending, lambda: asyncio.run(awaited(url))):
        with pytest.raises((InvalidOption, DatabaseUnreachable)) as caught:
            call()
        trace = "".join(traceback.format_exception(caught.value))
        assert "s3cr3t" not in trace
        assert "w0rd" not in trace


async def awaited(url: str) -> int:
    return await AsyncJobQueue(url, timeout=0.2).pending()


# ── the schema ────────────────────────────────────────────────────────────────────────────────────


@both_queues
def test_the_first_call_creates_the_schema_unless_create_is_false(
    empty_database: str, queue_class: Any
) -> None:
    with pytest.raises(SchemaMissing) as caught:
        queue_class(empty_database, create=False).pending()
    assert str(caught.value) == (
        'schema "howdah" has no Howdah tables. Run `howdah migrate`, '
        "or omit create=False to create them on first use."
    )
    queue = queue_class(empty_database)
    assert queue.pending() == 0
    queue.close()


async def test_first_calls_at_the_same_time_create_one_schema(empty_database: str) -> None:
    queues = [AsyncJobQueue(empty_database) for _ in range(4)]
    threads = [JobQueue(empty_database) for _ in range(4)]
    await asyncio.gather(
        *(queue.enqueue("a") for queue in queues for _ in range(4)),
        *(asyncio.to_thread(queue.enqueue, "a") for queue in threads),
    )
    assert await queues[0].pending() == 20
    for each in queues:
        await each.close()
    for queue in threads:
        queue.close()


# ── pools and processes ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_queue_runs_on_the_callers_own_pool(empty_database: str, autocommit: bool) -> None:
    with psycopg_pool.ConnectionPool(
        empty_database, min_size=1, max_size=2, open=True, kwargs={"autocommit": autocommit}
    ) as pool:
        queue = JobQueue(pool)
        queue.enqueue_many(("a", n) for n in range(6_000))
        job = queue.claim_one()
        assert job is not None
        queue.complete(job)
        with pool.connection() as conn:
            assert conn.autocommit is autocommit
            terminate_all(conn)
        queue.enqueue("a")
        queue.close()
        assert queue.pending() == 6_000
        with pool.connection() as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)


async def test_an_async_queue_runs_on_the_callers_own_pool(empty_database: str) -> None:
    async with asyncpg.create_pool(empty_database, min_size=1, max_size=2) as pool:
        queue = AsyncJobQueue(pool)
        await queue.enqueue_many(("a", n) for n in range(6_000))
        job = await queue.claim_one()
        assert job is not None
        await queue.complete(job)
        await queue.close()
        assert await queue.pending() == 5_999
        assert await pool.fetchval("SELECT 1") == 1


async def test_a_closed_pool_of_the_callers_is_reported_at_once(database: str) -> None:
    pool = psycopg_pool.ConnectionPool(database, open=False)
    with pytest.raises(DatabaseUnreachable, match="is not open yet"):
        JobQueue(pool, timeout=LONG).pending()
    apool = asyncpg.create_pool(database, min_size=0)
    with pytest.raises(DatabaseUnreachable, match="pool is not initialized"):
        await AsyncJobQueue(apool, timeout=LONG).pending()


def test_the_error_for_a_callers_pool_that_cannot_connect_does_not_show_the_password() -> None:
    with (
        psycopg_pool.ConnectionPool(UNREACHABLE, min_size=0, max_size=1, open=True) as pool,
        pytest.raises(DatabaseUnreachable) as caught,
    ):
        JobQueue(pool, timeout=0.3).pending()
    assert (caught.value.host, caught.value.database) == ("127.0.0.1", "shop")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_its_own_connections_and_worker_id(queue: JobQueue) -> None:
    queue.enqueue_many([("a", n) for n in range(20)])
    mine = queue.claim_one()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            jobs = queue.claim(batch_size=5)
            queue.complete(jobs)
            name = (jobs[0].worker_id or "").encode()
            queue.close()
            os.write(writer, name)
        finally:
            os._exit(0)
    for _ in range(5):
        job = queue.claim_one()
        assert job is not None
        queue.complete(job)
    os.waitpid(child, 0)
    os.close(writer)
    name = os.read(reader, 200).decode()
    os.close(reader)
    assert mine is not None
    queue.complete(mine)
    assert name.endswith(f":{child}")
    assert (mine.worker_id or "").endswith(f":{os.getpid()}")
    assert queue.counts()["completed"] == 11


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_a_thread_connects_does_not_block(
    silent: str, queue: JobQueue
) -> None:
    other = JobQueue(silent, timeout=1)
    with ThreadPoolExecutor(1) as thread:
        stuck = thread.submit(other.pending)
        while not other._backend.store._lock.locked():
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            os._exit(0 if not other._backend.store._lock.locked() and queue.pending() == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stuck.exception()


def test_a_queue_without_references_is_not_kept_for_forks() -> None:
    gc.collect()
    before = len(_stores)
    for _ in range(10):
        JobQueue("postgresql://")
    gc.collect()
    assert len(_stores) == before


# ── kept connections ───────────────────────────────────────────────────────────────────────────


PID = Statement("test", "SELECT pg_backend_pid()", (), lambda rows: rows[0][0])
SLEEP = Statement("test", "SELECT pg_sleep(0.05)", (), lambda _: None)


@pytest.fixture
async def store(database: str) -> AsyncIterator[AsyncStore]:
    store = AsyncStore(database, "howdah")
    yield store
    await store.close()


async def test_successive_statements_use_the_same_connection(store: AsyncStore) -> None:
    assert len({await store.run(PID) for _ in range(20)}) == 1
    assert len(store._pools.get().kept) == 1


async def test_kept_connections_do_not_block_other_callers(store: AsyncStore) -> None:
    await asyncio.gather(*(store.run(SLEEP) for _ in range(3 * POOL_CONNECTIONS)))
    assert len(store._pools.get().kept) == KEPT_CONNECTIONS
    await asyncio.gather(*(store.run(SLEEP) for _ in range(3 * POOL_CONNECTIONS)))


async def test_a_connection_that_was_idle_for_long_is_replaced(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await store.run(PID)
    monkeypatch.setattr(loop_pool, "KEPT_SECONDS", 0.0)
    assert await store.run(PID) != first


async def test_a_connection_whose_statement_was_cancelled_is_not_kept(
    store: AsyncStore, connect: Callable[[], psycopg.Connection[Any]]
) -> None:
    await store.run(PID)
    observer = connect()
    long = asyncio.create_task(
        store.run(Statement("test", "SELECT pg_sleep(60)", (), lambda _: None))
    )
    await eventually(
        lambda: observer.execute(
            "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(60)%' AND state = 'active'"
        ).fetchone()
    )
    assert not store._pools.get().kept
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    assert not store._pools.get().kept
    assert await store.run(PID)


async def test_closing_while_a_statement_is_in_flight_leaves_no_connection(
    store: AsyncStore, connect: Callable[[], psycopg.Connection[Any]]
) -> None:
    pid = await store.run(PID)
    in_flight = asyncio.create_task(store.run(SLEEP))
    await asyncio.sleep(0)
    assert not store._pools.get().kept  # the statement has taken it
    await store.close()
    await in_flight
    assert not store._pools.get().kept
    left = connect().execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [pid])
    assert left.fetchone() == (0,)


def test_a_closed_queue_opens_again(queue: JobQueue) -> None:
    queue.enqueue("a")
    queue.close()
    queue.close()
    assert queue.pending() == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_async_queue_can_be_used_in_one_event_loop_after_another(database: str) -> None:
    queue = AsyncJobQueue(database)

    async def use() -> Any:
        return await asyncio.gather(*(queue.enqueue("a") for _ in range(5)))

    async def use_and_close() -> int:
        await use()
        count = await queue.pending()
        await queue.close()
        return count

    asyncio.run(use_and_close())
    assert asyncio.run(use_and_close()) == 10
    asyncio.run(use())  # and left open
    assert asyncio.run(use_and_close()) == 20
    assert len(queue._backend.store._pools._values) == 1  # those of closed loops were dropped
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_async_queue_can_be_used_in_several_event_loops_at_once(database: str) -> None:
    queue = AsyncJobQueue(database)
    together = threading.Barrier(6)

    async def use() -> None:
        together.wait(20)
        for _ in range(5):
            await asyncio.gather(*(queue.enqueue("a") for _ in range(4)))
        await queue.close()

    with ThreadPoolExecutor(6) as threads:
        for used in [threads.submit(lambda: asyncio.run(use())) for _ in range(6)]:
            used.result(60)
    other = JobQueue(database)
    assert other.pending() == 6 * 5 * 4
    other.close()
    gc.collect()
