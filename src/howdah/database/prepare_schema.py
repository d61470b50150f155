"""Checks a schema and migrates it on first use: one generator of SQL, and a driver for each client.

A driver sends what the generator yields, and throws the database's errors into it. Errors are told apart by
SQLSTATE, which is the same in both drivers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import asyncpg
import psycopg
from psycopg.rows import tuple_row

from howdah.database import migrate
from howdah.errors import sqlstate
from howdah.protocol.statements import LONG_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Generator

    from howdah.database.statement_deadline import StatementDeadline

T = TypeVar("T")
Steps: TypeAlias = "Generator[migrate.Query | migrate.Script, Any, T]"

LOCK_DEADLINE_SECONDS = 60.0
_INSUFFICIENT_PRIVILEGE = "42501"
_LOCK_NOT_AVAILABLE = "55P03"


def prepare(schema: str, *, create: bool) -> Steps[None]:
    """Check that this code can use the schema, and migrate it if it is behind and `create` is set.

    A migration that cannot get a lock in time is retried: another transaction holds the lock."""
    if not (yield from migrate.check(schema, create=create)):
        return
    deadline = time.monotonic() + LOCK_DEADLINE_SECONDS
    while True:
        try:
            yield from migrate.steps(schema)
        except Exception as error:
            if sqlstate(error) == _INSUFFICIENT_PRIVILEGE:
                yield from migrate.refuse(schema)
            if sqlstate(error) != _LOCK_NOT_AVAILABLE or time.monotonic() > deadline:
                raise
            yield migrate.Script("ROLLBACK")
        else:
            return


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
        is_query = isinstance(step, migrate.Query)
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
            if isinstance(step, migrate.Query):
                send, value = steps.send, await conn.fetch(step.text, timeout=timeout)
            else:
                await conn.execute(step.text, timeout=LONG_TIMEOUT_SECONDS)
                send, value = steps.send, None
        except asyncpg.PostgresError as error:
            send, value = steps.throw, error
