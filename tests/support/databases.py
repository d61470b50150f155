"""Databases of the server under test: copies of a template, and a database that is emptied between tests.

A copy takes 100 ms or more, emptying 5 ms. Emptying deletes rows; it keeps tables, planner statistics and what
PostgreSQL has cached. A test that changes those needs a copy."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from howdah.embedded import EmbeddedServer

LOCK_TIMEOUT_SECONDS = 10
# Rows of a migration, which no test may delete.
SEEDED = ("migrations", "maintenance")

_DISCONNECT = (
    f"SELECT pg_terminate_backend(pid, {1000 * LOCK_TIMEOUT_SECONDS}) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)
_TABLES = (
    "SELECT format('howdah.%%I', relname) FROM pg_class "
    "WHERE relnamespace = 'howdah'::regnamespace AND relkind IN ('r', 'p') "
    "AND NOT relispartition AND relname <> ALL (%s) ORDER BY relname"
)
_MAKE_ALL_DUTIES_DUE = (
    "UPDATE howdah.maintenance "
    "SET due_at = clock_timestamp(), reached = '-infinity', last_error = NULL"
)


class Databases:
    """Creates and drops databases of one server."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._numbers = itertools.count(1)

    def url(self, name: str) -> str:
        return self._server.url.replace("/howdah?", f"/{name}?")

    def create(self, template: str | None = None, *, name: str | None = None) -> str:
        """The name of a new database: a copy of the template, or an empty database."""
        name = name or f"test_{next(self._numbers)}"
        source = f" TEMPLATE {template}" if template else ""
        self._execute(f"CREATE DATABASE {name}{source}")
        return name

    def drop(self, name: str) -> None:
        self._execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self._server.url, autocommit=True) as conn:
            conn.execute(statement.encode())


class SharedDatabase:
    """A database with the schema `howdah` that tests use one after the other."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._conn: psycopg.Connection[Any] | None = None
        self._empty = ""

    def empty(self) -> None:
        """End all connections that a test left open, delete all rows, and make all duties due."""
        try:
            self._connected().execute(self._empty.encode())
        except psycopg.OperationalError:  # a test restarted the server
            self.close()
            self._connected().execute(self._empty.encode())

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _connected(self) -> psycopg.Connection[Any]:
        if self._conn is None:
            self._conn = psycopg.connect(self.url, autocommit=True)
            self._conn.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'".encode())
            tables = [name for (name,) in self._conn.execute(_TABLES, [list(SEEDED)])]
            deletes = [f"DELETE FROM {table}" for table in tables]
            self._empty = ";".join([_DISCONNECT, *deletes, _MAKE_ALL_DUTIES_DUE])
        return self._conn
