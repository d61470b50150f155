from __future__ import annotations

import os
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from stage import HOWDAH, Terminal, fill, invoke, objects

from children import Children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from click.testing import Result
    from stage import Run, Shop

    from databases import Databases
    from howdah.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def filled_shop(databases: Databases, template: str) -> Shop:
    return fill(databases.url(databases.create(template, name="shop")))


@pytest.fixture
def shop(filled_shop: Shop) -> Shop:
    """A database with jobs in every state and recent throughput, and a worker that is alive. Tests only read it."""
    with psycopg.connect(filled_shop.url, autocommit=True) as conn:
        conn.execute(
            "UPDATE howdah.throughput "
            "SET bucket = date_bin('10 seconds', clock_timestamp(), timestamptz '2000-01-01')"
        )
        conn.execute("UPDATE howdah.workers SET seen_at = clock_timestamp()")
    return filled_shop


@pytest.fixture
def run_on_shop(shop: Shop) -> Run:
    """Runs a command on the shop database."""
    return lambda *arguments, **options: invoke(*arguments, "--database", shop.url, **options)


@pytest.fixture
def run(database: str) -> Run:
    """Runs a command on the test's database."""
    return lambda *arguments, **options: invoke(*arguments, "--database", database, **options)


@pytest.fixture
def read_json() -> Callable[[Result], list[dict[str, Any]]]:
    return objects


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts commands, each in a pseudo-terminal."""
    opened: list[Terminal] = []

    def start(*arguments: object, width: int = 120, height: int = 40, **variables: str) -> Terminal:
        opened.append(Terminal([str(each) for each in arguments], width, height, **variables))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture
def piped() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command as a process with its output in pipes."""

    def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR"}}
        return subprocess.run(
            [*HOWDAH, *map(str, arguments)], env=environment | variables, capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip

    return run


@contextmanager
def _doing(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(120)


@pytest.fixture
def meanwhile() -> Callable[[Callable[[], None]], Any]:
    """Runs a function in another thread during a `with` block."""
    return _doing


@pytest.fixture
def children(tmp_path: Path, database: str) -> Iterator[Children]:
    """Starts `howdah worker` in child processes, which end with the test."""
    children = Children(tmp_path, database)
    yield children
    children.close()


@pytest.fixture
def reader(server: EmbeddedServer, shop: Shop) -> Iterator[str]:
    """The shop's URL for a role that may only read."""
    with psycopg.connect(shop.url, autocommit=True) as conn:
        conn.execute("CREATE ROLE reader_role LOGIN")
        conn.execute("GRANT USAGE ON SCHEMA howdah TO reader_role")
        conn.execute("GRANT SELECT ON ALL TABLES IN SCHEMA howdah TO reader_role")
        yield shop.url.replace("://howdah@", "://reader_role@")
        conn.execute("DROP OWNED BY reader_role")
        conn.execute("DROP ROLE reader_role")
