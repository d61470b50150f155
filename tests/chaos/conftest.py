"""Worker processes that reach the database through a faulty proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from faulty_proxy import FaultyProxy

from children import Children

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


@pytest.fixture
def faulty_proxy(database: str) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(database)
    yield proxy
    proxy.close()


@pytest.fixture
def children(tmp_path: Path, faulty_proxy: FaultyProxy) -> Iterator[Children]:
    children = Children(tmp_path, faulty_proxy.url)
    yield children
    children.close()
