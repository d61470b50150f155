from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg


@pytest.fixture
def conn(connect: Callable[..., psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    """A connection in autocommit mode."""
    return connect()
