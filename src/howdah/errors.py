"""The errors that Howdah raises. Every message says what happened, to which thing, and what to do.

HowdahError
├── NoDatabase               no database was named
├── DatabaseUnreachable      the database does not answer
├── DatabaseFull             the database server has no disk space left
├── EmbeddedServerError      the embedded server could not be found, started or stopped
├── SchemaMissing            the tables do not exist, and this code may not create them
├── SchemaOutdated           the schema is older than this code, which may not migrate it
├── SchemaTooNew             the schema is newer than this code
├── NotPermitted             the database role lacks a privilege
├── InvalidOption            an option that does not exist, is out of range or contradicts another
├── InvalidJob               a job that may not be enqueued (.field, .index)
│   └── PayloadTooLarge      its data are over the limit
├── LeaseLost                the job was recovered, cancelled or claimed again (.ids)
├── NotClaimed               acknowledging a job that this queue did not claim (.id)
├── JobNotFound              no live or finished job has that id (.id)
├── UnknownTask              no task with that name is registered (.name)
├── DuplicateTask            two tasks have the same name (.name)
├── TaskInFlight             a job with this idempotency key has not ended (.id)
├── ResultTimeout            the job did not end in time (.id)
├── JobFailed                the awaited job failed (.job)
└── JobCancelled             the awaited job was cancelled (.job)
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from howdah.model import Job


class HowdahError(Exception):
    """Base class of all errors that Howdah raises."""


class NoDatabase(HowdahError):
    """No database was named."""

    def __init__(self) -> None:
        super().__init__(
            "no database was named. Set HOWDAH_DATABASE_URL (or DATABASE_URL) to a PostgreSQL URL, "
            "or run `howdah db start` to use an embedded PostgreSQL in this directory."
        )


class DatabaseUnreachable(HowdahError):
    """The database `database` at `host` does not answer, for `reason`. Messages never contain passwords."""

    def __init__(self, host: str, database: str, reason: str) -> None:
        self.host, self.database, self.reason = host, database, reason
        super().__init__(
            f'cannot reach database "{database}" at {host}: {reason}. '
            "Check that the server is up and that the URL is right."
        )


class DatabaseFull(HowdahError):
    """The database server has no disk space left. The statement was not executed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"the database server has no disk space left: {reason}. Nothing was written. Free disk space "
            "there (`howdah clear` removes old jobs) or enlarge the disk, and retry."
        )


class EmbeddedServerError(HowdahError):
    """The embedded server could not be found, started or stopped."""


class SchemaMissing(HowdahError):
    """The schema has no tables, and this code may not create them: `create=False`, or a missing privilege."""

    def __init__(self, schema: str, *, permitted: bool = True) -> None:
        self.schema = schema
        super().__init__(
            f'schema "{schema}" has no Howdah tables. Run `howdah migrate`, '
            "or omit create=False to create them on first use."
            if permitted
            else f'schema "{schema}" has no Howdah tables, and this role may not create them. Run '
            "`howdah migrate` as a role that may."
        )


class SchemaOutdated(HowdahError):
    """The schema is older than this code requires."""

    def __init__(self, schema: str, found: int, needed: int, *, permitted: bool = True) -> None:
        self.schema, self.found, self.needed = schema, found, needed
        what = (
            f"is at version {found} and this Howdah needs {needed}"
            if found != needed
            else f"has the functions of another build of version {found}"
        )
        super().__init__(
            f'schema "{schema}" {what}. Run `howdah migrate`'
            + ("." if permitted else " as its administrator; this role may not.")
        )


class SchemaTooNew(HowdahError):
    """A newer Howdah has migrated the schema, and this code cannot use it."""

    def __init__(self, schema: str, found: int, known: int) -> None:
        self.schema, self.found, self.known = schema, found, known
        super().__init__(
            f'schema "{schema}" is at version {found}, and this Howdah supports versions up to {known}. '
            "Upgrade the howdah package in this environment."
        )


class NotPermitted(HowdahError):
    """The database role lacks a privilege."""

    def __init__(self, reason: str, role: str | None = None) -> None:
        self.reason = reason
        who = "this role" if role is None else f'role "{role}"'
        super().__init__(
            f"the database does not let {who} do that: {reason}. `howdah migrate --grants` gives roles the "
            "rights of a producer, worker, observer or administrator."
        )


class InvalidOption(HowdahError, ValueError):
    """An option that does not exist, is out of range, or contradicts another."""

    @classmethod
    def unknown(cls, name: str, known: Iterable[str], what: str = "option") -> InvalidOption:
        """The error for an unknown name, with the most similar known name as a suggestion."""
        return cls(f'unknown {what} "{name}"{did_you_mean(name, known)}')


class InvalidJob(HowdahError, ValueError):
    """A job that may not be enqueued. `field` is the invalid field, `index` the job's place in a bulk call."""

    def __init__(self, message: str, *, field: str, index: int | None = None) -> None:
        self.field, self.index, self.message = field, index, message
        super().__init__(message if index is None else f"job {index}: {message}")

    def at(self, index: int) -> InvalidJob:
        """The same error with the job's index in a bulk enqueue."""
        return type(self)(self.message, field=self.field, index=index)


class PayloadTooLarge(InvalidJob):
    """A job's data are over the limit."""


class LeaseLost(HowdahError):
    """The lease was lost: the job was recovered, cancelled or claimed again. Nothing was written."""

    def __init__(self, ids: Iterable[UUID]) -> None:
        self.ids = tuple(ids)
        which = ", ".join(map(str, self.ids[:3])) + (" …" if len(self.ids) > 3 else "")
        super().__init__(
            f"the lease on {counted(len(self.ids), 'job')} was lost and nothing was written about them: {which}. "
            "Another worker may be running them; stop working on them."
        )


class NotClaimed(HowdahError):
    """This queue did not claim the job, so it cannot acknowledge it."""

    def __init__(self, job_id: UUID) -> None:
        self.id = job_id
        super().__init__(
            f"job {job_id} was not claimed by this queue, so there is no lease to act under. "
            "Pass the Job that claim() returned."
        )


class JobNotFound(HowdahError, LookupError):
    """No live or finished job has that id."""

    def __init__(self, job_id: UUID) -> None:
        self.id = job_id
        super().__init__(f"there is no job {job_id}; it may have been cleared after its retention.")


class UnknownTask(HowdahError, LookupError):
    """No task with that name is registered."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        super().__init__(f'no task named "{name}" is registered{did_you_mean(name, known)}')


class DuplicateTask(HowdahError, ValueError):
    """Two different functions are registered under the same name."""

    def __init__(self, name: str, first: str, second: str) -> None:
        self.name = name
        super().__init__(
            f'two tasks are named "{name}": {first} and {second}. Give one of them name="…".'
        )


class TaskInFlight(HowdahError):
    """A job with this idempotency key has not ended."""

    def __init__(self, job_id: UUID) -> None:
        self.id = job_id
        super().__init__(
            f"job {job_id} holds this idempotency key and has not ended; wait for its result."
        )


class ResultTimeout(HowdahError, TimeoutError):
    """The job did not end in time."""

    def __init__(self, job_id: UUID, seconds: float) -> None:
        self.id = job_id
        super().__init__(f"job {job_id} did not end within {seconds:g} seconds; it continues.")


class JobFailed(HowdahError):
    """The awaited job failed permanently. `job` is its last state."""

    def __init__(self, job: Job) -> None:
        self.job = job
        super().__init__(
            f"job {job.id} ({job.job_type}) failed after {counted(job.attempts, 'attempt')}: "
            f"{job.last_error}"
        )


class JobCancelled(HowdahError):
    """The awaited job was cancelled. `job` is its last state."""

    def __init__(self, job: Job) -> None:
        self.job = job
        super().__init__(f"job {job.id} ({job.job_type}) was cancelled.")


def counted(count: int, noun: str) -> str:
    """ "1 job", "2 jobs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def sqlstate(error: BaseException) -> str:
    """The SQLSTATE of a driver's error, or the empty string."""
    return getattr(error, "sqlstate", None) or ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` for the nearest known name, else the empty string."""
    near = get_close_matches(name, list(known), n=1)
    return f'; did you mean "{near[0]}"?' if near else ""
