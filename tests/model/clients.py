"""The connections of the model to the database: one for each client, and one for an observer.

No statement may wait: each connection gives up on a lock after `lock_timeout`, which is a violation."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from reference import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from reference import Heads, Lane

CLIENTS = 3
OBSERVER = CLIENTS  # reads only what is committed
JOB_TABLES = (
    "live_jobs", "leases", "finished_jobs", "lanes", "idempotency_keys", "freed_keys", "unassigned_keys",
    "job_events", "sweeps",
)  # fmt: skip


class Clients:
    """Runs statements for the clients."""

    def __init__(self, url: str, lock_timeout: str) -> None:
        options = f"-c search_path=howdah -c lock_timeout={lock_timeout} -c statement_timeout=20s"
        self.connections = [
            psycopg.connect(url, autocommit=True, options=options, prepare_threshold=1)
            for _ in range(CLIENTS + 1)
        ]
        self.seeds: dict[bool, float] = {}  # whether the first random() after it is below 1/16
        for seed in range(1000):
            if len(self.seeds) < 2:
                self.run(OBSERVER, "SELECT setseed(%s)", seed / 1000)
                (row,) = self.run(OBSERVER, "SELECT random() < 0.0625 AS is_low")
                self.seeds.setdefault(row["is_low"], seed / 1000)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def clear(self) -> None:
        """Roll every transaction back and delete every job."""
        for connection in self.connections:
            connection.rollback()
            connection.autocommit = True
        for table in JOB_TABLES:
            self.run(OBSERVER, f"DELETE FROM {table}")
        self.run(
            OBSERVER,
            "UPDATE maintenance SET due_at = 'infinity', reached = '-infinity', observed = '-infinity', state = '{}'",
        )

    def run(self, client: int, text: str, *parameters: object) -> list[dict[str, Any]]:
        single = len(parameters) == 1 and isinstance(parameters[0], dict)
        values: Any = parameters[0] if single else parameters
        with (
            violation_on_error(text),
            self.connections[client].cursor(row_factory=dict_row) as cursor,
        ):
            cursor.execute(sql.SQL(text), values or None)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def now(self) -> datetime:
        now: datetime = self.run(OBSERVER, "SELECT clock_timestamp() AS now")[0]["now"]
        return now

    def lane_rows(self, client: int = OBSERVER) -> dict[tuple[Lane, bool], datetime | None]:
        """Every row of lanes. A lane has a second row, its twin, if two transactions added it at the same time."""
        rows = self.run(
            client,
            "SELECT job_type, priority, twin, nullif(h.head_at, '-infinity') AS head_at "
            "FROM lanes AS l, lane_head(l.number) AS h",
        )
        return {((row["job_type"], row["priority"]), row["twin"]): row["head_at"] for row in rows}

    def heads(self, client: int) -> Heads:
        """The head of every lane: the lowest due time at which a claim searches."""
        heads: Heads = {}
        for (lane, _), head in self.lane_rows(client).items():
            other = heads.get(lane, head)
            heads[lane] = None if head is None or other is None else min(head, other)
        return heads


@contextmanager
def violation_on_error(text: str) -> Iterator[None]:
    """Every error is a violation: the model sends no statement that may fail or wait."""
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise Violation(f"P5: waited for another transaction in {text}") from error
    except psycopg.Error as error:
        raise Violation(f"{error} in {text}") from error
