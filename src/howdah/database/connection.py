"""Single connections outside the pools, for the command line, the doctor, benchmarks and chaos, and names for
the drivers' errors: no other package imports a driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
import psycopg
from psycopg.rows import tuple_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from howdah.protocol.statements import Rows

Connection: TypeAlias = psycopg.Connection[Any]

DatabaseError = psycopg.Error
ConnectionFailed = psycopg.OperationalError
UnreadableUrl = psycopg.ProgrammingError
InsufficientPrivilege = psycopg.errors.InsufficientPrivilege
InvalidSchemaName = psycopg.errors.InvalidSchemaName
LockNotAvailable = psycopg.errors.LockNotAvailable
UndefinedObject = psycopg.errors.UndefinedObject
UndefinedTable = psycopg.errors.UndefinedTable
AsyncDatabaseError = asyncpg.PostgresError


def connect(url: str, *, autocommit: bool = True, timeout: int = 5, **options: Any) -> Connection:
    """Open one connection. It prepares no statements, so it also works through a pooler."""
    return psycopg.connect(
        url, autocommit=autocommit, connect_timeout=timeout, prepare_threshold=None, **options
    )


async def connect_async(url: str, *, timeout: float = 5, command_timeout: float = 5) -> Any:
    """Open one asyncpg connection."""
    return await asyncpg.connect(url, timeout=timeout, command_timeout=command_timeout)


def fetch(conn: Connection, text: str, parameters: Sequence[Any] = ()) -> Rows:
    """Run a statement with `$1` placeholders and return its rows."""
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        return cursor.execute(text, parameters).fetchall()
