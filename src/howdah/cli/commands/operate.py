"""`howdah retry`, `cancel`, `rm`, `recover` and `clear`: commands that change jobs.

Jobs are selected by ids or by conditions. With conditions, the command prints how many jobs match and asks
for confirmation, then changes them in batches, the oldest first."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from howdah.cli.session import Command, queue_command
from howdah.cli.values import Duration, Misuse, StatusName, where_option
from howdah.errors import HowdahError, JobLocked, counted
from howdah.insight.durations import format_duration
from howdah.insight.filters import any_of
from howdah.model import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from uuid import UUID

    from howdah.cli.output import Output
    from howdah.cli.session import Session
    from howdah.insight.filters import Condition

BATCH_JOBS = 500
NAMED_JOBS = 3  # in an error
LOCKED = "locked"
"""The outcome for a job that another transaction has locked."""
LIVE = (Status.PENDING, Status.CLAIMED, Status.RUNNING)
FINAL = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A change to many jobs. `act` returns the outcome for each id that it changed."""

    name: str
    done: str
    allowed: Sequence[Status]
    default: Sequence[Status]
    refusal: str
    act: Callable[[Session, Sequence[UUID]], dict[UUID, str]]


def _cancel(session: Session, ids: Sequence[UUID]) -> dict[UUID, str]:
    return session.run(session.statements.cancel_jobs(ids))


def _retry(session: Session, ids: Sequence[UUID]) -> dict[UUID, str]:
    return dict.fromkeys(session.run(session.statements.retry_jobs(ids)), "pending")


def _remove(session: Session, ids: Sequence[UUID]) -> dict[UUID, str]:
    return dict.fromkeys(session.run(session.statements.remove_jobs(ids)), "removed")


RETRY = Verb(
    name="retry",
    done="retried",
    allowed=FINAL,
    default=(Status.FAILED, Status.CANCELLED),
    refusal="it is not finished",
    act=_retry,
)
CANCEL = Verb(
    name="cancel",
    done="cancelled",
    allowed=LIVE,
    default=LIVE,
    refusal="it is finished",
    act=_cancel,
)
REMOVE = Verb(
    name="remove",
    done="removed",
    allowed=FINAL,
    default=FINAL,
    refusal="it is not finished; cancel it first",
    act=_remove,
)


def _on_jobs(function: Callable[..., Any]) -> Command:
    """The arguments of a command that changes jobs."""

    @click.argument("ids", metavar="[ID]...", nargs=-1)
    @where_option
    @click.option(
        "--dry-run", is_flag=True, help="Change nothing; print the jobs that would change."
    )
    @click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
    @queue_command
    @functools.wraps(function)
    def command(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return command


@click.command("retry", short_help="Run finished jobs again.")
@_on_jobs
def retry_command(session: Session, output: Output, **which: Any) -> None:
    """Run finished jobs again. They keep their ids, and their attempts start at zero.

    --where selects only failed and cancelled jobs, unless a condition names the status.
    """
    _apply(RETRY, session, output, **which)


@click.command("cancel", short_help="Cancel waiting and running jobs.")
@_on_jobs
def cancel_command(session: Session, output: Output, **which: Any) -> None:
    """Cancel waiting and running jobs. The worker of a running job is notified, and stops it."""
    _apply(CANCEL, session, output, **which)


@click.command("rm", short_help="Delete finished jobs.")
@_on_jobs
def rm_command(session: Session, output: Output, **which: Any) -> None:
    """Delete finished jobs and their events. Cancel a waiting or running job first."""
    _apply(REMOVE, session, output, **which)


def _apply(
    verb: Verb,
    session: Session,
    output: Output,
    ids: Sequence[str],
    conditions: Sequence[Condition],
    dry_run: bool,
    yes: bool,
) -> None:
    if bool(ids) == bool(conditions):
        raise Misuse("name jobs either by their ids or with --where.")
    if dry_run and yes:
        raise Misuse("--dry-run and --yes cannot be used together.")
    if ids:
        _apply_to_ids(verb, session, output, ids, dry_run=dry_run)
    else:
        _apply_where(verb, session, output, conditions, dry_run=dry_run, yes=yes)


def _apply_to_ids(
    verb: Verb, session: Session, output: Output, parts: Sequence[str], *, dry_run: bool
) -> None:
    jobs = {job.id: job for job in [session.find(part) for part in parts]}
    possible = [job.id for job in jobs.values() if job.status in verb.allowed]
    done = dict.fromkeys(possible, f"would be {verb.done}")
    if not dry_run:
        done = verb.act(session, possible) if possible else {}
    for job_id, job in jobs.items():
        _print_outcome(output, verb, job_id, done.get(job_id), job.status)
    if len(done) < len(jobs) or LOCKED in done.values():
        click.get_current_context().exit(1)


def _print_outcome(
    output: Output, verb: Verb, job_id: UUID, outcome: str | None, status: Status
) -> None:
    if output.as_json:
        output.json({"id": job_id, "outcome": outcome or "refused", "status": status})
    elif outcome in (None, LOCKED):
        refusal = verb.refusal if outcome is None else "another transaction has locked it"
        click.echo(f"Error: job {job_id} cannot be {verb.done}: {refusal} ({status}).", err=True)
    else:
        word = verb.done if outcome == "pending" else outcome
        output.line(f"{job_id}  {word}")


def _apply_where(
    verb: Verb,
    session: Session,
    output: Output,
    conditions: Sequence[Condition],
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    names_status = any(condition.name == "status" for condition in conditions)
    statuses = verb.allowed if names_status else verb.default
    selected = [*conditions, any_of("status", [str(status) for status in statuses])]
    count, newest = session.search.count(selected)
    jobs = "job" if count == 1 else "jobs"
    if dry_run or newest is None:
        if output.as_json:
            output.json({"matched": count, verb.done: 0, "dry_run": dry_run})
        elif newest is None:
            output.line(f"No job that could be {verb.done} matches.")
        else:
            output.line(f"{count:,} {jobs} would be {verb.done}.")
            for job in session.search.jobs(selected, 10):
                output.line(f"{job.id}  {job.status}  ", job.job_type, indent=2)
            if count > 10:
                output.line(f"{output.sign('more')} and {count - 10:,} more", indent=2)
        return
    if not yes and not click.confirm(f"{verb.name.capitalize()} {count:,} {jobs}?", err=True):
        raise HowdahError("no job was changed.")
    done, left = _act_in_batches(verb, session, output, selected, newest, count)
    if output.as_json:
        output.json({"matched": count, verb.done: done, "dry_run": False})
    else:
        output.line(f"{counted(done, 'job')} {verb.done}.")
    if left:
        raise _left_out(verb, left)


def _act_in_batches(
    verb: Verb,
    session: Session,
    output: Output,
    conditions: Sequence[Condition],
    newest: UUID,
    count: int,
) -> tuple[int, list[UUID]]:
    """Change the jobs. Returns the number of changed jobs, and those that were left out because of a lock."""
    done = 0
    left: list[UUID] = []
    with _progress(output) as progress:
        task = progress.add_task(verb.name, total=count)
        for ids in session.search.batches(conditions, newest, BATCH_JOBS):
            try:
                outcomes = verb.act(session, ids)
            except JobLocked:  # no job of this batch was changed
                outcomes = dict.fromkeys(ids, LOCKED)
            locked = [job_id for job_id, outcome in outcomes.items() if outcome == LOCKED]
            done += len(outcomes) - len(locked)
            left += locked
            progress.advance(task, len(ids))
    return done, left


def _left_out(verb: Verb, left: list[UUID]) -> JobLocked:
    were, which = ("was", "it") if len(left) == 1 else ("were", "at least one of them")
    more = " …" if len(left) > NAMED_JOBS else ""
    return JobLocked(
        left,
        message=f"{counted(len(left), 'job')} {were} not {verb.done}, because another transaction has locked {which}: "
        f"{', '.join(map(str, left[:NAMED_JOBS]))}{more}. Run the command again when that transaction has ended.",
    )


def _progress(output: Output) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=output.aside,
        transient=True,
        disable=output.as_json or not output.aside.is_terminal,
    )


@click.command("recover", short_help="Recover the jobs of crashed workers now.")
@click.option("--timeout", type=Duration(), metavar="DURATION",
              help="Instead of expired leases: jobs claimed longer ago than this.")  # fmt: skip
@queue_command
def recover_command(session: Session, output: Output, timeout: timedelta | None) -> None:
    """Return the jobs of crashed workers to their queues now.

    Workers do this automatically every two seconds. Without --timeout, jobs with an expired lease are
    recovered. With it, jobs that were claimed longer ago than that are recovered, whatever their lease, so a
    live worker may lose a job that it is still running.
    """
    recovered = 0
    with _progress(output) as progress:
        task = progress.add_task("recover", total=None)
        while True:
            found = session.run(session.statements.recover_stale_jobs(timeout, BATCH_JOBS))
            recovered += found
            progress.advance(task, found)
            if found < BATCH_JOBS:
                break
    if output.as_json:
        output.json({"recovered": recovered})
    else:
        output.line(f"{recovered:,} {'job' if recovered == 1 else 'jobs'} recovered.")


@click.command("clear", short_help="Delete finished jobs before their retention ends.")
@click.option("--older-than", type=Duration(), required=True, metavar="DURATION",
              help="Only jobs that ended longer ago than this, as in 7d.")  # fmt: skip
@click.option("--status", "statuses", type=StatusName(), multiple=True,
              help="Only completed, failed or cancelled jobs. May be repeated.")  # fmt: skip
@queue_command
def clear_command(
    session: Session, output: Output, older_than: timedelta, statuses: Sequence[Status]
) -> None:
    """Delete finished jobs before their retention ends.

    Workers automatically delete jobs whose retention has ended.
    """
    for status in statuses:
        if status not in FINAL:
            raise Misuse(f"a {status} job is not finished; use {', '.join(FINAL)}.")
    statement = session.statements.clear_finished(older_than, statuses or FINAL)
    with _progress(output) as progress:
        progress.add_task("clear", total=None)
        cleared = session.run(statement)
    if output.as_json:
        output.json({"cleared": cleared})
    else:
        which = " or ".join(statuses) or "finished"
        output.line(f"{cleared:,} {which} {'job' if cleared == 1 else 'jobs'} older than "
                    f"{format_duration(older_than)} cleared.")  # fmt: skip
