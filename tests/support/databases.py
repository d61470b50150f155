"""Databases of the server under test: copies of a template, and a database that is emptied between tests.

A copy takes 100 ms or more, emptying 10 ms. Emptying deletes rows. It keeps planner statistics, dead rows and what
PostgreSQL has cached: a test that depends on those needs its own copy. If a test has changed the schema, the
next test gets a new copy."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from howdah.embedded import EmbeddedServer

LOCK_TIMEOUT_SECONDS = 10

_DISCONNECT = (
    f"SELECT pg_terminate_backend(pid, {1000 * LOCK_TIMEOUT_SECONDS}) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)
_TABLES = (
    "SELECT format('howdah.%I', relname) FROM pg_class "
    "WHERE relnamespace = 'howdah'::regnamespace AND relkind IN ('r', 'p') "
    "AND NOT relispartition ORDER BY relname"
)
# Every change of a catalog row leaves a row with a new xmin, or fewer rows. Temporary tables leave their schema.
_CATALOGS = (
    "pg_class", "pg_attribute", "pg_attrdef", "pg_constraint", "pg_default_acl", "pg_extension", "pg_index",
    "pg_proc", "pg_rewrite", "pg_trigger", "pg_type", "pg_db_role_setting",
    "pg_namespace WHERE nspname NOT LIKE 'pg%temp%'",
    "pg_database WHERE datname = current_database()",
)  # fmt: skip
_DUTIES = "howdah.maintenance"
_MAKE_ALL_DUTIES_DUE = (
    f"UPDATE {_DUTIES} SET due_at = clock_timestamp(), reached = '-infinity', observed = '-infinity', "
    "state = '{}', took = NULL, last_error = NULL"
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
        with self._connect() as conn:
            options = f" TEMPLATE {template}" if template else ""
            if template and conn.info.server_version >= 150000:
                options += " STRATEGY file_copy"  # 30 % less CPU than wal_log, without fsync
            conn.execute(f"CREATE DATABASE {name}{options}".encode())
        return name

    def drop(self, name: str) -> None:
        with self._connect() as conn:
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._server.url, autocommit=True)


class SharedDatabase:
    """A copy of a template with the schema `howdah`, which tests use one after the other."""

    def __init__(self, databases: Databases, template: str) -> None:
        self._databases = databases
        self._template = template
        self._name: str | None = None
        self._conn: psycopg.Connection[Any] | None = None
        self._read_schema = self._empty = ""
        self._schema: Any = None

    def empty(self) -> str:
        """End all connections that a test left open, delete all rows, and make all duties due. Returns the
        URL."""
        try:
            self._reuse()
        except (psycopg.Error, _Changed):  # by a test: of the server, or of the schema
            self.drop()
            self._copy()
        return self._databases.url(self._name or "")

    def drop(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None
        if self._name is not None:
            self._databases.drop(self._name)
            self._name = None

    def _reuse(self) -> None:
        if self._conn is None:
            raise _Changed
        self._conn.execute(_DISCONNECT)
        if self._conn.execute(self._read_schema.encode()).fetchall() != self._schema:
            raise _Changed
        self._conn.execute(self._empty.encode())

    def _copy(self) -> None:
        self._name = self._databases.create(self._template)
        self._conn = conn = psycopg.connect(self._databases.url(self._name), autocommit=True)
        conn.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'".encode())
        tables = [name for (name,) in conn.execute(_TABLES)]
        # The template has rows of migrations and grants, which belong to the schema.
        seeded = [
            name for name in tables if conn.execute(f"SELECT 1 FROM {name}".encode()).fetchone()
        ]
        deletes = [f"DELETE FROM {name}" for name in tables if name not in seeded]
        self._empty = ";".join([*deletes, _MAKE_ALL_DUTIES_DUE])
        self._read_schema = " UNION ALL ".join(
            [
                *(
                    f"SELECT NULL, count(*), max(xmin::text::bigint) FROM {each}"
                    for each in _CATALOGS
                ),
                *(f"SELECT t::text, 0, 0 FROM {name} AS t" for name in seeded if name != _DUTIES),
            ]
        )
        self._schema = conn.execute(self._read_schema.encode()).fetchall()


class _Changed(Exception):
    """The database cannot be used again."""
