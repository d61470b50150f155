"""What drivers' errors mean, and what the two stores share. Nothing here opens a connection."""

from __future__ import annotations

import asyncio
import re
import time
from typing import NoReturn, TypeAlias

import asyncpg
import psycopg
import psycopg_pool

from howdah.errors import (
    DatabaseFull,
    DatabaseUnreachable,
    HowdahError,
    InvalidJob,
    NotPermitted,
    PayloadTooLarge,
    SchemaMissing,
    sqlstate,
)
from howdah.protocol.schema_name import quote_schema
from howdah.protocol.statements import Statement

DATABASE_ERRORS = (
    HowdahError,
    psycopg.Error,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)
"""Whatever `run` may raise because of the database, as against a mistake of ours."""

TIMEOUT_SECONDS = 10.0
COMMAND_TIMEOUT_SECONDS = 60.0
"""Seconds that a statement may go without an answer, where neither it nor the caller says otherwise."""
POOL_CONNECTIONS = 10
RETRY_DELAY_SECONDS = 0.05


class Unanswered(TimeoutError):
    """A statement was sent, no answer came in time, and the connection was given up. Whether it was done
    is unknown."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")


_FIELDS = {
    "job_type_length": "job_type",
    "queue_length": "queue",
    "priority_range": "priority",
    "max_attempts_range": "max_attempts",
    "run_at_is_finite": "run_at",
    "keep_is_positive": "keep",
    "request_id_length": "request_id",
    "traceparent_length": "traceparent",
    "idempotency_key_length": "idempotency_key",
    "key_length": "idempotency_key",
    "ordering_key_length": "ordering_key",
    "data_within_limit": "data",
    "data_not_too_deep": "data",
}


def is_connection_lost(error: BaseException) -> bool:
    """Whether an error says that the connection is gone, or leads to a server that cannot write."""
    state = sqlstate(error)
    if state:
        # 08 connection exceptions, 57P01..05 shutdown and start-up, 53300 too many connections,
        # 25006 a read-only (demoted) server
        return state[:2] == "08" or state[:3] == "57P" or state in {"53300", "25006"}
    if isinstance(error, ValueError):  # asyncpg: a parameter of the wrong type, a bad URL
        return False
    return isinstance(
        error,
        OSError
        | psycopg.OperationalError
        | asyncpg.InterfaceError
        # asyncpg, when the server's farewell is already in its buffer
        | asyncpg.InternalClientError
        | asyncpg.PostgresConnectionError,
    )


def is_schema_missing(error: BaseException) -> bool:
    """Whether a schema, a table or a function of ours is not there."""
    return sqlstate(error) in {"3F000", "42P01", "42883"}


def is_transient(error: BaseException) -> bool:
    """Whether a statement may well succeed if it is sent again, unchanged, a little later."""
    if isinstance(error, DatabaseFull):
        return True
    # 40 rolled back to let another on, 53 out of something, 55 in use, 57 interrupted by an operator
    return is_connection_lost(error) or sqlstate(error)[:2] in {"40", "53", "55", "57"}


def is_refused(error: BaseException) -> bool:
    """Whether the server answered and will not let us in: asking again is of no use."""
    # libpq gives no SQLSTATE for a connection that was not made. A server that speaks another
    # language is asked again until the time limit.
    return sqlstate(error)[:2] in {"28", "3D"} or (
        isinstance(error, psycopg.OperationalError) and bool(_REFUSED.search(str(error)))
    )


_REFUSED = re.compile(
    r"FATAL: .*(authentication failed|does not exist|no pg_hba\.conf entry|not permitted to log in"
    r"|permission denied for database)|fe_sendauth: no password supplied"
)


def driver_error(error: BaseException | None) -> BaseException | None:
    """The driver's error inside one that SQLAlchemy or Django has wrapped."""
    while error is not None and not isinstance(error, psycopg.Error | asyncpg.PostgresError):
        error = getattr(error, "orig", None) or error.__cause__
    return error


def translate(error: BaseException, schema: str) -> BaseException:
    """A driver's error as one of ours where there is one, else the error itself."""
    cause = driver_error(error)
    if cause is None:
        return error
    state = sqlstate(cause)
    if is_schema_missing(cause):
        return SchemaMissing(schema)
    if state == "42501":
        return NotPermitted(message_of(cause))
    if state == "53100":
        return DatabaseFull(message_of(cause))
    if state in {"23514", "23502", "22P05", "22P02", "54001"}:
        diagnostics = getattr(cause, "diag", cause)
        constraint = getattr(diagnostics, "constraint_name", None) or ""
        field = _FIELDS.get(constraint) or getattr(diagnostics, "column_name", None) or "data"
        message = message_of(cause)
        kind = PayloadTooLarge if constraint == "data_within_limit" else InvalidJob
        return kind(f"the database refused {field}: {message}", field=field)
    return error


def message_of(error: BaseException) -> str:
    """The server's own sentence, without details and hints."""
    message = getattr(getattr(error, "diag", error), "message_primary", None)
    return message or next(iter(str(error).strip().splitlines()), type(error).__name__)


def raise_translated(error: BaseException, schema: str) -> NoReturn:
    """Raise the error as one of ours where there is one, else as it came."""
    translated = translate(error, schema)
    if translated is error:
        raise error
    raise translated from error


def refused_id(error: BaseException | None) -> str | None:
    """The id of the row that a constraint refused, as far as the server tells."""
    cause = driver_error(error)
    detail = getattr(getattr(cause, "diag", None), "message_detail", None)
    found = _FAILING_ROW.search(detail or getattr(cause, "detail", None) or "")
    return found[1] if found else None


_FAILING_ROW = re.compile(r"\(([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}),")

Where: TypeAlias = tuple[str, str]
"""A host and the name of a database on it, for messages."""


def unreachable(
    where: Where, error: BaseException, trouble: BaseException | None = None
) -> DatabaseUnreachable:
    """What to raise, with the last `trouble` for a reason if all that happened here was to wait."""
    if trouble is not None and isinstance(error, TimeoutError) and not str(error):
        error = trouble
    lines = str(error).strip().splitlines()
    empty = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return DatabaseUnreachable(*where, lines[0].rstrip(".") if lines else empty)


def seconds_left(give_up: float, least: float = 0.001) -> float:
    """What is left until a moment of the monotonic clock."""
    return max(give_up - time.monotonic(), least)


def has_schema(schema: str) -> Statement[bool]:
    """Whether the schema's tables are there."""
    name = quote_schema(schema) + ".migrations"
    return Statement(
        "has_schema", "SELECT to_regclass($1::text) IS NOT NULL", (name,), lambda rows: rows[0][0]
    )


def is_ours(database: object) -> bool:
    """Whether a pool is made and closed by us, not the caller's."""
    return not isinstance(database, psycopg_pool.ConnectionPool | asyncpg.Pool)


async def end_tasks(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks until they have ended. Once is not enough: asyncpg, where a time-out and a cancellation
    meet the end of what it waits for, gives the result and keeps the cancellation to itself."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.2)
