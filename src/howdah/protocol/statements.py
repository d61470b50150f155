"""One pure function per operation, each giving a `Statement`: a text, its parameters, and how to read
the rows. The sync and the async client, and callers' own connections, all run these and nothing else.

A statement and the SQL function behind it share one name. Placeholders are `$1`, so one text serves
asyncpg and psycopg; every parameter is cast, so no driver has to guess."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from howdah.encoding import copy_format, payload
from howdah.model import Event, Handle, Job, Status
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from uuid import UUID

T_co = TypeVar("T_co", covariant=True)
Rows = Sequence[Sequence[Any]]

LONG_TIMEOUT_SECONDS = 3600.0  # seconds, for what may go through the whole history


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows for a table, as COPY reads them in its text format."""

    schema: str
    table: str
    columns: tuple[str, ...]
    lines: Iterable[bytes]


@dataclass(frozen=True, slots=True)
class Statement(Generic[T_co]):
    """What to send and how to read the answer.

    `operation` is the name of the SQL function that it calls, or of the method that built it.
    `resend` builds the idempotent form to resend if the connection breaks before the answer: effects of
    a lost first send count as its own. Without it the same text is resent.
    `timeout` is the deadline in seconds of a statement that may take longer than others.
    `copy` is what a COPY sends after its text. A COPY has no parameters and returns no rows.
    """

    operation: str
    text: str
    parameters: tuple[Any, ...]
    decode: Callable[[Rows], T_co]
    resend: Callable[[], Statement[T_co]] | None = None
    timeout: float | None = None
    copy: Copy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which jobs `find` shows. Empty means any."""

    status: Sequence[str] = ()
    job_type: Sequence[str] = ()
    queue: Sequence[str] = ()
    ids: Sequence[UUID] = ()
    request_id: str | None = None
    ordering_key: str | None = None
    worker_id: str | None = None
    data: str | None = None
    before: UUID | None = None


_COLUMNS = (
    "id, seq, queue, job_type, priority, status, data::text, progress, current_stage, events_count, "
    "worker_id, lease_id, lease_expires_at, claims, claimed_at, run_at, created_at, started_at, "
    "completed_at, attempts, max_attempts, last_error, request_id, traceparent, idempotency_key, "
    "ordering_key, holds_key, blockers, cancel_requested, keep, result::text"
)


def _job(row: Sequence[Any]) -> Job:
    (job_id, seq, queue, job_type, priority, status, data, progress, stage, events, worker, lease_id,
     expires, claims, claimed, run_at, created, started, completed, attempts, max_attempts, error,
     request_id, traceparent, idempotency_key, ordering_key, holds, blockers, cancel, keep,
     result) = row  # fmt: skip
    return Job(
        id=job_id, seq=seq, queue=queue, job_type=job_type, priority=priority, status=_STATUS[status],
        data=payload.decode(data), progress=progress, current_stage=stage, events_count=events,
        worker_id=worker, lease_id=lease_id, lease_expires_at=expires, claims=claims,
        claimed_at=claimed, run_at=run_at, created_at=created, started_at=started,
        completed_at=completed, attempts=attempts, max_attempts=max_attempts, last_error=error,
        request_id=request_id, traceparent=traceparent, idempotency_key=idempotency_key,
        ordering_key=ordering_key, holds_key=holds, blockers=blockers, cancel_requested=cancel,
        keep=keep, result=None if result is None else payload.decode(result),
    )  # fmt: skip


_STATUS = {str(status): status for status in Status}


def _jobs(rows: Rows) -> list[Job]:
    return [_job(row) for row in rows]


def _ids(rows: Rows) -> list[UUID]:
    return [row[0] for row in rows]


def _value(rows: Rows) -> Any:
    return rows[0][0]


def _nothing(rows: Rows) -> None:
    return None


class Statements:
    """The operations on one schema."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._s = quote_schema(schema)

    def enqueue_jobs(
        self, jobs: str, idempotency_ttl: timedelta, *, resend: bool = False
    ) -> Statement[list[Handle]]:
        """Enqueue a JSON array of jobs; the answer is in its order. `again`: unless they are there."""
        return Statement(
            "enqueue_jobs",
            f"SELECT id, is_new FROM {self._s}.enqueue_jobs($1::text::jsonb, $2::boolean, $3::interval)",
            (jobs, resend, idempotency_ttl),
            lambda rows: [Handle(row[0], row[1]) for row in rows],
            None if resend else lambda: self.enqueue_jobs(jobs, idempotency_ttl, resend=True),
        )

    def copy_jobs(
        self, rows: Iterable[bytes], copied: Sequence[Mapping[str, Any]]
    ) -> Statement[list[Handle]]:
        """Enqueue jobs that have nothing special about them, and which `copied` holds in the end.
        `announce_jobs` must follow."""
        copy = Copy(self.schema, "live_jobs", copy_format.COLUMNS, rows)
        text = f"COPY {self._s}.live_jobs ({', '.join(copy_format.COLUMNS)}) FROM STDIN (ENCODING 'UTF8')"
        return Statement(
            "copy_jobs", text, (), lambda _: [Handle(job["id"], True) for job in copied], copy=copy
        )

    def announce_jobs(self, lanes: str) -> Statement[list[Handle]]:
        """Make the lanes of jobs that were copied, [[queue, job type, priority], …], and wake workers."""
        return Statement(
            "announce_jobs",
            f"SELECT {self._s}.announce_jobs($1::text::jsonb)",
            (lanes,),
            lambda _: [],
        )

    def claim_job_batch(
        self,
        worker_id: str,
        job_types: Sequence[str] | None,
        batch_size: int,
        lease: timedelta,
        queues: Sequence[str],
        *,
        started: bool = False,
        ignore_heads: bool = False,
    ) -> Statement[list[Job]]:
        """Claim up to `batch_size` due jobs, best first."""
        return Statement(
            "claim_job_batch",
            f"SELECT {_COLUMNS} FROM {self._s}.claim_job_batch($1::text, $2::text[], $3::int, "
            "$4::interval, $5::text[], $6::boolean, $7::boolean)",
            (
                worker_id,
                None if job_types is None else list(job_types),
                batch_size,
                lease,
                list(queues),
                started,
                ignore_heads,
            ),
            _jobs,
        )

    def complete_jobs(
        self,
        ids: Sequence[UUID],
        lease_ids: Sequence[UUID],
        results: Sequence[str | None],
        elapsed: Sequence[float | None] | None = None,
    ) -> Statement[list[UUID]]:
        """Complete jobs; the ids that were accepted come back."""
        text = (
            f"SELECT * FROM {self._s}.complete_jobs($1::uuid[], $2::uuid[], $3::text[]::jsonb[], "
            "$4::float8[], $5::boolean)"
        )
        lists = (
            list(ids),
            list(lease_ids),
            list(results),
            None if elapsed is None else list(elapsed),
        )
        return Statement(
            "complete_jobs",
            text,
            (*lists, False),
            _ids,
            lambda: Statement("complete_jobs", text, (*lists, True), _ids),
        )

    def fail_jobs(
        self,
        ids: Sequence[UUID],
        lease_ids: Sequence[UUID],
        errors: Sequence[str],
        retry_at: Sequence[datetime | None],
        retry_in: Sequence[timedelta | None],
        *,
        elapsed: Sequence[float | None] | None = None,
        tracebacks: Sequence[str | None] | None = None,
    ) -> Statement[list[UUID]]:
        """Fail jobs, each with its next due time, or none for no retry."""
        return Statement(
            "fail_jobs",
            f"SELECT * FROM {self._s}.fail_jobs($1::uuid[], $2::uuid[], $3::text[], "
            "$4::timestamptz[], $5::interval[], $6::float8[], $7::text[])",
            (
                list(ids),
                list(lease_ids),
                list(errors),
                list(retry_at),
                list(retry_in),
                None if elapsed is None else list(elapsed),
                None if tracebacks is None else list(tracebacks),
            ),
            _ids,
        )

    def release_jobs(
        self, ids: Sequence[UUID], lease_ids: Sequence[UUID], delay: timedelta
    ) -> Statement[list[UUID]]:
        """Give jobs back without burning an attempt."""
        return Statement(
            "release_jobs",
            f"SELECT * FROM {self._s}.release_jobs($1::uuid[], $2::uuid[], $3::interval)",
            (list(ids), list(lease_ids), delay),
            _ids,
        )

    def extend_jobs(
        self,
        ids: Sequence[UUID],
        lease_ids: Sequence[UUID],
        lease: timedelta,
        elapsed: Sequence[float | None] | None = None,
    ) -> Statement[list[tuple[UUID, bool, bool, bool]]]:
        """Extend leases: (id, extended, mine, cancel_requested) of each."""
        return Statement(
            "extend_jobs",
            f"SELECT id, extended, mine, cancel_requested FROM {self._s}.extend_jobs("
            "$1::uuid[], $2::uuid[], $3::interval, $4::float8[])",
            (list(ids), list(lease_ids), lease, None if elapsed is None else list(elapsed)),
            lambda rows: [(row[0], row[1], row[2], row[3]) for row in rows],
        )

    def start_jobs(self, ids: Sequence[UUID], lease_ids: Sequence[UUID]) -> Statement[list[UUID]]:
        """Say that jobs were started."""
        return Statement(
            "start_jobs",
            f"SELECT * FROM {self._s}.start_jobs($1::uuid[], $2::uuid[])",
            (list(ids), list(lease_ids)),
            _ids,
        )

    def report_progress(
        self,
        ids: Sequence[UUID],
        lease_ids: Sequence[UUID],
        progress: Sequence[int | None],
        stages: Sequence[str | None],
    ) -> Statement[list[tuple[UUID, bool, bool, bool]]]:
        """Report progress: (id, reported, mine, cancel_requested) of each."""
        return Statement(
            "report_progress",
            f"SELECT id, reported, mine, cancel_requested FROM {self._s}.report_progress("
            "$1::uuid[], $2::uuid[], $3::int[], $4::text[])",
            (list(ids), list(lease_ids), list(progress), list(stages)),
            lambda rows: [(row[0], row[1], row[2], row[3]) for row in rows],
        )

    def add_events(
        self,
        ids: Sequence[UUID],
        lease_ids: Sequence[UUID],
        kinds: Sequence[str],
        datas: Sequence[str],
    ) -> Statement[list[UUID]]:
        """Append events to claimed jobs."""
        return Statement(
            "add_events",
            f"SELECT * FROM {self._s}.add_events($1::uuid[], $2::uuid[], $3::text[], "
            "$4::text[]::jsonb[])",
            (list(ids), list(lease_ids), list(kinds), list(datas)),
            _ids,
        )

    def recover_stale_jobs(self, timeout: timedelta | None, limit: int) -> Statement[int]:
        """Return stale jobs to their lanes."""
        return Statement(
            "recover_stale_jobs",
            f"SELECT {self._s}.recover_stale_jobs($1::interval, $2::int)",
            (timeout, limit),
            _value,
        )

    def cancel_jobs(self, ids: Sequence[UUID]) -> Statement[dict[UUID, str]]:
        """Cancel jobs: id → "cancelled", or "cancelling" for one that is claimed."""
        return Statement(
            "cancel_jobs",
            f"SELECT id, status FROM {self._s}.cancel_jobs($1::uuid[])",
            (list(ids),),
            lambda rows: {row[0]: row[1] for row in rows},
        )

    def retry_jobs(self, ids: Sequence[UUID]) -> Statement[list[UUID]]:
        """Reopen finished jobs."""
        return Statement(
            "retry_jobs", f"SELECT * FROM {self._s}.retry_jobs($1::uuid[])", (list(ids),), _ids
        )

    def pending_count(self, queue: str | None, job_type: str | None) -> Statement[int]:
        """Count waiting jobs."""
        return Statement(
            "pending_count",
            f"SELECT {self._s}.pending_count($1::text, $2::text)",
            (queue, job_type),
            _value,
        )

    def counts(self, queue: str | None, job_type: str | None) -> Statement[dict[Status, int]]:
        """Count jobs by status."""
        return Statement(
            "counts",
            f"SELECT status, count(*) FROM {self._s}.jobs "
            "WHERE ($1::text IS NULL OR queue = $1::text) "
            "AND ($2::text IS NULL OR job_type = $2::text) GROUP BY status",
            (queue, job_type),
            lambda rows: dict.fromkeys(Status, 0) | {_STATUS[row[0]]: row[1] for row in rows},
        )

    def get(self, job_id: UUID) -> Statement[Job | None]:
        """One job, live or finished."""
        return Statement(
            "get",
            f"SELECT {_COLUMNS} FROM {self._s}.jobs WHERE id = $1::uuid",
            (job_id,),
            lambda rows: _job(rows[0]) if rows else None,
        )

    def find(self, filters: Filters, limit: int) -> Statement[list[Job]]:
        """Jobs that match, newest first, from `before` on."""
        conditions: list[str] = []
        values: list[Any] = []

        def add(condition: str, value: Any) -> None:
            values.append(value)
            conditions.append(condition.format(f"${len(values)}"))

        if filters.status:
            add("status = ANY ({}::text[])", [str(status) for status in filters.status])
        if filters.job_type:
            add("job_type = ANY ({}::text[])", list(filters.job_type))
        if filters.queue:
            add("queue = ANY ({}::text[])", list(filters.queue))
        if filters.ids:
            add("id = ANY ({}::uuid[])", list(filters.ids))
        if filters.request_id is not None:
            add("request_id = {}::text", filters.request_id)
        if filters.ordering_key is not None:
            add("ordering_key = {}::text", filters.ordering_key)
        if filters.worker_id is not None:
            add("worker_id = {}::text", filters.worker_id)
        if filters.data is not None:
            add("data @> {}::text::jsonb", filters.data)
        if filters.before is not None:
            add("id < {}::uuid", filters.before)
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        values.append(limit)
        return Statement(
            "find",
            f"SELECT {_COLUMNS} FROM {self._s}.jobs {where}ORDER BY id DESC LIMIT ${len(values)}::int",
            tuple(values),
            _jobs,
        )

    def events(self, job_id: UUID, after: int) -> Statement[list[Event]]:
        """A job's events, oldest first, from behind `after` on."""
        return Statement(
            "events",
            f"SELECT job_id, event_id, at, attempt, kind, data::text FROM {self._s}.job_events "
            "WHERE job_id = $1::uuid AND event_id > $2::bigint ORDER BY event_id",
            (job_id, after),
            lambda rows: [
                Event(
                    job_id=row[0],
                    event_id=row[1],
                    at=row[2],
                    attempt=row[3],
                    kind=row[4],
                    data=payload.decode(row[5]),
                )
                for row in rows
            ],
        )

    def clear_finished(self, older_than: timedelta, statuses: Sequence[str]) -> Statement[int]:
        """Remove finished jobs."""
        return Statement(
            "clear_finished",
            f"SELECT {self._s}.clear_finished($1::interval, $2::text[])",
            (older_than, [str(status) for status in statuses]),
            _value,
            timeout=LONG_TIMEOUT_SECONDS,
        )

    def remove_jobs(self, ids: Sequence[UUID]) -> Statement[list[UUID]]:
        """Remove finished jobs by id; those that were removed come back."""
        return Statement(
            "remove_jobs", f"SELECT * FROM {self._s}.remove_jobs($1::uuid[])", (list(ids),), _ids
        )

    def run_maintenance(
        self, timeout: float | None = 60.0
    ) -> Statement[list[tuple[str, timedelta, str | None]]]:
        """Run the duties that are due: (duty, took, error) of each."""
        return Statement(
            "run_maintenance",
            f"SELECT duty, took, error FROM {self._s}.run_maintenance()",
            (),
            lambda rows: [(row[0], row[1], row[2]) for row in rows],
            timeout=timeout,
        )
