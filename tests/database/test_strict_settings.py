"""Settings of a role or database that change statements, answers or transactions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import psycopg_pool
import pytest
import sqlalchemy
from click.testing import CliRunner
from sqlalchemy.ext.asyncio import create_async_engine

from blocking import BlockingAsyncJobQueue
from howdah import AsyncJobQueue, JobQueue, Status
from howdah.cli import main
from howdah.insight.doctor import Doctor

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = {
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "bytea_output": "escape",
    "array_nulls": "off",
    "quote_all_identifiers": "on",
    "extra_float_digits": "-10",
    "standard_conforming_strings": "off",
    "lock_timeout": "2s",
    "idle_in_transaction_session_timeout": "20s",
    "search_path": "nowhere",
    "plan_cache_mode": "force_custom_plan",
}


@pytest.fixture
def hostile(fresh_database: str) -> Iterator[str]:
    name = psycopg.conninfo.conninfo_to_dict(fresh_database)["dbname"]
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        for setting, value in HOSTILE.items():
            # search_path is a list, and a quoted name is one element of it.
            conn.execute(f"ALTER DATABASE {name} SET {setting} = '{value}'".encode())
    return fresh_database


@pytest.mark.parametrize("queue_class", [JobQueue, BlockingAsyncJobQueue])
def test_a_queue_works_with_every_setting(hostile: str, queue_class: Any) -> None:
    queue = queue_class(hostile)
    first = queue.enqueue("work", {"n": 1}, ordering_key="key", idempotency_key="i", keep=90000)
    queue.enqueue_many([("work", {"n": n}) for n in range(300)])
    queue.enqueue_many([{"job_type": "work", "ordering_key": "key"}] * 3)
    job = queue.get(first)
    assert (job.keep.total_seconds(), job.run_at.utcoffset() is not None) == (90000, True)
    done = 0
    while jobs := queue.claim(batch_size=100):
        done += len(queue.complete(jobs) or jobs)
    assert queue.counts()[Status.COMPLETED] == 304
    queue.close()


@pytest.mark.parametrize(
    "command",
    ["jobs", "queues", "workers", "doctor", "explain", "show", "retry", "migrate --check"],
)
def test_a_command_works_with_every_setting(hostile: str, command: str) -> None:
    queue = JobQueue(hostile)
    handle = queue.enqueue("work", keep=90000)
    with psycopg.connect(hostile, autocommit=True) as conn:
        conn.execute("SELECT howdah.register_worker('w', 'host', 1, '{default}', '{work}')")
    if command == "retry":
        queue.fail(queue.claim_one(["work"]), reason="bad", retry=False)
    queue.close()
    arguments = command.split()
    if command in ("explain", "show", "retry"):
        arguments.append(str(handle.id))
    answer = CliRunner().invoke(main, [*arguments, "--database", hostile])
    assert isinstance(answer.exception, SystemExit | None), answer.output
    assert "Traceback" not in answer.output
    if command != "doctor":  # which reports the isolation
        assert answer.exit_code == 0, answer.output


def test_the_doctor_reports_a_stricter_isolation(hostile: str) -> None:
    with psycopg.connect(hostile, autocommit=True) as conn:
        finding = next(iter(Doctor(conn, "howdah").examine()))
    assert finding.level == "warning"
    assert "default_transaction_isolation is serializable" in finding.text


LEVELS = ["serializable", "repeatable read"]


async def drain(queue: AsyncJobQueue, jobs: int) -> None:
    """Complete this many jobs with four claimers at a time, which get in each other's way."""
    done = 0

    async def consume() -> None:
        nonlocal done
        while done < jobs:
            claimed = await queue.claim(batch_size=3)
            await queue.complete(claimed)
            done += len(claimed)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(consume())


@pytest.mark.parametrize("level", LEVELS)
async def test_a_callers_async_pool_with_a_stricter_default_works(
    fresh_database: str, level: str
) -> None:
    settings = {"default_transaction_isolation": level}
    async with asyncpg.create_pool(
        fresh_database, min_size=4, max_size=4, server_settings=settings
    ) as pool:
        queue = AsyncJobQueue(pool)
        async with asyncio.TaskGroup() as group:
            for n in range(40):
                group.create_task(
                    queue.enqueue(
                        "work", ordering_key=f"key {n % 4}", idempotency_key=f"one of {n % 20}"
                    )
                )
        await queue.enqueue_many([("work", n) for n in range(300)])
        assert await queue.pending() == 320
        await drain(queue, 320)
        assert (await queue.counts())[Status.COMPLETED] == 320
        # The caller's own statements keep the caller's level.
        assert await pool.fetchval("SELECT current_setting('transaction_isolation')") == level


@pytest.mark.parametrize("level", LEVELS)
def test_a_callers_pool_with_a_stricter_default_works(fresh_database: str, level: str) -> None:
    options = f"-c default_transaction_isolation={level}".replace("e read", "e\\ read")
    with psycopg_pool.ConnectionPool(
        fresh_database, kwargs={"options": options}, min_size=4, max_size=4
    ) as pool:
        queue = JobQueue(pool)
        with ThreadPoolExecutor(4) as threads:
            list(
                threads.map(
                    lambda n: queue.enqueue(
                        "work", ordering_key=f"key {n % 4}", idempotency_key=f"one of {n % 20}"
                    ),
                    range(40),
                )
            )
            assert queue.pending() == 20

            def consume(_: int) -> None:
                while queue.pending():
                    queue.complete(queue.claim(batch_size=3))

            list(threads.map(consume, range(4)))
        assert queue.counts()[Status.COMPLETED] == 20
        with pool.connection() as conn:
            found = conn.execute("SELECT current_setting('transaction_isolation')").fetchone()
        assert found == (level,)


NAMES = [
    "$1",
    "a$1b",
    "%(p1)s",
    "%s",
    "%%",
    ":name",
    "a:b",
    "::text",
    'a"b',
    "it's",
    "{0}",
    "\\:x",
    "-- x",
]


@pytest.fixture(params=NAMES)
def schema(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def with_driver(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")


def test_any_schema_name_works_on_a_sync_connection(empty_database: str, schema: str) -> None:
    queue = JobQueue(empty_database, schema=schema)
    queue.enqueue_many([("a", n) for n in range(200)])
    engine = sqlalchemy.create_engine(with_driver(empty_database, "psycopg"))
    with psycopg.connect(empty_database) as conn:
        queue.enqueue("a", {"n": 1}, conn=conn)
    with engine.begin() as conn:
        queue.enqueue("a", {"n": 1}, conn=conn)
        assert queue.claim(conn=conn)
    engine.dispose()
    assert queue.counts()[Status.PENDING] == 192
    queue.close()


async def test_any_schema_name_works_on_an_async_connection(
    empty_database: str, schema: str
) -> None:
    queue = AsyncJobQueue(empty_database, schema=schema)
    await queue.enqueue_many([("a", n) for n in range(200)])
    for driver in ("psycopg", "asyncpg"):
        engine = create_async_engine(with_driver(empty_database, driver))
        async with engine.begin() as conn:
            await queue.enqueue("a", {"n": 1}, conn=conn)
        await engine.dispose()
    assert await queue.pending() == 202
    await queue.close()
