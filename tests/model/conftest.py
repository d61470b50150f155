"""One database and one System per file; each test starts with an empty queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from reference import Spec
from system import System

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from howdah.embedded import EmbeddedServer


@pytest.fixture(scope="module")
def model_url(
    server: EmbeddedServer, template: str, request: pytest.FixtureRequest
) -> Iterator[str]:
    """The URL of the database of this file."""
    name = "model_" + request.path.stem
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
    yield server.url.replace("/howdah?", f"/{name}?")
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


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
def connect_model(model_url: str) -> Iterator[Callable[..., psycopg.Connection]]:
    """Opens connections that the reference does not track."""
    opened: list[psycopg.Connection] = []

    def open_one(*, autocommit: bool = True) -> psycopg.Connection:
        opened.append(psycopg.connect(model_url, autocommit=autocommit))
        return opened[-1]

    yield open_one
    for conn in opened:
        conn.close()
