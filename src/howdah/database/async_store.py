"""Runs Statements for asyncio, on an asyncpg pool: the twin of `store.py`, with one pool per event loop.

Two connections are kept outside the pool (decision 0021). Every statement has a deadline (decision 0022)."""

from __future__ import annotations

import asyncio
import contextlib
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
from howdah.database.loop_pool import LoopPool, release
from howdah.database.own_thread import run_in_own_thread
from howdah.database.retry_loop import (
    COMMAND_TIMEOUT_SECONDS,
    POOL_CONNECTIONS,
    TIMEOUT_SECONDS,
    RetryLoop,
    StoreSettings,
)
from howdah.database.session_setup import READ_STRICT, SESSION_SETUP
from howdah.embedded import resolve_url
from howdah.encoding import database_url
from howdah.errors import InvalidOption, NoDatabase, NotPermitted, SchemaMissing
from howdah.protocol.per_loop import PerLoop
from howdah.protocol.statements import Statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from howdah.protocol.statements import Rows, Statement

T = TypeVar("T")

CONNECT_TIMEOUT_SECONDS = 5.0
CLOSE_TIMEOUT_SECONDS = 5.0
_POOLER_OPTIONS: dict[str, Any] = {"statement_cache_size": 0}
# A role or database may have a stricter default, whose snapshots are too old to hand over ordering keys. A
# pooler may refuse these settings; through one, BEGIN sets the isolation level of every statement. JIT: no
# statement of ours runs for long enough to be worth compiling.
_SESSION_OPTIONS: dict[str, Any] = {
    "server_settings": {"default_transaction_isolation": "read committed", "jit": "off"}
}


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
        self._is_strict = False  # transactions of the caller's pool: `READ_STRICT`
        self._pools = PerLoop(LoopPool)
        self._url = ""
        self._schema_seen = False

    async def run(self, statement: Statement[T], conn: Any = None) -> T:
        """Run one statement, by itself or in the caller's transaction."""
        if conn is None:
            try:
                return (await self.run_all([statement]))[0]
            except NotPermitted:
                if statement.fallback is None:
                    raise
                return (await self.run_all([statement.fallback()]))[0]
        schema = self._settings.schema
        try:
            if self._settings.create and not self._schema_seen:
                check = Statements(schema).has_schema()
                if not check.decode(await caller_connection.arun(conn, check)):
                    # Not on the caller's connection: a rollback there would undo the migration.
                    await self._open_pool(self._pools.get())
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
        loop = RetryLoop(self._settings, statements)
        here = self._pools.get()
        while True:
            pool = None
            try:
                pool = await self._open_pool(here, loop.deadline)
                answers = await self._attempt(here, pool, statements, loop)
            except (*ASYNC_ERRORS, asyncio.CancelledError) as raised:
                error = _raise_own_cancellation(raised)
                if pool is not None and is_schema_missing(error):
                    await self._check_schema(pool)
                loop.after(error)
                pause = loop.pause(error)
            else:
                if self._settings.is_failing:
                    self._settings.note_success()
                return answers
            await asyncio.sleep(pause)

    @property
    def command_timeout(self) -> float:
        """Seconds to wait for the answer to one statement."""
        return self._settings.command_timeout

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt found no usable connection."""
        return self._settings.is_failing

    async def _check_schema(self, pool: asyncpg.Pool) -> None:
        """Raise `SchemaTooNew` if a newer Howdah has migrated the schema while this process runs."""
        check = migrate.check(self._settings.schema, create=False)
        async with _acquire(pool, time.monotonic() + self._settings.checkout_timeout) as conn:
            await sql_steps.adrive(conn, check, self._settings.command_timeout)

    async def _attempt(
        self,
        here: LoopPool,
        pool: asyncpg.Pool,
        statements: Iterable[Statement[T]],
        loop: RetryLoop,
    ) -> list[T]:
        # At least one whole checkout: creating the schema on the first call may have taken the timeout.
        timeout = seconds_left(loop.deadline, self._settings.checkout_timeout)
        conn = await here.acquire(pool, timeout)
        is_single = isinstance(statements, list) and len(statements) == 1
        try:
            if is_single and not (self._is_behind_pooler or self._is_strict):
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
                    await here.expire(pool)
            elif isinstance(error, asyncio.CancelledError) and self._settings.is_own_pool:
                conn.terminate()  # a release would wait for an answer that may never come
            await release(pool, conn)
            raise
        await here.release(pool, conn, is_own=pool is not self._database)
        return [statement.decode(answer) for statement, answer in rows]

    async def _fetch(self, conn: Any, statement: Statement[Any], resend: bool) -> Rows:
        timeout = statement.timeout or self._settings.command_timeout
        with _unanswered_after(timeout):
            return await _fetch(conn, statement, resend, timeout)

    @contextlib.asynccontextmanager
    async def _transaction(self, conn: Any) -> AsyncIterator[None]:
        """`conn.transaction()` with a timeout, which a caller's pool may not have."""
        timeout = self._settings.command_timeout
        with _unanswered_after(timeout):
            await conn.execute("BEGIN ISOLATION LEVEL READ COMMITTED", timeout=timeout)
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

    async def _open_pool(self, here: LoopPool, deadline: float | None = None) -> asyncpg.Pool:
        """The pool of this event loop. The first caller opens it, and others wait for that."""
        if here.pool is None:
            if deadline is None:
                deadline = time.monotonic() + self._settings.timeout
            async with asyncio.timeout(seconds_left(deadline)):
                await here.opening.acquire()
            try:
                if here.pool is None:
                    here.pool = await self._connect_pool(deadline)
            finally:
                here.opening.release()
        return here.pool

    async def _connect_pool(self, deadline: float) -> asyncpg.Pool:
        settings = self._settings
        if isinstance(self._database, asyncpg.Pool):
            pool = self._database
        else:
            self._is_behind_pooler = await _is_pooler(await self.url(), deadline)
            pool = await asyncpg.create_pool(
                self._url,
                min_size=0,
                max_size=POOL_CONNECTIONS,
                timeout=CONNECT_TIMEOUT_SECONDS,
                command_timeout=settings.command_timeout,
                init=_set_up_session,
                reset=_skip_reset,
                **(_POOLER_OPTIONS if self._is_behind_pooler else _SESSION_OPTIONS),
            )
        prepare = migrate.prepare(settings.schema, create=settings.create)
        try:
            async with _acquire(pool, deadline) as conn:
                await sql_steps.adrive(conn, prepare, settings.command_timeout)
                if pool is self._database:
                    self._is_strict = await conn.fetchval(
                        READ_STRICT, timeout=settings.command_timeout
                    )
        except BaseException:
            if settings.is_own_pool:
                pool.terminate()
            raise
        return pool

    async def url(self) -> str:
        """The URL of this store's database. Opens no connection."""
        if not self._url and not isinstance(self._database, asyncpg.Pool):
            self._url = await run_in_own_thread(resolve_url, self._database)
            self._settings.address = database_url.host_and_database(self._url)
        return self._url

    async def close(self) -> None:
        """Close the pool of this event loop, unless it is the caller's. The next call opens it again."""
        here = self._pools.get()
        pool, here.pool = here.pool, None
        if pool is None or pool is self._database:
            return
        # If the server does not answer in time, asyncpg terminates the pool.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await here.release_kept(pool)
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
        await release(pool, conn)


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


async def _set_up_session(conn: Any) -> None:
    try:
        await conn.execute(SESSION_SETUP)
    except asyncpg.PostgresError:
        pass
    except BaseException:
        conn.terminate()  # the pool would close it politely, and wait for a server that does not answer
        raise


async def _skip_reset(conn: Any) -> None:
    """Reset nothing: statements of a store leave no state in a session, so the round trip can be saved."""


def _raise_own_cancellation(error: BaseException) -> BaseException:
    """Raise a cancellation of this task. asyncpg waits for some answers in tasks of its own; if a handler cancelled
    only such a task, the answer is lost as if the connection had broken, and that error is returned."""
    if not isinstance(error, asyncio.CancelledError):
        return error
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    return ConnectionAbortedError("the driver's wait for an answer was cancelled")


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
