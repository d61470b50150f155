"""Work as a generator of SQL, and a driver for each client, so that the sync and the async client run the same text.

A driver sends what the generator yields, and throws the database's errors into it. A generator tells errors apart by
SQLSTATE, which is the same in both drivers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import asyncpg
import psycopg
from psycopg.rows import tuple_row

from howdah.errors import sqlstate
from howdah.protocol.statements import LONG_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from howdah.database.statement_deadline import StatementDeadline

T = TypeVar("T")

RETRY_SECONDS = 60.0
_LOCK_NOT_AVAILABLE = "55P03"


@dataclass(frozen=True, slots=True)
class Query:
    """One statement that returns rows."""

    text: str


@dataclass(frozen=True, slots=True)
class Script:
    """Any number of statements whose rows are ignored."""

    text: str


Steps: TypeAlias = Generator[Query | Script, Any, T]


def with_retries(work: Callable[[], Steps[T]]) -> Steps[T]:
    """Run a transaction, from the start again while another transaction holds a lock that it needs."""
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return (yield from work())
        except Exception as error:
            if sqlstate(error) != _LOCK_NOT_AVAILABLE or time.monotonic() > deadline:
                raise
            yield Script("ROLLBACK")


def drive(
    conn: psycopg.Connection[Any],
    steps: Steps[T],
    timeout: float = 0,
    deadline: StatementDeadline | None = None,
) -> T:
    """Run steps on a psycopg connection in autocommit mode, and return their result. If there is a
    deadline, it is set for each step: `timeout` seconds, and more for a script, which may be a migration."""
    send: Any = steps.send
    value: Any = None
    while True:
        try:
            step = send(value)
        except StopIteration as stop:
            result: T = stop.value
            return result
        is_query = isinstance(step, Query)
        if deadline is not None:
            deadline.renew(timeout if is_query else LONG_TIMEOUT_SECONDS)
        try:
            with conn.cursor(row_factory=tuple_row) as cursor:
                cursor.execute(step.text.encode())
                send, value = steps.send, cursor.fetchall() if is_query else None
        except psycopg.Error as error:
            send, value = steps.throw, error


async def adrive(conn: Any, steps: Steps[T], timeout: float) -> T:
    """Run steps on an asyncpg connection, and return their result. Each query has `timeout` seconds, and a
    script, which may be a migration, has more."""
    send: Any = steps.send
    value: Any = None
    while True:
        try:
            step = send(value)
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            if isinstance(step, Query):
                send, value = steps.send, await conn.fetch(step.text, timeout=timeout)
            else:
                await conn.execute(step.text, timeout=LONG_TIMEOUT_SECONDS)
                send, value = steps.send, None
        except asyncpg.PostgresError as error:
            send, value = steps.throw, error
