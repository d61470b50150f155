"""Why a job is not running. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from howdah.errors import JobNotFound, counted, did_you_mean
from howdah.insight.durations import format_duration
from howdah.insight.reader import QueueReader
from howdah.insight.statistics import Statistics
from howdah.model import Job, Status

if TYPE_CHECKING:
    from uuid import UUID

    from howdah.insight.reader import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason for a job's state. `code` is for programs, `text` for people."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job is not running, or what it is doing."""

    job: Job
    reasons: tuple[Reason, ...]
    ahead: int | None = None
    starts_at: datetime | None = None


class Explainer(QueueReader):
    """Explains why a job is not running."""

    def __init__(self, runner: Runner, schema: str) -> None:
        super().__init__(runner, schema)
        self._statistics = Statistics(runner, schema)

    def explain(self, job_id: UUID) -> Explanation:
        """Explain why a job is not running."""
        job = self._run(self._statements.get(job_id))
        if job is None:
            raise JobNotFound(job_id)
        now = self._statistics.now()
        if job.status.is_final:
            return Explanation(job=job, reasons=(_ended(job),))
        if job.status is not Status.PENDING:
            return Explanation(job=job, reasons=(self._in_flight(job, now),))
        reasons = [*self._blocked(job), *self._not_due(job, now), *self._no_worker(job)]
        if job.attempts >= job.max_attempts:
            text = f"it has used all of its {job.max_attempts} attempts; cancel it and retry it to reset them"
            reasons.append(Reason(code="no-attempts", text=text))
        ahead, starts_at = None, None
        if not job.blockers:
            ahead = self._ahead(job)
            if all(reason.code in ("due-later", "busy") for reason in reasons):
                starts_at = self._estimate(job, ahead, now)
            if not reasons:
                text = (
                    f"{counted(ahead, 'job')} of its queue run before it"
                    if ahead
                    else "it is next in line"
                )
                reasons.append(Reason(code="behind" if ahead else "next", text=text))
        return Explanation(job=job, reasons=tuple(reasons), ahead=ahead, starts_at=starts_at)

    def _in_flight(self, job: Job, now: datetime) -> Reason:
        worker = next((w for w in self._statistics.workers() if w.worker_id == job.worker_id), None)
        left = job.lease_expires_at - now if job.lease_expires_at else timedelta(0)
        what = "runs" if job.status is Status.RUNNING else "is prefetched and waits for a free slot"
        if left < timedelta(0):
            text = f"the lease of worker {job.worker_id} expired; the job will be recovered within seconds"
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
        holder = self._fetch(
            "SELECT id, status, run_at FROM {s}.jobs WHERE ordering_key = $1::text AND holds_key",
            job.ordering_key,
            decode=lambda rows: rows[0] if rows else None,
        )
        if holder is None:
            text = f'the ordering key "{job.ordering_key}" has no holder yet; it is assigned within seconds'
            return [Reason(code="unsettled", text=text)]
        text = f'the ordering key "{job.ordering_key}" is held by job {holder[0]} ({holder[1]})'
        return [Reason(code="key-held", text=text)]

    def _not_due(self, job: Job, now: datetime) -> list[Reason]:
        if job.run_at <= now:
            return []
        why = "it waits for its retry" if job.attempts else "it was scheduled"
        text = f"{why}: due in {format_duration(job.run_at - now)}, at {_clock(job.run_at)}"
        return [Reason(code="due-later", text=text)]

    def _no_worker(self, job: Job) -> list[Reason]:
        alive = [worker for worker in self._statistics.workers() if worker.is_alive]
        if not alive:
            return [
                Reason(
                    code="no-worker", text="no worker is running; start one with `howdah worker`"
                )
            ]
        capable = [worker for worker in alive if job.job_type in worker.job_types]
        if not capable:
            known = {name for worker in alive for name in worker.job_types}
            near = did_you_mean(job.job_type, known)
            text = f'no live worker has a task named "{job.job_type}"{near}'
            return [Reason(code="unknown-type", text=text)]
        if not any(job.queue in worker.queues for worker in capable):
            text = f'no live worker serves the queue "{job.queue}"'
            return [Reason(code="unserved-queue", text=text)]
        if all(worker.running >= worker.concurrency > 0 for worker in capable):
            return [
                Reason(
                    code="busy",
                    text=f"every worker that can run it is busy ({counted(len(capable), 'worker')})",
                )
            ]
        return []

    def _ahead(self, job: Job) -> int:
        return self._fetch(
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
        rate = sum(lane.per_second for lane in self._statistics.lanes() if lane.queue == job.queue)
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
