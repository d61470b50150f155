"""Turns new jobs into the statements that enqueue them: checks, encodes and batches them. `operations.py`
adds the operations on existing jobs. Decisions 0002 and 0014 explain the formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from howdah.encoding import copy_format, payload, validation
from howdah.errors import InvalidJob, InvalidOption
from howdah.model import NewJob, new_id, new_ids, request_id
from howdah.protocol.statements import Statements

if TYPE_CHECKING:
    from uuid import UUID

    from howdah.model import Handle, NewJobLike, Seconds
    from howdah.protocol.statements import Statement

BATCH_BYTES = 4 * 2**20
BATCH_JOBS = 5_000
CHUNK_JOBS = 200  # encoded at a time; a COPY of fewer costs more than it saves
COPY_JOBS = 20_000  # at most in one COPY
ROW_BYTES = 200  # estimate of what the other fields add to a job's data
_PLAIN = frozenset(copy_format.COLUMNS)

_DEFAULTS = NewJob(job_type="")
_NEW_JOB_FIELDS = NewJob.__struct_fields__


class LazyJobs(Iterable[NewJob]):
    """Jobs that are built from other items, each when it is needed."""

    def __init__(self, items: Iterable[Any], make: Callable[[Any], NewJob]) -> None:
        self.items = list(items)
        self.make = make

    def __iter__(self) -> Iterator[NewJob]:
        return map(self.make, self.items)

    @classmethod
    def of(cls, jobs: Iterable[NewJobLike]) -> LazyJobs:
        """Jobs in any of the forms that `enqueue_many` takes."""
        return jobs if isinstance(jobs, LazyJobs) else cls(jobs, _to_new_job)


class NewJobs:
    """Builds the statements that enqueue jobs."""

    def __init__(
        self,
        *,
        schema: str,
        keep: Seconds | None,
        payload_limit: int,
        idempotency_ttl: Seconds,
    ) -> None:
        self.statements = Statements(schema)
        self.keep = None if keep is None else validation.to_timedelta(keep, "keep")
        self.payload_limit = validation.check_option(
            validation.check_integer, payload_limit, "payload_limit", 2, 2**30
        )
        self.idempotency_ttl = validation.to_timedelta(idempotency_ttl, "idempotency_ttl")

    def new_job(
        self, job_type: str, data: Any, unknown: Mapping[str, Any], **options: Any
    ) -> NewJob:
        """The job that a call to `enqueue` describes."""
        refuse_unknown(unknown, (*_NEW_JOB_FIELDS, "conn"))
        return NewJob(job_type=job_type, data={} if data is None else data, **options)

    def encode(self, job: NewJob, job_id: UUID | None = None) -> dict[str, Any]:
        """Check and encode a job. Its id, its request id and the queue's retention are filled in."""
        if job.request_id is None and (current := request_id.get()) is not None:
            job = msgspec.structs.replace(job, request_id=current)
        if job.keep is None and self.keep is not None:
            job = msgspec.structs.replace(job, keep=self.keep)
        return payload.encode_job(job, job_id or new_id(), self.payload_limit)

    def encode_many(self, jobs: Iterable[NewJobLike]) -> list[dict[str, Any]]:
        """Check and encode jobs in any of their forms. An error names the index."""
        return [job for chunk in self.encode_chunks(LazyJobs.of(jobs)) for job in chunk]

    def encode_chunks(self, jobs: LazyJobs) -> Iterator[list[dict[str, Any]]]:
        """The same as an iterator, `CHUNK_JOBS` at a time."""
        for start in range(0, len(jobs.items), CHUNK_JOBS):
            chunk = jobs.items[start : start + CHUNK_JOBS]
            encoded: list[dict[str, Any]] = []
            for item, job_id in zip(chunk, new_ids(len(chunk)), strict=True):
                try:
                    encoded.append(self.encode(jobs.make(item), job_id))
                except InvalidJob as error:
                    raise error.at(start + len(encoded)) from None
                except InvalidOption as error:
                    raise InvalidOption(f"job {start + len(encoded)}: {error}") from None
                except Exception as error:  # the caller's mapping may raise anything
                    why = f"it could not be read: {payload.format_error(error)}."
                    raise InvalidJob(why, field="job").at(start + len(encoded)) from error
            yield encoded

    def enqueue(
        self, jobs: list[dict[str, Any]], *, resend: bool = False
    ) -> list[Statement[list[Handle]]]:
        """Statements that enqueue encoded jobs, as many as their size requires. With `resend`, jobs that exist
        already are not enqueued again."""
        return [
            self.statements.enqueue_jobs(
                payload.encode_batch(batch), self.idempotency_ttl, resend=resend
            )
            for batch in _batches(jobs)
        ]

    def enqueue_many(self, jobs: Iterable[NewJobLike], *, on_caller_connection: bool) -> Bulk:
        """A bulk enqueue of jobs in any of their forms, on the caller's connection or our own."""
        return Bulk(self, LazyJobs.of(jobs), copy=not on_caller_connection)


class Bulk:
    """A bulk enqueue, to be run in one transaction. Its statements are built while they are sent: the server
    stores the first jobs while the next ones are encoded.

    Jobs are sent with COPY up to the first one that has a field which COPY cannot fill. That job and the
    following ones are sent as JSON. After a broken connection, all of them are resent as JSON."""

    def __init__(self, new_jobs: NewJobs, jobs: LazyJobs, *, copy: bool) -> None:
        self.encoded: list[dict[str, Any]] = []
        self._new_jobs = new_jobs
        self._copy = copy and len(jobs.items) >= CHUNK_JOBS
        self._chunks = new_jobs.encode_chunks(jobs)
        self._next: list[dict[str, Any]] = []
        self._advance()  # so that an invalid job among the first is refused before anything is sent

    def __bool__(self) -> bool:
        return bool(self.encoded)

    def statements(self) -> Iterable[Statement[list[Handle]]]:
        """The statements to send. If the connection breaks, iterate over them again."""
        return self if self._copy else self._new_jobs.enqueue(self._rest())

    def __iter__(self) -> Iterator[Statement[list[Handle]]]:
        if not self._copy:
            self._rest()
            yield from self._new_jobs.enqueue(self.encoded, resend=True)
            return
        self._copy = False  # the next iteration resends as JSON
        lanes: set[tuple[str, str, int]] = set()
        while self._is_plain():
            copied: list[dict[str, Any]] = []
            yield self._new_jobs.statements.copy_jobs(self._lines(copied), copied)
            lanes |= {_lane(job) for job in copied}
        if lanes:
            yield self._new_jobs.statements.announce_jobs(payload.encode_batch(sorted(lanes)))
        yield from self._new_jobs.enqueue(self._rest())

    def _advance(self) -> None:
        self._next = next(self._chunks, [])
        self.encoded += self._next

    def _is_plain(self) -> bool:
        return bool(self._next) and all(map(_PLAIN.issuperset, self._next))

    def _lines(self, copied: list[dict[str, Any]]) -> Iterator[bytes]:
        """The lines of one COPY: the next jobs, up to the first that COPY cannot write."""
        while len(copied) < COPY_JOBS and self._is_plain():
            copied += self._next
            yield copy_format.encode_lines(self._next)
            self._advance()

    def _rest(self) -> list[dict[str, Any]]:
        """The jobs that have not been sent."""
        rest: list[dict[str, Any]] = []
        while self._next:
            rest += self._next
            self._advance()
        return rest


def _lane(job: Mapping[str, Any]) -> tuple[str, str, int]:
    return (
        job.get("queue", _DEFAULTS.queue),
        job["job_type"],
        job.get("priority", _DEFAULTS.priority),
    )


def refuse_unknown(unknown: Iterable[Any], known: Iterable[str]) -> None:
    for name in unknown:
        raise InvalidOption.unknown(str(name), known)


def _to_new_job(job: NewJobLike) -> NewJob:
    match job:
        case NewJob():
            return job
        case (str() as job_type, data):
            return NewJob(job_type=job_type, data=data)
        case Mapping():
            refuse_unknown((name for name in job if name not in _NEW_JOB_FIELDS), _NEW_JOB_FIELDS)
            if "job_type" not in job:
                raise InvalidJob("job_type is missing.", field="job_type")
            return NewJob(**job)
        case _:
            raise InvalidJob(
                f"a {type(job).__name__} is not a job; give a NewJob, a mapping or (job_type, data).",
                field="job",
            )


def _batches(jobs: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for job in jobs:
        length = len(memoryview(job["data"])) + ROW_BYTES
        if batch and (len(batch) >= BATCH_JOBS or size + length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += length
    if batch:
        yield batch
