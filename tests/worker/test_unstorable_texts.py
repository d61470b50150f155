"""A text that the encoding of the database does not have harms only its own report, and changes no outcome."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest

from howdah import Cancel, Context, Retry, Status
from waiting import ended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import RunWorker
    from databases import Databases
    from howdah import App
    from howdah.embedded import EmbeddedServer

RESULT_SECONDS = 30  # less than an outcome waits for reports that cannot be written


@pytest.fixture
def database(server: EmbeddedServer, databases: Databases) -> Iterator[str]:
    """The URL of a database whose encoding has no arrow."""
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("CREATE DATABASE test_latin1 ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'")
    yield databases.url("test_latin1")
    databases.drop("test_latin1")


async def test_a_stage_that_cannot_be_stored_delays_no_outcome_and_no_other_report(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    started, reported = asyncio.Barrier(5), asyncio.Barrier(5)

    @app.task
    async def work(ctx: Context, number: int) -> int:
        await started.wait()
        ctx.progress(10, "→ stage" if number == 2 else f"stage {number}")
        ctx.event("note", {"number": number})
        await reported.wait()
        return number

    async with running_worker(app, concurrency=5):
        handles = [await work.aenqueue(number) for number in range(5)]
        for number, handle in enumerate(handles):
            assert await handle.aresult(RESULT_SECONDS) == number
    jobs = [await handle.ajob() for handle in handles]
    assert [job.current_stage for job in jobs] == ["stage 0", "stage 1", None, "stage 3", "stage 4"]
    for number, handle in enumerate(handles):
        events = await app.aqueue.events(handle)
        assert [event.data for event in events] == [{"number": number}]
    (line,) = [each for each in caplog.records if "progress rejected" in each.message]
    assert line.__dict__["job_id"] == str(handles[2].id)


async def test_an_error_that_cannot_be_stored_is_escaped_and_its_attempt_is_retried(
    app: App, running_worker: RunWorker
) -> None:
    @app.task(max_attempts=2, retry=Retry.fixed(0.1))
    async def fails() -> None:
        raise ValueError("a → b")

    async with running_worker(app):
        handle = await fails.aenqueue()
        job = await ended(handle)
    assert (job.status, job.attempts) == (Status.FAILED, 2)
    assert job.last_error == r"ValueError: a \u2192 b"
    for event in await app.aqueue.events(handle):
        assert event.data["error"] == r"ValueError: a \u2192 b"
        assert r"raise ValueError(\"a \u2192 b\")" in event.data["traceback"].replace('"', r"\"")


async def test_a_job_whose_reason_to_cancel_cannot_be_stored_is_cancelled(
    app: App, running_worker: RunWorker
) -> None:
    @app.task
    async def cancels() -> None:
        raise Cancel("a → b")

    async with running_worker(app):
        job = await ended(await cancels.aenqueue())
    assert (job.status, job.last_error) == (Status.CANCELLED, r"a \u2192 b")
