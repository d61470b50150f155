"""Runs Statements: a psycopg pool for the sync client, an asyncpg pool for the async one.

Owns pools, first use (the schema is checked, and made if it is missing), reconnecting, and what a
driver's error means. A statement whose connection broke is sent again, as `Statement.again` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import asyncpg
import psycopg
import psycopg_pool
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from howdah import borrowed, config, migrate, payload
from howdah.embedded import resolve_url
from howdah.errors import (
    DatabaseUnreachable,
    HowdahError,
    InvalidJob,
    InvalidOption,
    NoDatabase,
    PayloadTooLarge,
    SchemaMissing,
)
from howdah.statements import Statement, quote_schema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator, Sequence

    from howdah.statements import Rows

T = TypeVar("T")

DATABASE_ERRORS = (
    HowdahError,
    psycopg.Error,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)
"""Whatever `run` may raise because of the database, as against a mistake of ours."""

TIMEOUT = 10.0
COMMAND_TIMEOUT = 60.0
CLOSE_TIMEOUT = 5.0
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
        # 08 connection exceptions, 57P01..05 shutdown and start-up, 53300 too many connections,
        # 25006 a read-only (demoted) server
        return state[:2] == "08" or state[:3] == "57P" or state in {"53300", "25006"}
    if isinstance(error, ValueError):  # asyncpg: a parameter of the wrong type, a bad URL
        return False
    return isinstance(
        error,
        OSError
        | psycopg.OperationalError
        | asyncpg.InterfaceError
        # asyncpg, when the server's farewell is already in its buffer
        | asyncpg.InternalClientError
        | asyncpg.PostgresConnectionError,
    )


def is_transient(error: BaseException) -> bool:
    """Whether a statement may well succeed if it is sent again, unchanged, a little later."""
    # 40 rolled back to let another on, 53 out of something, 55 in use, 57 interrupted by an operator
    return is_connection_lost(error) or sqlstate(error)[:2] in {"40", "53", "55", "57"}


def is_refused(error: BaseException) -> bool:
    """Whether the server answered and will not let us in: asking again is of no use."""
    # libpq gives no SQLSTATE for a connection that was not made. A server that speaks another
    # language is asked again until the time limit.
    return sqlstate(error)[:2] in {"28", "3D"} or (
        isinstance(error, psycopg.OperationalError) and bool(_REFUSED.search(str(error)))
    )


_REFUSED = re.compile(
    r"FATAL: .*(authentication failed|does not exist|no pg_hba\.conf entry|not permitted to log in"
    r"|permission denied for database)|fe_sendauth: no password supplied"
)


def driver_error(error: BaseException | None) -> BaseException | None:
    """The driver's error inside one that SQLAlchemy or Django has wrapped."""
    while error is not None and not isinstance(error, psycopg.Error | asyncpg.PostgresError):
        error = getattr(error, "orig", None) or error.__cause__
    return error


def translate(error: BaseException, schema: str) -> BaseException:
    """A driver's error as one of ours where there is one, else the error itself."""
    cause = driver_error(error)
    if cause is None:
        return error
    state = sqlstate(cause)
    if state in {"3F000", "42P01", "42883"}:
        return SchemaMissing(schema)
    if state in {"23514", "23502", "22P05", "22P02", "54001"}:
        diagnostics = getattr(cause, "diag", cause)
        constraint = getattr(diagnostics, "constraint_name", None) or ""
        field = _FIELDS.get(constraint) or getattr(diagnostics, "column_name", None) or "data"
        message = getattr(diagnostics, "message_primary", None) or str(cause).splitlines()[0]
        kind = PayloadTooLarge if constraint == "data_within_limit" else InvalidJob
        return kind(f"the database refused {field}: {message}", field=field)
    return error


def raise_translated(error: BaseException, schema: str) -> NoReturn:
    """Raise the error as one of ours where there is one, else as it came."""
    translated = translate(error, schema)
    if translated is error:
        raise error
    raise translated from error


def refused_id(error: BaseException | None) -> str | None:
    """The id of the row that a constraint refused, as far as the server tells."""
    cause = driver_error(error)
    detail = getattr(getattr(cause, "diag", None), "message_detail", None)
    found = _FAILING_ROW.search(detail or getattr(cause, "detail", None) or "")
    return found[1] if found else None


_FAILING_ROW = re.compile(r"\(([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}),")

Where: TypeAlias = tuple[str, str]
"""A host and the name of a database on it, for messages."""


def _unreachable(
    where: Where, error: BaseException, trouble: BaseException | None = None
) -> DatabaseUnreachable:
    """What to raise, with the last `trouble` for a reason if all that happened here was to wait."""
    if trouble is not None and isinstance(error, TimeoutError):
        error = trouble
    lines = str(error).strip().splitlines()
    empty = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return DatabaseUnreachable(*where, lines[0].rstrip(".") if lines else empty)


def _seconds_left(give_up: float, least: float = 0.001) -> float:
    return max(give_up - time.monotonic(), least)


def _unreadable() -> InvalidOption:
    # The parsers' own words may hold a part of the password.
    return InvalidOption(
        "the database URL cannot be read; write it as postgresql://user:password@host:5432/database, "
        "with special characters in the password percent-encoded."
    )


def _has_schema(schema: str) -> Statement[bool]:
    name = quote_schema(schema) + ".migrations"
    return Statement("SELECT to_regclass($1::text) IS NOT NULL", (name,), lambda rows: rows[0][0])


class Store:
    """The sync runner: statements on a psycopg pool that opens on first use and survives a fork."""

    def __init__(
        self,
        database: str | psycopg_pool.ConnectionPool[Any] | None,
        schema: str,
        *,
        create: bool = True,
        timeout: float = TIMEOUT,
        command_timeout: float | None = None,
    ) -> None:
        if database is not None and not isinstance(database, str | psycopg_pool.ConnectionPool):
            raise InvalidOption(
                f"JobQueue takes a URL or a psycopg_pool.ConnectionPool, not {type(database).__name__}."
            )
        self._database = database
        self._schema = schema
        self._create = create
        self._timeout = payload.to_timedelta(timeout, "timeout", minimum=0.001).total_seconds()
        self._command_timeout = command_timeout
        self._lock = threading.Lock()
        self._pool: psycopg_pool.ConnectionPool[Any] | None = None
        self._url = ""
        self._where: Where = ("(unknown)", "(unknown)")
        self._schema_seen = False
        self._trouble: BaseException | None = None
        # The first call may make the schema, which takes its time and is not the server's silence.
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
                check = _has_schema(self._schema)
                if not check.decode(borrowed.run(conn, check)):
                    # Not here: it is not for the caller's transaction to undo.
                    self._ready()
                self._schema_seen = True
            rows = borrowed.run(conn, statement)
        except NoDatabase:
            raise SchemaMissing(self._schema) from None
        except Exception as error:
            raise_translated(error, self._schema)
        return statement.decode(rows)

    def run_all(self, statements: Sequence[Statement[T]]) -> list[T]:
        """Run statements in one transaction, again from the start if the connection breaks."""
        give_up = time.monotonic() + self._timeout
        broken = False
        while True:
            pool = None
            try:
                pool = self._ready(give_up)
                return self._attempt(pool, statements, broken, give_up)
            except (psycopg.Error, OSError) as error:
                if not is_connection_lost(error):
                    raise_translated(error, self._schema)
                if time.monotonic() >= give_up or self._is_hopeless(error):
                    raise _unreachable(self._where, error) from error
            broken = True
            self._discard(pool)

    def _is_hopeless(self, error: BaseException) -> bool:
        # The caller's own pool is not ours to open.
        return isinstance(error, psycopg_pool.PoolClosed) and not _is_ours(self._database)

    def _discard(self, pool: psycopg_pool.ConnectionPool[Any] | None) -> None:
        """Part with a pool one of whose connections broke. What others are using stays open."""
        if pool is None or not _is_ours(self._database):
            if pool is not None:
                pool.check()
            time.sleep(RETRY_PAUSE)
            return
        # A new one is quicker than the old one's own attempts, which lie seconds apart.
        with self._lock:
            if self._pool is pool:
                self._pool = None
        pool.close(timeout=0)

    def _attempt(
        self,
        pool: psycopg_pool.ConnectionPool[Any],
        statements: Sequence[Statement[T]],
        broken: bool,
        give_up: float,
    ) -> list[T]:
        with (
            pool.connection(_seconds_left(give_up, self._patience)) as conn,
            _limited(conn, self._command_timeout),
        ):
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

    def _ready(self, give_up: float | None = None) -> psycopg_pool.ConnectionPool[Any]:
        if give_up is None:
            give_up = time.monotonic() + self._timeout
        pool = self._pool
        if pool is None:
            if not self._lock.acquire(timeout=_seconds_left(give_up)):
                raise _unreachable(self._where, TimeoutError(), self._trouble)
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
            with self._database.connection(_seconds_left(give_up)) as conn:
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
        self._where = config.host_and_database(self._url)
        with self._connect(give_up) as conn:
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

    def url(self) -> str:
        """Where this store's database is."""
        self._ready()
        return self._url

    def connect(self) -> psycopg.Connection[Any]:
        """A connection of its own in autocommit mode, tried until the time limit."""
        return self._connect(time.monotonic() + self._timeout)

    def _connect(self, give_up: float) -> psycopg.Connection[Any]:
        while True:
            patience = min(_KEEPALIVES["connect_timeout"], math.ceil(_seconds_left(give_up)))
            options = _KEEPALIVES | {"connect_timeout": patience}
            try:
                return psycopg.connect(
                    self._url, autocommit=True, prepare_threshold=None, **options
                )
            except psycopg.ProgrammingError:
                raise _unreadable() from None
            except psycopg.OperationalError as error:
                self._trouble = error
                # A server that is starting up will answer; a wrong password or name will not.
                if time.monotonic() >= give_up or is_refused(error):
                    raise _unreachable(self._where, error) from error
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


def _is_ours(database: object) -> bool:
    return not isinstance(database, psycopg_pool.ConnectionPool | asyncpg.Pool)


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


@contextlib.contextmanager
def _limited(conn: psycopg.Connection[Any], seconds: float | None) -> Iterator[None]:
    """Hang up on a server that does not answer in time. libpq would wait for it as long as the network
    says that somebody is there, and a proxy in between always is."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, _hang_up, (conn,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hang_up(conn: psycopg.Connection[Any]) -> None:
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(conn.fileno())) as end,
    ):
        end.shutdown(socket.SHUT_RDWR)


def _fetch(conn: psycopg.Connection[Any], statement: Statement[Any], broken: bool) -> Rows:
    if broken and statement.again is not None:
        statement = statement.again
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        return cursor.execute(statement.text, statement.parameters).fetchall()


_ASYNC_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)


class AsyncStore:
    """The async runner: statements on an asyncpg pool that opens on first use, one per event loop."""

    def __init__(
        self,
        database: str | asyncpg.Pool | None,
        schema: str,
        *,
        create: bool = True,
        timeout: float = TIMEOUT,
        command_timeout: float = COMMAND_TIMEOUT,
    ) -> None:
        if database is not None and not isinstance(database, str | asyncpg.Pool):
            raise InvalidOption(
                f"AsyncJobQueue takes a URL or an asyncpg.Pool, not {type(database).__name__}."
            )
        self._database = database
        self._schema = schema
        self._create = create
        self._timeout = payload.to_timedelta(timeout, "timeout", minimum=0.001).total_seconds()
        self._command_timeout = command_timeout
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._opening: asyncio.Lock | None = None
        self._pool: asyncpg.Pool | None = None
        self._url = ""
        self._where: Where = ("the given pool's server", "(the given pool's)")
        self._schema_seen = False
        self._trouble: BaseException | None = None
        # The first call may make the schema, which takes its time and is not the server's silence.
        self._patience = min(self._timeout, 1.0)

    async def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        if conn is None:
            return (await self.run_all([statement]))[0]
        try:
            if self._create and not self._schema_seen:
                check = _has_schema(self._schema)
                if not check.decode(await borrowed.arun(conn, check)):
                    # Not here: it is not for the caller's transaction to undo.
                    await self._ready()
                self._schema_seen = True
            rows = await borrowed.arun(conn, statement)
        except NoDatabase:
            raise SchemaMissing(self._schema) from None
        except Exception as error:
            raise_translated(error, self._schema)
        return statement.decode(rows)

    async def run_all(self, statements: Sequence[Statement[T]]) -> list[T]:
        """Run statements in one transaction, again from the start if the connection breaks."""
        give_up = time.monotonic() + self._timeout
        broken = False
        while True:
            try:
                pool = await self._ready(give_up)
                return await self._attempt(pool, statements, broken, give_up)
            except _ASYNC_ERRORS as error:
                if is_refused(error):
                    raise _unreachable(self._where, error) from error
                if not is_connection_lost(error):
                    raise_translated(error, self._schema)
                if time.monotonic() >= give_up or self._is_hopeless(error):
                    raise _unreachable(self._where, error, self._trouble) from error
                if not isinstance(error, TimeoutError):
                    self._trouble = error
            broken = True
            await asyncio.sleep(RETRY_PAUSE)

    def _is_hopeless(self, error: BaseException) -> bool:
        # The caller's own pool is not ours to open.
        return not _is_ours(self._database) and str(error).startswith("pool is ")

    async def _attempt(
        self, pool: asyncpg.Pool, statements: Sequence[Statement[T]], broken: bool, give_up: float
    ) -> list[T]:
        async with pool.acquire(timeout=_seconds_left(give_up, self._patience)) as conn:
            try:
                if len(statements) == 1:
                    rows = [await _afetch(conn, statements[0], broken)]
                else:
                    async with conn.transaction():
                        rows = [await _afetch(conn, statement, broken) for statement in statements]
            except _ASYNC_ERRORS as error:
                # A time-out is an OSError too: who did not answer once is not asked again.
                if is_connection_lost(error):
                    conn.terminate()
                    if _is_ours(self._database):
                        # Nor are its neighbours: each would take its own time to be found out.
                        await pool.expire_connections()
                raise
        return [
            statement.decode(answer) for statement, answer in zip(statements, rows, strict=True)
        ]

    async def _ready(self, give_up: float | None = None) -> asyncpg.Pool:
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            # Another loop's or process's pool cannot be used here, nor closed from here.
            self._home, self._pool, self._opening = home, None, asyncio.Lock()
        if self._pool is None:
            assert self._opening is not None  # noqa: S101 - set together with _home
            if give_up is None:
                give_up = time.monotonic() + self._timeout
            async with asyncio.timeout(_seconds_left(give_up)):
                await self._opening.acquire()
            try:
                if self._pool is None:
                    self._pool = await self._open(give_up)
            finally:
                self._opening.release()
        return self._pool

    async def _open(self, give_up: float) -> asyncpg.Pool:
        if isinstance(self._database, asyncpg.Pool):
            pool = self._database
        else:
            if not self._url:
                self._url = await asyncio.to_thread(resolve_url, self._database)
                self._where = config.host_and_database(self._url)
            pool = await asyncpg.create_pool(
                self._url,
                min_size=0,
                max_size=POOL_SIZE,
                timeout=5.0,
                command_timeout=self._command_timeout,
                reset=_leave_as_it_is,
            )
        try:
            async with _acquire(pool, give_up) as conn:
                if await adrive(conn, migrate.check(self._schema, create=self._create)):
                    await _amigrate(conn, self._schema)
        except BaseException:
            if _is_ours(self._database):
                pool.terminate()
            raise
        self._trouble = None
        return pool

    async def url(self) -> str:
        """Where this store's database is."""
        await self._ready()
        return self._url

    async def close(self) -> None:
        """Close the pool, unless it is the caller's. The next call opens it again."""
        pool, self._pool = self._pool, None
        if pool is None or pool is self._database or self._home is None:
            return
        if self._home == (os.getpid(), asyncio.get_running_loop()):
            # A server that no longer answers is not waited for: the pool is then terminated.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await pool.close()


@contextlib.asynccontextmanager
async def _acquire(pool: asyncpg.Pool, give_up: float) -> AsyncIterator[Any]:
    try:
        conn = await pool.acquire(timeout=_seconds_left(give_up))
    except ValueError:  # asyncpg reads the URL only now
        raise _unreadable() from None
    try:
        yield conn
    finally:
        await pool.release(conn)


async def _leave_as_it_is(conn: Any) -> None:
    """No statement of ours leaves anything in a session, so none needs a round trip to reset it."""


async def _afetch(conn: Any, statement: Statement[Any], broken: bool) -> Rows:
    if broken and statement.again is not None:
        statement = statement.again
    limit = {} if statement.timeout is None else {"timeout": statement.timeout}
    rows: Rows = await conn.fetch(statement.text, *statement.parameters, **limit)
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
