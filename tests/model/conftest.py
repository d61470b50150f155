"""One database and one System per file; each test starts with an empty queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from reference import Spec
from system import System

if TYPE_CHECKING:
    from collections.abc import Iterator

    from databases import Databases


@pytest.fixture(scope="module")
def model_url(databases: Databases, template: str) -> Iterator[str]:
    """The URL of the database of this file."""
    name = databases.create(template)
    yield databases.url(name)
    databases.drop(name)


@pytest.fixture(scope="module")
def shared_system(model_url: str) -> Iterator[System]:
    system = System(model_url)
    yield system
    system.close()


@pytest.fixture
def system(shared_system: System) -> System:
    """An empty queue with the lane of the default job type."""
    shared_system.clear()
    shared_system.enqueue(0, Spec())
    shared_system.complete(0, shared_system.claim(0))
    return shared_system


@pytest.fixture
def database(model_url: str) -> str:
    """For `connect`: its connections are not tracked by the reference."""
    return model_url
