"""Every loop that retries waits longer from attempt to attempt. Connections are counted at a proxy."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from blocking import BlockingAsyncJobQueue
from counting import CountingProxy
from howdah import (
    App,
    AsyncJobQueue,
    DatabaseClosed,
    DatabaseReadOnly,
    DatabaseUnreachable,
    JobQueue,
)
from howdah.database.async_store import AsyncStore
from howdah.database.backoff import Backoff
from howdah.database.retry_loop import RetryLoop, StoreSettings
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import RunWorker
    from howdah.embedded import EmbeddedServer


@pytest.fixture
def counting(server: EmbeddedServer) -> Iterator[CountingProxy]:
    proxy = CountingProxy(server.socket_directory / ".s.PGSQL.5432")
    yield proxy
    proxy.close()


@pytest.fixture
def conn(fresh_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        yield conn


def set_read_only(conn: psycopg.Connection[Any], *, on: bool) -> None:
    name = conn.info.dbname
    change = "SET default_transaction_read_only = on" if on else "RESET ALL"
    conn.execute("SET default_transaction_read_only = off")
    conn.execute(f"ALTER DATABASE {name} {change}".encode())
    conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


@pytest.mark.parametrize("queue_class", [JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"])
def test_an_enqueue_on_a_read_only_server_says_so_and_opens_few_connections(
    queue_class: Any, counting: CountingProxy, conn: psycopg.Connection[Any]
) -> None:
    queue = queue_class(counting.url(conn.info.dbname), timeout=5)
    queue.pending()
    set_read_only(conn, on=True)
    before = counting.connections
    with pytest.raises(DatabaseReadOnly, match="is read-only: cannot execute") as caught:
        queue.enqueue("a")
    assert "Point the URL at the primary" in str(caught.value)
    assert "check that the server is up" not in str(caught.value).lower()
    assert counting.connections - before < 30
    set_read_only(conn, on=False)
    assert queue.enqueue("a").is_new
    queue.close()


@pytest.fixture
def close_database(
    conn: psycopg.Connection[Any], server: EmbeddedServer
) -> Iterator[Callable[[bool], None]]:
    """Sets ALLOW_CONNECTIONS of the database, from another one, and ends its sessions."""
    name = conn.info.dbname
    with psycopg.connect(server.url, autocommit=True) as admin:

        def close(closed: bool) -> None:
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {not closed}".encode())
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
            )

        yield close
        close(False)


@pytest.mark.parametrize("queue_class", [JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first call", "later call"])
def test_a_database_that_is_closed_to_connections_is_retried_and_named(
    queue_class: Any,
    is_first: bool,
    counting: CountingProxy,
    conn: psycopg.Connection[Any],
    close_database: Callable[[bool], None],
) -> None:
    queue = queue_class(counting.url(conn.info.dbname), timeout=3)
    if not is_first:
        queue.pending()
    close_database(True)
    before = counting.connections
    with pytest.raises(DatabaseClosed, match="is closed to connections") as caught:
        queue.enqueue("a")
    assert "ALLOW_CONNECTIONS" in str(caught.value)
    assert "Check that the server is up" not in str(caught.value)
    assert 2 <= counting.connections - before < 30  # it was retried, with pauses
    close_database(False)
    assert queue.enqueue("a").is_new
    queue.close()


async def test_a_worker_waits_for_a_database_that_is_closed_to_connections(
    conn: psycopg.Connection[Any],
    fresh_database: str,
    running_worker: RunWorker,
    caplog: pytest.LogCaptureFixture,
    close_database: Callable[[bool], None],
) -> None:
    app = App(fresh_database)

    @app.task
    async def work() -> None:
        pass

    async with running_worker(app) as worker:
        await eventually(lambda: worker.health()["ready"], "it is ready")
        caplog.set_level(logging.WARNING)
        close_database(True)
        await eventually(
            lambda: any(
                "is closed to connections" in getattr(r, "error", "") for r in caplog.records
            ),
            "it says so",
            deadline=30,
        )
        close_database(False)
        queue = AsyncJobQueue(fresh_database)
        handle = await queue.enqueue("work")

        async def completed() -> bool:
            return (await queue.get(handle)).status == "completed"

        await eventually(completed, "the worker claims again", deadline=30)
        await queue.close()


def test_many_short_calls_to_a_read_only_server_back_off_together(
    counting: CountingProxy, conn: psycopg.Connection[Any]
) -> None:
    queue = JobQueue(counting.url(conn.info.dbname), timeout=1.5)
    queue.pending()
    set_read_only(conn, on=True)
    before = counting.connections
    for _ in range(4):
        with pytest.raises(DatabaseReadOnly):
            queue.enqueue("a")
    assert counting.connections - before < 32
    queue.close()


async def test_an_idle_worker_on_a_read_only_server_opens_few_connections_and_comes_back(
    counting: CountingProxy,
    conn: psycopg.Connection[Any],
    fresh_database: str,
    running_worker: RunWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App(counting.url(conn.info.dbname))

    @app.task
    async def work() -> None:
        pass

    async with running_worker(app) as worker:
        await eventually(lambda: worker.health()["ready"], "it is ready")
        caplog.set_level(logging.WARNING)
        set_read_only(conn, on=True)
        before, began = counting.connections, time.monotonic()
        await eventually(
            lambda: any("is read-only" in getattr(r, "error", "") for r in caplog.records),
            "it says so",
        )
        await asyncio.sleep(max(0.0, 8 - (time.monotonic() - began)))
        per_second = (counting.connections - before) / (time.monotonic() - began)
        assert per_second < 8  # 116 a second without a pause
        set_read_only(conn, on=False)
        queue = AsyncJobQueue(fresh_database)
        handle = await queue.enqueue("work")

        async def completed() -> bool:
            return (await queue.get(handle)).status == "completed"

        await eventually(completed, "the worker claims again", deadline=30)
        await queue.close()


def test_delays_double_up_to_the_limit_with_jitter() -> None:
    backoff = Backoff(0.1, 1.0)
    for limit in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert limit / 2 <= backoff.next() <= limit
    backoff.reset()
    assert backoff.next() <= 0.1
    assert len({Backoff().next() for _ in range(20)}) > 10


def test_an_old_failure_to_connect_is_not_the_reason_for_a_later_timeout() -> None:
    settings = StoreSettings(None, "howdah", create=False, timeout=10, command_timeout=10)
    first = RetryLoop(settings)
    first.after(ConnectionRefusedError("Connect call failed"))
    # Another call that waits meanwhile: this is why it got no connection.
    assert "Connect call failed" in str(settings.unreachable(TimeoutError(), first.began))
    time.sleep(0.01)
    later = RetryLoop(settings)
    with pytest.raises(DatabaseUnreachable, match="no answer in time"):
        raise settings.unreachable(TimeoutError(), later.began)
    settings.note_success()
    assert "no answer in time" in str(settings.unreachable(TimeoutError(), first.began))


async def test_a_success_ends_the_backoff_of_a_store(
    counting: CountingProxy, conn: psycopg.Connection[Any]
) -> None:
    store = AsyncStore(counting.url(conn.info.dbname), "howdah")
    queue = JobQueue(counting.url(conn.info.dbname))
    statement = queue._operations.statements.pending_count(None, None)
    await store.run(statement)
    conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await store.run(statement)
    assert not store.is_failing
    await store.close()
    queue.close()
