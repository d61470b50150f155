"""Runs Statements for asyncio, on an asyncpg pool: the twin of `store.py`, one pool per event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

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
from howdah.embedded import resolve_url
from howdah.encoding import database_url, validation
from howdah.errors import InvalidOption, NoDatabase, SchemaMissing
from howdah.protocol.statements import LONG_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterable, Iterator

    from howdah.protocol.statements import Rows, Statement

T = TypeVar("T")

CLOSE_TIMEOUT_SECONDS = 5.0
AT_HAND = 2  # a worker has a claim and an acknowledgement under way at once
STALE = 300.0  # seconds after which something on the way may have forgotten an idle connection
_POOLED = {"statement_cache_size": 0}

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
        timeout: float = TIMEOUT_SECONDS,
        command_timeout: float = COMMAND_TIMEOUT_SECONDS,
    ) -> None:
        if database is not None and not isinstance(database, str | asyncpg.Pool):
            raise InvalidOption(
                f"AsyncJobQueue takes a URL or an asyncpg.Pool, not {type(database).__name__}."
            )
        self._database = database
        self._schema = schema
        self._create = create
        self._timeout = validation.to_timedelta(timeout, "timeout", minimum=0.001).total_seconds()
        self._command_timeout = validation.to_timedelta(
            command_timeout, "command_timeout", minimum=0.001
        ).total_seconds()
        self._pooled = False
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._opening: asyncio.Lock | None = None
        self._pool: asyncpg.Pool | None = None
        self._at_hand: list[tuple[float, Any]] = []
        self._acquiring = 0
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
                check = has_schema(self._schema)
                if not check.decode(await caller_connection.arun(conn, check)):
                    # Not here: it is not for the caller's transaction to undo.
                    await self._ready()
                self._schema_seen = True
            rows = await caller_connection.arun(conn, statement)
        except NoDatabase:
            raise SchemaMissing(self._schema) from None
        except Exception as error:
            raise_translated(error, self._schema)
        return statement.decode(rows)

    async def run_all(self, statements: Iterable[Statement[T]]) -> list[T]:
        """Run statements in one transaction, again from the start if the connection breaks. They may be
        made as they are asked for."""
        give_up = time.monotonic() + self._timeout
        broken = False
        while True:
            pool = None
            try:
                pool = await self._ready(give_up)
                return await self._attempt(pool, statements, broken, give_up)
            except _ASYNC_ERRORS as error:
                if is_refused(error):
                    raise unreachable(self._where, error) from error
                if not is_connection_lost(error):
                    if pool is not None and is_schema_missing(error):
                        await self._look_again(pool)
                    raise_translated(error, self._schema)
                if isinstance(error, Unanswered) and not broken:
                    # It took its time, and may have been done: that is found out by asking again.
                    give_up = max(give_up, time.monotonic() + self._timeout)
                if time.monotonic() >= give_up or self._is_hopeless(error):
                    raise unreachable(self._where, error, self._trouble) from error
                if not isinstance(error, TimeoutError):
                    self._trouble = error
            broken = True
            await asyncio.sleep(RETRY_DELAY_SECONDS)

    async def _look_again(self, pool: asyncpg.Pool) -> None:
        """Raise `SchemaTooNew` if what is missing went with a migration under our feet."""
        async with _acquire(pool, time.monotonic() + self._patience) as conn:
            await adrive(conn, migrate.check(self._schema, create=False), self._command_timeout)

    def _is_hopeless(self, error: BaseException) -> bool:
        # The caller's own pool is not ours to open.
        return not is_ours(self._database) and str(error).startswith("pool is ")

    async def _attempt(
        self, pool: asyncpg.Pool, statements: Iterable[Statement[T]], broken: bool, give_up: float
    ) -> list[T]:
        conn = await self._acquire(pool, seconds_left(give_up, self._patience))
        try:
            if isinstance(statements, list) and len(statements) == 1 and not self._pooled:
                rows = [(each, await self._fetch(conn, each, broken)) for each in statements]
            else:
                async with self._transaction(conn):
                    rows = [(each, await self._fetch(conn, each, broken)) for each in statements]
        except BaseException as error:
            # A time-out is an OSError too: who did not answer once is not asked again.
            if isinstance(error, _ASYNC_ERRORS) and is_connection_lost(error):
                conn.terminate()
                if is_ours(self._database):
                    # Nor are its neighbours: each would take its own time to be found out.
                    await pool.expire_connections()
                    for _, other in self._at_hand:
                        other.terminate()
                    await self._put_down(pool)
            await pool.release(conn)
            raise
        if self._may_keep(pool):
            self._at_hand.append((time.monotonic(), conn))
        else:
            await pool.release(conn)
        return [statement.decode(answer) for statement, answer in rows]

    async def _acquire(self, pool: asyncpg.Pool, timeout: float) -> Any:
        """A connection, preferably one at hand: the pool's own way takes longer than a short statement."""
        while self._at_hand:
            since, conn = self._at_hand.pop()
            if not conn.is_closed() and time.monotonic() - since < STALE:
                return conn
            conn.terminate()
            await pool.release(conn)
        self._acquiring += 1
        try:
            return await pool.acquire(timeout=timeout)
        finally:
            self._acquiring -= 1

    def _may_keep(self, pool: asyncpg.Pool) -> bool:
        """Whether a connection may stay at hand: nobody waits for one, and the pool is not closing."""
        free = self._pool is pool is not self._database and not self._acquiring
        return free and len(self._at_hand) < AT_HAND

    async def _put_down(self, pool: asyncpg.Pool) -> None:
        """Give the pool back what is at hand."""
        while self._at_hand:
            await pool.release(self._at_hand.pop()[1])

    async def _fetch(self, conn: Any, statement: Statement[Any], broken: bool) -> Rows:
        limit = statement.timeout or self._command_timeout
        with _answered(limit):
            return await _afetch(conn, statement, broken, limit)

    @contextlib.asynccontextmanager
    async def _transaction(self, conn: Any) -> AsyncIterator[None]:
        """As `conn.transaction()`, with a limit that does not depend on whose pool it is."""
        limit = self._command_timeout
        with _answered(limit):
            await conn.execute("BEGIN", timeout=limit)
        try:
            yield
        except Unanswered:
            raise  # nor would this be answered
        except BaseException:
            if not conn.is_closed():
                await conn.execute("ROLLBACK", timeout=limit)
            raise
        with _answered(limit):
            await conn.execute("COMMIT", timeout=limit)

    async def _ready(self, give_up: float | None = None) -> asyncpg.Pool:
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            # Another loop's or process's pool cannot be used here, nor closed from here.
            self._home, self._pool, self._opening = home, None, asyncio.Lock()
            self._at_hand, self._acquiring = [], 0
        if self._pool is None:
            assert self._opening is not None  # noqa: S101 - set together with _home
            if give_up is None:
                give_up = time.monotonic() + self._timeout
            async with asyncio.timeout(seconds_left(give_up)):
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
                self._where = database_url.host_and_database(self._url)
            self._pooled = await _is_pooled(self._url, give_up)
            pool = await asyncpg.create_pool(
                self._url,
                min_size=0,
                max_size=POOL_CONNECTIONS,
                timeout=5.0,
                command_timeout=self._command_timeout,
                reset=_leave_as_it_is,
                **(_POOLED if self._pooled else {}),
            )
        try:
            async with _acquire(pool, give_up) as conn:
                check = migrate.check(self._schema, create=self._create)
                if await adrive(conn, check, self._command_timeout):
                    try:
                        await _amigrate(conn, self._schema)
                    except asyncpg.InsufficientPrivilegeError:
                        await adrive(conn, migrate.refuse(self._schema), self._command_timeout)
        except BaseException:
            if is_ours(self._database):
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
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await self._put_down(pool)
                    await pool.close()


@contextlib.asynccontextmanager
async def _acquire(pool: asyncpg.Pool, give_up: float) -> AsyncIterator[Any]:
    try:
        conn = await pool.acquire(timeout=seconds_left(give_up))
    except ValueError:  # asyncpg reads the URL only now
        raise database_url.unreadable_url() from None
    try:
        yield conn
    except TimeoutError:
        conn.terminate()  # to give it back would be to wait for it
        raise
    finally:
        await pool.release(conn)


async def _is_pooled(url: str, give_up: float) -> bool:
    """Whether a pooler in transaction mode stands in between: it hands out process ids of its own.

    Such a pooler gives each transaction another session, where statements that were prepared before do
    not exist. asyncpg prepares every statement, so each then goes in a transaction of its own, and none
    is kept. Asked in a simple query, the one kind that needs no preparing."""
    try:
        conn = await asyncpg.connect(
            url, timeout=seconds_left(give_up), statement_cache_size=0,
            command_timeout=seconds_left(give_up, 1.0) / 2,  # and then once more
        )  # fmt: skip
    except ValueError:  # asyncpg reads the URL only now
        raise database_url.unreadable_url() from None
    try:
        ours = conn.get_server_pid()
        await conn.execute(
            f"DO $$ BEGIN IF pg_backend_pid() <> {ours:d} THEN RAISE SQLSTATE 'HWPLR'; END IF; END $$"
        )
    except asyncpg.PostgresError as error:
        if error.sqlstate == "HWPLR":
            return True
        raise
    finally:
        conn.terminate()
    return False


async def _leave_as_it_is(conn: Any) -> None:
    """No statement of ours leaves anything in a session, so none needs a round trip to reset it."""


@contextlib.contextmanager
def _answered(seconds: float) -> Iterator[None]:
    """Tell an answer that does not come in time from a connection that could not be had in time."""
    try:
        yield
    except TimeoutError as error:
        raise Unanswered(seconds) from error


async def _afetch(conn: Any, statement: Statement[Any], broken: bool, limit: float) -> Rows:
    if broken and statement.resend is not None:
        statement = statement.resend()
    if (copy := statement.copy) is not None:
        await conn.copy_to_table(
            copy.table, schema_name=copy.schema, columns=copy.columns, encoding="UTF8",
            source=_in_turns(copy.lines), timeout=limit,
        )  # fmt: skip
        return []
    rows: Rows = await conn.fetch(statement.text, *statement.parameters, timeout=limit)
    return rows


async def _in_turns(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Parts that take time to make, with room for others in between."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def adrive(
    conn: Any, work: Generator[migrate.Query | migrate.Script, Any, T], limit: float
) -> T:
    """Run a generator of SQL on an asyncpg connection, and give its result. So many seconds for each step."""
    answer: Rows | None = None
    while True:
        try:
            step = work.send(answer)
        except StopIteration as stop:
            value: T = stop.value
            return value
        if isinstance(step, migrate.Query):
            answer = await conn.fetch(step.text, timeout=limit)
        else:
            answer = None
            await conn.execute(step.text, timeout=limit)


async def _amigrate(conn: Any, schema: str) -> None:
    give_up = time.monotonic() + migrate.RETRY_SECONDS
    while True:
        try:
            await adrive(conn, migrate.steps(schema), LONG_TIMEOUT_SECONDS)
        except asyncpg.LockNotAvailableError:
            await conn.execute("ROLLBACK")
            if time.monotonic() > give_up:
                raise
        else:
            return
