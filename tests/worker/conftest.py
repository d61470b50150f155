"""What several tests of the worker start with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from children import Children
from howdah.worker import fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import psycopg


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
