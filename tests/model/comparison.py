"""Compares the jobs in the database with those of the reference, and checks the promises on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from reference import REFUNDS, Requeued, Soon, must

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from reference import ModelJob, Reference

STATE = """
    SELECT id, status, attempts, claims, lease_id, started_at IS NOT NULL AS started,
           holds_key, blockers, cancel_requested, progress, events_count, NULL::jsonb AS result,
           run_at, seq
    FROM live_jobs
    UNION ALL
    SELECT id, status, attempts, claims, lease_id, false, false, 0, cancel_requested, progress,
           events_count, result, run_at, seq
    FROM finished_jobs
"""
LEASES = "SELECT lease_id, job_ids, expires_at - clock_timestamp() AS left FROM leases"
PATIENCE = timedelta(minutes=20)  # more than a walk takes: only `pass_time` lets a lease expire


def compare_jobs(
    reference: Reference,
    client: int,
    rows: Sequence[dict[str, Any]],
    since: datetime,
    now: datetime,
) -> None:
    view = reference.view(client)
    found = {row["id"]: row for row in rows}
    must(len(found) == len(rows), "P1: a job is both live and finished")
    same(found.keys(), view.keys(), "P1, P5: every enqueued job exists, and no other")
    for job_id, job in view.items():
        row = found[job_id]
        _set_due_time(reference, client, job, row["run_at"], since, now)
        actual = {name: row[name] for name in _COMPARED}
        same(actual, _expected(job), f"the state of job {job_id}")
    _check_promises(found, view)


def compare_leases(
    reference: Reference,
    client: int,
    jobs: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
) -> None:
    """A lease whose jobs have ended may be removed at any time, and must be when it has expired."""
    seen = reference.leases_seen(client)
    found = {row["lease_id"]: row for row in rows}
    for job in jobs:
        if job["status"] == "claimed":
            must(
                job["lease_id"] in found and job["id"] in found[job["lease_id"]]["job_ids"],
                f"P9: {job['id']} is claimed without a lease that recovery can find",
            )
    for lease, row in found.items():
        must(lease in seen, f"recovery did not remove the lease {lease}")
        late = seen[lease] - row["left"]
        must(
            timedelta() <= late < PATIENCE,
            f"the time left of lease {lease}: expected {seen[lease]}, the database has {row['left']}",
        )


def _set_due_time(
    reference: Reference,
    client: int,
    job: ModelJob,
    run_at: datetime,
    since: datetime,
    now: datetime,
) -> None:
    if not job.live:
        return
    if isinstance(job.run_at, Soon):
        due = job.run_at.delay
        must(since + due <= run_at <= now + due, f"P7: {job.id} is due at the wrong time")
    elif isinstance(job.run_at, Requeued):
        if job.lane not in reference.extended_lanes or run_at != job.run_at.own:
            same(run_at, job.run_at.head, f"the due time of {job.id}")
    else:
        same(run_at, job.run_at, f"the due time of {job.id}")
        return
    place = reference.jobs
    if client in reference.open and job.id in reference.open[client].wrote:
        place = reference.open[client].wrote
    place[job.id] = replace(job, run_at=run_at)


def _check_promises(found: dict[UUID, dict[str, Any]], view: dict[UUID, ModelJob]) -> None:
    """Check the promises on the rows, independent of the reference."""
    holders: Counter[str] = Counter()
    jobs_by_key: dict[str, list[ModelJob]] = {}
    for job_id, row in found.items():
        spec = view[job_id].spec
        must(row["attempts"] <= spec.max_attempts, f"P4: {job_id} has too many attempts")
        must(
            row["claims"] - row["attempts"] <= REFUNDS,
            f"P4: {job_id} had too many attempts refunded",
        )
        must(
            row["status"] != "claimed" or row["blockers"] == 0,
            f"P7: {job_id} is claimed although it is blocked",
        )
        if spec.key is not None and view[job_id].live:
            holders[spec.key] += row["holds_key"]
            jobs_by_key.setdefault(spec.key, []).append(view[job_id])
    for key, count in holders.items():
        must(count <= 1, f"P7: {count} jobs hold the key {key}")
    for jobs in jobs_by_key.values():
        by_turn = sorted(jobs, key=lambda job: job.turn)
        by_seq = sorted(jobs, key=lambda job: found[job.id]["seq"])
        same([j.id for j in by_seq], [j.id for j in by_turn], "P7: the line before a key")


_COMPARED = (
    "status", "attempts", "claims", "lease_id", "started", "holds_key", "blockers",
    "cancel_requested", "progress", "events_count", "result",
)  # fmt: skip


def _expected(job: ModelJob) -> dict[str, Any]:
    return {
        "status": job.status,
        "attempts": job.attempts,
        "claims": job.claims,
        "lease_id": job.lease,
        "started": job.started and job.live,
        "holds_key": job.holds_key,
        "blockers": job.blockers,
        "cancel_requested": job.cancel_requested,
        "progress": job.progress,
        "events_count": job.events,
        "result": job.result,
    }


def same(actual: Any, expected: Any, sentence: str) -> None:
    must(actual == expected, f"{sentence}: expected {expected}, the database has {actual}")
