"""Runs statements on a caller's connection, inside the caller's transaction.

Supports connections of psycopg and asyncpg, sessions and connections of SQLAlchemy (sync and async) and
Django's connection. SQLAlchemy and Django are recognized by the modules of their classes, and are never
imported unless the caller has imported them. The caller commits, rolls back and retries.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
from psycopg.rows import tuple_row

from howdah.errors import InvalidOption

if TYPE_CHECKING:
    from howdah.protocol.statements import Rows, Statement

_PLACEHOLDER = re.compile(r"\$(\d+)")


def _comes_from(conn: object, package: str) -> bool:
    return any(cls.__module__.startswith(package) for cls in type(conn).__mro__)


def _names(parameters: tuple[Any, ...]) -> dict[str, Any]:
    return {f"p{number}": value for number, value in enumerate(parameters, 1)}


def _sqlalchemy(statement: Statement[Any]) -> tuple[Any, dict[str, Any]]:
    # Without the space, SQLAlchemy parses `:p1::jsonb` as a parameter named `p`.
    text = sys.modules["sqlalchemy"].text(_PLACEHOLDER.sub(r":p\1 ", statement.text))
    return text, _names(statement.parameters)


def _is_django(conn: object) -> bool:
    # `django.db.connection` is a proxy. Its class is in another module, which Django's caches use, too.
    return _comes_from(conn, "django.db.") or (
        _comes_from(conn, "django.utils.connection") and hasattr(conn, "vendor")
    )


def _unsupported(conn: object, kind: str, others: str) -> InvalidOption:
    return InvalidOption(
        f"conn= is a {type(conn).__module__}.{type(conn).__qualname__}, and {kind} takes {others}."
    )


def run(conn: Any, statement: Statement[Any]) -> Rows:
    """Run a statement on a caller's sync connection."""
    if isinstance(conn, psycopg.Connection):
        with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
            return cursor.execute(statement.text, statement.parameters).fetchall()
    if (
        _comes_from(conn, "sqlalchemy.")
        and not _comes_from(conn, "sqlalchemy.ext.asyncio")
        and hasattr(conn, "execute")  # an Engine has no such method
    ):
        text, names = _sqlalchemy(statement)
        return [tuple(row) for row in conn.execute(text, names).all()]
    if _is_django(conn) and getattr(conn, "vendor", None) == "postgresql":
        text = _PLACEHOLDER.sub(r"%(p\1)s", statement.text.replace("%", "%%"))
        with conn.cursor() as cursor:
            cursor.execute(text, _names(statement.parameters))
            rows: Rows = cursor.fetchall()
            return rows
    raise _unsupported(
        conn,
        "JobQueue",
        "a psycopg Connection, a SQLAlchemy Session or Connection, or Django's connection to PostgreSQL",
    )


async def arun(conn: Any, statement: Statement[Any]) -> Rows:
    """Run a statement on a caller's async connection."""
    if isinstance(conn, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        rows: Rows = await conn.fetch(statement.text, *statement.parameters)
        return rows
    if isinstance(conn, psycopg.AsyncConnection):
        async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
            await cursor.execute(statement.text, statement.parameters)
            return await cursor.fetchall()
    if _comes_from(conn, "sqlalchemy.ext.asyncio") and hasattr(conn, "execute"):
        text, names = _sqlalchemy(statement)
        return [tuple(row) for row in (await conn.execute(text, names)).all()]
    raise _unsupported(
        conn,
        "AsyncJobQueue",
        "an asyncpg or psycopg AsyncConnection, or a SQLAlchemy AsyncSession or AsyncConnection",
    )
