"""Assertions about enqueued jobs: in the database, in an open transaction, in an inline block."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from howdah import App, InvalidJob
from howdah.testing import (
    aassert_enqueued,
    aassert_not_enqueued,
    assert_enqueued,
    assert_not_enqueued,
    drain,
    inline,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

app = App()


@app.task
def resize(path: str, width: int = 100, owner: UUID | None = None) -> None:
    pass


@app.task
def resize_all() -> None:
    pass


@pytest.fixture
def here(howdah_database: str) -> Iterator[str]:
    yield howdah_database
    app.close()


def test_a_pending_job_and_a_completed_job_are_found(here: str) -> None:
    resize.enqueue("a.png", 400)
    assert [job.status for job in assert_enqueued(resize, "a.png", 400)] == ["pending"]
    drain(app)
    assert [job.status for job in assert_enqueued(resize, "a.png", 400)] == ["completed"]


def test_an_omitted_argument_matches_any_value(here: str) -> None:
    resize.enqueue("a.png", width=400)
    resize.enqueue("b.png", width=400)
    assert len(assert_enqueued(resize)) == 2
    assert len(assert_enqueued(resize, width=400)) == 2
    assert len(assert_enqueued(resize, "a.png")) == 1
    assert_not_enqueued(resize, "c.png")


def test_an_argument_that_the_job_omits_has_its_default(here: str) -> None:
    resize.enqueue("a.png")
    assert_enqueued(resize, "a.png", width=100)
    assert_not_enqueued(resize, "a.png", width=400)


def test_values_are_compared_as_json(here: str) -> None:
    resize.enqueue("a.png", owner=UUID(int=1))
    assert_enqueued(resize, owner=UUID(int=1))
    assert_not_enqueued(resize, owner=UUID(int=2))


def test_options_set_with_using_are_compared(here: str) -> None:
    resize.using(priority=150, queue="fast", delay=60, keep=timedelta(days=1)).enqueue("a.png")
    assert_enqueued(resize.using(priority=150, queue="fast"), "a.png")
    assert_enqueued(resize.using(delay=60, keep=86400), "a.png")
    assert_not_enqueued(resize.using(priority=100), "a.png")
    assert_not_enqueued(resize.using(delay=3600), "a.png")


def test_a_misspelled_argument_is_rejected() -> None:
    with inline(app), pytest.raises(InvalidJob, match="unexpected keyword argument 'widht'"):
        assert_not_enqueued(resize, widht=400)


def test_the_message_lists_the_jobs_and_suggests_the_nearest(here: str) -> None:
    resize.enqueue("b.png", 40)
    resize.enqueue("a.png", 300)
    with pytest.raises(AssertionError) as caught:
        assert_enqueued(resize.using(priority=100), "a.png", 400)
    assert str(caught.value) == (
        "resize was not enqueued with path='a.png', width=400, priority=100.\n"
        "Jobs of resize are:\n"
        "  resize(path='b.png', width=40), pending, queue='default', priority=100\n"
        "  resize(path='a.png', width=300), pending, queue='default', priority=100\n"
        "Did you mean resize(path='a.png', width=300), pending, queue='default', priority=100? "
        "There width is 300."
    )


def test_the_message_names_the_tasks_that_have_jobs(here: str) -> None:
    with pytest.raises(AssertionError, match=r"not enqueued\. Enqueued are: no jobs at all\.$"):
        assert_enqueued(resize)
    resize_all.enqueue()
    with pytest.raises(
        AssertionError, match=r'Enqueued are: resize_all \(1\)\. Did you mean "resize_all"\?$'
    ):
        assert_enqueued(resize)


def test_the_message_of_assert_not_enqueued_lists_the_jobs(here: str) -> None:
    resize.enqueue("a.png")
    with pytest.raises(
        AssertionError,
        match=r"resize was enqueued with path='a.png':\n  resize\(path='a.png'\), pend",
    ):
        assert_not_enqueued(resize, "a.png")


def test_in_an_inline_block_its_jobs_are_searched() -> None:
    with inline(app):
        resize.enqueue("a.png")
        assert_enqueued(resize, "a.png")
        assert_not_enqueued(resize, "b.png")


def test_an_open_transaction_is_searched(here: str) -> None:
    with psycopg.connect(here) as conn:
        resize.using(conn=conn).enqueue("a.png")
        assert_enqueued(resize.using(conn=conn), "a.png")
        assert_not_enqueued(resize)
        conn.rollback()
        assert_not_enqueued(resize.using(conn=conn))


def test_a_sqlalchemy_session_is_searched(here: str) -> None:
    engine = create_engine(here.replace("postgresql:", "postgresql+psycopg:"))
    with Session(engine) as session:
        resize.using(conn=session).enqueue("a.png")
        assert_enqueued(resize.using(conn=session), "a.png")
    engine.dispose()


async def test_an_asyncpg_transaction_is_searched(here: str) -> None:
    conn = await asyncpg.connect(here)
    transaction = conn.transaction()
    await transaction.start()
    await resize.using(conn=conn).aenqueue("a.png")
    await aassert_enqueued(resize.using(conn=conn), "a.png")
    await aassert_not_enqueued(resize.using(conn=conn), "b.png")
    await transaction.rollback()
    await conn.close()
    await aassert_not_enqueued(resize)
    await app.aclose()
