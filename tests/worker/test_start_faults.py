"""Connections that fail while a worker starts, and a server that has none left: only a misconfiguration ends a worker."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from howdah import App, ConnectionLimit, JobQueue, Worker
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import RunWorker
    from proxy import Proxy

CONNECTIONS = 8  # that a worker opens until it has run its first job


def name_of(database: str) -> str:
    return database.partition("?")[0].rpartition("/")[2]


def add_work(app: App) -> Any:
    @app.task
    async def work() -> None:
        pass

    return work


@pytest.mark.parametrize("after_bytes", [False, True], ids=["refused", "cut"])
@pytest.mark.parametrize("number", range(1, CONNECTIONS + 1))
async def test_a_worker_survives_a_failure_of_any_of_its_first_connections(
    proxy: Proxy, database: str, running_worker: RunWorker, number: int, after_bytes: bool
) -> None:
    app, direct = App(proxy.url(name_of(database))), App(database)
    add_work(app)
    work = add_work(direct)
    proxy.refuse_one(number, after_bytes=after_bytes)
    handle = await work.aenqueue()
    async with running_worker(app):
        assert await handle.aresult(60) is None
        assert proxy.refused == 1 or proxy.accepted < number
    with psycopg.connect(database) as conn:
        assert conn.execute("SELECT worker_id FROM howdah.workers").fetchall() == []
    await app.aclose()
    await direct.aclose()


async def test_a_worker_that_is_stopped_while_it_registers_leaves_no_row(
    proxy: Proxy, database: str
) -> None:
    """The registration was executed, and its answer did not arrive."""
    app = App(proxy.url(name_of(database)))
    add_work(app)
    worker = Worker(app, worker_id="cut-here")
    loop = asyncio.get_running_loop()
    proxy.cut(
        b"cut-here",  # a parameter
        executed=True,
        then=lambda: loop.call_soon_threadsafe(worker.stop),
        silently=True,
    )
    async with asyncio.timeout(60):
        await worker.run()
    assert proxy.cuts == 1
    with psycopg.connect(database) as conn:
        assert conn.execute("SELECT worker_id, idle FROM howdah.workers").fetchall() == []
    await app.aclose()


# ── the limit of connections ──────────────────────────────────────────────────────────────────────


class Limited:
    """A role with a limit of connections, which the test changes."""

    def __init__(self, conn: psycopg.Connection[Any], database: str) -> None:
        self._conn = conn
        self.url = database.replace("postgresql://howdah@", "postgresql://limited@")
        conn.execute("CREATE ROLE limited LOGIN IN ROLE howdah")

    def set(self, limit: int) -> None:
        self._conn.execute(f"ALTER ROLE limited CONNECTION LIMIT {limit}".encode())

    def terminate(self, condition: str = "true") -> int:
        rows = self._conn.execute(
            f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            f"WHERE usename = 'limited' AND {condition}".encode()
        )
        return len(rows.fetchall())


@pytest.fixture
def limited(fresh_database: str) -> Iterator[Limited]:
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        role = Limited(conn, fresh_database)
        assert "limited" in role.url
        yield role
        role.terminate()
        conn.execute("DROP ROLE limited")


def unreachable_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [
        each
        for each in caplog.records
        if each.levelno == logging.WARNING
        and "accepts no more connections" in str(getattr(each, "error", ""))
    ]


async def test_a_worker_at_the_limit_of_connections_says_so_once_and_comes_back(
    limited: Limited,
    fresh_database: str,
    running_worker: RunWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, direct = App(limited.url), App(fresh_database)
    add_work(app)
    work = add_work(direct)
    async with running_worker(app, lease=1) as worker:
        await eventually(lambda: worker.health()["ready"], "it is ready")
        caplog.set_level(logging.INFO)
        limited.set(0)
        limited.terminate()
        await eventually(lambda: unreachable_lines(caplog), "it says so")
        handle = await work.aenqueue()
        await asyncio.sleep(6)
        assert len(unreachable_lines(caplog)) == 1
        assert not worker.health()["ready"]
        limited.set(-1)
        assert await handle.aresult(30) is None
        await eventually(
            lambda: any(each.message == "database reachable again" for each in caplog.records),
            "it says that it is back",
        )
    await app.aclose()
    await direct.aclose()


async def test_a_worker_whose_heartbeat_has_no_connection_claims_nothing(
    limited: Limited, fresh_database: str, running_worker: RunWorker
) -> None:
    app, direct = App(limited.url), App(fresh_database)
    add_work(app)
    work = add_work(direct)
    async with running_worker(app, lease=1) as worker:
        await eventually(lambda: worker.health()["ready"], "it is ready")
        limited.set(0)
        assert limited.terminate("query LIKE '%%beat_worker%%'") == 1
        await eventually(lambda: not worker.health()["ready"], "the heartbeat has noticed")
        handle = await work.aenqueue()
        await asyncio.sleep(2)
        job = await handle.ajob()
        assert (job.status, job.claims) == ("pending", 0)
        limited.set(-1)
        assert await handle.aresult(30) is None
    await app.aclose()
    await direct.aclose()


async def test_a_worker_that_starts_at_the_limit_waits_for_a_connection(
    limited: Limited, fresh_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    app, direct = App(limited.url), App(fresh_database)
    add_work(app)
    work = add_work(direct)
    limited.set(0)
    worker = Worker(app)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: unreachable_lines(caplog), "it says so")
    limited.set(-1)
    handle = await work.aenqueue()
    assert await handle.aresult(30) is None
    assert len(unreachable_lines(caplog)) == 1
    worker.stop()
    await running
    await app.aclose()
    await direct.aclose()


def test_a_queue_names_the_limit_of_connections(limited: Limited) -> None:
    limited.set(0)
    queue = JobQueue(limited.url, timeout=0.5)
    with pytest.raises(ConnectionLimit, match='too many connections for role "limited"'):
        queue.enqueue("a")
    queue.close()
