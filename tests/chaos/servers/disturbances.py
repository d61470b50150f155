"""What others do to a database that is not ours alone. Each is a context manager: for as long as the block
lasts, somebody holds something."""

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
    """Somebody has read the queue and gone to lunch: `idle in transaction`, with a snapshot that vacuum
    must heed. Gives its process id."""
    with psycopg.connect(url) as conn:
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT count(*) FROM howdah.jobs")
        conn.execute("SELECT pg_current_xact_id()")
        yield conn.info.backend_pid
        conn.rollback()


@contextlib.contextmanager
def ddl_lock(url: str) -> Iterator[int]:
    """Somebody changes the table of live jobs and does not commit: nobody can even read it. Gives how
    many statements were seen to wait for it."""
    with psycopg.connect(url) as conn:
        conn.execute("LOCK TABLE howdah.live_jobs IN ACCESS EXCLUSIVE MODE")
        yield conn.info.backend_pid
        conn.rollback()


def waiting_for(url: str, pid: int) -> int:
    """How many sessions wait for a lock that this one holds."""
    with psycopg.connect(url, autocommit=True) as conn:
        row = conn.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))", [pid]
        ).fetchone()
    assert row is not None
    return int(row[0])


def reindex(url: str, *, concurrently: bool) -> None:
    """Build the indexes of the table of live jobs anew.

    It takes its locks one after the other, so whoever reads before it writes may meet it in a deadlock;
    PostgreSQL then ends either, and one tries again."""
    how = " CONCURRENTLY" if concurrently else ""
    with psycopg.connect(url, autocommit=True) as conn:
        while True:
            try:
                conn.execute(f"REINDEX TABLE{how} howdah.live_jobs".encode())
            except psycopg.errors.DeadlockDetected:
                _drop_half_built(conn)
            else:
                return


def _drop_half_built(conn: psycopg.Connection[Any]) -> None:
    """What a REINDEX CONCURRENTLY that was ended leaves behind."""
    for (index,) in conn.execute(_NOT_VALID).fetchall():
        conn.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {index}".encode())


def indexes_are_valid(url: str) -> bool:
    """Whether a REINDEX has left nothing half-built behind."""
    with psycopg.connect(url, autocommit=True) as conn:
        return not conn.execute(_NOT_VALID).fetchall()


@contextlib.contextmanager
def no_connection_left(url: str) -> Iterator[int]:
    """Others take every connection that the server has, also ours when they are ended. Gives how many
    they have.

    `url` is of the superuser, for whom the server has some in reserve; those are taken as well."""
    taken: list[psycopg.Connection[Any]] = []
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            try:
                taken.append(psycopg.connect(url, autocommit=True, application_name="taker"))
            except psycopg.OperationalError:
                stop.wait(0.005)

    with psycopg.connect(url, autocommit=True) as conn:
        thread = threading.Thread(target=take, name="takes-connections")
        thread.start()
        try:
            until(lambda: _end_others(conn) == 0, "nobody else has a connection")
            until(lambda: _is_full(url), "no connection is left")
            yield len(taken)
        finally:
            stop.set()
            thread.join()
            for each in taken:
                each.close()


def _end_others(conn: psycopg.Connection[Any]) -> int:
    """End the connections of everybody but the takers; how many there were."""
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
