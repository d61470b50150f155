"""One database per module, emptied before each test: faster than a new database, for tests that do not change
the tables themselves. A module uses it with `database, module_database = emptied.database, …`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.embedded import EmbeddedServer

_numbers = itertools.count(1)

EMPTY = """
DO $$
DECLARE
    v_table regclass;
BEGIN
    FOR v_table IN
        SELECT c.oid
        FROM pg_class AS c
        WHERE c.relnamespace = 'howdah'::regnamespace AND c.relkind IN ('r', 'p')
          AND NOT c.relispartition AND c.relname NOT IN ('migrations', 'maintenance')
    LOOP
        EXECUTE format('DELETE FROM %s', v_table);
    END LOOP;
END $$
"""


@pytest.fixture(scope="module")
def module_database(server: EmbeddedServer, template: str) -> Iterator[str]:
    name = f"module_{next(_numbers)}"
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
    yield server.url.replace("/howdah?", f"/{name}?")
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def database(module_database: str) -> str:
    """The URL of this module's database, with empty tables."""
    with psycopg.connect(module_database, autocommit=True) as conn:
        conn.execute("SET lock_timeout = '5s'")
        conn.execute(EMPTY.encode())
    return module_database
