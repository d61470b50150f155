"""`howdah queues` and `howdah workers`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

import click
from rich.text import Text

from howdah.cli.output import Column, relative
from howdah.cli.session import queue_command
from howdah.insight.durations import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from howdah.cli.output import Output
    from howdah.cli.session import Session
    from howdah.insight.statistics import Lane, WorkerInfo

SPARKLINE_BUCKETS = 18  # of ten seconds each
LANE_COLUMNS = (
    Column(title="type", flexible=True, min_width=16),
    Column(title="queue", drop=3, flexible=True),
    Column(title="due", right=True),
    Column(title="scheduled", drop=5, right=True),
    Column(title="blocked", drop=4, right=True),
    Column(title="running", right=True),
    Column(title="jobs/s", drop=2, right=True),
    Column(title="wait", drop=6, right=True),
    Column(title="run", drop=9, right=True),
    Column(title="failing/min", drop=8, right=True),
    Column(title="oldest due", drop=10, right=True),
    Column(title="last 3 min", drop=7),
)
WORKER_COLUMNS = (
    Column(title="worker", flexible=True, min_width=24),
    Column(title="state"),
    Column(title="running", right=True),
    Column(title="seen", drop=1, right=True),
    Column(title="up", drop=6, right=True),
    Column(title="queues", drop=3, flexible=True),
    Column(title="types", drop=5, flexible=True, min_width=12),
)


@click.command("queues", short_help="Count waiting and running jobs, with rates.")
@queue_command
def queues_command(session: Session, output: Output) -> None:
    """Count waiting and running jobs by queue and job type, with rates.

    The rates come from counters that workers write. JOBS/S, FAILING/MIN and the mean times WAIT and RUN cover
    the last five minutes.
    """
    lanes = session.statistics.lanes()
    if output.as_json:
        for lane in lanes:
            output.json(asdict(lane))
        return
    if not lanes:
        output.note("No job is waiting or running, and none ended in the last five minutes.")
        return
    now = session.statistics.now()
    output.print_table(LANE_COLUMNS, [lane_row(output, lane, now) for lane in lanes])


def lane_row(
    output: Output, lane: Lane, now: datetime, rates: Sequence[int] = ()
) -> list[str | Text]:
    """A queue and job type as a row of a table."""
    failing = lane.failed_per_minute
    return [
        lane.job_type,
        lane.queue,
        Text(f"{lane.due:,}", "yellow" if lane.due else "dim"),
        f"{lane.scheduled:,}" if lane.scheduled else "",
        f"{lane.blocked:,}" if lane.blocked else "",
        Text(f"{lane.running:,}", "cyan" if lane.running else "dim"),
        rate(lane.per_second),
        "" if lane.mean_wait is None else format_duration(timedelta(seconds=lane.mean_wait)),
        "" if lane.mean_run is None else format_duration(timedelta(seconds=lane.mean_run)),
        Text(rate(failing), "red") if failing else "",
        relative(lane.oldest_due, now),
        Text(output.sparkline(rates[-SPARKLINE_BUCKETS:]), "green")
        if any(rates[-SPARKLINE_BUCKETS:])
        else "",
    ]


def rate(value: float) -> str:
    """A rate with two to three significant digits."""
    if value == 0:
        return "0"
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


@click.command("workers", short_help="List the workers and their state.")
@queue_command
def workers_command(session: Session, output: Output) -> None:
    """List the workers and their state, the most recently seen first."""
    workers = session.statistics.workers()
    if output.as_json:
        for worker in workers:
            output.json(asdict(worker) | {"alive": worker.is_alive})
        return
    if not workers:
        output.note("No worker is running. Start one with `howdah worker MODULE:APP`.")
        return
    now = session.statistics.now()
    output.print_table(WORKER_COLUMNS, [worker_row(worker, now) for worker in workers])


def worker_row(worker: WorkerInfo, now: datetime) -> list[str | Text]:
    """A worker as a row of a table."""
    state = Text("lost", "red")
    if worker.is_alive:
        state = Text("busy", "green") if worker.running else Text("idle", "dim")
    limit = f"/{worker.concurrency}" if worker.concurrency else ""
    return [
        worker.worker_id,
        state,
        f"{worker.running}{limit}",
        relative(now - worker.seen_ago, now),
        format_duration(now - worker.started_at),
        ", ".join(worker.queues),
        ", ".join(worker.job_types),
    ]
