"""One database and one System for each file here; every test begins with it cleared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from reference import Spec
from system import System

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from databases import Databases


@pytest.fixture(scope="module")
def model_url(databases: Databases, template: str) -> Iterator[str]:
    """The URL of a database of this file's own."""
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
    """A queue with no jobs in it, and with the lane of the commonest."""
    shared_system.clear()
    shared_system.enqueue(0, Spec())
    shared_system.complete(0, shared_system.claim(0))
    return shared_system


@pytest.fixture
def database(model_url: str) -> str:
    return model_url


@pytest.fixture
def connect_model(
    connect: Callable[..., psycopg.Connection],
) -> Callable[..., psycopg.Connection]:
    """Opens connections that the model knows nothing of."""
    return connect
