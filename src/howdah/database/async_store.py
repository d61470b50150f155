"""Runs Statements for asyncio, on an asyncpg pool: the twin of `store.py`, with one pool per event loop.

Two connections are kept outside the pool (decision 0021). Every statement has a deadline (decision 0022)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from howdah.database import caller_connection, migrate, sql_steps
from howdah.database.driver_errors import (
    ASYNC_ERRORS,
    Unanswered,
    is_connection_lost,
    is_schema_missing,
    raise_translated,
    seconds_left,
)
from howdah.database.retry_loop import (
    COMMAND_TIMEOUT_SECONDS,
    POOL_CONNECTIONS,
    RETRY_DELAY_SECONDS,
    TIMEOUT_SECONDS,
    RetryLoop,
    StoreSettings,
)
from howdah.embedded import resolve_url
from howdah.encoding import database_url
from howdah.errors import InvalidOption, NoDatabase, SchemaMissing
from howdah.protocol.statements import Statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from howdah.protocol.statements import Rows, Statement

T = TypeVar("T")

CONNECT_TIMEOUT_SECONDS = 5.0
CLOSE_TIMEOUT_SECONDS = 5.0
KEPT_CONNECTIONS = 2  # a worker has a claim and an acknowledgement in flight at once
KEPT_SECONDS = 300.0  # after this, a firewall or proxy may have dropped an idle connection
_POOLER_OPTIONS = {"statement_cache_size": 0}


class AsyncStore:
    """The async runner: statements on an asyncpg pool that opens on first use, one per event loop."""

    def __init__(
        self,
        database: str | asyncpg.Pool | None,
        schema: str,
        *,
        create: bool = True,
        timeout: float = TIMEOUT_SECONDS,
        command_timeout: float = COMMAND_TIMEOUT_SECONDS,
    ) -> None:
        if database is not None and not isinstance(database, str | asyncpg.Pool):
            raise InvalidOption(
                f"AsyncJobQueue takes a URL or an asyncpg.Pool, not {type(database).__name__}."
            )
        self._database = database
        self._settings = StoreSettings(
            database, schema, create=create, timeout=timeout, command_timeout=command_timeout
        )
        self._settings.address = ("the given pool's server", "(the given pool's)")
        self._is_behind_pooler = False
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._opening: asyncio.Lock | None = None
        self._pool: asyncpg.Pool | None = None
        self._kept: list[tuple[float, Any]] = []
        self._acquiring = 0
        self._url = ""
        self._schema_seen = False

    async def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        if conn is None:
            return (await self.run_all([statement]))[0]
        schema = self._settings.schema
        try:
            if self._settings.create and not self._schema_seen:
                check = Statements(schema).has_schema()
                if not check.decode(await caller_connection.arun(conn, check)):
                    # Not on the caller's connection: a rollback there would undo the migration.
                    await self._open_pool()
                self._schema_seen = True
            rows = await caller_connection.arun(conn, statement)
        except NoDatabase:
            raise SchemaMissing(schema) from None
        except Exception as error:
            raise_translated(error, schema)
        return statement.decode(rows)

    async def run_all(self, statements: Iterable[Statement[T]]) -> list[T]:
        """Run statements in one transaction, from the start again if the connection breaks. An iterable may
        build them while they are sent."""
        loop = RetryLoop(self._settings)
        while True:
            pool = None
            try:
                pool = await self._open_pool(loop.deadline)
                return await self._attempt(pool, statements, loop)
            except ASYNC_ERRORS as error:
                if pool is not None and is_schema_missing(error):
                    await self._check_schema(pool)
                loop.after(error)
            await asyncio.sleep(RETRY_DELAY_SECONDS)

    async def _check_schema(self, pool: asyncpg.Pool) -> None:
        """Raise `SchemaTooNew` if a newer Howdah has migrated the schema while this process runs."""
        check = migrate.check(self._settings.schema, create=False)
        async with _acquire(pool, time.monotonic() + self._settings.checkout_timeout) as conn:
            await sql_steps.adrive(conn, check, self._settings.command_timeout)

    async def _attempt(
        self, pool: asyncpg.Pool, statements: Iterable[Statement[T]], loop: RetryLoop
    ) -> list[T]:
        # At least one whole checkout: creating the schema on the first call may have taken the timeout.
        timeout = seconds_left(loop.deadline, self._settings.checkout_timeout)
        conn = await self._acquire(pool, timeout)
        is_single = isinstance(statements, list) and len(statements) == 1
        try:
            if is_single and not self._is_behind_pooler:
                rows = [(each, await self._fetch(conn, each, loop.resend)) for each in statements]
            else:
                async with self._transaction(conn):
                    rows = [
                        (each, await self._fetch(conn, each, loop.resend)) for each in statements
                    ]
        except BaseException as error:
            # This includes a timeout, which is an OSError: a connection that did not answer is not used again.
            if isinstance(error, ASYNC_ERRORS) and is_connection_lost(error):
                conn.terminate()
                if self._settings.is_own_pool:
                    # Nor are the other connections: each would have to time out before it is replaced.
                    await pool.expire_connections()
                    for _, other in self._kept:
                        other.terminate()
                    await self._release_kept(pool)
            await pool.release(conn)
            raise
        if self._may_keep(pool):
            self._kept.append((time.monotonic(), conn))
        else:
            await pool.release(conn)
        return [statement.decode(answer) for statement, answer in rows]

    async def _acquire(self, pool: asyncpg.Pool, timeout: float) -> Any:
        """A connection, if possible a kept one: a checkout takes longer than a short statement."""
        while self._kept:
            since, conn = self._kept.pop()
            if not conn.is_closed() and time.monotonic() - since < KEPT_SECONDS:
                return conn
            conn.terminate()
            await pool.release(conn)
        self._acquiring += 1
        try:
            return await pool.acquire(timeout=timeout)
        finally:
            self._acquiring -= 1

    def _may_keep(self, pool: asyncpg.Pool) -> bool:
        """Whether a connection may be kept out of the pool: no caller waits for one, and the pool is not
        being closed."""
        is_free = self._pool is pool is not self._database and not self._acquiring
        return is_free and len(self._kept) < KEPT_CONNECTIONS

    async def _release_kept(self, pool: asyncpg.Pool) -> None:
        """Release the kept connections to the pool."""
        while self._kept:
            await pool.release(self._kept.pop()[1])

    async def _fetch(self, conn: Any, statement: Statement[Any], resend: bool) -> Rows:
        timeout = statement.timeout or self._settings.command_timeout
        with _unanswered_after(timeout):
            return await _fetch(conn, statement, resend, timeout)

    @contextlib.asynccontextmanager
    async def _transaction(self, conn: Any) -> AsyncIterator[None]:
        """`conn.transaction()` with a timeout, which a caller's pool may not have."""
        timeout = self._settings.command_timeout
        with _unanswered_after(timeout):
            await conn.execute("BEGIN", timeout=timeout)
        try:
            yield
        except Unanswered:
            raise  # a ROLLBACK would not be answered either
        except BaseException:
            if not conn.is_closed():
                await conn.execute("ROLLBACK", timeout=timeout)
            raise
        with _unanswered_after(timeout):
            await conn.execute("COMMIT", timeout=timeout)

    async def _open_pool(self, deadline: float | None = None) -> asyncpg.Pool:
        """The pool of this event loop. The first caller opens it, and others wait for that."""
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._owner != owner:
            # The pool of another loop or process can neither be used nor closed here.
            self._owner, self._pool, self._opening = owner, None, asyncio.Lock()
            self._kept, self._acquiring = [], 0
        if self._pool is None:
            assert self._opening is not None  # noqa: S101 - set together with _owner
            if deadline is None:
                deadline = time.monotonic() + self._settings.timeout
            async with asyncio.timeout(seconds_left(deadline)):
                await self._opening.acquire()
            try:
                if self._pool is None:
                    self._pool = await self._connect_pool(deadline)
            finally:
                self._opening.release()
        return self._pool

    async def _connect_pool(self, deadline: float) -> asyncpg.Pool:
        settings = self._settings
        if isinstance(self._database, asyncpg.Pool):
            pool = self._database
        else:
            if not self._url:
                self._url = await asyncio.to_thread(resolve_url, self._database)
                settings.address = database_url.host_and_database(self._url)
            self._is_behind_pooler = await _is_pooler(self._url, deadline)
            pool = await asyncpg.create_pool(
                self._url,
                min_size=0,
                max_size=POOL_CONNECTIONS,
                timeout=CONNECT_TIMEOUT_SECONDS,
                command_timeout=settings.command_timeout,
                reset=_skip_reset,
                **(_POOLER_OPTIONS if self._is_behind_pooler else {}),
            )
        prepare = migrate.prepare(settings.schema, create=settings.create)
        try:
            async with _acquire(pool, deadline) as conn:
                await sql_steps.adrive(conn, prepare, settings.command_timeout)
        except BaseException:
            if settings.is_own_pool:
                pool.terminate()
            raise
        settings.last_error = None
        return pool

    async def url(self) -> str:
        """The URL of this store's database."""
        await self._open_pool()
        return self._url

    async def close(self) -> None:
        """Close the pool, unless it is the caller's. The next call opens it again."""
        pool, self._pool = self._pool, None
        if pool is None or pool is self._database or self._owner is None:
            return
        if self._owner == (os.getpid(), asyncio.get_running_loop()):
            # If the server does not answer in time, asyncpg terminates the pool.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await self._release_kept(pool)
                    await pool.close()


@contextlib.asynccontextmanager
async def _acquire(pool: asyncpg.Pool, deadline: float) -> AsyncIterator[Any]:
    try:
        conn = await pool.acquire(timeout=seconds_left(deadline))
    except ValueError:  # asyncpg parses the URL only now
        raise database_url.unreadable_url() from None
    try:
        yield conn
    except TimeoutError:
        conn.terminate()  # releasing it would wait for its answer
        raise
    finally:
        await pool.release(conn)


async def _is_pooler(url: str, deadline: float) -> bool:
    """Whether the URL leads to a pooler in transaction mode, which gives clients its own process ids.

    Such a pooler runs each transaction in another session, without the statements that were prepared
    before. asyncpg prepares every statement, so each then runs in its own transaction, and none is cached.
    The check is a simple query, the only kind that is not prepared."""
    try:
        conn = await asyncpg.connect(
            url, timeout=seconds_left(deadline), statement_cache_size=0,
            command_timeout=seconds_left(deadline, 1.0) / 2,  # which leaves time for one retry
        )  # fmt: skip
    except ValueError:  # asyncpg parses the URL only now
        raise database_url.unreadable_url() from None
    try:
        pid = conn.get_server_pid()
        await conn.execute(
            f"DO $$ BEGIN IF pg_backend_pid() <> {pid:d} THEN RAISE SQLSTATE 'HWPLR'; END IF; END $$"
        )
    except asyncpg.PostgresError as error:
        if error.sqlstate == "HWPLR":
            return True
        raise
    finally:
        conn.terminate()
    return False


async def _skip_reset(conn: Any) -> None:
    """Reset nothing: statements of a store leave no state in a session, so the round trip can be saved."""


@contextlib.contextmanager
def _unanswered_after(seconds: float) -> Iterator[None]:
    """Raise a timeout of an answer as `Unanswered`: a timeout of a checkout means that nothing was sent."""
    try:
        yield
    except TimeoutError as error:
        raise Unanswered(seconds) from error


async def _fetch(conn: Any, statement: Statement[Any], resend: bool, timeout: float) -> Rows:
    if resend and statement.resend is not None:
        statement = statement.resend()
    if (copy := statement.copy) is not None:
        await conn.copy_to_table(
            copy.table, schema_name=copy.schema, columns=copy.columns, encoding="UTF8",
            source=_yield_between(copy.lines), timeout=timeout,
        )  # fmt: skip
        return []
    rows: Rows = await conn.fetch(statement.text, *statement.parameters, timeout=timeout)
    return rows


async def _yield_between(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Parts that take time to make. The event loop runs other tasks after each."""
    for part in parts:
        yield part
        await asyncio.sleep(0)
