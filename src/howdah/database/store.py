"""Runs Statements for the sync client, on a psycopg pool.

Owns the pool, the first use (the schema is checked, and created if it is missing) and reconnecting.
`retry_loop.py` decides when a statement is resent. `async_store.py` does the same for asyncio.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import psycopg_pool
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from howdah.database import caller_connection, connection, migrate, sql_steps
from howdah.database.driver_errors import (
    Address,
    is_connection_lost,
    is_refused,
    is_schema_missing,
    raise_translated,
    seconds_left,
    unsendable_text,
)
from howdah.database.retry_loop import (
    COMMAND_TIMEOUT_SECONDS,
    POOL_CONNECTIONS,
    TIMEOUT_SECONDS,
    RetryLoop,
    StoreSettings,
)
from howdah.database.session_setup import READ_STRICT, SESSION_SETUP
from howdah.database.statement_deadline import StatementDeadline
from howdah.embedded import resolve_url
from howdah.encoding import database_url
from howdah.encoding.safe_logger import get_logger
from howdah.errors import InvalidOption, NoDatabase, NotPermitted, SchemaMissing
from howdah.protocol.statements import Statements

if TYPE_CHECKING:
    from collections.abc import Iterable

    from howdah.protocol.statements import Rows, Statement

logger = get_logger(__name__)

T = TypeVar("T")

POOL_NAME = "howdah-pool"
CONNECT_TIMEOUT_SECONDS = 5
CLOSE_TIMEOUT_SECONDS = 5.0
# Idle threads of a pool stop in milliseconds. One that is connecting is not waited for.
REPLACE_TIMEOUT_SECONDS = 0.2
IDLE_CHECKOUT_SECONDS = 0.05
# A half-open connection is noticed within about 25 seconds, also while an answer is awaited.
_LIBPQ_OPTIONS: dict[str, Any] = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": 10,  # seconds
    "keepalives_interval": 5,  # seconds
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # milliseconds
    **connection.ENCODING,
}


class Store:
    """The sync runner: statements on a psycopg pool that opens on first use and survives a fork."""

    def __init__(
        self,
        database: str | psycopg_pool.ConnectionPool[Any] | None,
        schema: str,
        *,
        create: bool = True,
        timeout: float = TIMEOUT_SECONDS,
        command_timeout: float = COMMAND_TIMEOUT_SECONDS,
    ) -> None:
        if database is not None and not isinstance(database, str | psycopg_pool.ConnectionPool):
            raise InvalidOption(
                f"JobQueue takes a URL or a psycopg_pool.ConnectionPool, not {type(database).__name__}."
            )
        self._database = database
        self._settings = StoreSettings(
            database, schema, create=create, timeout=timeout, command_timeout=command_timeout
        )
        self._lock = threading.Lock()
        self._pool: psycopg_pool.ConnectionPool[Any] | None = None
        self._schema_seen = False
        self._is_strict = False  # transactions of our role or database: `READ_STRICT`
        _stores.add(self)

    def _forget_pool(self) -> None:
        # The sockets belong to the parent: the child drops them without closing them and opens its own.
        # A reference to the pool is kept: its finalizer would wait for threads that the child lacks.
        if self._pool is not None:
            _pools_of_parents.append(self._pool)
        self._lock = threading.Lock()
        self._pool = None

    def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        if conn is None:
            try:
                return self.run_all([statement])[0]
            except NotPermitted:
                if statement.fallback is None:
                    raise
                return self.run_all([statement.fallback()])[0]
        schema = self._settings.schema
        try:
            if self._settings.create and not self._schema_seen:
                check = Statements(schema).has_schema()
                if not check.decode(caller_connection.run(conn, check)):
                    # Not on the caller's connection: a rollback there would undo the migration.
                    self._open_pool()
                self._schema_seen = True
            rows = caller_connection.run(conn, statement)
        except NoDatabase:
            raise SchemaMissing(schema) from None
        except Exception as error:
            raise_translated(error, schema)
        return statement.decode(rows)

    def run_all(self, statements: Iterable[Statement[T]]) -> list[T]:
        """Run statements in one transaction, from the start again if the connection breaks. An iterable may
        build them while they are sent."""
        loop = RetryLoop(self._settings, statements)
        while True:
            pool = None
            try:
                pool = self._open_pool(loop)
                answers = self._attempt(pool, statements, loop.resend)
            except (psycopg.Error, OSError) as error:
                if pool is not None and is_schema_missing(error):
                    self._check_schema(pool)
                is_broken = loop.after(error)
                pause = loop.pause(error)
            else:
                if self._settings.is_failing:
                    self._settings.note_success()
                return answers
            if is_broken and pool is not None:
                self._replace(pool)
            time.sleep(pause)

    @property
    def command_timeout(self) -> float:
        """Seconds to wait for the answer to one statement."""
        return self._settings.command_timeout

    def _check_schema(self, pool: psycopg_pool.ConnectionPool[Any]) -> None:
        """Raise `SchemaTooNew` if a newer Howdah has migrated the schema while this process runs."""
        check = migrate.check(self._settings.schema, create=False)
        with pool.connection(self._settings.checkout_timeout) as conn:
            self._drive(conn, check)

    def _drive(self, conn: psycopg.Connection[Any], steps: sql_steps.Steps[T]) -> T:
        timeout = self._settings.command_timeout
        with StatementDeadline(conn, timeout) as deadline:
            return sql_steps.drive(conn, steps, timeout, deadline)

    def _replace(self, pool: psycopg_pool.ConnectionPool[Any]) -> None:
        """Replace a pool after one of its connections broke. Connections in use stay open."""
        if pool is self._database:
            _replace_idle_connections(pool)
            return
        # A new pool connects at once. The attempts of the old one are seconds apart.
        with self._lock:
            if self._pool is pool:
                self._pool = None
        pool.close(REPLACE_TIMEOUT_SECONDS)

    def _attempt(
        self,
        pool: psycopg_pool.ConnectionPool[Any],
        statements: Iterable[Statement[T]],
        resend: bool,
    ) -> list[T]:
        is_single = isinstance(statements, list) and len(statements) == 1
        timeout = self._settings.command_timeout
        rows = []
        with (
            pool.connection(self._settings.checkout_timeout) as conn,
            StatementDeadline(conn, timeout) as deadline,
        ):
            try:
                is_plain = is_single and not self._is_strict
                with contextlib.nullcontext() if is_plain else conn.transaction():
                    if self._is_strict:
                        conn.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                    for each in statements:
                        deadline.renew(each.timeout or timeout)
                        rows.append((each, _fetch(conn, each, resend)))
                    deadline.renew(timeout)
                if not conn.autocommit:  # the caller's pool
                    conn.commit()
            except psycopg.Error as error:
                if is_connection_lost(error):
                    if pool is not self._database:
                        # Before the connection is returned: an open pool would connect in its place.
                        self._replace(pool)
                    conn.close()
                raise
        return [statement.decode(answer) for statement, answer in rows]

    def _open_pool(self, loop: RetryLoop | None = None) -> psycopg_pool.ConnectionPool[Any]:
        """The pool. The first caller opens it, and others wait for that until their deadline."""
        pool = self._pool
        if pool is not None:
            return pool
        loop = loop or RetryLoop(self._settings)
        if not self._lock.acquire(timeout=seconds_left(loop.deadline)):
            raise self._settings.unreachable(TimeoutError(), loop.began)
        try:
            if self._pool is None:
                self._pool = self._connect_pool(loop)
            return self._pool
        finally:
            self._lock.release()

    def _connect_pool(self, loop: RetryLoop) -> psycopg_pool.ConnectionPool[Any]:
        settings = self._settings
        prepare = migrate.prepare(settings.schema, create=settings.create)
        if isinstance(self._database, psycopg_pool.ConnectionPool):
            settings.address = _address_of(self._database)
            with self._database.connection(seconds_left(loop.deadline)) as conn:
                settings.address = (conn.info.host, conn.info.dbname)
                autocommit = conn.autocommit
                conn.autocommit = True
                try:
                    self._drive(conn, prepare)
                    self._is_strict = _is_strict(conn)
                finally:
                    conn.autocommit = autocommit
            return self._database
        url = resolve_url(self._database)
        settings.address = database_url.host_and_database(url)
        # The first connection is not the pool's, so that an unreachable server is reported with its reason.
        with self._connect(url, loop) as conn:
            self._drive(conn, prepare)
            self._is_strict = _is_strict(conn)
        return _Pool(
            url,
            connection_class=_Connection,
            min_size=0,
            max_size=POOL_CONNECTIONS,
            open=True,
            timeout=settings.timeout,
            reconnect_timeout=settings.checkout_timeout / 2,
            name=POOL_NAME,
            kwargs={"autocommit": True, "prepare_threshold": None, **_LIBPQ_OPTIONS},
            configure=_set_up_session,
        )

    def _connect(self, url: str, loop: RetryLoop) -> psycopg.Connection[Any]:
        while True:
            timeout = min(CONNECT_TIMEOUT_SECONDS, math.ceil(seconds_left(loop.deadline)))
            options = _LIBPQ_OPTIONS | {"connect_timeout": timeout}
            try:
                conn = psycopg.connect(url, autocommit=True, prepare_threshold=None, **options)
                _set_up_session(conn)
                return conn
            except psycopg.ProgrammingError:
                raise database_url.unreadable_url() from None
            except psycopg.OperationalError as error:
                self._settings.note_failure(error)
                # A server that is starting will answer; a wrong password or name stays wrong.
                if time.monotonic() >= loop.deadline or is_refused(error):
                    raise self._settings.unreachable(error, loop.began) from error
                pause = loop.pause(error)
            time.sleep(pause)

    def close(self) -> None:
        """Close the pool, unless it is the caller's. The next call opens it again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and pool is not self._database:
            pool.close(CLOSE_TIMEOUT_SECONDS)


class _Pool(psycopg_pool.ConnectionPool[Any]):
    """A pool that does not delay the exit of a process that did not close it.

    The finalizer of the base class joins the pool's four daemon threads, for 5 seconds each. Threads no
    longer run while the interpreter is finalized, and since Python 3.13 joining them waits for the whole
    timeout. Their sockets are closed with the process. An `atexit` hook that closes pools is no
    alternative: daemon threads that still use the pool would open it again and print tracebacks."""

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        if not sys.is_finalizing():
            super().close(timeout)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            super().__del__()


class _Connection(psycopg.Connection[Any]):
    """A connection of our pools, by which `_PoolLog` recognizes it."""


class _PoolLog(logging.Filter):
    """Passes what psycopg logs about our own pools to our logger, at the level DEBUG. The errors are raised to
    the callers, and a program that has not set up logging would show these lines on its standard error."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        if any(isinstance(each, _Connection) or _names_pool(each) for each in arguments):
            logger.debug("connection pool", extra={"detail": record.getMessage()})
            return False
        return True


def _names_pool(value: object) -> bool:
    # The pool's name, the name of one of its threads, or one of its tasks, which refers to the pool.
    if isinstance(value, str):
        return value == POOL_NAME or value.startswith(f"{POOL_NAME}-")
    pool = getattr(value, "pool", None)
    return isinstance(pool() if callable(pool) else pool, _Pool)


logging.getLogger("psycopg.pool").addFilter(_PoolLog())


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_pools_of_parents: list[object] = []


def _after_fork() -> None:
    for store in list(_stores):
        store._forget_pool()


os.register_at_fork(after_in_child=_after_fork)


def _address_of(pool: psycopg_pool.ConnectionPool[Any]) -> Address:
    # Either may be a callable in newer versions of the pool.
    known: dict[str, Any] = (
        conninfo_to_dict(pool.conninfo) if isinstance(pool.conninfo, str) else {}
    )
    if isinstance(pool.kwargs, dict):
        known |= pool.kwargs
    return str(known.get("host", "localhost")), str(known.get("dbname", "(default)"))


def _replace_idle_connections(pool: psycopg_pool.ConnectionPool[Any]) -> None:
    """Make a caller's pool replace its idle connections. `pool.check()` would wait for an answer on each,
    and a server that is silent never sends one."""
    with contextlib.suppress(psycopg_pool.PoolTimeout):
        for _ in range(pool.get_stats().get("pool_available", 0)):
            conn = pool.getconn(IDLE_CHECKOUT_SECONDS)
            conn.close()
            pool.putconn(conn)


def _fetch(conn: psycopg.Connection[Any], statement: Statement[Any], resend: bool) -> Rows:
    if resend and statement.resend is not None:
        statement = statement.resend()
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        if statement.copy is not None:
            with cursor.copy(statement.text) as copy:
                for lines in statement.copy.lines:
                    copy.write(lines)
            return []
        try:
            # Binary, so that DateStyle and IntervalStyle of the role or database do not matter.
            cursor.execute(statement.text, statement.parameters, binary=True)
        except UnicodeEncodeError as error:  # the caller's pool
            raise unsendable_text(error) from error
        return cursor.fetchall()


def _set_up_session(conn: psycopg.Connection[Any]) -> None:
    # After an error of the connection, the next statement on it raises the same error.
    with StatementDeadline(conn, CONNECT_TIMEOUT_SECONDS), contextlib.suppress(psycopg.Error):
        conn.execute(SESSION_SETUP.encode())


def _is_strict(conn: psycopg.Connection[Any]) -> bool:
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        return cursor.execute(READ_STRICT).fetchall() == [(True,)]
