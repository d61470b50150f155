"""The implementation of the fixture `howdah_database`: a queue that is emptied before each test, on a PostgreSQL
server that is started for the session, or in a schema that is created for it in an existing database."""

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

# The data is deleted at the end of the session, so it need not survive a crash of the machine.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "200",
}
# Identifies schemas that killed sessions left, also those of other versions: must not change.
MARK = "made by the pytest fixture howdah_database, which deletes all that is in it"
LOCK_TIMEOUT_SECONDS = 1
_WATCHDOG = (
    "import sys\n"
    "if not sys.stdin.read():\n"
    "    from howdah.testing.database import remove_server\n"
    "    remove_server(sys.argv[1])\n"
)


@contextlib.contextmanager
def session_server() -> Iterator[str]:
    """The URL of a server that runs until the end of the block or of this process."""
    directory = tempfile.mkdtemp(prefix="howdah-pytest-")
    os.chmod(directory, 0o755)  # noqa: S103 - a server of root runs under another account
    with _watchdog(directory):
        try:
            yield EmbeddedServer(Path(directory) / "pg", settings=SETTINGS).start()
        finally:
            remove_server(directory)


def remove_server(directory: str) -> None:
    """Stop the server of a session and delete its files."""
    EmbeddedServer(Path(directory) / "pg").remove()
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _watchdog(directory: str) -> Iterator[None]:
    """A process that removes the server if this process is killed, which closes its standard input."""
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", _WATCHDOG, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must not stop it
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        try:
            yield
        finally:
            process.communicate(b"done")


class SessionSchema:
    """The schema of a test session."""

    def __init__(self, conn: Connection, schema: str) -> None:
        self._conn = conn
        self._schema = schema
        # Tables with rows of a migration are kept as they are. All other rows belong to tests.
        seeds = [table for table in self._tables() if self._has_rows(table)]
        self._delete = ";".join(f"DELETE FROM {t}" for t in self._tables() if t not in seeds)

    def empty(self) -> None:
        """Delete all rows. If a transaction that a test left open holds a lock, its connection is ended."""
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
def session_schema(url: str, schema: str, *, drop: bool) -> Iterator[SessionSchema]:
    """A schema in the database at `url`, created here and dropped at the end. A schema that was not created by
    this function, or that another session uses, is rejected."""
    name = quote_schema(schema)
    with connection.connect(url) as conn:
        conn.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'".encode())
        locked = conn.execute(
            "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [f"howdah:pytest:{schema}"]
        ).fetchone()
        if locked != (True,):
            raise HowdahError(
                f'another pytest is using schema "{schema}" of {database_url.redact(url)}. Under xdist, give '
                "each worker its own: write {worker} into howdah_database_url or howdah_schema."
            )
        found = conn.execute(
            "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s",
            [schema],
        ).fetchone()
        if found is not None and found != (MARK,):
            raise HowdahError(
                f'schema "{schema}" of {database_url.redact(url)} was not created by howdah_database, '
                "which deletes all jobs in it. Set howdah_database_url to a database for tests, or drop the "
                "schema."
            )
        conn.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE".encode())
        try:
            conn.execute(f"CREATE SCHEMA {name}; COMMENT ON SCHEMA {name} IS '{MARK}'".encode())
            migrate.migrate(conn, schema)
            yield SessionSchema(conn, schema)
        finally:
            if drop:
                conn.execute(f"DROP SCHEMA {name} CASCADE".encode())
