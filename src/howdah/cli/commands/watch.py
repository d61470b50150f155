"""`howdah watch` and `howdah wait`: follow one job until it ends. The exit code says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from howdah.async_queue import AsyncJobQueue
from howdah.cli.output import STYLES, clock, compact, one_line, plain
from howdah.cli.session import queue_command
from howdah.cli.values import Duration
from howdah.database.connection import AsyncDatabaseError
from howdah.errors import HowdahError, JobCancelled, JobFailed, ResultTimeout
from howdah.execution.watch import Watcher
from howdah.insight.durations import format_duration
from howdah.model import Status
from howdah.protocol.statements import Statement
from howdah.protocol.worker_statements import WorkerStatements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from uuid import UUID

    from rich.console import Console

    from howdah.cli.output import Output
    from howdah.cli.session import Session
    from howdah.execution.watch import Change
    from howdah.model import Event, Job


class ReadOnlyStatements(WorkerStatements):
    """For a role that may only read: registers no watcher, so changes are found by polling."""

    def watch_jobs(self, watcher: str, ids: Sequence[UUID], duration: timedelta) -> Statement[None]:
        """Do nothing."""
        return Statement("watch_jobs", "SELECT 1", (), lambda rows: None)

    def unwatch_jobs(self, watcher: str, ids: Sequence[UUID]) -> Statement[None]:
        """Do nothing."""
        return Statement("unwatch_jobs", "SELECT 1", (), lambda rows: None)


def follow(
    session: Session, job_id: UUID, show: Callable[[Change], None], timeout: timedelta | None
) -> Job | None:
    """Show every change until the job ends. Returns its last state, or None if it was not kept."""
    statements = (WorkerStatements if session.may_watch() else ReadOnlyStatements)(session.schema)

    async def run() -> Job | None:
        queue = AsyncJobQueue(session.url, schema=session.schema, create=False)
        watcher = Watcher(queue, statements)
        job: Job | None = None
        try:
            async with asyncio.timeout(timeout.total_seconds() if timeout else None):
                async for change in watcher.changes(job_id):
                    job = change.job
                    show(change)
        except TimeoutError:
            seconds = timeout.total_seconds() if timeout else 0
            raise ResultTimeout(job_id, seconds) from None
        except AsyncDatabaseError as error:
            raise HowdahError(f"the database rejected the statement: {error}.") from error
        finally:
            await watcher.close()
            await queue.close()
        # A job without an end time has no row: it completed with keep=0.
        return None if job is not None and job.status.is_final and job.completed_at is None else job

    return asyncio.run(run())


def follow_live(
    session: Session,
    output: Output,
    console: Console,
    job_id: UUID,
    timeout: timedelta | None = None,
) -> Job | None:
    """Follow with a progress bar; events are printed above it."""
    screen = Screen(output)
    with Live(screen, console=console, auto_refresh=True, refresh_per_second=8) as live:

        def show(change: Change) -> None:
            for event in change.events:
                live.console.print(_event_line(event), soft_wrap=True)
            screen.job = change.job
            live.refresh()

        return follow(session, job_id, show, timeout)


class Screen:
    """The last known state of a job as a progress bar."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.job: Job | None = None

    def __rich__(self) -> Any:
        job = self.job
        if job is None:
            return Text("connecting …", "dim")
        top = Table.grid(padding=(0, 2, 0, 0))
        top.add_column(no_wrap=True)
        top.add_column(width=24)
        top.add_column(no_wrap=True, justify="right")
        top.add_column(no_wrap=True, overflow="ellipsis")
        style = STYLES[job.status]
        bar = ProgressBar(total=100, completed=job.progress, complete_style=style,
                          finished_style=style)  # fmt: skip
        top.add_row(
            Text(f"{self._output.sign(job.status)} {job.status}", f"bold {style}"),
            bar,
            f"{job.progress} %",
            Text(one_line(job.current_stage or ""), "dim"),
        )
        if job.attempts <= 1 or job.status.is_final:
            return top
        text = f"attempt {job.attempts} of {job.max_attempts}: {one_line(job.last_error or '')}"
        return Group(top, Text(text, "dim", no_wrap=True, overflow="ellipsis"))


def _event_line(event: Event) -> Text:
    data = event.data
    if event.kind == "error" and isinstance(data, dict) and "error" in data:
        return Text.assemble(
            (clock(event.at, event.at), "dim"),
            ("  error  ", STYLES["error"]),
            f"attempt {event.attempt}: {one_line(data['error'])}",
        )
    if event.kind == "log" and isinstance(data, dict) and set(data) == {"text"}:
        return Text.assemble((clock(event.at, event.at), "dim"), f"  {one_line(data['text'])}")
    text = "" if data in ({}, None) else f"  {compact(data)}"
    return Text.assemble(
        (clock(event.at, event.at), "dim"), (f"  {one_line(event.kind)}", STYLES["event"]), text
    )


def _change_line(change: Change) -> Text:
    job = change.job
    stage = f"  {one_line(job.current_stage)}" if job.current_stage else ""
    return Text(f"{job.status}  {job.progress} %{stage}")


def change_facts(change: Change) -> dict[str, Any]:
    """A change for `--json`."""
    job = change.job
    return {
        "id": job.id,
        "status": job.status,
        "progress": job.progress,
        "stage": job.current_stage,
        "attempts": job.attempts,
        "events": [
            {
                "event_id": event.event_id,
                "at": event.at,
                "attempt": event.attempt,
                "kind": event.kind,
                "data": event.data,
            }
            for event in change.events
        ],
    }


def report_end(output: Output, job: Job | None) -> None:
    """Print how the job ended. Raises JobFailed or JobCancelled, which set the exit code."""
    if job is None:
        return output.note("The job completed and was not kept.")
    if job.status is Status.FAILED:
        raise JobFailed(job)
    if job.status is Status.CANCELLED:
        raise JobCancelled(job)
    began = job.started_at or job.claimed_at or job.created_at
    ended = job.completed_at or began
    output.note(f"Completed in {format_duration(ended - began)}.")
    if job.result is not None:
        output.line(compact(job.result))
    return None


@contextlib.contextmanager
def interruptible() -> Any:
    """Ctrl-C ends the command with the usual exit code; the job is not cancelled."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("The job was not cancelled.", err=True)
        raise SystemExit(130) from None


@click.command("watch", short_help="Follow a job: progress, stage and events.")
@click.argument("job_id", metavar="ID")
@queue_command
def watch_command(session: Session, output: Output, job_id: str) -> None:
    """Follow a job until it ends: progress, stage and events.

    ID may be the beginning or the end of an id that matches only one job. The exit code is 5 if the job
    failed or was cancelled.
    """
    job = session.find(job_id)
    with interruptible():
        if output.is_terminal:
            output.line((one_line(job.job_type), "bold"), f"  {job.id}")
            end = follow_live(session, output, output.console, job.id)
        else:
            end = follow(session, job.id, lambda change: _print_change(output, change), None)
    if not output.as_json:
        report_end(output, end)
    elif end is not None and end.status is not Status.COMPLETED:
        click.get_current_context().exit(5)


def _print_change(output: Output, change: Change) -> None:
    if output.as_json:
        return output.json(change_facts(change))
    for event in change.events:
        output.line(_event_line(event))
    return output.line(_change_line(change))


@click.command("wait", short_help="Wait for a job and print its result.")
@click.argument("job_id", metavar="ID")
@click.option("--timeout", type=Duration(), metavar="DURATION",
              help="How long to wait, as in 30s. The job is not cancelled.")  # fmt: skip
@queue_command
def wait_command(session: Session, output: Output, job_id: str, timeout: timedelta | None) -> None:
    """Wait for a job to end and print its result.

    ID may be the beginning or the end of an id that matches only one job. The exit code is 5 if the job
    failed or was cancelled, and 1 if it did not end in time.
    """
    wait_for(session, output, session.resolve(job_id), timeout)


def wait_for(session: Session, output: Output, job_id: UUID, timeout: timedelta | None) -> None:
    """Wait, with a progress bar if standard error is a terminal, and print the result."""
    with interruptible():
        if output.aside.is_terminal and not output.as_json:
            job = follow_live(session, output, output.aside, job_id, timeout)
        else:
            job = follow(session, job_id, lambda change: None, timeout)
    if not output.as_json:
        return report_end(output, job)
    output.json({"id": job_id, "status": "completed"} if job is None else plain(job))
    if job is not None and job.status is not Status.COMPLETED:
        click.get_current_context().exit(5)
    return None
