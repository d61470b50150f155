"""Workers on a line that fails, and a common server for the runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from faulty_proxy import Wire

from children import Children

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


@pytest.fixture
def wire(database: str) -> Iterator[Wire]:
    wire = Wire(database)
    yield wire
    wire.close()


@pytest.fixture
def children(tmp_path: Path, wire: Wire) -> Iterator[Children]:
    children = Children(tmp_path, wire.url)
    yield children
    children.close()
