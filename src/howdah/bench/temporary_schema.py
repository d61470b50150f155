"""The temporary schema of a measurement: created at the start, dropped at the end, even after an error. A schema left
by a killed run is dropped by the first run that starts more than an hour later."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

from howdah.database import migrate
from howdah.database.connection import Connection, DatabaseError
from howdah.errors import HowdahError
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PREFIX = "howdah_bench_"
ABANDONED_SECONDS = 3600  # longer than any measurement


@contextlib.contextmanager
def temporary_schema(connect: Callable[[], Connection]) -> Iterator[str]:
    """A schema of the latest version with a unique name."""
    with connect() as conn:
        (now,) = _one(conn, "SELECT extract(epoch FROM clock_timestamp())::bigint")
        _drop_abandoned(conn, now)
        schema = f"{PREFIX}{now:08x}_{secrets.token_hex(3)}"
        try:
            migrate.migrate(conn, schema)
        except DatabaseError as error:
            _drop(connect, schema)
            raise HowdahError(
                f"the database refused to make a schema to measure in: {_reason(error)}. It takes a "
                "role with the right to create schemas: GRANT CREATE ON DATABASE … TO …."
            ) from error
        except BaseException:
            _drop(connect, schema)
            raise
    try:
        yield schema
    finally:
        _drop(connect, schema)


def _drop(connect: Callable[[], Connection], schema: str) -> None:
    # On a new connection: the one that created the schema may be broken.
    try:
        with connect() as conn:
            conn.execute(f"DROP SCHEMA IF EXISTS {quote_schema(schema)} CASCADE".encode())
    except (DatabaseError, HowdahError) as error:
        raise HowdahError(
            f'schema "{schema}" could not be removed: {_reason(error)}. When the database answers '
            f"again: DROP SCHEMA {schema} CASCADE;"
        ) from error


def _drop_abandoned(conn: Connection, now: int) -> None:
    rows = conn.execute(
        f"SELECT nspname FROM pg_namespace WHERE nspname ~ '^{PREFIX}[0-9a-f]{{8}}_[0-9a-f]{{6}}$' "
        "AND pg_has_role(nspowner, 'MEMBER')".encode()
    ).fetchall()
    for (name,) in rows:
        if now - int(name.removeprefix(PREFIX)[:8], 16) > ABANDONED_SECONDS:
            conn.execute(f"DROP SCHEMA IF EXISTS {quote_schema(name)} CASCADE".encode())


def _one(conn: Connection, text: str) -> tuple[Any, ...]:
    row = conn.execute(text.encode()).fetchone()
    assert row is not None  # noqa: S101 - an aggregate or a constant
    return tuple(row)


def _reason(error: Exception) -> str:
    primary = error.diag.message_primary if isinstance(error, DatabaseError) else None
    return (primary or str(error)).strip().rstrip(".")
