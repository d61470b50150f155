"""A queue that is emptied for every test: on a PostgreSQL made for the session, or in a schema made for it in
a database that exists. Behind the fixture `howdah_database`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from howdah.database import connection, migrate
from howdah.database.connection import Connection, LockNotAvailable
from howdah.embedded import EmbeddedServer
from howdah.encoding import database_url
from howdah.errors import HowdahError
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

# Nothing of this outlives the session, so nothing has to survive a crash of the machine.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "200",
}
MARK = "made by the pytest fixture howdah_database, which deletes all that is in it"
LOCK_TIMEOUT = "1s"
_WATCHDOG = (
    "import sys\n"
    "if not sys.stdin.read():\n"
    "    from howdah.testing.database import remove_server\n"
    "    remove_server(sys.argv[1])\n"
)


@contextlib.contextmanager
def session_server() -> Iterator[str]:
    """The URL of a server that is there until the block, or this process, has ended."""
    where = tempfile.mkdtemp(prefix="howdah-pytest-")
    os.chmod(where, 0o755)  # noqa: S103 - root's server runs under another account
    with _watchdog(where):
        try:
            yield EmbeddedServer(Path(where) / "pg", settings=SETTINGS).start()
        finally:
            remove_server(where)


def remove_server(where: str) -> None:
    """Stop a session's server and delete what it left."""
    EmbeddedServer(Path(where) / "pg").remove()
    shutil.rmtree(where, ignore_errors=True)


@contextlib.contextmanager
def _watchdog(where: str) -> Iterator[None]:
    """A process that removes the server when this one is killed: then its standard input ends."""
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", _WATCHDOG, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        try:
            yield
        finally:
            process.communicate(b"done")


class Emptied:
    """A schema of this session's own."""

    def __init__(self, conn: Connection, schema: str) -> None:
        self._conn = conn
        self._schema = schema
        # What a migration has put there stays; the rest is of the tests.
        seeds = [table for table in self._tables() if self._has_rows(table)]
        self._delete = ";".join(f"DELETE FROM {t}" for t in self._tables() if t not in seeds)

    def empty(self) -> None:
        """Delete every row. A transaction that a test left open is ended if it stands in the way."""
        try:
            self._conn.execute(self._delete.encode())
        except LockNotAvailable:
            self._conn.execute(
                "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity AS a "
                "WHERE a.state LIKE 'idle in transaction%%' AND a.pid IN ("
                "SELECT l.pid FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation "
                "WHERE c.relnamespace = %s::regnamespace)",
                [quote_schema(self._schema)],
            )
            self._conn.execute(self._delete.encode())

    def _tables(self) -> list[str]:
        rows = self._conn.execute(
            "SELECT format('%%I.%%I', %s::text, c.relname) FROM pg_class AS c "
            "WHERE c.relnamespace = %s::regnamespace "
            "AND c.relkind IN ('r', 'p') AND NOT c.relispartition ORDER BY c.relname",
            [self._schema, quote_schema(self._schema)],
        )
        return [name for (name,) in rows]

    def _has_rows(self, table: str) -> bool:
        row = self._conn.execute(f"SELECT EXISTS (SELECT FROM {table})".encode()).fetchone()
        return bool(row and row[0])


@contextlib.contextmanager
def session_schema(url: str, schema: str, *, drop: bool) -> Iterator[Emptied]:
    """A schema in the database at `url`, made here and dropped at the end. One that somebody else has
    made is left alone, and so is one that another session is using."""
    name = quote_schema(schema)
    with connection.connect(url) as conn:
        conn.execute(f"SET lock_timeout = '{LOCK_TIMEOUT}'".encode())
        locked = conn.execute(
            "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [f"howdah:pytest:{schema}"]
        ).fetchone()
        if locked != (True,):
            raise HowdahError(
                f'another pytest is using schema "{schema}" of {database_url.redact(url)}. Under xdist give '
                "each worker its own: write {worker} into howdah_database_url or howdah_schema."
            )
        found = conn.execute(
            "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s",
            [schema],
        ).fetchone()
        if found is not None and found != (MARK,):
            raise HowdahError(
                f'schema "{schema}" of {database_url.redact(url)} was not made by howdah_database, which '
                "deletes all jobs in it. Name a database for tests in howdah_database_url, or drop it."
            )
        conn.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE".encode())
        try:
            conn.execute(f"CREATE SCHEMA {name}; COMMENT ON SCHEMA {name} IS '{MARK}'".encode())
            migrate.migrate(conn, schema)
            yield Emptied(conn, schema)
        finally:
            if drop:
                conn.execute(f"DROP SCHEMA {name} CASCADE".encode())
