"""Seeing into a queue: why a job is not running, what a queue, a worker and a job have been doing. Reads
only, and never counts finished rows; rates come from what workers roll up themselves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from howdah.errors import JobNotFound, counted, did_you_mean
from howdah.model import Job, Status
from howdah.protocol.schema_name import quote_schema
from howdah.protocol.statements import Statement, Statements

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from howdah.protocol.statements import Rows

T = TypeVar("T")

ALIVE = timedelta(seconds=45)  # a worker is seen every ten seconds
RATE_WINDOW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason why a job is where it is. `code` is for programs, `text` for people."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job is not running, or what it is doing."""

    job: Job
    reasons: tuple[Reason, ...]
    ahead: int | None = None
    starts_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A queue and job type: what waits, what runs, and how fast it goes."""

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
    """A worker, as it said itself."""

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
        """Whether it was heard of lately."""
        return self.seen_ago < ALIVE


class Runner(Protocol):
    """Who runs statements: a `Store`, or a single connection."""

    def run(self, statement: Statement[T]) -> T:
        """Run one statement and read its answer."""


class Questions:
    """Statements made up on the spot, on one schema: `{s}` stands for its name."""

    def __init__(self, runner: Runner, schema: str) -> None:
        self._run = runner.run
        self._statements = Statements(schema)
        self._s = quote_schema(schema)

    def _ask(self, text: str, *parameters: Any, decode: Callable[[Rows], T]) -> T:
        return self._run(Statement("insight", text.replace("{s}", self._s), parameters, decode))


class Insight(Questions):
    """What goes on in a queue, and why."""

    # ── lanes and workers ─────────────────────────────────────────────────────────────────────────

    def lanes(self) -> list[Lane]:
        """Every queue and job type with something alive in it, or done in the last minutes."""
        return self._ask(
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
        """Every worker that has not said goodbye, the one seen last first."""
        return self._ask(
            """
            SELECT worker_id, host, pid, queues, job_types, started_at, clock_timestamp() - seen_at, idle,
                   coalesce((info ->> 'running')::int, 0), coalesce((info ->> 'concurrency')::int, 0)
            FROM {s}.workers
            ORDER BY seen_at DESC
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
        """(completed, failed or retried) of each of the last buckets of ten seconds, oldest first."""
        return self._ask(
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
        """What each queue and job type ended in each of the last buckets of ten seconds, oldest first."""
        rates: dict[tuple[str, str], list[int]] = {}

        def fill(rows: Rows) -> dict[tuple[str, str], list[int]]:
            for queue, job_type, age, ended in rows:
                counts = rates.setdefault((queue, job_type), [0] * buckets)
                if 0 <= age < buckets:
                    counts[buckets - 1 - age] = ended
            return rates

        return self._ask(
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
        """What time it is there: the database's clock decides."""
        now: datetime = self._ask("SELECT clock_timestamp()", decode=lambda rows: rows[0][0])
        return now

    # ── one job ───────────────────────────────────────────────────────────────────────────────────

    def explain(self, job_id: UUID) -> Explanation:
        """Why is it not running?"""
        job = self._run(self._statements.get(job_id))
        if job is None:
            raise JobNotFound(job_id)
        now = self.now()
        if job.status.is_final:
            return Explanation(job=job, reasons=(_ended(job),))
        if job.status is not Status.PENDING:
            return Explanation(job=job, reasons=(self._held(job, now),))
        reasons = [*self._blocked(job), *self._not_due(job, now), *self._nobody(job)]
        if job.attempts >= job.max_attempts:
            text = f"it has used its {job.max_attempts} attempts; `howdah retry {job.id}` gives it new ones"
            reasons.append(Reason(code="no-attempts", text=text))
        ahead, starts_at = None, None
        if not job.blockers:
            ahead = self._ahead(job)
            if all(reason.code in ("due-later", "busy") for reason in reasons):
                starts_at = self._estimate(job, ahead, now)
            if not reasons:
                text = (
                    f"{counted(ahead, 'job')} of its queue to go before it"
                    if ahead
                    else "it is next in line"
                )
                reasons.append(Reason(code="behind" if ahead else "next", text=text))
        return Explanation(job=job, reasons=tuple(reasons), ahead=ahead, starts_at=starts_at)

    def _held(self, job: Job, now: datetime) -> Reason:
        worker = next((w for w in self.workers() if w.worker_id == job.worker_id), None)
        left = job.lease_expires_at - now if job.lease_expires_at else timedelta(0)
        what = "runs" if job.status is Status.RUNNING else "was claimed and waits for a free slot"
        if left < timedelta(0):
            text = f"its worker {job.worker_id} let the lease run out; it will be recovered within seconds"
            return Reason(code="expired", text=text)
        seen = "" if worker is None else f", last seen {worker.seen_ago.total_seconds():.0f} s ago"
        if job.cancel_requested:
            return Reason(
                code="cancelling", text=f"its worker {job.worker_id} was asked to stop it{seen}"
            )
        return Reason(code="running", text=f"it {what} on {job.worker_id}{seen}")

    def _blocked(self, job: Job) -> list[Reason]:
        if not job.blockers:
            return []
        if job.ordering_key is None:
            return [
                Reason(
                    code="blocked", text=f"{counted(job.blockers, 'other job')} must end before it"
                )
            ]
        holder = self._ask(
            "SELECT id, status, run_at FROM {s}.jobs WHERE ordering_key = $1::text AND holds_key",
            job.ordering_key,
            decode=lambda rows: rows[0] if rows else None,
        )
        if holder is None:
            text = f'the key "{job.ordering_key}" is about to be given to the next job'
            return [Reason(code="unsettled", text=text)]
        text = f'the key "{job.ordering_key}" is held by job {holder[0]} ({holder[1]})'
        return [Reason(code="key-held", text=text)]

    def _not_due(self, job: Job, now: datetime) -> list[Reason]:
        if job.run_at <= now:
            return []
        why = "it waits for its retry" if job.attempts else "it was scheduled"
        text = f"{why}: due in {describe(job.run_at - now)}, at {_clock(job.run_at)}"
        return [Reason(code="due-later", text=text)]

    def _nobody(self, job: Job) -> list[Reason]:
        alive = [worker for worker in self.workers() if worker.is_alive]
        if not alive:
            return [
                Reason(
                    code="no-worker", text="no worker is running; start one with `howdah worker`"
                )
            ]
        knowing = [worker for worker in alive if job.job_type in worker.job_types]
        if not knowing:
            known = {name for worker in alive for name in worker.job_types}
            near = did_you_mean(job.job_type, known)
            text = f'no live worker has a task named "{job.job_type}"{near}'
            return [Reason(code="unknown-type", text=text)]
        if not any(job.queue in worker.queues for worker in knowing):
            text = f'no live worker serves the queue "{job.queue}"'
            return [Reason(code="unserved-queue", text=text)]
        if all(worker.running >= worker.concurrency > 0 for worker in knowing):
            return [
                Reason(
                    code="busy",
                    text=f"all who could run it are busy: {counted(len(knowing), 'worker')}",
                )
            ]
        return []

    def _ahead(self, job: Job) -> int:
        return self._ask(
            """
            SELECT count(*)
            FROM {s}.live_jobs
            WHERE status = 'pending' AND blockers = 0 AND queue = $1::text
              AND run_at <= greatest(clock_timestamp(), $3::timestamptz)
              AND (priority > $2::int
                   OR (priority = $2::int AND (run_at, id) < ($3::timestamptz, $4::uuid)))
            """,
            job.queue,
            job.priority,
            job.run_at,
            job.id,
            decode=lambda rows: int(rows[0][0]),
        )

    def _estimate(self, job: Job, ahead: int, now: datetime) -> datetime | None:
        rate = sum(lane.per_second for lane in self.lanes() if lane.queue == job.queue)
        if not rate:
            return None
        return max(now, job.run_at) + timedelta(seconds=ahead / rate)


def _ended(job: Job) -> Reason:
    at = "" if job.completed_at is None else f" at {_clock(job.completed_at)}"
    verb = "was cancelled" if job.status is Status.CANCELLED else str(job.status)
    lines = (
        (job.last_error or "").strip().splitlines() if job.status is not Status.COMPLETED else []
    )
    return Reason(code=str(job.status), text=f"it {verb}{at}" + (f": {lines[0]}" if lines else ""))


def _clock(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def describe(duration: timedelta) -> str:
    """A duration in the unit a person would use: 12 ms, 3.2 s, 4 min, 2 h 5 min, 3 days."""
    seconds = max(0.0, duration.total_seconds())
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{minutes // 1440} days"
