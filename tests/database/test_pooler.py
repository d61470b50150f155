"""Through a real PgBouncer in transaction mode, where a session ends with its transaction."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from blocking import BlockingAsyncJobQueue
from howdah import App, AsyncJobQueue, ConnectionLimit, JobQueue, Status, Worker
from howdah.database import listener
from howdah.insight.doctor import Doctor, Finding
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="PgBouncer is not installed")


@pytest.fixture
def pooled(database: str) -> Iterator[str]:
    """The URL of `database` behind a pooler in transaction mode with two connections to it."""
    with run_pooler(database, "transaction", "default_pool_size = 2\n") as url:
        yield url


@contextlib.contextmanager
def run_pooler(database: str, mode: str, settings_text: str = "") -> Iterator[str]:
    """The URL of `database` behind a pooler."""
    parts = urlsplit(database)
    name = parts.path.lstrip("/")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="howdah-pooler-") as directory:
        settings = Path(directory) / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n{name} = host={parse_qs(parts.query)['host'][0]} port=5432 user=howdah\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = {mode}\n{settings_text}"
        )
        Path(directory).chmod(0o755)
        # PgBouncer refuses to run as root, and only its account and root may use the server's socket.
        account = Path(parse_qs(parts.query)["host"][0]).owner() if os.geteuid() == 0 else None
        process = subprocess.Popen(
            [str(PROGRAM), "-q", str(settings)], user=account, stderr=subprocess.DEVNULL
        )
        try:
            _wait_for(port)
            yield f"postgresql://howdah@127.0.0.1:{port}/{name}"
        finally:
            process.terminate()
            process.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, "the pooler did not start"
            time.sleep(0.02)
        else:
            return


def test_the_sync_queue_works_through_a_pooler(pooled: str) -> None:
    queue = JobQueue(pooled)
    queue.enqueue_many([("work", {"n": n}) for n in range(50)])
    for _ in range(10):
        queue.complete(queue.claim(batch_size=5))
    assert queue.counts()[Status.COMPLETED] == 50
    queue.close()


async def test_the_async_queue_works_through_a_pooler(pooled: str) -> None:
    queue = AsyncJobQueue(pooled)
    # More at once than the pooler has connections, so that callers use each other's sessions.
    await asyncio.gather(*(queue.enqueue("work", {"n": n}, queue=f"q{n % 3}") for n in range(60)))

    async def work(name: str) -> None:
        while jobs := await queue.claim(queues=name, batch_size=3):
            await queue.complete(jobs)

    await asyncio.gather(*(work(f"q{n % 3}") for n in range(9)))
    assert (await queue.counts())[Status.COMPLETED] == 60
    await queue.close()


async def test_a_worker_falls_back_to_polling_behind_a_pooler(pooled: str) -> None:
    app = App(pooled)

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    worker = Worker(app, concurrency=4)
    running = asyncio.create_task(worker.run())
    await worker.ready.wait()
    handles = [await double.aenqueue(n) for n in range(20)]
    assert [await handle.aresult(120) for handle in handles] == [2 * n for n in range(20)]
    worker.stop()
    await running
    await app.aclose()


async def test_nothing_listens_in_a_session_that_a_pooler_shares(
    pooled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LISTEN would stay in the session, and its notifications would reach whichever client has it next."""
    monkeypatch.setattr(listener, "SHARED_RETRY_SECONDS", 0.1)
    attempts: list[object] = []
    own_session = listener.Listener._own_session

    async def counted(self: listener.Listener, conn: object) -> int:
        attempts.append(conn)
        return await own_session(self, conn)

    monkeypatch.setattr(listener.Listener, "_own_session", counted)
    listening = listener.Listener(pooled, "howdah")
    listening.start()
    try:
        async with asyncio.timeout(120):
            await listening.connected.wait()  # so that nobody waits for it
            while len(attempts) < 5:
                assert not listening.healthy
                assert await asyncio.to_thread(channels, pooled) == set()
                await asyncio.sleep(0.02)
    finally:
        await listening.stop()


def channels(url: str) -> set[str]:
    """The channels that both sessions of the pooler listen on."""
    with (
        psycopg.connect(url, prepare_threshold=None) as one,
        psycopg.connect(url, prepare_threshold=None) as other,
    ):
        return {
            row[0]
            for conn in (one, other)
            for row in conn.execute("SELECT pg_listening_channels()")
        }


async def test_a_listener_works_through_a_pooler_in_session_mode(database: str) -> None:
    with run_pooler(database, "session") as url:
        listening = listener.Listener(url, "howdah")
        woken = asyncio.Event()
        listening.subscribe("wake", lambda payload: woken.set() if payload else None)
        listening.start()
        try:
            await eventually(lambda: listening.healthy, "it has notified itself")
            with psycopg.connect(database, autocommit=True) as conn:
                conn.execute("SELECT pg_notify('howdah:wake', '[]')")
            await asyncio.wait_for(woken.wait(), 60)
        finally:
            await listening.stop()


def doctor(url: str) -> dict[str, Finding]:
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as conn:
        return {each.check: each for each in Doctor(conn, "howdah").examine()}


def test_the_doctor_says_that_a_shared_session_gets_no_notifications(
    pooled: str, database: str
) -> None:
    found = doctor(pooled)["notifications"]
    assert found.level == "warning"
    assert found.text.startswith("none through this pooler: it is in transaction mode")
    assert channels(pooled) == set()
    with run_pooler(database, "session") as url:
        found = doctor(url)["notifications"]
    assert (found.level, found.text) == ("ok", "LISTEN works through the pooler, in session mode")


@pytest.mark.parametrize("queue_class", [JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"])
def test_the_limit_of_a_pooler_is_named(database: str, queue_class: Any) -> None:
    with run_pooler(database, "transaction", "max_client_conn = 1\n") as url:
        with psycopg.connect(url, prepare_threshold=None) as conn:
            conn.execute("SELECT 1")
            queue = queue_class(url, timeout=1)
            with pytest.raises(ConnectionLimit, match="accepts no more connections"):
                queue.enqueue("a")
        queue.close()
