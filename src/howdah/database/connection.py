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

ENCODING: dict[str, Any] = {"client_encoding": "UTF8"}
"""An option of psycopg. Without it the database or role decides: a character that its encoding lacks could not be sent,
and with SQL_ASCII text is returned as bytes. Poolers accept it, and asyncpg sends it as well."""


def connect(url: str, *, autocommit: bool = True, timeout: int = 5, **options: Any) -> Connection:
    """Open one connection. It prepares no statements, so it also works through a pooler."""
    return psycopg.connect(
        url,
        autocommit=autocommit,
        connect_timeout=timeout,
        prepare_threshold=None,
        **ENCODING,
        **options,
    )


async def connect_async(url: str, *, timeout: float = 5, command_timeout: float = 5) -> Any:
    """Open one asyncpg connection."""
    return await asyncpg.connect(url, timeout=timeout, command_timeout=command_timeout)


def fetch(conn: Connection, text: str, parameters: Sequence[Any] = ()) -> Rows:
    """Run a statement with `$1` placeholders and return its rows, in binary: DateStyle and IntervalStyle of the role
    or database do not matter."""
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        return cursor.execute(text, parameters, binary=True).fetchall()


def shares_session(conn: Connection, rounds: int = 5) -> bool:
    """Whether a pooler gives this connection's session to other clients as well: transaction mode."""
    info = conn.info
    (own,) = fetch(conn, "SELECT pg_backend_pid()")[0]
    with psycopg.connect(
        info.dsn, password=info.password, autocommit=True, prepare_threshold=None, connect_timeout=5
    ) as other:
        pids = [
            (
                fetch(other, "SELECT pg_backend_pid()")[0][0],
                fetch(conn, "SELECT pg_backend_pid()")[0][0],
            )
            for _ in range(rounds)
        ]
    return any(theirs == own or ours != own for theirs, ours in pids)
