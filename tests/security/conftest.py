from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import psycopg.sql
import pytest
from secured import GRANTS, ROLES, Secured, create_role, require_passwords, succeed

from databases import Databases, SharedDatabase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from howdah.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def secured_template(server: EmbeddedServer, template: str) -> str:
    """The name of a template database with roles."""
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE template_secured TEMPLATE {template}".encode())
        for role in ROLES.values():
            create_role(conn, role)
    require_passwords(server, server.directory / "cluster", list(ROLES.values()))
    url = server.url.replace("/howdah?", "/template_secured?")
    succeed("migrate", "--database", url, "--grants", GRANTS)
    return "template_secured"


@pytest.fixture(scope="session")
def secured_database(databases: Databases, secured_template: str) -> Iterator[SharedDatabase]:
    shared = SharedDatabase(databases, secured_template)
    yield shared
    shared.drop()


@pytest.fixture
def secured(secured_database: SharedDatabase) -> Secured:
    """A database with the four roles and no jobs."""
    return Secured(secured_database.empty())


@pytest.fixture
def new_role(server: EmbeddedServer) -> Iterator[Callable[..., str]]:
    """Creates roles that are dropped after the test."""
    created: list[str] = []

    def create(name: str, options: str = "LOGIN") -> str:
        with psycopg.connect(server.url, autocommit=True) as conn:
            create_role(conn, name, options=options)
        created.append(name)
        return name

    yield create
    with psycopg.connect(server.url, autocommit=True) as conn:
        databases = [
            row[0]
            for row in conn.execute("SELECT datname FROM pg_database WHERE datallowconn").fetchall()
        ]
        names = {row[0] for row in conn.execute("SELECT rolname FROM pg_roles").fetchall()}
    existing = [name for name in created if name in names]
    for database in databases:
        with psycopg.connect(
            server.url.replace("/howdah?", f"/{database}?"), autocommit=True
        ) as conn:
            for name in existing:
                identifier = psycopg.sql.Identifier(name)
                conn.execute(psycopg.sql.SQL("DROP OWNED BY {} CASCADE").format(identifier))
    with psycopg.connect(server.url, autocommit=True) as conn:
        for name in existing:
            identifier = psycopg.sql.Identifier(name)
            conn.execute(psycopg.sql.SQL("DROP ROLE {}").format(identifier))
