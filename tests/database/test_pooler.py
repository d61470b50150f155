"""Through a real PgBouncer in transaction mode, where a session ends with its transaction."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from howdah import App, AsyncJobQueue, JobQueue, Status, Worker
from howdah.database import listener

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="PgBouncer is not installed")


@pytest.fixture
def pooled(database: str) -> Iterator[str]:
    """The URL of `database` behind a pooler with two connections to it."""
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
            "auth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n"
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


async def test_a_listener_behind_a_pooler_is_never_healthy(
    pooled: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pooler may run LISTEN and the probing NOTIFY in the same session, which then notifies itself.
    Notifications of other sessions do not arrive."""
    monkeypatch.setattr(listener, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(listener, "PROBE_TIMEOUT_SECONDS", 0.2)
    listening = listener.Listener(pooled, "howdah")
    listening.start()
    probes: set[object] = set()
    try:
        async with asyncio.timeout(240):
            while len(probes) < 5:
                with psycopg.connect(database, autocommit=True) as conn:
                    probes |= {
                        row[0]
                        for row in conn.execute(
                            "SELECT query_start FROM pg_stat_activity "
                            "WHERE starts_with(query, 'NOTIFY ') AND datname = current_database()"
                        )
                    }
                assert not listening.healthy
                await asyncio.sleep(0.01)
    finally:
        await listening.stop()
