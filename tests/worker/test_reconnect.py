"""Workers that lose their database, in several ways: they reconnect, and so does their listener. These workers poll
once an hour, so only a notification can wake them."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import psycopg

from children import Child, Children, all_ended
from howdah import JobQueue
from howdah.embedded import EmbeddedServer
from waiting import until

HOURLY = {"FAULT_APP_POLL": "3600", "FAULT_APP_LEASE": "3"}
BURST = [{"job_type": "nap", "data": {"seconds": 0.02}, "max_attempts": 5}] * 150


def listens(conn: psycopg.Connection[Any], besides: int | None = None) -> int | None:
    """The server process of the worker's listening connection."""
    row = conn.execute(
        "SELECT pid FROM pg_stat_activity WHERE starts_with(query, 'NOTIFY ') AND pid <> ALL (%s) "
        "AND datname = current_database() AND state = 'idle'",
        [[] if besides is None else [besides]],
    ).fetchone()
    return None if row is None else int(row[0])


def assert_notifications_wake(children: Children, worker: Child, queue: JobQueue) -> None:
    """A job starts on the idle worker, which polls once an hour."""
    until(lambda: _is_idle(children.database), "the worker is idle")
    handle = queue.enqueue("nap", {"seconds": 0})
    until(lambda: str(handle.id) in children.counted("accepted"), "a notification woke it")
    assert worker.process.poll() is None


def _is_idle(database: str) -> bool:
    with psycopg.connect(database) as conn:
        return conn.execute("SELECT idle FROM howdah.workers").fetchall() == [(True,)]


def assert_all_ran(children: Children, conn: psycopg.Connection[Any]) -> None:
    until(lambda: all_ended(conn), "every job ended")
    ended = conn.execute("SELECT DISTINCT status FROM howdah.jobs").fetchall()
    assert ended == [("completed",)]
    assert set(children.counted("accepted").values()) == {1}


def test_a_worker_survives_a_server_that_is_restarted_under_load(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="howdah-restart-") as name:
        Path(name).chmod(0o755)
        server = EmbeddedServer(Path(name) / "pg", settings={"fsync": "off"})
        children = Children(tmp_path, server.start())
        queue = JobQueue(server.url)
        try:
            worker = children.start("--concurrency", "8", **HOURLY)
            queue.enqueue_many(BURST)
            until(lambda: len(children.ledger("effect")) > 20, "some jobs ran")
            server.stop("immediate")
            server.start()
            with psycopg.connect(server.url, autocommit=True) as conn:
                assert_all_ran(children, conn)
                until(lambda: listens(conn), "it listens again")
                assert_notifications_wake(children, worker, queue)
        finally:
            children.close()
            queue.close()
            server.remove()


def test_a_worker_survives_the_repeated_termination_of_its_connections(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    worker = children.start("--concurrency", "8", **HOURLY).ready()
    queue.enqueue_many(BURST)
    for already in (10, 60, 110):
        until(lambda n=already: len(children.ledger("effect")) > n, "some jobs ran")
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert_all_ran(children, conn)
    until(lambda: listens(conn), "it listens again")
    assert_notifications_wake(children, worker, queue)


def test_a_worker_closes_connections_that_are_read_only(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    worker = children.start("--concurrency", "8", **HOURLY).ready()
    name = conn.info.dbname
    conn.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    seen: set[int] = set()

    def count_connections() -> int:
        pids = conn.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")
        seen.update(pid for (pid,) in pids)
        return len(seen)

    until(lambda: count_connections() > 12, "it opens new connections")
    # Sessions that began read-only stay read-only; only new sessions can write.
    conn.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only".encode())
    queue.enqueue_many(BURST[:50])
    assert_all_ran(children, conn)
    assert_notifications_wake(children, worker, queue)


# ── a black hole ──────────────────────────────────────────────────────────────────────────────────


class BlackHole:
    """A proxy that can stop forwarding: the existing connections stay open and silent. New connections are
    forwarded."""

    def __init__(self, server_socket: Path) -> None:
        self._server_socket = str(server_socket)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._swallowing: threading.Event = threading.Event()
        self._links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, database: str) -> str:
        return f"postgresql://howdah@127.0.0.1:{self._listening.getsockname()[1]}/{database}"

    def swallow(self) -> None:
        """Stop forwarding on the existing connections."""
        self._swallowing.set()
        self._swallowing = threading.Event()

    def close(self) -> None:
        self._listening.close()
        for link in self._links:
            link.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server_socket)
                self._links += [client, server]
                for ends in ((client, server), (server, client)):
                    arguments = (*ends, self._swallowing)
                    threading.Thread(target=_forward, args=arguments, daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket, swallowing: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if not swallowing.is_set():
                sink.sendall(data)
        if not swallowing.is_set():
            sink.shutdown(socket.SHUT_WR)


def test_a_worker_replaces_connections_that_have_gone_silent(
    children: Children,
    queue: JobQueue,
    conn: psycopg.Connection[Any],
    server: EmbeddedServer,
) -> None:
    hole = BlackHole(server.socket_directory / ".s.PGSQL.5432")
    children.database = hole.url(conn.info.dbname)
    try:
        worker = children.start("--concurrency", "8", **HOURLY | {"FAULT_APP_LEASE": "9"})
        queue.enqueue_many(BURST)
        until(lambda: len(children.ledger("effect")) > 20, "some jobs ran")
        silent = listens(conn)
        hole.swallow()
        assert_all_ran(children, conn)
        until(lambda: listens(conn, besides=silent), "it listens on a new connection")
        assert_notifications_wake(children, worker, queue)
        # The leases were extended: the heartbeat has replaced its connection too.
        assert conn.execute("SELECT max(attempts) FROM howdah.jobs").fetchone() == (1,)
    finally:
        children.close()
        hole.close()
