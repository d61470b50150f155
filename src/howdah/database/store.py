"""Runs Statements for the sync client, on a psycopg pool.

Owns the pool, first use (the schema is checked, and made if it is missing) and reconnecting. A statement
whose connection broke is sent again, as `Statement.resend` says. `async_store.py` does the same for asyncio.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import psycopg_pool
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from howdah.database import caller_connection, migrate
from howdah.database.driver_errors import (
    COMMAND_TIMEOUT_SECONDS,
    POOL_CONNECTIONS,
    RETRY_DELAY_SECONDS,
    TIMEOUT_SECONDS,
    Unanswered,
    Where,
    has_schema,
    is_connection_lost,
    is_ours,
    is_refused,
    is_schema_missing,
    raise_translated,
    seconds_left,
    unreachable,
)
from howdah.database.statement_deadline import Patience
from howdah.embedded import resolve_url
from howdah.encoding import database_url, validation
from howdah.errors import InvalidOption, NoDatabase, SchemaMissing
from howdah.protocol.statements import LONG_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from howdah.protocol.statements import Rows, Statement

T = TypeVar("T")

# A half-open connection is noticed within about 25 seconds, also while an answer is awaited.
_KEEPALIVES: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
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
        self._schema = schema
        self._create = create
        self._timeout = validation.to_timedelta(timeout, "timeout", minimum=0.001).total_seconds()
        self._command_timeout = validation.to_timedelta(
            command_timeout, "command_timeout", minimum=0.001
        ).total_seconds()
        self._lock = threading.Lock()
        self._pool: psycopg_pool.ConnectionPool[Any] | None = None
        self._url = ""
        self._where: Where = ("(unknown)", "(unknown)")
        self._schema_seen = False
        self._trouble: BaseException | None = None
        # For a connection, at a time.
        self._patience = min(self._timeout, 1.0)
        _stores.add(self)

    def _forget(self) -> None:
        # The parent's sockets are the parent's: the child drops them unclosed and makes its own.
        # The pool is kept, as its end would wait for threads and locks that the child does not have.
        if self._pool is not None:
            _left_by_parents.append(self._pool)
        self._lock = threading.Lock()
        self._pool = None

    def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        if conn is None:
            return self.run_all([statement])[0]
        try:
            if self._create and not self._schema_seen:
                check = has_schema(self._schema)
                if not check.decode(caller_connection.run(conn, check)):
                    # Not here: it is not for the caller's transaction to undo.
                    self._ready()
                self._schema_seen = True
            rows = caller_connection.run(conn, statement)
        except NoDatabase:
            raise SchemaMissing(self._schema) from None
        except Exception as error:
            raise_translated(error, self._schema)
        return statement.decode(rows)

    def run_all(self, statements: Iterable[Statement[T]]) -> list[T]:
        """Run statements in one transaction, again from the start if the connection breaks. They may be
        made as they are asked for."""
        give_up = time.monotonic() + self._timeout
        broken = False
        while True:
            pool = None
            try:
                pool = self._ready(give_up)
                return self._attempt(pool, statements, broken, give_up)
            except (psycopg.Error, OSError) as error:
                if not is_connection_lost(error):
                    if pool is not None and is_schema_missing(error):
                        self._look_again(pool)
                    raise_translated(error, self._schema)
                if isinstance(error, Unanswered) and not broken:
                    # It took its time, and may have been done: that is found out by asking again.
                    give_up = max(give_up, time.monotonic() + self._timeout)
                if time.monotonic() >= give_up or self._is_hopeless(error):
                    raise unreachable(self._where, error) from error
                if isinstance(error, psycopg_pool.PoolTimeout):
                    continue  # nothing was sent; who asks anew has the pool try anew
            broken = True
            self._discard(pool)

    def _look_again(self, pool: psycopg_pool.ConnectionPool[Any]) -> None:
        """Raise `SchemaTooNew` if what is missing went with a migration under our feet."""
        with (
            pool.connection(self._patience) as conn,
            Patience(conn, self._command_timeout),
        ):
            migrate.drive(conn, migrate.check(self._schema, create=False))

    def _is_hopeless(self, error: BaseException) -> bool:
        # The caller's own pool is not ours to open.
        return isinstance(error, psycopg_pool.PoolClosed) and not is_ours(self._database)

    def _discard(self, pool: psycopg_pool.ConnectionPool[Any] | None) -> None:
        """Part with a pool one of whose connections broke. What others are using stays open."""
        if pool is None or not is_ours(self._database):
            if pool is not None:
                _empty(pool)
            time.sleep(RETRY_DELAY_SECONDS)
            return
        # A new one is quicker than the old one's own attempts, which lie seconds apart.
        with self._lock:
            if self._pool is pool:
                self._pool = None
        pool.close(timeout=0)

    def _attempt(
        self,
        pool: psycopg_pool.ConnectionPool[Any],
        statements: Iterable[Statement[T]],
        broken: bool,
        give_up: float,
    ) -> list[T]:
        alone = isinstance(statements, list) and len(statements) == 1
        rows = []
        with (
            # Not until the end at once: the pool's own attempts to connect lie ever further apart.
            pool.connection(self._patience) as conn,
            Patience(conn, self._command_timeout) as patience,
        ):
            try:
                with contextlib.nullcontext() if alone else conn.transaction():
                    for each in statements:
                        patience.renew(each.timeout or self._command_timeout)
                        rows.append((each, _fetch(conn, each, broken)))
                    patience.renew(self._command_timeout)
                if not conn.autocommit:  # a pool of the caller's
                    conn.commit()
            except psycopg.Error as error:
                if is_connection_lost(error):
                    conn.close()
                raise
        return [statement.decode(answer) for statement, answer in rows]

    def _ready(self, give_up: float | None = None) -> psycopg_pool.ConnectionPool[Any]:
        if give_up is None:
            give_up = time.monotonic() + self._timeout
        pool = self._pool
        if pool is None:
            if not self._lock.acquire(timeout=seconds_left(give_up)):
                raise unreachable(self._where, TimeoutError(), self._trouble)
            try:
                if self._pool is None:
                    self._pool = self._open(give_up)
                    self._trouble = None
                pool = self._pool
            finally:
                self._lock.release()
        return pool

    def _open(self, give_up: float) -> psycopg_pool.ConnectionPool[Any]:
        if isinstance(self._database, psycopg_pool.ConnectionPool):
            self._where = _where_of(self._database)
            with self._database.connection(seconds_left(give_up)) as conn:
                self._url = conn.info.dsn
                self._where = (conn.info.host, conn.info.dbname)
                autocommit = conn.autocommit
                conn.autocommit = True
                try:
                    self._prepare(conn)
                finally:
                    conn.autocommit = autocommit
            return self._database
        self._url = resolve_url(self._database)
        self._where = database_url.host_and_database(self._url)
        with self._connect(give_up) as conn:
            self._prepare(conn)
        # The first connection is made here, so that an unreachable server is told at once and why.
        return psycopg_pool.ConnectionPool(
            self._url,
            min_size=0,
            max_size=POOL_CONNECTIONS,
            open=True,
            timeout=self._timeout,
            reconnect_timeout=self._patience / 2,
            name="howdah",
            kwargs={"autocommit": True, "prepare_threshold": None, **_KEEPALIVES},
        )

    def url(self) -> str:
        """Where this store's database is."""
        self._ready()
        return self._url

    def connect(self) -> psycopg.Connection[Any]:
        """A connection of its own in autocommit mode, tried until the time limit."""
        return self._connect(time.monotonic() + self._timeout)

    def _connect(self, give_up: float) -> psycopg.Connection[Any]:
        while True:
            patience = min(_KEEPALIVES["connect_timeout"], math.ceil(seconds_left(give_up)))
            options = _KEEPALIVES | {"connect_timeout": patience}
            try:
                return psycopg.connect(
                    self._url, autocommit=True, prepare_threshold=None, **options
                )
            except psycopg.ProgrammingError:
                raise database_url.unreadable_url() from None
            except psycopg.OperationalError as error:
                self._trouble = error
                # A server that is starting up will answer; a wrong password or name will not.
                if time.monotonic() >= give_up or is_refused(error):
                    raise unreachable(self._where, error) from error
            time.sleep(RETRY_DELAY_SECONDS)

    def _prepare(self, conn: psycopg.Connection[Any]) -> None:
        with Patience(conn, self._command_timeout) as patience:
            if migrate.drive(conn, migrate.check(self._schema, create=self._create)):
                patience.renew(LONG_TIMEOUT_SECONDS)
                try:
                    migrate.migrate(conn, self._schema)
                except psycopg.errors.InsufficientPrivilege:
                    migrate.drive(conn, migrate.refuse(self._schema))

    def close(self) -> None:
        """Close the pool, unless it is the caller's. The next call opens it again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and pool is not self._database:
            pool.close()


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_left_by_parents: list[object] = []


def _after_fork() -> None:
    for store in list(_stores):
        store._forget()


os.register_at_fork(after_in_child=_after_fork)


def _where_of(pool: psycopg_pool.ConnectionPool[Any]) -> Where:
    # Either may be a callable in newer versions of the pool.
    known: dict[str, Any] = (
        conninfo_to_dict(pool.conninfo) if isinstance(pool.conninfo, str) else {}
    )
    if isinstance(pool.kwargs, dict):
        known |= pool.kwargs
    return str(known.get("host", "localhost")), str(known.get("dbname", "(default)"))


def _empty(pool: psycopg_pool.ConnectionPool[Any]) -> None:
    """Have a pool replace what lies idle in it. Not `check`: that waits for every answer, also for ever."""
    with contextlib.suppress(psycopg_pool.PoolTimeout):
        for _ in range(pool.get_stats().get("pool_available", 0)):
            conn = pool.getconn(RETRY_DELAY_SECONDS)
            conn.close()
            pool.putconn(conn)


def _fetch(conn: psycopg.Connection[Any], statement: Statement[Any], broken: bool) -> Rows:
    if broken and statement.resend is not None:
        statement = statement.resend()
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        if statement.copy is not None:
            with cursor.copy(statement.text) as copy:
                for lines in statement.copy.lines:
                    copy.write(lines)
            return []
        return cursor.execute(statement.text, statement.parameters).fetchall()
