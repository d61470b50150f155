"""What several tests of the worker start with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import process_tasks
from children import Children
from howdah.worker import fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import psycopg

    from howdah import App


@pytest.fixture
def children(tmp_path: Path, database: str) -> Iterator[Children]:
    children = Children(tmp_path, database)
    yield children
    children.close()


@pytest.fixture
def conn(connect: Callable[..., psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    return connect()


@pytest.fixture
def hourly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls once an hour: something else must have woken the worker."""
    monkeypatch.setattr(fetcher, "POLL_SECONDS", 3600.0)
    monkeypatch.setattr(fetcher, "POLL_SECONDS_LISTENING", 3600.0)


@pytest.fixture
def process_app(app: App, database: str, monkeypatch: pytest.MonkeyPatch) -> App:
    """An app with the tasks of `process_tasks`, which task processes can import."""
    monkeypatch.setenv("HOWDAH_DATABASE_URL", database)
    for task in process_tasks.app.tasks.values():
        app._register(task.function, task.name, task.options)
    return app
