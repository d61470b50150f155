"""Databases of the server under test: copies of a template, and a database that is emptied between tests.

A copy takes 100 ms or more, emptying 15 ms. Emptying deletes rows. If a test changed the schema or left another object
behind, the database is replaced by a new copy. Planner statistics and what PostgreSQL has cached are kept: a test that
depends on those needs its own copy."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import psycopg

from howdah import sql

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
# Everything that a test may change but rows. Daily partitions come and go by maintenance.
_OBJECTS = f"""
SELECT md5(concat_ws('|',
    ({sql.script("catalog")})::text,
    (SELECT string_agg(concat(version, functions_hash), ',' ORDER BY version) FROM migrations),
    (SELECT string_agg(concat(duty, rank, period, spacing), ',' ORDER BY duty) FROM maintenance),
    (SELECT string_agg(nspname, ',' ORDER BY nspname) FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp'),
    (SELECT string_agg(relname, ',' ORDER BY relname) FROM pg_class WHERE relnamespace = 'public'::regnamespace),
    (SELECT string_agg(proname, ',' ORDER BY proname) FROM pg_proc WHERE pronamespace = 'public'::regnamespace),
    (SELECT string_agg(relname || relacl::text, ',' ORDER BY relname) FROM pg_class
     WHERE relnamespace = 'howdah'::regnamespace AND relacl IS NOT NULL AND NOT relispartition),
    (SELECT string_agg(setconfig::text, ',' ORDER BY setrole) FROM pg_db_role_setting AS s
     JOIN pg_database AS d ON d.oid = s.setdatabase WHERE d.datname = current_database())))
"""


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
    """A copy of the template that tests use one after the other."""

    def __init__(self, databases: Databases, template: str) -> None:
        self._databases = databases
        self._template = template
        self._conn: psycopg.Connection[Any] | None = None
        self._empty = ""
        self._create()

    @property
    def url(self) -> str:
        return self._databases.url(self._name)

    def empty(self) -> None:
        """End all connections that a test left open, delete all rows, and make all duties due."""
        try:
            is_intact = self._objects() == self._expected
        except psycopg.Error:  # a test restarted the server, or dropped the schema
            self.close()
            is_intact = False
        if is_intact:
            self._connected().execute(self._empty.encode())
        else:
            self.close()
            self._databases.drop(self._name)
            self._create()

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _create(self) -> None:
        self._name = self._databases.create(self._template)
        self._expected = self._objects()

    def _objects(self) -> str:
        (objects,) = self._connected().execute(_OBJECTS.encode()).fetchone() or ("",)
        return str(objects)

    def _connected(self) -> psycopg.Connection[Any]:
        if self._conn is None:
            self._conn = psycopg.connect(self.url, autocommit=True)
            self._conn.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'".encode())
            self._conn.execute("SET search_path = howdah, pg_temp")
            tables = [name for (name,) in self._conn.execute(_TABLES, [list(SEEDED)])]
            deletes = [f"DELETE FROM {table}" for table in tables]
            self._empty = ";".join([_DISCONNECT, *deletes, _MAKE_ALL_DUTIES_DUE])
        return self._conn
