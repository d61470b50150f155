"""The operations that workers, watchers and the task runner add to `statements.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from howdah.protocol.columns import ids_of, nothing, select_list
from howdah.protocol.statements import Statement, Statements

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from howdah.protocol.statements import Rows


class Claimed(msgspec.Struct, frozen=True):
    """The columns of a job that a worker needs. The data are still text."""

    id: UUID
    lease_id: UUID
    job_type: str
    queue: str
    data: str
    attempts: int
    max_attempts: int
    claims: int
    request_id: str | None
    traceparent: str | None
    idempotency_key: str | None
    waited: float
    """Seconds from due to claimed, by the database's clock."""


_CLAIMED_COLUMNS = select_list(Claimed)


class WorkerStatements(Statements):
    """The operations on one schema, including those of workers."""

    def claim(
        self,
        worker_id: str,
        job_types: Sequence[str],
        batch_size: int,
        lease: timedelta,
        queues: Sequence[str],
        due_from: float | None,
    ) -> Statement[list[Claimed]]:
        """A claim with few columns and an asynchronous commit: if a crash of the server loses the claim, its fence is
        rejected (decision 0016). Every other statement commits durably. Suspects are claimed with the other jobs,
        since a worker runs them one at a time (decision 0020). `due_from`: see `claim_job_batch`."""
        return Statement(
            "claim_runs",
            f"SELECT {_CLAIMED_COLUMNS} FROM set_config('synchronous_commit', 'off', true), "
            f"{self._s}.claim_runs($1::text, $2::text[], $3::int, $4::interval, $5::text[], "
            "to_timestamp($6::float8))",
            (worker_id, list(job_types), batch_size, lease, list(queues), due_from),
            lambda rows: [Claimed(*row) for row in rows],
            is_divisible=True,
        )

    def next_wake(
        self, worker_id: str, job_types: Sequence[str], queues: Sequence[str], overdue: bool
    ) -> Statement[tuple[datetime | None, int, datetime]]:
        """When the next job will be due, how many idle workers answer it before this one, and the current time
        of the database. `overdue` includes jobs that are due already."""
        return Statement(
            "next_wake",
            f"SELECT due_at, rank, now FROM {self._s}.next_wake($1::text, $2::text[], $3::text[], "
            "$4::boolean)",
            (worker_id, list(job_types), list(queues), overdue),
            lambda rows: (rows[0][0], rows[0][1], rows[0][2]),
        )

    def pass_wake(
        self,
        worker_id: str,
        job_types: Sequence[str],
        queues: Sequence[str],
        due_from: float | None,
    ) -> Statement[None]:
        """Wake as many other workers as there are due jobs."""
        return Statement(
            "pass_wake",
            f"SELECT {self._s}.pass_wake($1::text, $2::text[], $3::text[], "
            "to_timestamp($4::float8))",
            (worker_id, list(job_types), list(queues), due_from),
            nothing,
        )

    def register_worker(
        self,
        worker_id: str,
        host: str,
        pid: int,
        queues: Sequence[str],
        job_types: Sequence[str],
        priorities: Sequence[int],
        info: str,
        life: UUID,
        idle: bool = True,
    ) -> Statement[None]:
        """Register one life of a worker and create the lanes of its tasks."""
        return Statement(
            "register_worker",
            f"SELECT {self._s}.register_worker($1::text, $2::text, $3::int, $4::text[], $5::text[], "
            "$6::int[], $7::jsonb, $8::uuid, $9::boolean)",
            (
                worker_id,
                host,
                pid,
                list(queues),
                list(job_types),
                list(priorities),
                info,
                life,
                idle,
            ),
            nothing,
        )

    def touch_worker(
        self,
        worker_id: str,
        idle: bool | None,
        info: str | None,
        life: UUID,
        full_types: Sequence[str] | None = None,
    ) -> Statement[bool | None]:
        """Record that a worker is alive, whether it is idle, and for which types it has no free slot. False if
        it is not registered, and None if another transaction has locked its row."""
        return Statement(
            "touch_worker",
            f"SELECT {self._s}.touch_worker($1::text, $2::boolean, $3::jsonb, $4::uuid, $5::text[])",
            (worker_id, idle, info, life, None if full_types is None else list(full_types)),
            lambda rows: rows[0][0],
        )

    def beat_worker(
        self, worker_id: str, info: str, counts: str | None, life: UUID
    ) -> Statement[bool]:
        """Record that a worker is alive, and its throughput. False if it is not registered."""
        return Statement(
            "beat_worker",
            f"SELECT {self._s}.beat_worker($1::text, $2::jsonb, $3::jsonb, $4::uuid)",
            (worker_id, info, counts, life),
            lambda rows: rows[0][0] is not False,  # None: its row is locked
        )

    def remove_worker(self, worker_id: str, life: UUID) -> Statement[None]:
        """Remove this life of a worker: it has stopped."""
        return Statement(
            "remove_worker",
            f"SELECT {self._s}.remove_worker($1::text, $2::uuid)",
            (worker_id, life),
            nothing,
        )

    def complete_runs(
        self,
        ids: list[UUID],
        lease_ids: list[UUID],
        results: list[str | None],
        elapsed: list[float | None] | None,
    ) -> Statement[list[UUID]]:
        """`complete_jobs` in one step and with a short answer if every job is accepted, as nearly always. It raises
        if another transaction has locked one of the jobs: `complete_jobs` skips those."""
        parameters = (ids, lease_ids, results if any(results) else None, elapsed)
        sent = "$1::uuid[], $2::uuid[], $3::text[]::jsonb[], $4::float8[]"

        def decode(rows: Rows) -> list[UUID]:
            return ids if rows[0][0] is None else rows[0][0]

        return Statement(
            "complete_runs",
            f"SELECT {self._s}.complete_runs({sent})",
            parameters,
            decode,
            lambda: Statement(
                "complete_jobs",
                f"SELECT ARRAY (SELECT {self._s}.complete_jobs({sent}, true, false))",
                parameters,
                decode,
            ),
        )

    def stop_jobs(
        self, ids: Sequence[UUID], lease_ids: Sequence[UUID], reasons: Sequence[str]
    ) -> Statement[list[UUID]]:
        """End claimed jobs as cancelled."""
        return Statement(
            "stop_jobs",
            f"SELECT * FROM {self._s}.stop_jobs($1::uuid[], $2::uuid[], $3::text[], false)",
            (list(ids), list(lease_ids), list(reasons)),
            ids_of,
        )

    def takeover_jobs(self, ids: Sequence[UUID]) -> Statement[list[UUID]]:
        """Take claimed jobs away from their workers."""
        return Statement(
            "takeover_jobs",
            f"SELECT * FROM {self._s}.takeover_jobs($1::uuid[])",
            (list(ids),),
            ids_of,
        )

    def enqueue_and_claim(
        self,
        job: str,
        worker_id: str,
        lease: timedelta,
        idempotency_ttl: timedelta,
        lease_id: UUID,
        *,
        resend: bool = False,
    ) -> Statement[tuple[UUID, UUID | None]]:
        """Enqueue one job with a new id and claim it: (id, fence). The fence is None if the idempotency key is
        taken. With `resend`, a job that exists already is not enqueued again."""
        values = (job, worker_id, lease, idempotency_ttl, lease_id)
        return Statement(
            "enqueue_and_claim",
            f"SELECT id, lease_id FROM {self._s}.enqueue_and_claim($1::text::jsonb, $2::text, "
            "$3::interval, $4::interval, $5::uuid, $6::boolean)",
            (*values, not resend),
            lambda rows: (rows[0][0], rows[0][1]),
            None if resend else lambda: self.enqueue_and_claim(*values, resend=True),
        )

    def add_late_events(
        self,
        ids: Sequence[UUID],
        lease_ids: Sequence[UUID],
        kinds: Sequence[str],
        datas: Sequence[str],
        numbers: Sequence[int] | None = None,
    ) -> Statement[list[UUID]]:
        """Append events to jobs that were completed by their handlers. For `numbers` see `add_events`."""
        return Statement(
            "add_late_events",
            f"SELECT * FROM {self._s}.add_late_events($1::uuid[], $2::uuid[], $3::text[], "
            "$4::text[]::jsonb[], $5::bigint[])",
            (
                list(ids),
                list(lease_ids),
                list(kinds),
                list(datas),
                None if numbers is None else list(numbers),
            ),
            ids_of,
        )

    def watch_jobs(self, watcher: str, ids: Sequence[UUID], duration: timedelta) -> Statement[None]:
        """Subscribe to notifications about changes of jobs, for `duration`."""
        return Statement(
            "watch_jobs",
            f"SELECT {self._s}.watch_jobs($1::text, $2::uuid[], $3::interval)",
            (watcher, list(ids), duration),
            nothing,
        )

    def unwatch_jobs(self, watcher: str, ids: Sequence[UUID]) -> Statement[None]:
        """Unsubscribe from these notifications."""
        return Statement(
            "unwatch_jobs",
            f"SELECT {self._s}.unwatch_jobs($1::text, $2::uuid[])",
            (watcher, list(ids)),
            nothing,
        )
