"""Follows all jobs by polling: enqueues by their ids, claims among the jobs in flight, finished jobs on the
last pages of their partition, and events likewise. Reads only; the cost does not grow with the history.

If more than LIMIT things of one kind happen between two polls, a poll returns the newest of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from howdah.encoding import payload
from howdah.insight.reader import QueueReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.insight.reader import Runner
    from howdah.protocol.statements import Rows

LIMIT = 1000
OVERLAP = timedelta(seconds=5)  # a transaction may commit after a later one
SKEW = timedelta(minutes=1)  # an id holds its producer's clock, which may be slow
FIRST_PAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """One thing that happened: enqueued, claimed, completed, failed, cancelled, error or event."""

    at: datetime
    what: str
    job_id: UUID
    job_type: str | None = None
    queue: str | None = None
    attempt: int | None = None
    worker_id: str | None = None
    took: float | None = None
    error: str | None = None
    event: str | None = None
    data: Any = None
    key: tuple[Any, ...] = ()


class Tail(QueueReader):
    """Finds what happened since the last poll."""

    def __init__(self, runner: Runner, schema: str, back: timedelta) -> None:
        super().__init__(runner, schema)
        self._back = back
        self._since: datetime | None = None
        self._pages: dict[str, int] = {}
        self._seen: dict[tuple[Any, ...], datetime] = {}

    def poll(self) -> list[Occurrence]:
        """What happened since the last poll, in order; the first poll covers the time `back`."""
        now: datetime = self._fetch("SELECT clock_timestamp()", decode=lambda rows: rows[0][0])
        since = now - self._back if self._since is None else self._since - OVERLAP
        found = [
            *self._enqueued(since),
            *self._claimed(since),
            *self._finished(since),
            *self._events(since),
        ]
        fresh = [each for each in found if each.key not in self._seen]
        self._seen = {key: at for key, at in self._seen.items() if at > since - OVERLAP}
        self._seen |= {each.key: each.at for each in fresh}
        self._since = now
        return sorted(fresh, key=lambda each: each.at)

    def _enqueued(self, since: datetime) -> list[Occurrence]:
        milliseconds = max(0, int((since - SKEW).timestamp() * 1000))
        return self._fetch(
            """
            SELECT created_at, id, job_type, queue
            FROM {s}.jobs
            WHERE id > $1::uuid AND created_at > $2::timestamptz
            ORDER BY id DESC
            LIMIT $3::int
            """,
            UUID(int=milliseconds << 80),
            since,
            LIMIT,
            decode=lambda rows: [
                Occurrence(
                    at=r[0], what="enqueued", job_id=r[1], job_type=r[2], queue=r[3],
                    key=("enqueued", r[1]),
                )
                for r in rows
            ],
        )  # fmt: skip

    def _claimed(self, since: datetime) -> list[Occurrence]:
        return self._fetch(
            """
            SELECT j.claimed_at, j.id, j.job_type, j.queue, j.attempts, j.worker_id
            FROM (SELECT unnest(l.job_ids) AS id, l.lease_id
                  FROM {s}.leases AS l
                  WHERE l.claimed_at > $1::timestamptz) AS c
            JOIN {s}.live_jobs AS j ON j.id = c.id AND j.lease_id = c.lease_id
            ORDER BY j.claimed_at DESC
            LIMIT $2::int
            """,
            since,
            LIMIT,
            decode=lambda rows: [
                Occurrence(
                    at=r[0], what="claimed", job_id=r[1], job_type=r[2], queue=r[3], attempt=r[4],
                    worker_id=r[5], key=("claimed", r[1], r[0]),
                )
                for r in rows
            ],
        )  # fmt: skip

    def _finished(self, since: datetime) -> list[Occurrence]:
        rows: list[Any] = self._newest(
            "finished_jobs", _COLUMNS, "completed_at > $1::timestamptz", since
        )
        return list(_finished_jobs(rows))

    def _newest(self, parent: str, columns: str, recent: str, since: datetime) -> list[Any]:
        """The newest rows of a partitioned table. No index finds them, because it would cost every write. Rows are
        appended to the partition of a day, so the newest are on its last pages. Rows of jobs that are kept for less
        than a day are deleted one by one, and vacuum makes room for new rows on other pages, which are not read."""
        sizes = self._partition_pages(parent)
        selects: list[str] = []
        values: list[Any] = [since, LIMIT]
        for name, pages in sizes.items():
            start = max(0, self._pages.get(name, pages - FIRST_PAGES) - 1)
            if pages == 0:
                continue
            values.append(f"({start},0)")
            where = f"ctid >= ${len(values)}::text::tid AND {recent}"
            suffix = name.removeprefix(f"{parent}_")
            if suffix == "default":
                source = f"{{s}}.{name} WHERE "
            else:
                day = _SHORT if suffix == "short" else datetime.strptime(suffix, "%Y%m%d").date()  # noqa: DTZ007
                values.append(day)
                source = f"{{s}}.{parent} WHERE drop_on = ${len(values)}::date AND "
            selects.append(f"(SELECT {columns} FROM {source}{where})")
        self._pages |= sizes
        if not selects:
            return []
        text = " UNION ALL ".join(selects) + " ORDER BY 1 DESC LIMIT $2::int"
        return self._fetch(text, *values, decode=list)

    def _partition_pages(self, parent: str) -> dict[str, int]:
        return self._fetch(
            """
            SELECT c.relname, pg_relation_size(c.oid) / current_setting('block_size')::int
            FROM pg_inherits AS i
            JOIN pg_class AS c ON c.oid = i.inhrelid
            WHERE i.inhparent = to_regclass($1::text)
              AND c.relname ~ ('^' || $2::text || '_([0-9]{8}|short|default)$')
              AND (c.relname !~ '_default$' OR has_table_privilege(c.oid, 'SELECT'))
            """,
            f"{self._s}.{parent}",
            parent,
            decode=lambda rows: {r[0]: r[1] or 0 for r in rows},
        )

    def _events(self, since: datetime) -> list[Occurrence]:
        rows = self._newest(
            "job_events",
            "at, job_id, event_id, attempt, kind, data::text",
            "at > $1::timestamptz",
            since,
        )
        names: dict[UUID, tuple[str, str]] = self._fetch(
            "SELECT id, job_type, queue FROM {s}.jobs WHERE id = ANY ($1::uuid[])",
            list({row[1] for row in rows}),
            decode=lambda jobs: {job[0]: (job[1], job[2]) for job in jobs},
        )
        return [_event(row, *names.get(row[1], (None, None))) for row in rows]


_SHORT = date(1970, 1, 1)  # the day of jobs that are kept for less than a day
_COLUMNS = (
    "completed_at, id, job_type, queue, status, attempts, worker_id, last_error, "
    "extract(epoch FROM completed_at - coalesce(started_at, claimed_at))::float8"
)


def _finished_jobs(rows: Rows) -> Iterator[Occurrence]:
    for at, job_id, job_type, queue, status, attempts, worker, error, took in rows:
        yield Occurrence(
            at=at, what=status, job_id=job_id, job_type=job_type, queue=queue, attempt=attempts,
            worker_id=worker, took=took, error=None if status == "completed" else error,
            key=(status, job_id, at),
        )  # fmt: skip


def _event(row: Any, job_type: str | None, queue: str | None) -> Occurrence:
    at, job_id, event_id, attempt, kind, text = row
    data = payload.decode(text)
    is_error = kind == "error" and isinstance(data, dict) and "error" in data
    return Occurrence(
        at=at, what="error" if is_error else "event", job_id=job_id, job_type=job_type, queue=queue,
        attempt=attempt, worker_id=data.get("worker") if is_error else None,
        error=data["error"] if is_error else None, event=kind, data=data, key=("event", event_id),
    )  # fmt: skip
