"""Runs statements on a caller's connection, inside the caller's transaction.

Supports connections of psycopg and asyncpg, sessions and connections of SQLAlchemy (sync and async) and
Django's connection. SQLAlchemy and Django are recognized by the modules of their classes, and are never
imported unless the caller has imported them. The caller commits, rolls back and retries.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
from psycopg.rows import tuple_row

from howdah.errors import InvalidOption

if TYPE_CHECKING:
    from howdah.protocol.statements import Rows, Statement

# Or a quoted name or literal, which stays as it is: a schema's name may contain "$1".
_PLACEHOLDER = re.compile(r""""(?:[^"]|"")*"|'(?:[^']|'')*'|\$(\d+)""")


def _comes_from(conn: object, package: str) -> bool:
    return any(cls.__module__.startswith(package) for cls in type(conn).__mro__)


def _names(parameters: tuple[Any, ...]) -> dict[str, Any]:
    return {f"p{number}": value for number, value in enumerate(parameters, 1)}


def _percent_style(text: str) -> str:
    """A statement with `%(p1)s` instead of `$1`."""
    return _PLACEHOLDER.sub(
        lambda found: found[0] if found[1] is None else f"%(p{found[1]})s", text.replace("%", "%%")
    )


def _driver_sql(dialect: Any, statement: Statement[Any]) -> tuple[str, Any]:
    """A statement for `exec_driver_sql` of SQLAlchemy, in the style of its driver. SQLAlchemy's `text()` would
    take parts of a schema's name, such as `:name` or `%(name)s`, for parameters."""
    if dialect.paramstyle == "numeric_dollar":
        return statement.text, statement.parameters
    if dialect.paramstyle == "pyformat":
        return _percent_style(statement.text), _names(statement.parameters)
    raise InvalidOption(
        f"conn= uses SQLAlchemy's driver {dialect.driver}, which is not supported; use psycopg or asyncpg."
    )


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
        if hasattr(conn, "connection") and not hasattr(conn, "exec_driver_sql"):
            conn = conn.connection()  # of a Session
        driver_sql, values = _driver_sql(conn.dialect, statement)
        return [tuple(row) for row in conn.exec_driver_sql(driver_sql, values).all()]
    if _is_django(conn) and getattr(conn, "vendor", None) == "postgresql":
        with conn.cursor() as cursor:
            cursor.execute(_percent_style(statement.text), _names(statement.parameters))
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
        if not hasattr(conn, "exec_driver_sql"):
            conn = await conn.connection()  # of a Session
        driver_sql, values = _driver_sql(conn.dialect, statement)
        return [tuple(row) for row in (await conn.exec_driver_sql(driver_sql, values)).all()]
    raise _unsupported(
        conn,
        "AsyncJobQueue",
        "an asyncpg or psycopg AsyncConnection, or a SQLAlchemy AsyncSession or AsyncConnection",
    )
