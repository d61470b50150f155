"""Builds a `Statement` for each operation: a text, its parameters, and a decoder for the rows. The sync and the
async client, and callers' connections, run these and nothing else.

A statement and its SQL function have the same name. Placeholders are `$1`, so one text serves asyncpg and
psycopg. Every parameter is cast, so no driver has to infer a type. No statement waits for a job that another
transaction has locked: it is rejected, and `held_jobs` tells it from a lost one (decision 0004)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from howdah.encoding import copy_format
from howdah.model import Event, Handle, Job, Status
from howdah.protocol.columns import first_value, ids_of, row_decoder, select_list
from howdah.protocol.duties import DutyStep
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from uuid import UUID

    from howdah.protocol.filters import Filters

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
Rows = Sequence[Sequence[Any]]

LONG_TIMEOUT_SECONDS = 3600.0  # for statements that may read the whole history, and for migrations


@dataclass(frozen=True, slots=True)
class Statement(Generic[T_co]):
    """What to send and how to read the answer.

    `operation` is the name of the SQL function that it calls, or of the method that built it.
    `resend` builds the idempotent form to resend if the connection breaks before the answer: effects of
    a lost first send count as its own. Without it the same text is resent.
    `fallback` builds the form for a role that may not call the function, and may read the tables.
    `timeout` is the deadline in seconds of a statement that may take longer than others.
    `is_divisible`: if it is not answered in time, the caller divides it instead of sending it again.
    `copy` is what a COPY sends after its text. A COPY has no parameters and returns no rows.
    """

    operation: str
    text: str
    parameters: tuple[Any, ...]
    decode: Callable[[Rows], T_co]
    resend: Callable[[], Statement[T_co]] | None = None
    fallback: Callable[[], Statement[T_co]] | None = None
    timeout: float | None = None
    copy: copy_format.Copy | None = None
    is_divisible: bool = False

    def then(self, check: Callable[[T_co], U]) -> Statement[U]:
        """The statement with one more step after its decoding, in each of its forms."""

        def each(form: Callable[[], Statement[T_co]] | None) -> Any:
            return None if form is None else lambda: form().then(check)

        same: Any = self  # of another type after the step
        return replace(
            same,
            decode=lambda rows: check(self.decode(rows)),
            resend=each(self.resend),
            fallback=each(self.fallback),
        )


_JOB_COLUMNS = select_list(Job)
_EVENT_COLUMNS = select_list(Event)
_job = row_decoder(Job)
_event = row_decoder(Event)


def _jobs(rows: Rows) -> list[Job]:
    return [_job(row) for row in rows]


class Statements:
    """The operations on one schema."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._s = quote_schema(schema)

    def has_schema(self) -> Statement[bool]:
        """Whether the schema's tables exist."""
        return Statement(
            "has_schema",
            "SELECT to_regclass($1::text) IS NOT NULL",
            (f"{self._s}.migrations",),
            first_value,
        )

    def enqueue_jobs(
        self, jobs: str, idempotency_ttl: timedelta, *, resend: bool = False
    ) -> Statement[list[Handle]]:
        """Enqueue a JSON array of jobs with new ids; the handles are in its order. With `resend`, jobs that exist
        already are not enqueued again."""
        return Statement(
            "enqueue_jobs",
            f"SELECT id, is_new FROM {self._s}.enqueue_jobs($1::text::jsonb, $2::boolean, $3::interval, "
            "true)",
            (jobs, resend, idempotency_ttl),
            lambda rows: [Handle(row[0], row[1]) for row in rows],
            None if resend else lambda: self.enqueue_jobs(jobs, idempotency_ttl, resend=True),
        )

    def copy_jobs(
        self, rows: Iterable[bytes], copied: Sequence[Mapping[str, Any]]
    ) -> Statement[list[Handle]]:
        """Enqueue jobs that need no lookup. `copied` holds them when the rows have been sent.
        `announce_jobs` must follow."""
        copy = copy_format.Copy(self.schema, "live_jobs", copy_format.COLUMNS, rows)
        text = f"COPY {self._s}.live_jobs ({', '.join(copy_format.COLUMNS)}) FROM STDIN (ENCODING 'UTF8')"
        return Statement(
            "copy_jobs", text, (), lambda _: [Handle(job["id"], True) for job in copied], copy=copy
        )

    def announce_jobs(self, lanes: str) -> Statement[list[Handle]]:
        """Create the lanes of copied jobs, [[queue, job type, priority], …], and notify workers."""
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
        due_from: float | None = None,
    ) -> Statement[list[Job]]:
        """Claim up to `batch_size` due jobs, highest priority first. `due_from`, in seconds since 1970, finds jobs
        below the heads of their lanes."""
        return Statement(
            "claim_job_batch",
            f"SELECT {_JOB_COLUMNS} FROM {self._s}.claim_job_batch($1::text, $2::text[], $3::int, "
            "$4::interval, $5::text[], $6::boolean, to_timestamp($7::float8))",
            (
                worker_id,
                None if job_types is None else list(job_types),
                batch_size,
                lease,
                list(queues),
                started,
                due_from,
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
        """Complete jobs. Returns the ids that were accepted."""
        text = (
            f"SELECT * FROM {self._s}.complete_jobs($1::uuid[], $2::uuid[], $3::text[]::jsonb[], "
            "$4::float8[], $5::boolean, false)"
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
            ids_of,
            lambda: Statement("complete_jobs", text, (*lists, True), ids_of),
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
        """Fail jobs. Each has its next due time, or none for no retry."""
        return Statement(
            "fail_jobs",
            f"SELECT * FROM {self._s}.fail_jobs($1::uuid[], $2::uuid[], $3::text[], "
            "$4::timestamptz[], $5::interval[], $6::float8[], $7::text[], false)",
            (
                list(ids),
                list(lease_ids),
                list(errors),
                list(retry_at),
                list(retry_in),
                None if elapsed is None else list(elapsed),
                None if tracebacks is None else list(tracebacks),
            ),
            ids_of,
        )

    def release_jobs(
        self, ids: Sequence[UUID], lease_ids: Sequence[UUID], delay: timedelta
    ) -> Statement[list[UUID]]:
        """Release jobs without using an attempt."""
        return Statement(
            "release_jobs",
            f"SELECT * FROM {self._s}.release_jobs($1::uuid[], $2::uuid[], $3::interval, false)",
            (list(ids), list(lease_ids), delay),
            ids_of,
        )

    def extend_jobs(
        self,
        ids: Sequence[UUID],
        lease_ids: Sequence[UUID],
        lease: timedelta,
        elapsed: Sequence[float | None] | None = None,
        more_leases: Sequence[UUID] = (),
        ended_leases: Sequence[UUID] = (),
    ) -> Statement[list[tuple[UUID, bool, bool, bool]]]:
        """Extend the leases of jobs: (id, extended, mine, cancel_requested) of each. Of `more_leases` the id is None,
        and `mine` is whether the lease exists. `ended_leases`, which have no job any more, are removed."""
        return Statement(
            "extend_jobs",
            f"SELECT id, extended, mine, cancel_requested FROM {self._s}.extend_jobs("
            "$1::uuid[], $2::uuid[], $3::interval, $4::float8[], $5::uuid[], $6::uuid[])",
            (
                list(ids),
                list(lease_ids),
                lease,
                None if elapsed is None else list(elapsed),
                list(more_leases),
                list(ended_leases),
            ),
            lambda rows: [(row[0], row[1], row[2], row[3]) for row in rows],
        )

    def start_jobs(self, ids: Sequence[UUID], lease_ids: Sequence[UUID]) -> Statement[list[UUID]]:
        """Record that jobs were started."""
        return Statement(
            "start_jobs",
            f"SELECT * FROM {self._s}.start_jobs($1::uuid[], $2::uuid[], false)",
            (list(ids), list(lease_ids)),
            ids_of,
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

    def held_jobs(
        self, ids: Sequence[UUID], lease_ids: Sequence[UUID]
    ) -> Statement[list[tuple[UUID, UUID]]]:
        """The jobs whose lease is still the caller's, also if another transaction has locked them."""
        return Statement(
            "held_jobs",
            f"SELECT id, lease_id FROM {self._s}.held_jobs($1::uuid[], $2::uuid[])",
            (list(ids), list(lease_ids)),
            lambda rows: [(row[0], row[1]) for row in rows],
        )

    def add_events(
        self,
        ids: Sequence[UUID],
        lease_ids: Sequence[UUID],
        kinds: Sequence[str],
        datas: Sequence[str],
        numbers: Sequence[int] | None = None,
    ) -> Statement[list[UUID]]:
        """Append events to claimed jobs. Those with a number are written once, although they are sent
        again: the numbers of a run ascend, and their upper 32 bits name the run."""
        return Statement(
            "add_events",
            f"SELECT * FROM {self._s}.add_events($1::uuid[], $2::uuid[], $3::text[], "
            "$4::text[]::jsonb[], $5::bigint[], false)",
            (
                list(ids),
                list(lease_ids),
                list(kinds),
                list(datas),
                None if numbers is None else list(numbers),
            ),
            ids_of,
        )

    def recover_stale_jobs(self, timeout: timedelta | None, limit: int) -> Statement[int]:
        """Return stale jobs to the queue."""
        return Statement(
            "recover_stale_jobs",
            f"SELECT {self._s}.recover_stale_jobs($1::interval, $2::int)",
            (timeout, limit),
            first_value,
        )

    def cancel_jobs(self, ids: Sequence[UUID]) -> Statement[dict[UUID, str]]:
        """Cancel jobs: id → "cancelled", "cancelling" for one that is claimed, or "locked"."""
        return Statement(
            "cancel_jobs",
            f"SELECT id, status FROM {self._s}.cancel_jobs($1::uuid[])",
            (list(ids),),
            lambda rows: {row[0]: row[1] for row in rows},
        )

    def retry_jobs(self, ids: Sequence[UUID]) -> Statement[list[UUID]]:
        """Reopen finished jobs."""
        return Statement(
            "retry_jobs", f"SELECT * FROM {self._s}.retry_jobs($1::uuid[])", (list(ids),), ids_of
        )

    def pending_count(self, queue: str | None, job_type: str | None) -> Statement[int]:
        """Count pending jobs."""
        return Statement(
            "pending_count",
            f"SELECT {self._s}.pending_count($1::text, $2::text)",
            (queue, job_type),
            first_value,
        )

    def counts(self, queue: str | None, job_type: str | None) -> Statement[dict[Status, int]]:
        """Count jobs by status."""
        return Statement(
            "counts",
            f"SELECT status, count(*) FROM {self._s}.jobs "
            "WHERE ($1::text IS NULL OR queue = $1::text) "
            "AND ($2::text IS NULL OR job_type = $2::text) GROUP BY status",
            (queue, job_type),
            lambda rows: dict.fromkeys(Status, 0) | {Status(row[0]): row[1] for row in rows},
        )

    def get(self, job_id: UUID) -> Statement[Job | None]:
        """One job, live or finished."""
        return self.get_many([job_id]).then(lambda jobs: jobs[0] if jobs else None)

    def get_many(self, ids: Sequence[UUID]) -> Statement[list[Job]]:
        """The jobs with these ids, in any order."""
        statement = Statement(
            "get_jobs",
            f"SELECT {_JOB_COLUMNS} FROM {self._s}.get_jobs($1::uuid[])",
            (list(ids),),
            _jobs,
        )
        text = f"SELECT {_JOB_COLUMNS} FROM {self._s}.jobs WHERE id = ANY ($1::uuid[])"
        return replace(statement, fallback=lambda: replace(statement, text=text))

    def find(self, filters: Filters, limit: int) -> Statement[list[Job]]:
        """Jobs that match every filter, newest first."""
        where, values = filters.where()
        values.append(limit)
        return Statement(
            "find",
            f"SELECT {_JOB_COLUMNS} FROM {self._s}.jobs {where}ORDER BY id DESC LIMIT ${len(values)}::int",
            tuple(values),
            _jobs,
        )

    def events(self, job_id: UUID, after: int) -> Statement[list[Event]]:
        """A job's events after event id `after`, oldest first."""
        statement: Statement[list[Event]] = Statement(
            "get_events",
            f"SELECT {_EVENT_COLUMNS} FROM {self._s}.get_events($1::uuid, $2::bigint)",
            (job_id, after),
            lambda rows: [_event(row) for row in rows],
        )
        where = "WHERE job_id = $1::uuid AND event_id > $2::bigint"
        text = f"SELECT {_EVENT_COLUMNS} FROM {self._s}.job_events {where} ORDER BY event_id"
        return replace(statement, fallback=lambda: replace(statement, text=text))

    def clear_finished(self, older_than: timedelta, statuses: Sequence[str]) -> Statement[int]:
        """Remove finished jobs."""
        return Statement(
            "clear_finished",
            f"SELECT {self._s}.clear_finished($1::interval, $2::text[])",
            (older_than, [str(status) for status in statuses]),
            first_value,
            timeout=LONG_TIMEOUT_SECONDS,
        )

    def remove_jobs(self, ids: Sequence[UUID]) -> Statement[list[UUID]]:
        """Remove finished jobs by id. Returns the ids that were removed."""
        return Statement(
            "remove_jobs", f"SELECT * FROM {self._s}.remove_jobs($1::uuid[])", (list(ids),), ids_of
        )

    def run_due_duty(self, ran: Sequence[str], timeout: float | None) -> Statement[DutyStep | None]:
        """Run one step of the maintenance duty that is due first, or None if none is due. `ran` are duties that
        this caller has run already: they are not run again while another transaction holds their rows."""
        return Statement(
            "run_due_duty",
            f"SELECT duty, took, error, more FROM {self._s}.run_due_duty($1::text[])",
            (list(ran),),
            lambda rows: DutyStep(*rows[0]) if rows else None,
            timeout=timeout,
        )
