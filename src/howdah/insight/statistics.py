"""What waits, what runs and how fast: by queue and job type, and by worker. Never counts finished rows:
rates are read from the counters that workers write."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from howdah.insight.reader import QueueReader

if TYPE_CHECKING:
    from howdah.protocol.statements import Rows

ALIVE = timedelta(seconds=45)  # a live worker updates `seen_at` every ten seconds
RATE_WINDOW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A queue and job type: what waits, what runs, and how fast."""

    queue: str
    job_type: str
    due: int
    scheduled: int
    blocked: int
    running: int
    oldest_due: datetime | None
    per_second: float
    failed_per_minute: float
    mean_wait: float | None
    mean_run: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker, as it registered itself."""

    worker_id: str
    host: str
    pid: int
    queues: list[str]
    job_types: list[str]
    started_at: datetime
    seen_ago: timedelta
    idle: bool
    running: int
    concurrency: int

    @property
    def is_alive(self) -> bool:
        """Whether its last heartbeat is recent. One far ahead was written by a clock that was ahead."""
        return abs(self.seen_ago) < ALIVE


class Statistics(QueueReader):
    """What waits, what runs and how fast."""

    def lanes(self) -> list[Lane]:
        """Every queue and job type with live jobs, or with jobs that ended in the last five minutes."""
        return self._fetch(
            """
            WITH live AS (
                SELECT queue, job_type,
                       count(*) FILTER (WHERE status = 'pending' AND blockers = 0
                                        AND run_at <= clock_timestamp()) AS due,
                       count(*) FILTER (WHERE status = 'pending' AND blockers = 0
                                        AND run_at > clock_timestamp()) AS scheduled,
                       count(*) FILTER (WHERE status = 'pending' AND blockers > 0) AS blocked,
                       count(*) FILTER (WHERE status = 'claimed') AS running,
                       min(run_at) FILTER (WHERE status = 'pending' AND blockers = 0
                                           AND run_at <= clock_timestamp()) AS oldest_due
                FROM {s}.live_jobs
                GROUP BY queue, job_type),
            done AS (
                SELECT queue, job_type, sum(completed) AS completed, sum(failed + retried) AS failed,
                       sum(wait_seconds) AS waited, sum(run_seconds) AS ran,
                       sum(completed + failed + retried + cancelled) AS ended
                FROM {s}.throughput
                WHERE bucket > clock_timestamp() - $1::interval
                GROUP BY queue, job_type)
            SELECT queue, job_type, coalesce(due, 0), coalesce(scheduled, 0), coalesce(blocked, 0),
                   coalesce(running, 0), oldest_due,
                   coalesce(completed, 0)::float8 / extract(epoch FROM $1::interval)::float8,
                   coalesce(failed, 0)::float8 * 60 / extract(epoch FROM $1::interval)::float8,
                   (waited / nullif(ended, 0))::float8, (ran / nullif(ended, 0))::float8
            FROM live FULL JOIN done USING (queue, job_type)
            ORDER BY queue, job_type
            """,
            RATE_WINDOW,
            decode=lambda rows: [
                Lane(
                    queue=r[0], job_type=r[1], due=r[2], scheduled=r[3], blocked=r[4], running=r[5],
                    oldest_due=r[6], per_second=r[7], failed_per_minute=r[8], mean_wait=r[9],
                    mean_run=r[10],
                )
                for r in rows
            ],
        )  # fmt: skip

    def workers(self) -> list[WorkerInfo]:
        """Every registered worker, the most recently seen first. One that stops cleanly removes its row."""
        return self._fetch(
            """
            SELECT worker_id, host, pid, queues, job_types, started_at, clock_timestamp() - seen_at, idle,
                   coalesce((info ->> 'running')::int, 0), coalesce((info ->> 'concurrency')::int, 0)
            FROM {s}.workers
            ORDER BY abs(extract(epoch FROM clock_timestamp() - seen_at))
            """,
            decode=lambda rows: [
                WorkerInfo(
                    worker_id=r[0], host=r[1], pid=r[2], queues=r[3], job_types=r[4], started_at=r[5],
                    seen_ago=r[6], idle=r[7], running=r[8], concurrency=r[9],
                )
                for r in rows
            ],
        )  # fmt: skip

    def rates(self, buckets: int = 30) -> list[tuple[int, int]]:
        """(completed, failed or retried) jobs in each of the last ten-second buckets, oldest first."""
        return self._fetch(
            """
            SELECT coalesce(sum(t.completed), 0)::bigint, coalesce(sum(t.failed + t.retried), 0)::bigint
            FROM generate_series(0, $1::int - 1) AS n
            CROSS JOIN LATERAL (
                SELECT date_bin('10 seconds', clock_timestamp(), timestamptz '2000-01-01')
                       - n * interval '10 seconds' AS bucket) AS b
            LEFT JOIN {s}.throughput AS t ON t.bucket = b.bucket
            GROUP BY b.bucket
            ORDER BY b.bucket
            """,
            buckets,
            decode=lambda rows: [(r[0], r[1]) for r in rows],
        )

    def lane_rates(self, buckets: int = 30) -> dict[tuple[str, str], list[int]]:
        """Jobs that ended, by queue and job type, in each of the last ten-second buckets, oldest first."""
        rates: dict[tuple[str, str], list[int]] = {}

        def fill(rows: Rows) -> dict[tuple[str, str], list[int]]:
            for queue, job_type, age, ended in rows:
                counts = rates.setdefault((queue, job_type), [0] * buckets)
                if 0 <= age < buckets:
                    counts[buckets - 1 - age] = ended
            return rates

        return self._fetch(
            """
            SELECT queue, job_type,
                   floor(extract(epoch FROM b.this - bucket) / 10)::int,
                   sum(completed + failed + retried + cancelled)::bigint
            FROM {s}.throughput
            CROSS JOIN (
                SELECT date_bin('10 seconds', clock_timestamp(), timestamptz '2000-01-01') AS this) AS b
            WHERE bucket > b.this - $1::int * interval '10 seconds'
            GROUP BY 1, 2, 3
            """,
            buckets,
            decode=fill,
        )

    def now(self) -> datetime:
        """The time of the database's clock."""
        now: datetime = self._fetch("SELECT clock_timestamp()", decode=lambda rows: rows[0][0])
        return now
