"""`howdah retry`, `cancel`, `rm`, `recover` and `clear`: what an operator does to jobs.

Jobs are named by id or by conditions. By conditions the command says how many it means and asks first, and
then goes through them batch by batch, the oldest first."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from howdah.cli.session import Command, queue_command
from howdah.cli.values import Duration, Misuse, StatusName, where_option
from howdah.errors import HowdahError
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

BATCH = 500
LIVE = (Status.PENDING, Status.CLAIMED, Status.RUNNING)
FINAL = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """Something that is done to many jobs. `act` gives what became of each id that it was done to."""

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
    refusal="it has not ended",
    act=_retry,
)
CANCEL = Verb(
    name="cancel", done="cancelled", allowed=LIVE, default=LIVE, refusal="it has ended", act=_cancel
)
REMOVE = Verb(
    name="remove",
    done="removed",
    allowed=FINAL,
    default=FINAL,
    refusal="it has not ended; cancel it first",
    act=_remove,
)


def _on_jobs(function: Callable[..., Any]) -> Command:
    """The arguments of a command that does something to jobs."""

    @click.argument("ids", metavar="[ID]...", nargs=-1)
    @where_option
    @click.option("--dry-run", is_flag=True, help="Change nothing; say which jobs it would be.")
    @click.option("--yes", is_flag=True, help="Do not ask.")
    @queue_command
    @functools.wraps(function)
    def command(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return command


@click.command("retry", short_help="Reopen finished jobs.")
@_on_jobs
def retry_command(session: Session, output: Output, **which: Any) -> None:
    """Reopen finished jobs, under their own ids and with no attempts used.

    With --where only failed and cancelled jobs are meant, unless a condition names the status.
    """
    _apply(RETRY, session, output, **which)


@click.command("cancel", short_help="Cancel jobs, waiting or running.")
@_on_jobs
def cancel_command(session: Session, output: Output, **which: Any) -> None:
    """Cancel jobs. One that runs is stopped by its worker, who is told at once."""
    _apply(CANCEL, session, output, **which)


@click.command("rm", short_help="Delete finished jobs.")
@_on_jobs
def rm_command(session: Session, output: Output, **which: Any) -> None:
    """Delete finished jobs and their events. One that waits or runs must be cancelled first."""
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
        raise Misuse("name jobs by their ids, or by --where; one of the two.")
    if dry_run and yes:
        raise Misuse("--dry-run and --yes exclude each other.")
    if ids:
        _apply_to_ids(verb, session, output, ids, dry_run=dry_run)
    else:
        _apply_where(verb, session, output, conditions, dry_run=dry_run, yes=yes)


def _apply_to_ids(
    verb: Verb, session: Session, output: Output, pieces: Sequence[str], *, dry_run: bool
) -> None:
    jobs = {job.id: job for job in [session.find(piece) for piece in pieces]}
    possible = [job.id for job in jobs.values() if job.status in verb.allowed]
    done = dict.fromkeys(possible, f"would be {verb.done}")
    if not dry_run:
        done = verb.act(session, possible) if possible else {}
    for job_id, job in jobs.items():
        _tell(output, verb, job_id, done.get(job_id), job.status)
    if len(done) < len(jobs):
        click.get_current_context().exit(1)


def _tell(output: Output, verb: Verb, job_id: UUID, outcome: str | None, status: Status) -> None:
    if output.as_json:
        output.json({"id": job_id, "outcome": outcome or "refused", "status": status})
    elif outcome is None:
        click.echo(
            f"Error: job {job_id} cannot be {verb.done}: {verb.refusal} ({status}).", err=True
        )
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
    meant = [*conditions, any_of("status", [str(status) for status in statuses])]
    count, newest = session.search.count(meant)
    jobs = "job" if count == 1 else "jobs"
    if dry_run or newest is None:
        if output.as_json:
            output.json({"matched": count, verb.done: 0, "dry_run": dry_run})
        elif newest is None:
            output.line(f"No job that could be {verb.done} matches.")
        else:
            output.line(f"{count:,} {jobs} would be {verb.done}.")
            for job in session.search.jobs(meant, 10):
                output.line(f"{job.id}  {job.status}  ", job.job_type, indent=2)
            if count > 10:
                output.line(f"{output.sign('more')} and {count - 10:,} more", indent=2)
        return
    if not yes and not click.confirm(f"{verb.name.capitalize()} {count:,} {jobs}?", err=True):
        raise HowdahError("nothing was changed.")
    done = _in_batches(verb, session, output, meant, newest, count)
    if output.as_json:
        output.json({"matched": count, verb.done: done, "dry_run": False})
    else:
        output.line(f"{done:,} {'job' if done == 1 else 'jobs'} {verb.done}.")


def _in_batches(
    verb: Verb,
    session: Session,
    output: Output,
    conditions: Sequence[Condition],
    newest: UUID,
    count: int,
) -> int:
    done = 0
    with _progress(output) as progress:
        task = progress.add_task(verb.name, total=count)
        for ids in session.search.batches(conditions, newest, BATCH):
            done += len(verb.act(session, ids))
            progress.advance(task, len(ids))
    return done


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


@click.command("recover", short_help="Return the jobs of vanished workers now.")
@click.option("--timeout", type=Duration(), metavar="DURATION",
              help="Also jobs claimed longer ago than this, whatever their workers say.")  # fmt: skip
@queue_command
def recover_command(session: Session, output: Output, timeout: timedelta | None) -> None:
    """Return the jobs of vanished workers to their queues now.

    Workers do this by themselves every two seconds. Without --timeout only jobs whose lease has run out
    are meant; with it a live worker may lose a job that it is still running.
    """
    recovered = 0
    with _progress(output) as progress:
        task = progress.add_task("recover", total=None)
        while True:
            found = session.run(session.statements.recover_stale_jobs(timeout, BATCH))
            recovered += found
            progress.advance(task, found)
            if found < BATCH:
                break
    if output.as_json:
        output.json({"recovered": recovered})
    else:
        output.line(f"{recovered:,} {'job' if recovered == 1 else 'jobs'} recovered.")


@click.command("clear", short_help="Delete finished jobs before their time.")
@click.option("--older-than", type=Duration(), required=True, metavar="DURATION",
              help="Those that ended longer ago than this, as in 7d.")  # fmt: skip
@click.option("--status", "statuses", type=StatusName(), multiple=True,
              help="Only completed, failed or cancelled ones. May be repeated.")  # fmt: skip
@queue_command
def clear_command(
    session: Session, output: Output, older_than: timedelta, statuses: Sequence[Status]
) -> None:
    """Delete finished jobs before their retention ends.

    Workers delete what is past its retention by themselves.
    """
    for status in statuses:
        if status not in FINAL:
            raise Misuse(f"a {status} job has not ended; there are {', '.join(FINAL)}.")
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
