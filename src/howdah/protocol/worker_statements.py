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


_CLAIMED_COLUMNS = select_list(
    Claimed, data="data::text", waited="extract(epoch FROM claimed_at - run_at)::float8"
)


class WorkerStatements(Statements):
    """The operations on one schema, including those of workers."""

    def claim(
        self,
        worker_id: str,
        job_types: Sequence[str],
        batch_size: int,
        lease: timedelta,
        queues: Sequence[str],
        ignore_heads: bool,
    ) -> Statement[list[Claimed]]:
        """`claim_job_batch` with fewer columns and an asynchronous commit: if a crash of the server loses
        the claim, its fence is rejected (decision 0016). Every other statement commits durably."""
        return Statement(
            "claim_job_batch",
            f"SELECT {_CLAIMED_COLUMNS} FROM set_config('synchronous_commit', 'off', true), "
            f"{self._s}.claim_job_batch($1::text, $2::text[], $3::int, $4::interval, $5::text[], "
            "false, $6::boolean)",
            (worker_id, list(job_types), batch_size, lease, list(queues), ignore_heads),
            lambda rows: [Claimed(*row) for row in rows],
        )

    def next_due_at(
        self, job_types: Sequence[str], queues: Sequence[str]
    ) -> Statement[tuple[datetime | None, datetime]]:
        """When the next scheduled job will be due, and the current time of the database."""
        return Statement(
            "next_due_at",
            f"SELECT {self._s}.next_due_at($1::text[], $2::text[]), clock_timestamp()",
            (list(job_types), list(queues)),
            lambda rows: (rows[0][0], rows[0][1]),
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
    ) -> Statement[None]:
        """Register a worker and create the lanes of its tasks."""
        return Statement(
            "register_worker",
            f"SELECT {self._s}.register_worker($1::text, $2::text, $3::int, $4::text[], $5::text[], "
            "$6::int[], $7::jsonb)",
            (worker_id, host, pid, list(queues), list(job_types), list(priorities), info),
            nothing,
        )

    def touch_worker(self, worker_id: str, idle: bool | None, info: str | None) -> Statement[None]:
        """Record that a worker is alive, and whether it is idle."""
        return Statement(
            "touch_worker",
            f"SELECT {self._s}.touch_worker($1::text, $2::boolean, $3::jsonb)",
            (worker_id, idle, info),
            nothing,
        )

    def beat_worker(self, worker_id: str, info: str, counts: str | None) -> Statement[None]:
        """Record that a worker is alive, and its throughput."""
        return Statement(
            "beat_worker",
            f"SELECT {self._s}.beat_worker($1::text, $2::jsonb, $3::jsonb)",
            (worker_id, info, counts),
            nothing,
        )

    def remove_worker(self, worker_id: str) -> Statement[None]:
        """Remove a worker that has stopped."""
        return Statement(
            "remove_worker", f"SELECT {self._s}.remove_worker($1::text)", (worker_id,), nothing
        )

    def stop_jobs(
        self, ids: Sequence[UUID], lease_ids: Sequence[UUID], reasons: Sequence[str]
    ) -> Statement[list[UUID]]:
        """End claimed jobs as cancelled."""
        return Statement(
            "stop_jobs",
            f"SELECT * FROM {self._s}.stop_jobs($1::uuid[], $2::uuid[], $3::text[])",
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
    ) -> Statement[tuple[UUID, UUID | None]]:
        """Enqueue one job and claim it: (id, fence). The fence is None if the idempotency key is taken."""
        return Statement(
            "enqueue_and_claim",
            f"SELECT id, lease_id FROM {self._s}.enqueue_and_claim($1::text::jsonb, $2::text, "
            "$3::interval, $4::interval, $5::uuid)",
            (job, worker_id, lease, idempotency_ttl, lease_id),
            lambda rows: (rows[0][0], rows[0][1]),
        )

    def add_late_events(
        self,
        ids: Sequence[UUID],
        lease_ids: Sequence[UUID],
        kinds: Sequence[str],
        datas: Sequence[str],
    ) -> Statement[list[UUID]]:
        """Append events to jobs that were completed by their handlers."""
        return Statement(
            "add_late_events",
            f"SELECT * FROM {self._s}.add_late_events($1::uuid[], $2::uuid[], $3::text[], "
            "$4::text[]::jsonb[])",
            (list(ids), list(lease_ids), list(kinds), list(datas)),
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
