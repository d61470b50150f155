"""Runs Statements: a psycopg pool for the sync client, an asyncpg pool for the async one.

Owns pools, first use (the schema is checked, and made if it is missing), reconnecting, and what a
driver's error means. A statement whose connection broke is sent again, as `Statement.again` says.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg
import psycopg
import psycopg_pool
from psycopg.rows import tuple_row

from howdah import borrowed, config, migrate
from howdah.embedded import resolve_url
from howdah.errors import (
    DatabaseUnreachable,
    InvalidJob,
    InvalidOption,
    PayloadTooLarge,
    SchemaMissing,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from howdah.statements import Rows, Statement

T = TypeVar("T")

TIMEOUT = 10.0
POOL_SIZE = 10
RETRY_PAUSE = 0.05

# A half-open connection is noticed within about 25 seconds, also while an answer is awaited.
_KEEPALIVES: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}

_FIELDS = {
    "job_type_length": "job_type",
    "queue_length": "queue",
    "priority_range": "priority",
    "max_attempts_range": "max_attempts",
    "run_at_is_finite": "run_at",
    "keep_is_positive": "keep",
    "request_id_length": "request_id",
    "traceparent_length": "traceparent",
    "idempotency_key_length": "idempotency_key",
    "key_length": "idempotency_key",
    "ordering_key_length": "ordering_key",
    "data_within_limit": "data",
    "data_not_too_deep": "data",
}


def sqlstate(error: BaseException) -> str:
    """The SQLSTATE of a driver's error, or the empty string."""
    return getattr(error, "sqlstate", None) or ""


def is_connection_lost(error: BaseException) -> bool:
    """Whether an error says that the connection is gone, or leads to a server that cannot write."""
    state = sqlstate(error)
    if state:
        # 08 connection exceptions, 57P01..05 shutdown and start-up, 25006 a read-only (demoted) server
        return state[:2] == "08" or state[:3] == "57P" or state == "25006"
    return isinstance(
        error,
        OSError
        | psycopg.OperationalError
        | asyncpg.InterfaceError
        | asyncpg.PostgresConnectionError,
    )


def translate(error: BaseException, schema: str) -> BaseException:
    """A driver's error as one of ours where there is one, else the error itself."""
    state = sqlstate(error)
    if state in {"3F000", "42P01", "42883"}:
        return SchemaMissing(schema)
    if state in {"23514", "23502", "22P05", "22P02", "54001"}:
        diagnostics = getattr(error, "diag", error)
        constraint = getattr(diagnostics, "constraint_name", None) or ""
        field = _FIELDS.get(constraint) or getattr(diagnostics, "column_name", None) or "data"
        message = getattr(diagnostics, "message_primary", None) or str(error).splitlines()[0]
        kind = PayloadTooLarge if constraint == "data_within_limit" else InvalidJob
        return kind(f"the database refused {field}: {message}", field=field)
    return error


def _unreachable(url: str, error: BaseException) -> DatabaseUnreachable:
    reason = str(error).strip().splitlines()
    host, database = config.host_and_database(url)
    return DatabaseUnreachable(host, database, reason[-1] if reason else type(error).__name__)


class Store:
    """The sync runner: statements on a psycopg pool that opens on first use and survives a fork."""

    def __init__(
        self,
        database: str | psycopg_pool.ConnectionPool[Any] | None,
        schema: str,
        *,
        create: bool = True,
        timeout: float = TIMEOUT,
    ) -> None:
        if database is not None and not isinstance(database, str | psycopg_pool.ConnectionPool):
            raise InvalidOption(
                f"JobQueue takes a URL or a psycopg_pool.ConnectionPool, not {type(database).__name__}."
            )
        self._database = database
        self._schema = schema
        self._create = create
        self._timeout = timeout
        self._lock = threading.Lock()
        self._pool: psycopg_pool.ConnectionPool[Any] | None = None
        self._pid = 0
        self._url = ""
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # The parent's sockets are the parent's: the child drops them unclosed and makes its own.
        self._lock = threading.Lock()
        self._pool = None

    def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        if conn is not None:
            try:
                return statement.decode(borrowed.run(conn, statement))
            except psycopg.Error as error:
                raise translate(error, self._schema) from error
        return self.run_all([statement])[0]

    def run_all(self, statements: Sequence[Statement[T]]) -> list[T]:
        """Run statements in one transaction, again from the start if the connection breaks."""
        give_up = time.monotonic() + self._timeout
        pool = self._ready()
        broken = False
        while True:
            try:
                return self._attempt(pool, statements, broken, give_up - time.monotonic())
            except (psycopg.Error, OSError) as error:
                if not is_connection_lost(error):
                    raise translate(error, self._schema) from error
                if time.monotonic() >= give_up:
                    raise _unreachable(self._url, error) from error
            broken = True
            pool.check()
            time.sleep(RETRY_PAUSE)

    def _attempt(
        self,
        pool: psycopg_pool.ConnectionPool[Any],
        statements: Sequence[Statement[T]],
        broken: bool,
        seconds: float,
    ) -> list[T]:
        with pool.connection(max(seconds, 0.001)) as conn:
            try:
                if len(statements) == 1:
                    rows = [_fetch(conn, statements[0], broken)]
                else:
                    with conn.transaction():
                        rows = [_fetch(conn, statement, broken) for statement in statements]
            except psycopg.Error as error:
                if is_connection_lost(error):
                    conn.close()
                raise
        return [
            statement.decode(answer) for statement, answer in zip(statements, rows, strict=True)
        ]

    def _ready(self) -> psycopg_pool.ConnectionPool[Any]:
        pool = self._pool
        if pool is None:
            with self._lock:
                if self._pool is None:
                    self._pool = self._open()
                pool = self._pool
        return pool

    def _open(self) -> psycopg_pool.ConnectionPool[Any]:
        if isinstance(self._database, psycopg_pool.ConnectionPool):
            with self._database.connection(self._timeout) as conn:
                self._url = conn.info.dsn
                autocommit = conn.autocommit
                conn.autocommit = True
                try:
                    self._prepare(conn)
                finally:
                    conn.autocommit = autocommit
            return self._database
        self._url = resolve_url(self._database)
        with self.connect() as conn:
            self._prepare(conn)
        # The first connection is made here, so that an unreachable server is told at once and why.
        return psycopg_pool.ConnectionPool(
            self._url,
            min_size=0,
            max_size=POOL_SIZE,
            open=True,
            timeout=self._timeout,
            reconnect_timeout=self._timeout,
            name="howdah",
            kwargs={"autocommit": True, "prepare_threshold": None, **_KEEPALIVES},
        )

    def connect(self) -> psycopg.Connection[Any]:
        """A connection of its own in autocommit mode, tried until the time limit."""
        give_up = time.monotonic() + self._timeout
        while True:
            try:
                return psycopg.connect(
                    self._url, autocommit=True, prepare_threshold=None, **_KEEPALIVES
                )
            except psycopg.OperationalError as error:
                # A server that is starting up will answer; a wrong password or name will not.
                if time.monotonic() >= give_up or sqlstate(error)[:2] in {"28", "3D"}:
                    raise _unreachable(self._url, error) from error
            time.sleep(RETRY_PAUSE)

    def _prepare(self, conn: psycopg.Connection[Any]) -> None:
        if migrate.drive(conn, migrate.check(self._schema, create=self._create)):
            migrate.migrate(conn, self._schema)

    def close(self) -> None:
        """Close the pool, unless it is the caller's. The next call opens it again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and pool is not self._database:
            pool.close()


def _fetch(conn: psycopg.Connection[Any], statement: Statement[Any], broken: bool) -> Rows:
    if broken and statement.again is not None:
        statement = statement.again
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        return cursor.execute(statement.text, statement.parameters).fetchall()


class AsyncStore:
    """The async runner: statements on an asyncpg pool that opens on first use, one per event loop."""

    def __init__(
        self,
        database: str | asyncpg.Pool | None,
        schema: str,
        *,
        create: bool = True,
        timeout: float = TIMEOUT,
    ) -> None:
        if database is not None and not isinstance(database, str | asyncpg.Pool):
            raise InvalidOption(
                f"AsyncJobQueue takes a URL or an asyncpg.Pool, not {type(database).__name__}."
            )
        self._database = database
        self._schema = schema
        self._create = create
        self._timeout = timeout
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._opening: asyncio.Lock | None = None
        self._pool: asyncpg.Pool | None = None
        self._url = ""

    async def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        if conn is not None:
            try:
                return statement.decode(await borrowed.arun(conn, statement))
            except (psycopg.Error, asyncpg.PostgresError) as error:
                raise translate(error, self._schema) from error
        return (await self.run_all([statement]))[0]

    async def run_all(self, statements: Sequence[Statement[T]]) -> list[T]:
        """Run statements in one transaction, again from the start if the connection breaks."""
        give_up = time.monotonic() + self._timeout
        broken = False
        while True:
            try:
                pool = await self._ready()
                return await self._attempt(pool, statements, broken, give_up - time.monotonic())
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
                if not is_connection_lost(error):
                    raise translate(error, self._schema) from error
                if time.monotonic() >= give_up:
                    raise _unreachable(self._url, error) from error
            broken = True
            await asyncio.sleep(RETRY_PAUSE)

    async def _attempt(
        self, pool: asyncpg.Pool, statements: Sequence[Statement[T]], broken: bool, seconds: float
    ) -> list[T]:
        async with pool.acquire(timeout=max(seconds, 0.001)) as conn:
            try:
                if len(statements) == 1:
                    rows = [await _afetch(conn, statements[0], broken)]
                else:
                    async with conn.transaction():
                        rows = [await _afetch(conn, statement, broken) for statement in statements]
            except asyncpg.PostgresError as error:
                if is_connection_lost(error):
                    conn.terminate()
                raise
        return [
            statement.decode(answer) for statement, answer in zip(statements, rows, strict=True)
        ]

    async def _ready(self) -> asyncpg.Pool:
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            # Another loop's or process's pool cannot be used here, nor closed from here.
            self._home, self._pool, self._opening = home, None, asyncio.Lock()
        if self._pool is None:
            assert self._opening is not None  # noqa: S101 - set together with _home
            async with self._opening:
                if self._pool is None:
                    self._pool = await self._open()
        return self._pool

    async def _open(self) -> asyncpg.Pool:
        if isinstance(self._database, asyncpg.Pool):
            pool = self._database
        else:
            if not self._url:
                self._url = await asyncio.to_thread(resolve_url, self._database)
            pool = await asyncpg.create_pool(
                self._url, min_size=0, max_size=POOL_SIZE, timeout=5.0, command_timeout=60.0
            )
        try:
            async with pool.acquire(timeout=self._timeout) as conn:
                if await adrive(conn, migrate.check(self._schema, create=self._create)):
                    await _amigrate(conn, self._schema)
        except BaseException:
            if pool is not self._database:
                pool.terminate()
            raise
        return pool

    async def close(self) -> None:
        """Close the pool, unless it is the caller's. The next call opens it again."""
        pool, self._pool = self._pool, None
        if pool is None or pool is self._database or self._home is None:
            return
        if self._home == (os.getpid(), asyncio.get_running_loop()):
            await pool.close()


async def _afetch(conn: Any, statement: Statement[Any], broken: bool) -> Rows:
    if broken and statement.again is not None:
        statement = statement.again
    rows: Rows = await conn.fetch(statement.text, *statement.parameters)
    return rows


async def adrive(conn: Any, work: Generator[migrate.Query | migrate.Script, Any, T]) -> T:
    """Run a generator of SQL on an asyncpg connection, and give its result."""
    answer: Rows | None = None
    while True:
        try:
            step = work.send(answer)
        except StopIteration as stop:
            value: T = stop.value
            return value
        if isinstance(step, migrate.Query):
            answer = await conn.fetch(step.text)
        else:
            answer = None
            await conn.execute(step.text)


async def _amigrate(conn: Any, schema: str) -> None:
    give_up = time.monotonic() + migrate.PATIENCE
    while True:
        try:
            await adrive(conn, migrate.steps(schema))
        except asyncpg.LockNotAvailableError:
            await conn.execute("ROLLBACK")
            if time.monotonic() > give_up:
                raise
        else:
            return
