"""`howdah jobs` and `howdah show`: a list of jobs, and the details of one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from howdah.cli.output import STYLES, Column, clock, compact, one_line, plain, relative
from howdah.cli.session import queue_command
from howdah.cli.values import Name, StatusName, where_option
from howdah.insight.durations import format_duration
from howdah.insight.filters import any_of
from howdah.model import Job, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from howdah.cli.output import Output
    from howdah.cli.session import Session
    from howdah.insight.filters import Condition
    from howdah.model import Event

Moment = tuple["datetime", str, str]

JOB_COLUMNS = (
    Column(title="id"),
    Column(title="status"),
    Column(title="type", flexible=True, min_width=11),
    Column(title="queue", drop=5, flexible=True),
    Column(title="prio", drop=6, right=True),
    Column(title="age", drop=3, right=True),
    Column(title="took", drop=4, right=True),
    Column(title="attempts", drop=4, right=True),
    Column(title="detail", drop=1, flexible=True, min_width=24),
)


@click.command("jobs", short_help="List jobs, the newest first.")
@click.option("--status", "statuses", type=StatusName(), multiple=True,
              help="Only jobs with this status. May be repeated.")  # fmt: skip
@click.option("--type", "types", type=Name(), multiple=True, metavar="NAME",
              help="Only jobs of this type. May be repeated.")  # fmt: skip
@click.option("--queue", "queues", type=Name(), multiple=True, metavar="NAME",
              help="Only jobs of this queue. May be repeated.")  # fmt: skip
@where_option
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True,
              help="Maximum number of jobs.")  # fmt: skip
@click.option("--before", metavar="ID", help="Only jobs older than this one: the next page.")
@queue_command
def jobs_command(
    session: Session,
    output: Output,
    statuses: Sequence[Status],
    types: Sequence[str],
    queues: Sequence[str],
    conditions: Sequence[Condition],
    limit: int,
    before: str | None,
) -> None:
    """List jobs, the newest first."""
    wanted = [*conditions]
    for name, values in (("status", statuses), ("type", types), ("queue", queues)):
        if values:
            wanted.append(any_of(name, [str(value) for value in values]))
    older_than = None if before is None else session.resolve(before)
    found = session.search.jobs(wanted, limit + 1, older_than)
    shown, more = found[:limit], len(found) > limit
    if output.as_json:
        for job in shown:
            output.json(job)
        return
    if not shown:
        output.note("No job matches." if wanted or before else "There are no jobs.")
        return
    now = session.statistics.now()
    output.print_table(JOB_COLUMNS, [_row(output, job, now) for job in shown])
    if more:
        output.note(f"Next page: --before {shown[-1].id}")


def _row(output: Output, job: Job, now: datetime) -> list[str | Text]:
    return [
        str(job.id),
        output.status(job.status),
        job.job_type,
        "" if job.queue == "default" else job.queue,
        "" if job.priority == 100 else str(job.priority),
        relative(job.created_at, now),
        took(job, now),
        f"{job.attempts}/{job.max_attempts}" if job.attempts > 1 else "",
        _detail(job, now),
    ]


def took(job: Job, now: datetime) -> str:
    """How long the job ran, or has been running."""
    began = job.started_at or (job.claimed_at if job.status is Status.COMPLETED else None)
    if began is None:
        return ""
    return format_duration((job.completed_at or now) - began)


def _detail(job: Job, now: datetime) -> Text:
    match job.status:
        case Status.FAILED | Status.CANCELLED:
            return Text(
                one_line(job.last_error or ""), "red" if job.status is Status.FAILED else ""
            )
        case Status.COMPLETED:
            return Text("" if job.result is None else compact(job.result), "dim")
        case Status.RUNNING | Status.CLAIMED:
            stage = f" {one_line(job.current_stage)}" if job.current_stage else ""
            stopping = "stopping, " if job.cancel_requested else ""
            return Text(f"{stopping}{job.progress} %{stage}")
        case _:
            if job.blockers:
                key = f"key {one_line(job.ordering_key)}" if job.ordering_key else "other jobs"
                return Text(f"blocked by {key}")
            if job.run_at > now:
                why = f": {one_line(job.last_error)}" if job.last_error else ""
                return Text(f"due {relative(job.run_at, now)}{why}")
            return Text("")


@click.command("show", short_help="Show the details of a job.")
@click.argument("job_id", metavar="ID")
@queue_command
def show_command(session: Session, output: Output, job_id: str) -> None:
    """Show the details of a job: timeline, errors, events, data and result.

    ID may be the beginning or the end of an id that matches only one job.
    """
    job = session.find(job_id)
    events = session.run(session.statements.events(job.id, 0))
    if output.as_json:
        output.json(plain(job) | {"events": [_event(event) for event in events]})
        return
    now = session.statistics.now()
    _print_heading(output, job, now)
    _print_timeline(output, job, events, now)
    _print_value(output, "data", job.data)
    if job.status is Status.COMPLETED and job.result is not None:
        _print_value(output, "result", job.result)
    _print_errors(output, job, events, now)


def _event(event: Event) -> dict[str, Any]:
    return {
        "event_id": event.event_id,
        "at": event.at,
        "attempt": event.attempt,
        "kind": event.kind,
        "data": event.data,
    }


def _print_heading(output: Output, job: Job, now: datetime) -> None:
    sign = output.sign(job.status)
    output.line((f"{sign} {job.status}", f"bold {STYLES[job.status]}"), "  ",
                (one_line(job.job_type), "bold"))  # fmt: skip
    output.line(str(job.id))
    rows = [
        ("queue", job.queue),
        ("priority", str(job.priority)),
        ("attempts", f"{job.attempts} of {job.max_attempts}"),
        ("progress", f"{output.bar(job.progress)} {job.progress} %" if job.progress else ""),
        ("stage", job.current_stage or ""),
        ("worker", job.worker_id or ""),
        ("lease", _lease(job, now)),
        ("ordering key", job.ordering_key or ""),
        ("idempotency key", job.idempotency_key or ""),
        ("request", job.request_id or ""),
        ("kept for", format_duration(job.keep) if job.keep is not None else ""),
    ]
    if job.cancel_requested and not job.status.is_final:
        rows.append(("cancelling", "the worker was asked to stop the job"))
    shown = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        output.line((name.ljust(width), "dim"), f"  {one_line(value)}")


def _lease(job: Job, now: datetime) -> str:
    if job.lease_expires_at is None or job.status.is_final:
        return ""
    verb = "expires" if job.lease_expires_at > now else "expired"
    return f"{verb} {relative(job.lease_expires_at, now)}"


def _print_timeline(output: Output, job: Job, events: Sequence[Event], now: datetime) -> None:
    output.line("")
    output.line(("timeline", "bold"))
    moments = sorted(_moments(job, events), key=lambda moment: moment[0])
    before: datetime | None = None
    rows: list[list[str | Text]] = []
    for at, what, text in moments:
        step = "" if before is None else f"+{format_duration(at - before)}"
        rows.append([Text(clock(at, now), "dim"), step, Text(what, STYLES.get(what, "")), text])
        before = at
    columns = (
        Column(title=""),
        Column(title="", right=True),
        Column(title=""),
        Column(title="", flexible=True),
    )
    for line in output.table(columns, rows, indent=2)[1:]:
        output.console.print(line, soft_wrap=True)
    if not job.status.is_final and job.run_at > now:
        output.line(f"due {relative(job.run_at, now)}, at {clock(job.run_at, now)}", indent=2)


def _moments(job: Job, events: Sequence[Event]) -> Iterator[Moment]:
    yield job.created_at, "enqueued", ""
    first_due = (job.run_at - job.created_at).total_seconds()
    if first_due > 0.01 and (job.claimed_at or job.status.is_final) and not job.last_error:
        yield job.run_at, "due", ""
    if job.claimed_at is not None:
        yield job.claimed_at, "claimed", f"by {job.worker_id}" if job.worker_id else ""
    if job.started_at is not None and job.started_at != job.claimed_at:
        yield job.started_at, "started", f"attempt {job.attempts}"
    for event in events:
        if event.kind == "error" and isinstance(event.data, dict) and "error" in event.data:
            yield event.at, "error", f"attempt {event.attempt}: {one_line(event.data['error'])}"
        elif event.kind == "log" and isinstance(event.data, dict) and set(event.data) == {"text"}:
            yield event.at, "log", one_line(event.data["text"])
        else:
            data = "" if event.data in ({}, None) else f" {compact(event.data)}"
            yield event.at, "event", f"{one_line(event.kind)}{data}"
    if job.completed_at is not None:
        began = job.started_at or job.claimed_at
        ran = "" if began is None else f"after {format_duration(job.completed_at - began)}"
        yield job.completed_at, str(job.status), ran


def _print_value(output: Output, name: str, value: Any) -> None:
    output.line("")
    output.line((name, "bold"))
    if value == {}:
        return output.line(("(none)", "dim"), indent=2)
    return output.block(json.dumps(value, indent=2, ensure_ascii=False))


def _print_errors(output: Output, job: Job, events: Sequence[Event], now: datetime) -> None:
    errors = [event for event in events if event.kind == "error" and isinstance(event.data, dict)]
    shown: dict[str, int] = {}
    for event in errors:
        output.line("")
        worker = f", {one_line(event.data['worker'])}" if event.data.get("worker") else ""
        output.line((f"error of attempt {event.attempt}", "bold red"),
                    (f"  {clock(event.at, now)}{worker}", "dim"))  # fmt: skip
        text = str(event.data.get("traceback") or event.data.get("error") or "")
        if text in shown:
            output.line((f"(same as attempt {shown[text]})", "dim"), indent=2)
        else:
            output.block(text)
            shown[text] = event.attempt
    last = job.last_error
    if last and not any(event.data.get("error") == last for event in errors):
        output.line("")
        output.line(("last error", "bold red"))
        output.block(last)
