"""Jobs in the caller's transaction, with every supported library."""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from howdah import (
    AsyncJobQueue,
    InvalidOption,
    JobQueue,
    LeaseLost,
    PayloadTooLarge,
    SchemaMissing,
    Status,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator


INSERT = "INSERT INTO orders (id) VALUES (1)"


class CallerConnection(NamedTuple):
    """A caller's connection or session, and how its library executes, commits and rolls back."""

    conn: Any
    execute: Callable[[str], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]


class Observer:
    """Counts committed rows."""

    def __init__(self, conn: psycopg.Connection) -> None:
        self._conn = conn
        conn.execute("CREATE TABLE orders (id int)")

    def orders(self) -> int:
        return self._count("SELECT count(*) FROM orders")

    def jobs(self, status: str = "pending") -> int:
        return self._count(f"SELECT count(*) FROM howdah.jobs WHERE status = '{status}'")

    def _count(self, query: str) -> int:
        row = self._conn.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def observer(connect: Callable[[], psycopg.Connection]) -> Iterator[Observer]:
    conn = connect()
    yield Observer(conn)
    conn.execute("DROP TABLE orders")


def with_driver(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")


# ── sync ──────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def by_psycopg(url: str) -> Iterator[CallerConnection]:
    with contextlib.closing(psycopg.connect(url)) as conn:
        yield CallerConnection(conn, lambda q: conn.execute(q.encode()), conn.commit, conn.rollback)


@contextlib.contextmanager
def by_sqlalchemy_connection(url: str) -> Iterator[CallerConnection]:
    engine = sqlalchemy.create_engine(with_driver(url, "psycopg"))
    with engine.connect() as conn:
        yield CallerConnection(
            conn, lambda q: conn.execute(sqlalchemy.text(q)), conn.commit, conn.rollback
        )
    engine.dispose()


@contextlib.contextmanager
def by_sqlalchemy_session(url: str) -> Iterator[CallerConnection]:
    engine = sqlalchemy.create_engine(with_driver(url, "psycopg"))
    with Session(engine) as conn:
        yield CallerConnection(
            conn, lambda q: conn.execute(sqlalchemy.text(q)), conn.commit, conn.rollback
        )
    engine.dispose()


@contextlib.contextmanager
def by_sqlalchemy_scoped_session(url: str) -> Iterator[CallerConnection]:
    engine = sqlalchemy.create_engine(with_driver(url, "psycopg"))
    conn = scoped_session(sessionmaker(engine))
    yield CallerConnection(
        conn, lambda q: conn.execute(sqlalchemy.text(q)), conn.commit, conn.rollback
    )
    conn.remove()
    engine.dispose()


@contextlib.contextmanager
def by_django(url: str) -> Iterator[CallerConnection]:
    with django_connection(url) as conn:
        conn.set_autocommit(False)

        def execute(query: str) -> None:
            with conn.cursor() as cursor:
                cursor.execute(query)

        yield CallerConnection(conn, execute, conn.commit, conn.rollback)


@contextlib.contextmanager
def django_connection(url: str) -> Iterator[Any]:
    """`django.db.connection`, configured for this database."""
    import django
    from django.conf import settings
    from django.db import connection, connections

    if not settings.configured:
        settings.configure(USE_TZ=True)
        django.setup()
    known = psycopg.conninfo.conninfo_to_dict(url)
    before = connections.settings
    connections.settings = connections.configure_settings(
        {
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": known["dbname"],
                "USER": known["user"],
                "HOST": known["host"],
                "PORT": known["port"],
            }
        }
    )
    if hasattr(connections._connections, "default"):
        del connections["default"]
    try:
        yield connection
    finally:
        connection.close()
        del connections["default"]
        connections.settings = before


SYNC = [
    by_psycopg, by_sqlalchemy_connection, by_sqlalchemy_session, by_sqlalchemy_scoped_session, by_django,
]  # fmt: skip
sync_libraries = pytest.mark.parametrize("library", SYNC, ids=lambda each: each.__name__[3:])


@sync_libraries
def test_a_job_and_its_completion_commit_or_roll_back_with_the_callers_rows(
    queue: JobQueue, database: str, observer: Observer, library: Any
) -> None:
    with library(database) as mine:
        mine.execute(INSERT)
        lost = queue.enqueue("a", {"é": [1, None]}, delay=timedelta(0), conn=mine.conn)
        assert queue.get(lost, conn=mine.conn).data == {"é": [1, None]}
        assert observer.jobs() == 0
        mine.rollback()
        assert (observer.orders(), observer.jobs()) == (0, 0)

        mine.execute(INSERT)
        handle = queue.enqueue("a", {"n": "100%"}, conn=mine.conn)
        queue.enqueue_many([("b", n) for n in range(5)], conn=mine.conn)
        assert observer.jobs() == 0
        mine.commit()
        assert (observer.orders(), observer.jobs()) == (1, 6)

        job = queue.claim_one("a")
        assert job is not None
        assert job.id == handle.id
        assert job.data == {"n": "100%"}
        mine.execute(INSERT)
        queue.complete(handle, {"made": 1.5}, conn=mine.conn)
        mine.rollback()
        assert (observer.orders(), observer.jobs("completed")) == (1, 0)
        mine.execute(INSERT)
        queue.complete(handle, {"made": 1.5}, conn=mine.conn)
        mine.commit()
        assert (observer.orders(), observer.jobs("completed")) == (2, 1)
        assert queue.get(job).result == {"made": 1.5}


@sync_libraries
def test_every_operation_runs_in_the_callers_transaction(
    queue: JobQueue, database: str, observer: Observer, library: Any
) -> None:
    at = datetime(2040, 1, 1, tzinfo=UTC)
    queue.enqueue_many([("a", n) for n in range(7)])
    with library(database) as mine:
        conn = mine.conn
        one = queue.claim_one(conn=conn, lease=60)
        assert one is not None
        assert one.status is Status.RUNNING
        assert one.lease_expires_at is not None
        assert one.lease_expires_at.tzinfo is not None
        rest = queue.claim(["a"], batch_size=6, conn=conn)
        queue.extend([one, *rest], lease=timedelta(minutes=5), conn=conn)
        queue.progress(rest[0], 30, "stage", conn=conn)
        queue.event(rest[0], "seen", {"x": 1}, conn=conn)
        queue.fail(rest[1], ValueError("no"), run_at=at, conn=conn)
        queue.fail([rest[2]], "no", delay=60, conn=conn)
        queue.fail(rest[3], "no", retry=False, conn=conn)
        queue.release(rest[4], delay=30, conn=conn)
        assert queue.cancel([rest[4], rest[5]], conn=conn) == {
            rest[4].id: "cancelled",
            rest[5].id: "cancelling",
        }
        assert queue.retry(rest[3], conn=conn) == [rest[3].id]
        queue.complete([one, rest[0]], ["r", None], conn=conn)
        with pytest.raises(LeaseLost) as caught:
            queue.complete(rest[1:3], conn=conn)
        assert set(caught.value.ids) == {rest[1].id, rest[2].id}
        assert observer.jobs() == 7
        mine.commit()
        assert queue.get(rest[1]).run_at == at
        assert {status: n for status, n in queue.counts().items() if n} == {
            Status.COMPLETED: 2, Status.PENDING: 3, Status.CANCELLED: 1, Status.CLAIMED: 1,
        }  # fmt: skip


@sync_libraries
def test_errors_in_the_callers_transaction_are_howdahs_errors(
    database: str, observer: Observer, library: Any
) -> None:
    queue = JobQueue(database, payload_limit=200_000)
    with library(database) as mine:
        with pytest.raises(PayloadTooLarge, match=r"^the database refused data: "):
            queue.enqueue("a", "x" * 100_000, conn=mine.conn)
        mine.rollback()
        with pytest.raises(PayloadTooLarge) as caught:
            queue.enqueue_many([("a", 1), ("a", "x" * 100_000)], conn=mine.conn)
        assert caught.value.index == 1
        mine.rollback()
        with pytest.raises(SchemaMissing):
            JobQueue(database, schema="nope", create=False).enqueue("a", conn=mine.conn)
        mine.rollback()
    assert observer.jobs() == 0


def test_a_job_is_enqueued_only_if_djangos_atomic_block_commits(
    queue: JobQueue, database: str, observer: Observer
) -> None:
    from django.db import connection, transaction

    with django_connection(database):
        with transaction.atomic():
            queue.enqueue("a", conn=connection)
            transaction.set_rollback(True)
        assert observer.jobs() == 0
        with transaction.atomic():
            queue.enqueue("a", conn=connection)
            assert observer.jobs() == 0
        assert observer.jobs() == 1
        from django.db import connections

        queue.enqueue("a", conn=connections["default"])
        assert observer.jobs() == 2


def test_the_first_use_of_a_callers_connection_creates_the_schema_outside_its_transaction(
    empty_database: str,
) -> None:
    queue = JobQueue(empty_database)
    with contextlib.closing(psycopg.connect(empty_database)) as conn:
        queue.enqueue("a", conn=conn)
        conn.rollback()
        assert queue.pending() == 0
        queue.enqueue("a", conn=conn)
        conn.commit()
    assert queue.pending() == 1
    queue.close()


def test_a_queue_without_a_database_works_on_the_callers_connection(
    database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, observer: Observer
) -> None:
    monkeypatch.delenv("HOWDAH_DATABASE_URL", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    with psycopg.connect(database) as conn:
        JobQueue().enqueue("a", conn=conn)
    assert observer.jobs() == 1
    with psycopg.connect(database) as conn, pytest.raises(SchemaMissing):
        JobQueue(schema="elsewhere").enqueue("a", conn=conn)


def test_a_schema_with_a_percent_sign_works_in_django(empty_database: str) -> None:
    queue = JobQueue(empty_database, schema="100% mine")
    with django_connection(empty_database) as conn:
        queue.enqueue("a", conn=conn)
    assert queue.pending() == 1
    queue.close()


# ── async ─────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def by_apsycopg(url: str) -> AsyncIterator[CallerConnection]:
    conn = await psycopg.AsyncConnection.connect(url)
    yield CallerConnection(conn, lambda q: conn.execute(q.encode()), conn.commit, conn.rollback)
    await conn.close()


def by_transactions(conn: Any) -> CallerConnection:
    """asyncpg begins a transaction only on request."""
    begun: list[Any] = []

    async def execute(query: str) -> None:
        if not begun:
            begun.append(conn.transaction())
            await begun[0].start()
        if query:
            await conn.execute(query)

    async def end(name: str) -> None:
        await getattr(begun.pop(), name)()

    return CallerConnection(conn, execute, lambda: end("commit"), lambda: end("rollback"))


@contextlib.asynccontextmanager
async def by_asyncpg(url: str) -> AsyncIterator[CallerConnection]:
    conn = await asyncpg.connect(url)
    yield by_transactions(conn)
    await conn.close()


@contextlib.asynccontextmanager
async def by_asyncpg_with_codecs(url: str) -> AsyncIterator[CallerConnection]:
    conn = await asyncpg.connect(url)
    for name in ("json", "jsonb"):
        await conn.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    yield by_transactions(conn)
    await conn.close()


@contextlib.asynccontextmanager
async def by_asyncpg_pool(url: str) -> AsyncIterator[CallerConnection]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as conn:
        yield by_transactions(conn)


def by_async_sqlalchemy(driver: str, kind: str) -> Any:
    @contextlib.asynccontextmanager
    async def library(url: str) -> AsyncIterator[CallerConnection]:
        engine = create_async_engine(with_driver(url, driver).replace("@/", "@:5432/"))
        async with AsyncSession(engine) if kind == "session" else engine.connect() as conn:

            def execute(query: str) -> Awaitable[Any]:
                return conn.execute(sqlalchemy.text(query or "SELECT 1"))

            yield CallerConnection(conn, execute, conn.commit, conn.rollback)
        await engine.dispose()

    library.__name__ = f"by_sqlalchemy_{driver}_{kind}"
    return library


ASYNC = [
    by_apsycopg, by_asyncpg, by_asyncpg_with_codecs, by_asyncpg_pool,
    *(by_async_sqlalchemy(driver, kind)
      for driver in ("asyncpg", "psycopg") for kind in ("session", "connection")),
]  # fmt: skip
async_libraries = pytest.mark.parametrize("library", ASYNC, ids=lambda each: each.__name__[3:])


@async_libraries
async def test_an_async_enqueue_and_completion_commit_or_roll_back_with_the_callers_rows(
    aqueue: AsyncJobQueue, database: str, observer: Observer, library: Any
) -> None:
    async with library(database) as mine:
        await mine.execute(INSERT)
        lost = await aqueue.enqueue("a", {"é": [1, None]}, conn=mine.conn)
        assert (await aqueue.get(lost, conn=mine.conn)).data == {"é": [1, None]}
        assert observer.jobs() == 0
        await mine.rollback()
        assert (observer.orders(), observer.jobs()) == (0, 0)

        await mine.execute(INSERT)
        handle = await aqueue.enqueue("a", {"n": "100%"}, conn=mine.conn)
        await aqueue.enqueue_many([("b", n) for n in range(5)], conn=mine.conn)
        assert observer.jobs() == 0
        await mine.commit()
        assert (observer.orders(), observer.jobs()) == (1, 6)

        job = await aqueue.claim_one("a")
        assert job is not None
        assert job.data == {"n": "100%"}
        for end in (mine.rollback, mine.commit):
            await mine.execute(INSERT)
            await aqueue.complete(handle, {"made": 1.5}, conn=mine.conn)
            await end()
        assert (observer.orders(), observer.jobs("completed")) == (2, 1)
        assert (await aqueue.get(job)).result == {"made": 1.5}


@async_libraries
async def test_every_async_operation_runs_in_the_callers_transaction(
    aqueue: AsyncJobQueue, database: str, observer: Observer, library: Any
) -> None:
    at = datetime(2040, 1, 1, tzinfo=UTC)
    await aqueue.enqueue_many([("a", n) for n in range(7)])
    async with library(database) as mine:
        conn = mine.conn
        await mine.execute("")
        one = await aqueue.claim_one(conn=conn, lease=60)
        assert one is not None
        assert one.lease_expires_at is not None
        assert one.lease_expires_at.tzinfo is not None
        rest = await aqueue.claim(["a"], batch_size=6, conn=conn)
        await aqueue.extend([one, *rest], lease=timedelta(minutes=5), conn=conn)
        await aqueue.progress(rest[0], 30, "stage", conn=conn)
        await aqueue.event(rest[0], "seen", {"x": 1}, conn=conn)
        await aqueue.fail(rest[1], ValueError("no"), run_at=at, conn=conn)
        await aqueue.fail([rest[2]], "no", delay=60, conn=conn)
        await aqueue.fail(rest[3], "no", retry=False, conn=conn)
        await aqueue.release(rest[4], delay=30, conn=conn)
        assert await aqueue.cancel([rest[4], rest[5]], conn=conn) == {
            rest[4].id: "cancelled",
            rest[5].id: "cancelling",
        }
        assert await aqueue.retry(rest[3], conn=conn) == [rest[3].id]
        await aqueue.complete([one, rest[0]], ["r", None], conn=conn)
        with pytest.raises(LeaseLost):
            await aqueue.complete(rest[1:3], conn=conn)
        assert observer.jobs() == 7
        await mine.commit()
        assert (await aqueue.get(rest[1])).run_at == at
        assert {status: n for status, n in (await aqueue.counts()).items() if n} == {
            Status.COMPLETED: 2, Status.PENDING: 3, Status.CANCELLED: 1, Status.CLAIMED: 1,
        }  # fmt: skip

        await mine.execute("")
        big = AsyncJobQueue(database, payload_limit=200_000)
        with pytest.raises(PayloadTooLarge, match=r"^the database refused data: "):
            await big.enqueue("a", "x" * 100_000, conn=conn)
        await mine.rollback()


# ── unsupported connections ──────────────────────────────────────────────────────────────────────────────


def test_a_wrong_kind_of_connection_is_refused_by_name(database: str) -> None:
    queue = JobQueue(database)
    engine = sqlalchemy.create_engine(with_driver(database, "psycopg"))
    for wrong, name in (
        (object(), "builtins.object"),
        (database, "builtins.str"),
        (engine, "sqlalchemy.engine.base.Engine"),
        (AsyncSession(), "sqlalchemy.ext.asyncio.session.AsyncSession"),
    ):
        with pytest.raises(InvalidOption) as caught:
            queue.enqueue("a", conn=wrong)
        assert str(caught.value) == (
            f"conn= is a {name}, and JobQueue takes a psycopg Connection, a SQLAlchemy Session or "
            "Connection, or Django's connection to PostgreSQL."
        )


async def test_a_wrong_kind_of_async_connection_is_refused_by_name(database: str) -> None:
    queue = AsyncJobQueue(database)
    with psycopg.connect(database) as sync:
        for wrong in (object(), sync, Session(), create_async_engine("postgresql+asyncpg://")):
            with pytest.raises(InvalidOption) as caught:
                await queue.enqueue("a", conn=wrong)
            assert str(caught.value) == (
                f"conn= is a {type(wrong).__module__}.{type(wrong).__qualname__}, and AsyncJobQueue "
                "takes an asyncpg or psycopg AsyncConnection, or a SQLAlchemy AsyncSession or "
                "AsyncConnection."
            )


async def test_an_async_connection_is_refused_by_the_sync_queue_and_named(database: str) -> None:
    conn = await asyncpg.connect(database)
    with pytest.raises(
        InvalidOption, match=r"^conn= is a asyncpg\.connection\.Connection, and JobQ"
    ):
        await asyncio.to_thread(JobQueue(database).enqueue, "a", conn=conn)
    await conn.close()
