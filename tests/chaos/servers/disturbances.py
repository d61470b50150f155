"""Other sessions that disturb a shared database. The context managers hold a resource while their block runs."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import psycopg

from children import until

if TYPE_CHECKING:
    from collections.abc import Iterator


_NOT_VALID = """
    SELECT i.indexrelid::regclass::text
    FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid
    WHERE c.relnamespace = 'howdah'::regnamespace AND NOT i.indisvalid
"""


@contextlib.contextmanager
def held_transaction(url: str) -> Iterator[int]:
    """A session that read the queue and stays `idle in transaction`, with a snapshot that holds vacuum back. Yields
    its process id."""
    with psycopg.connect(url) as conn:
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT count(*) FROM howdah.jobs")
        conn.execute("SELECT pg_current_xact_id()")
        yield conn.info.backend_pid
        conn.rollback()


@contextlib.contextmanager
def ddl_lock(url: str) -> Iterator[int]:
    """A session that holds the strongest lock on live_jobs: no other session can even read it. Yields its process
    id."""
    with psycopg.connect(url) as conn:
        conn.execute("LOCK TABLE howdah.live_jobs IN ACCESS EXCLUSIVE MODE")
        yield conn.info.backend_pid
        conn.rollback()


def waiting_for(url: str, pid: int) -> int:
    """The number of sessions that wait for a lock of this process."""
    with psycopg.connect(url, autocommit=True) as conn:
        row = conn.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))", [pid]
        ).fetchone()
    assert row is not None
    return int(row[0])


def reindex(url: str, *, concurrently: bool) -> None:
    """Rebuild the indexes of live_jobs.

    REINDEX takes its locks one after the other, so it can deadlock with a transaction that reads before it writes.
    PostgreSQL then cancels one of the two; the REINDEX is retried."""
    how = " CONCURRENTLY" if concurrently else ""
    with psycopg.connect(url, autocommit=True) as conn:
        while True:
            try:
                conn.execute(f"REINDEX TABLE{how} howdah.live_jobs".encode())
            except psycopg.errors.DeadlockDetected:
                _drop_invalid_indexes(conn)
            else:
                return


def _drop_invalid_indexes(conn: psycopg.Connection[Any]) -> None:
    """A cancelled REINDEX CONCURRENTLY leaves invalid indexes."""
    for (index,) in conn.execute(_NOT_VALID).fetchall():
        conn.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {index}".encode())


def indexes_are_valid(url: str) -> bool:
    """Whether no REINDEX left an invalid index."""
    with psycopg.connect(url, autocommit=True) as conn:
        return not conn.execute(_NOT_VALID).fetchall()


@contextlib.contextmanager
def no_connection_left(url: str) -> Iterator[int]:
    """Take every connection slot of the server: terminate all other connections and take their slots too. Yields the
    number of slots taken.

    `url` is that of the superuser; the slots reserved for superusers are taken as well."""
    taken: list[psycopg.Connection[Any]] = []
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            try:
                taken.append(psycopg.connect(url, autocommit=True, application_name="taker"))
            except psycopg.OperationalError:
                stop.wait(0.005)

    with psycopg.connect(url, autocommit=True) as conn:
        thread = threading.Thread(target=take, name="connection-taker")
        thread.start()
        try:
            until(lambda: _terminate_others(conn) == 0, "no other session is connected")
            until(lambda: _is_full(url), "no connection slot is free")
            yield len(taken)
        finally:
            stop.set()
            thread.join()
            for each in taken:
                each.close()


def _terminate_others(conn: psycopg.Connection[Any]) -> int:
    """Terminate all connections except those of the taker; returns how many there were."""
    return len(
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND backend_type = 'client backend' AND application_name <> 'taker'"
        ).fetchall()
    )


def _is_full(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError as error:
        return "too many clients" in str(error)
    return False
