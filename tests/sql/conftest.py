"""One database for all tests of the SQL contract, wiped before each: copying one for every test would
take most of the time. Tests that change tables or planner statistics ask for `fresh_database`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.embedded import EmbeddedServer

WIPE = """
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
    UPDATE howdah.maintenance
    SET due_at = clock_timestamp(), reached = '-infinity', last_error = NULL;
END $$
"""


@pytest.fixture(scope="session")
def shared_database(server: EmbeddedServer, template: str) -> str:
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE sql_contract TEMPLATE {template}".encode())
    return server.url.replace("/howdah?", "/sql_contract?")


@pytest.fixture
def database(shared_database: str) -> str:
    """The URL of a database with the newest schema and no jobs."""
    with psycopg.connect(shared_database, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        )
        conn.execute(WIPE)
    return shared_database


@pytest.fixture
def conn(connect: Callable[..., psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    """A connection in autocommit mode."""
    return connect()


@pytest.fixture
def fresh_database(make_database: Callable[[str | None], str], template: str) -> str:
    """The URL of a database of this test's own."""
    return make_database(template)
