"""Statements for roles that may read the tables and may not call the functions."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest

from howdah import AsyncJobQueue, Job, JobNotFound, JobQueue

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def reader_url(database: str) -> Iterator[str]:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("CREATE ROLE table_reader LOGIN")
        conn.execute("GRANT USAGE ON SCHEMA howdah TO table_reader")
        conn.execute("GRANT SELECT ON ALL TABLES IN SCHEMA howdah TO table_reader")
        yield database.replace("://howdah@", "://table_reader@")
        conn.execute("DROP OWNED BY table_reader")
        conn.execute("DROP ROLE table_reader")


@pytest.fixture
def job(queue: JobQueue) -> Job:
    queue.enqueue("work")
    (job,) = queue.claim(["work"])
    return job


def test_a_role_that_only_reads_tables_gets_the_same_answers(
    queue: JobQueue, job: Job, reader_url: str
) -> None:
    reader = JobQueue(reader_url, create=False)
    try:
        assert reader.get(job) == queue.get(job)
        assert reader.get(job).lease_id is None
        assert reader.events(job) == queue.events(job)
        with pytest.raises(JobNotFound):
            reader.get(uuid.uuid4())
    finally:
        reader.close()


async def test_a_role_that_only_reads_tables_gets_the_same_answers_in_async_code(
    queue: JobQueue, job: Job, reader_url: str
) -> None:
    reader = AsyncJobQueue(reader_url, create=False)
    try:
        assert await reader.get(job) == queue.get(job)
        with pytest.raises(JobNotFound):
            await reader.get(uuid.uuid4())
    finally:
        await reader.close()
