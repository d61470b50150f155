"""The errors that Howdah raises. Every message says what happened, to which thing, and what to do.

HowdahError
├── NoDatabase               no database was named
├── DatabaseUnreachable      the database does not answer
│   ├── DatabaseTimeout      a statement was not answered in time
│   ├── DatabaseReadOnly     the server is read-only: a standby, or demoted
│   ├── ConnectionLimit      the server, role, database or pooler has no free connection
│   └── DatabaseClosed       the database accepts no connections: ALLOW_CONNECTIONS is false
├── DatabaseFull             the database server has no disk space left
├── EmbeddedServerError      the embedded server could not be found, started or stopped
├── SchemaMissing            the tables do not exist, and this code may not create them
├── SchemaOutdated           the schema is older than this code, which may not migrate it
├── SchemaTooNew             the schema is newer than this code
├── NotPermitted             the database role lacks a privilege
├── InvalidOption            an option that does not exist, is out of range or contradicts another
├── InvalidJob               a job that may not be enqueued (.field, .index)
│   ├── PayloadTooLarge      its data are over the limit
│   └── IdempotencyConflict  its key belongs to a job with other data (.id)
├── LeaseLost                the job was recovered, cancelled or claimed again (.ids)
├── JobLocked                another transaction has locked the job, whose lease is not lost (.ids)
├── NotClaimed               acknowledging a job that this queue did not claim (.id)
├── JobNotFound              no live or finished job has that id (.id)
├── UnknownTask              no task with that name is registered (.name)
├── DuplicateTask            two tasks have the same name (.name)
├── TooManyEvents            an async handler adds events faster than they can be written (.job_id)
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
        super().__init__(self._advice())

    def _advice(self) -> str:
        return (
            f'cannot reach database "{self.database}" at {self.host}: {self.reason}. '
            "Check that the server is up and that the URL is right."
        )


class DatabaseTimeout(DatabaseUnreachable):
    """A statement was sent and not answered in time. Whether it was executed is unknown."""

    def _advice(self) -> str:
        return (
            f'database "{self.database}" at {self.host} did not answer a statement in time: {self.reason}. '
            "The server is busy, the statement is large or waits for a lock, or the connection is dead. "
            "Whether it was executed is unknown."
        )


class DatabaseReadOnly(DatabaseUnreachable):
    """The server answers and cannot write: it is a standby, was demoted, or is set to be read-only."""

    def _advice(self) -> str:
        return (
            f'database "{self.database}" at {self.host} is read-only: {self.reason}. Nothing was written. '
            "The server is a standby, was demoted, or has default_transaction_read_only = on. "
            "Point the URL at the primary."
        )


class ConnectionLimit(DatabaseUnreachable):
    """The server, the role, the database or a pooler accepts no more connections."""

    def _advice(self) -> str:
        return (
            f'database "{self.database}" at {self.host} accepts no more connections: {self.reason}. '
            "Raise the limit (max_connections, or CONNECTION LIMIT of the role or the database), run fewer "
            "clients, or use a connection pooler."
        )


class DatabaseClosed(DatabaseUnreachable):
    """The server answers, and the database accepts no connections: ALLOW_CONNECTIONS is false."""

    def _advice(self) -> str:
        return (
            f'database "{self.database}" at {self.host} is closed to connections: {self.reason}. '
            "An administrator has set ALLOW_CONNECTIONS to false, as for a restore, or a DROP DATABASE was "
            "interrupted."
        )


class TooManyEvents(HowdahError):
    """A handler in the event loop adds events faster than they can be written."""

    def __init__(self, job_id: object) -> None:
        self.job_id = job_id
        super().__init__(
            f"job {job_id} has too many events that are not written yet. Add fewer or smaller events, or use a "
            "`def` handler, which waits until they are written."
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


class IdempotencyConflict(InvalidJob):
    """A job of this type with the same idempotency key and other data exists. `id` is that job's id."""

    def __init__(
        self, message: str, *, id: UUID, field: str = "idempotency_key", index: int | None = None
    ) -> None:
        self.id = id
        super().__init__(message, field=field, index=index)

    def at(self, index: int) -> IdempotencyConflict:
        """The same error with the job's index in a bulk enqueue."""
        return type(self)(self.message, id=self.id, index=index)


class LeaseLost(HowdahError):
    """The lease was lost: the job was recovered, cancelled or claimed again. Nothing was written, except if `in_doubt`: the
    connection broke before the answer to an earlier send, which may have ended the job."""

    def __init__(self, ids: Iterable[UUID], *, in_doubt: bool = False) -> None:
        self.ids = tuple(ids)
        self.in_doubt = in_doubt
        which = ", ".join(map(str, self.ids[:3])) + (" …" if len(self.ids) > 3 else "")
        lost = f"the lease on {counted(len(self.ids), 'job')} was lost"
        super().__init__(
            f"{lost}: {which}. The connection broke before the first answer, so this call may have written it before "
            "that; read the job to find out."
            if in_doubt
            else f"{lost} and nothing was written about them: {which}. "
            "Another worker may be running them; stop working on them."
        )


class JobLocked(HowdahError):
    """Another transaction has locked the jobs for too long. Their lease was not lost, and nothing was written about
    them. `lost` are jobs of the same call whose lease was lost. For an operator's call, `message` is the server's."""

    def __init__(
        self, ids: Iterable[UUID], *, lost: Iterable[UUID] = (), message: str | None = None
    ) -> None:
        self.ids, self.lost = tuple(ids), tuple(lost)
        which = ", ".join(map(str, self.ids[:3])) + (" …" if len(self.ids) > 3 else "")
        more = (
            f" The lease on {counted(len(self.lost), 'other job')} was lost." if self.lost else ""
        )
        super().__init__(
            message
            or f"another transaction has locked {counted(len(self.ids), 'job')} and does not end; nothing was written "
            f"about them: {which}. The lease is still yours: call again with these jobs. pg_stat_activity shows the "
            f"transaction, probably as 'idle in transaction'; end it.{more}"
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
