"""What the errors of both drivers mean, and their translation to the errors in `errors.py`."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, NoReturn, TypeAlias
from uuid import UUID

import asyncpg
import psycopg
import psycopg_pool

from howdah.errors import (
    ConnectionLimit,
    DatabaseClosed,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseTimeout,
    DatabaseUnreachable,
    HowdahError,
    IdempotencyConflict,
    InvalidJob,
    InvalidOption,
    JobLocked,
    NotPermitted,
    PayloadTooLarge,
    SchemaMissing,
    sqlstate,
)

if TYPE_CHECKING:
    from howdah.database.service_task import ServiceTask

ASYNC_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)
"""What asyncpg raises because of the database."""
DATABASE_ERRORS = (HowdahError, psycopg.Error, *ASYNC_ERRORS)
"""What a store may raise because of the database. Any other exception is a bug in Howdah."""


class Unanswered(TimeoutError):
    """A statement was sent, no answer came before its deadline, and its connection was closed. Whether the
    server executed it is unknown."""

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
    "idempotency_ttl_range": "idempotency_ttl",
    "ordering_key_length": "ordering_key",
    "data_within_limit": "data",
    "data_not_too_deep": "data",
}


def is_connection_lost(error: BaseException) -> bool:
    """Whether the connection is gone, or leads to a server that cannot write."""
    state = sqlstate(error)
    if state:
        # 08 connection exceptions, 57P01..05 shutdown and startup, 53300 too many connections,
        # 25006 a read-only (demoted) server
        return (
            state[:2] == "08"
            or state[:3] == "57P"
            or state in {"53300", "25006"}
            or is_closed(error)
        )
    if isinstance(error, ValueError):  # asyncpg: a parameter of the wrong type, a bad URL
        return False
    return isinstance(
        error,
        OSError
        | psycopg.OperationalError
        | asyncpg.InterfaceError
        # asyncpg raises this if its buffer already holds the server's shutdown message
        | asyncpg.InternalClientError
        | asyncpg.PostgresConnectionError,
    )


def is_schema_missing(error: BaseException) -> bool:
    """Whether a schema, table or function of Howdah does not exist."""
    return sqlstate(error) in {"3F000", "42P01", "42883"}


def is_transient(error: BaseException) -> bool:
    """Whether the same statement may succeed if it is retried a little later."""
    if isinstance(error, DatabaseFull):
        return True
    # 40 rolled back by a conflict, 53 out of a resource, 55 object in use, 57 operator intervention
    return is_connection_lost(error) or sqlstate(error)[:2] in {"40", "53", "55", "57"}


def is_statement_cancelled(error: BaseException) -> bool:
    """Whether `statement_timeout`, `lock_timeout` or an operator ended the statement. It may end every attempt."""
    return sqlstate(error) in {"57014", "55P03"}


def is_locked(error: BaseException) -> bool:
    """Whether another transaction had locked a row for too long, or the two waited for each other."""
    return sqlstate(error) in {"55P03", "40P01"}


def is_too_much(error: BaseException) -> bool:
    """Whether a smaller statement may succeed where this one was not answered in time, was ended by a timeout of the
    server, or needed too much memory."""
    is_timeout = isinstance(error, DatabaseTimeout) or is_statement_cancelled(error)
    return is_timeout or sqlstate(error) == "53200"


def is_refused(error: BaseException) -> bool:
    """Whether the server answered and rejects the login: retrying is useless."""
    # libpq gives no SQLSTATE for a connection that was not made. A server whose messages are not in
    # English is retried until the deadline.
    return sqlstate(error)[:2] in {"28", "3D"} or (
        isinstance(error, psycopg.OperationalError) and bool(_REFUSED.search(str(error)))
    )


_REFUSED = re.compile(
    r"FATAL: .*(authentication failed|does not exist|no pg_hba\.conf entry|not permitted to log in"
    r"|permission denied for database)|fe_sendauth: no password supplied"
)


def is_read_only(error: BaseException) -> bool:
    """Whether the server answered and cannot write."""
    return sqlstate(error) == "25006"


def is_connection_limit(error: BaseException) -> bool:
    """Whether the server or a pooler has no free connection."""
    # Without a SQLSTATE as in `is_refused`, and PgBouncer sends 08P01.
    return sqlstate(error) == "53300" or (
        isinstance(error, psycopg.OperationalError | asyncpg.PostgresError)
        and bool(_LIMIT.search(str(error)))
    )


_LIMIT = re.compile(
    r"too many (clients|connections)|remaining connection slots are reserved|no more connections allowed"
)


def is_closed(error: BaseException) -> bool:
    """Whether the server answered, and the database accepts no connections."""
    # The SQLSTATE, 55000, has other meanings too, and libpq gives none.
    return sqlstate(error) in {"", "55000"} and (
        isinstance(error, psycopg.OperationalError | asyncpg.PostgresError)
        and bool(_CLOSED.search(str(error)))
    )


_CLOSED = re.compile(r"not currently accepting connections|cannot connect to invalid database")


def is_pool_closed(error: BaseException) -> bool:
    """Whether a pool was closed, or was never opened."""
    return isinstance(error, psycopg_pool.PoolClosed) or (
        isinstance(error, asyncpg.InterfaceError) and str(error).startswith("pool is ")
    )


def is_own_pool(database: object) -> bool:
    """Whether the store makes and closes the pool itself: the caller passed none."""
    return not isinstance(database, psycopg_pool.ConnectionPool | asyncpg.Pool)


def driver_error(error: BaseException | None) -> BaseException | None:
    """The driver's error inside one that SQLAlchemy or Django has wrapped."""
    while error is not None and not isinstance(error, psycopg.Error | asyncpg.PostgresError):
        error = getattr(error, "orig", None) or error.__cause__
    return error


def translate(error: BaseException, schema: str) -> BaseException:
    """The error of `errors.py` for a driver's error, or the same error if there is none."""
    if isinstance(error, UnicodeEncodeError):
        return unsendable_text(error)
    cause = driver_error(error)
    if cause is None:
        return error
    state = sqlstate(cause)
    if is_schema_missing(cause):
        return SchemaMissing(schema)
    if state == "42723":  # raised by a migration that found functions of others in the schema
        hint = getattr(getattr(cause, "diag", None), "message_hint", None) or getattr(
            cause, "hint", ""
        )
        return HowdahError(f"{message_of(cause)}. {hint or ''}".strip())
    if state == "23505" and (conflict := _idempotency_conflict(cause)) is not None:
        return conflict
    if state == "55P03" and (locked := _job_locked(cause)) is not None:
        return locked
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


def unsendable_text(error: UnicodeEncodeError) -> InvalidOption:
    """The error for text that the encoding of a caller's connection lacks."""
    character = error.object[error.start]
    return InvalidOption(
        f"the client_encoding of your connection is {error.encoding}, which has no character {character!r}; "
        "set its client_encoding to UTF8."
    )


def _idempotency_conflict(error: BaseException) -> IdempotencyConflict | None:
    diagnostics = getattr(error, "diag", error)
    if getattr(diagnostics, "constraint_name", None) != "idempotency_keys_pkey":
        return None
    first = _FIRST_JOB.search(_detail_of(error))
    if first is None:
        return None
    return IdempotencyConflict(
        f"{message_of(error)}. Use another key for other data.", id=UUID(first[1])
    )


def _job_locked(error: BaseException) -> JobLocked | None:
    """The error of `raise_locked`. Any other lock timeout is not about jobs."""
    message = message_of(error)
    if not message.startswith("no jobs were "):
        return None
    detail = _detail_of(error)
    hint = getattr(getattr(error, "diag", error), "message_hint", None) or getattr(
        error, "hint", None
    )
    sentences = [part.rstrip(".") for part in (message, detail, hint) if part]
    return JobLocked(map(UUID, re.findall(_ID, detail)), message=". ".join(sentences) + ".")


def _detail_of(error: BaseException | None) -> str:
    detail = getattr(getattr(error, "diag", None), "message_detail", None)
    return detail or getattr(error, "detail", None) or ""


def message_of(error: BaseException) -> str:
    """The server's primary message, without details and hints."""
    message = getattr(getattr(error, "diag", error), "message_primary", None)
    return message or next(iter(str(error).strip().splitlines()), type(error).__name__)


def raise_translated(error: BaseException, schema: str) -> NoReturn:
    """Raise `translate(error)`."""
    translated = translate(error, schema)
    if translated is error:
        raise error
    raise translated from error


def refused_id(error: BaseException | None) -> str | None:
    """The id of the row that a constraint refused, if the server reports it."""
    found = _FAILING_ROW.search(_detail_of(driver_error(error)))
    return found[1] or found[2] if found else None


_ID = "([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
_FAILING_ROW = re.compile(rf"\({_ID},|Refused job: {_ID}")
_FIRST_JOB = re.compile(f"First job: {_ID}")

Address: TypeAlias = tuple[str, str]
"""A host and the name of a database there, for messages."""


def unreachable(
    address: Address, error: BaseException, last_error: BaseException | None = None
) -> DatabaseUnreachable:
    """The error to raise for a database that cannot be reached. If this call only waited, the reason is
    the last error of the caller it waited for."""
    if last_error is not None and isinstance(error, TimeoutError) and not str(error):
        error = last_error
    kind = DatabaseUnreachable
    if is_read_only(error):
        kind = DatabaseReadOnly
    elif is_connection_limit(error):
        kind = ConnectionLimit
    elif isinstance(error, Unanswered):
        kind = DatabaseTimeout
    elif is_closed(error):
        kind = DatabaseClosed
    lines = str(error).strip().splitlines()
    empty = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return kind(*address, lines[0].rstrip(".") if lines else empty)


def seconds_left(deadline: float, least: float = 0.001) -> float:
    """Seconds until a deadline of the monotonic clock, but at least `least`."""
    return max(deadline - time.monotonic(), least)


async def end_tasks(*tasks: ServiceTask) -> None:
    """Cancel tasks until they have ended. Once is not enough: if a timeout, a cancellation and the result
    coincide, asyncpg returns the result and drops the cancellation."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.end()
        await asyncio.wait(left, timeout=0.2)
