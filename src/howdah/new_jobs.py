"""New jobs, from what callers pass to the statements that enqueue them: checked, encoded, and in batches
that suit the server. The half of `operations.py` that has nothing to do with claims."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from howdah import checks, lines, payload
from howdah.errors import InvalidJob, InvalidOption
from howdah.model import NewJob, new_id, new_ids, request_id
from howdah.statements import Statements

if TYPE_CHECKING:
    from uuid import UUID

    from howdah.model import Handle, NewJobLike, Seconds
    from howdah.statements import Statement

BATCH_BYTES = 4 * 2**20
BATCH_JOBS = 5_000
COPY_FROM = 200  # jobs: below that its round trips cost more than it saves
_PLAIN = frozenset(lines.COLUMNS)

_NEW_JOB_FIELDS = NewJob.__struct_fields__


class NewJobs:
    """Turns what callers enqueue into statements."""

    def __init__(
        self,
        *,
        schema: str,
        keep: Seconds | None,
        payload_limit: int,
        idempotency_ttl: Seconds,
    ) -> None:
        self.statements = Statements(schema)
        self.keep = None if keep is None else checks.to_timedelta(keep, "keep")
        self.payload_limit = checks.option(
            checks.check_integer, payload_limit, "payload_limit", 2, 2**30
        )
        self.idempotency_ttl = checks.to_timedelta(idempotency_ttl, "idempotency_ttl")

    def new_job(
        self, job_type: str, data: Any, unknown: Mapping[str, Any], **options: Any
    ) -> NewJob:
        """The job that a call to `enqueue` describes."""
        refuse_unknown(unknown, (*_NEW_JOB_FIELDS, "conn"))
        return NewJob(job_type=job_type, data={} if data is None else data, **options)

    def encode(self, job: NewJob, job_id: UUID | None = None) -> dict[str, Any]:
        """A job, checked, with its id, its request id and the queue's retention filled in."""
        if job.request_id is None and (current := request_id.get()) is not None:
            job = msgspec.structs.replace(job, request_id=current)
        if job.keep is None and self.keep is not None:
            job = msgspec.structs.replace(job, keep=self.keep)
        return payload.encode_job(job, job_id or new_id(), self.payload_limit)

    def encode_many(self, jobs: Iterable[NewJobLike]) -> list[dict[str, Any]]:
        """Jobs in any of their forms, checked; an error names the index."""
        encoded = []
        jobs = list(jobs)
        for index, (job, job_id) in enumerate(zip(jobs, new_ids(len(jobs)), strict=True)):
            try:
                encoded.append(self.encode(_to_new_job(job), job_id))
            except InvalidJob as error:
                raise error.at(index) from None
            except InvalidOption as error:
                raise InvalidOption(f"job {index}: {error}") from None
        return encoded

    def enqueue(self, jobs: list[dict[str, Any]]) -> list[Statement[list[Handle]]]:
        """Encoded jobs in as many statements as their size asks for."""
        return [self._enqueue(batch) for batch in _batches(jobs)]

    def _enqueue(
        self, jobs: list[dict[str, Any]], *, again: bool = False
    ) -> Statement[list[Handle]]:
        batch = payload.encode_batch(jobs)
        return self.statements.enqueue_jobs(batch, self.idempotency_ttl, again=again)

    def enqueue_many(
        self, jobs: list[dict[str, Any]], *, borrowed: bool
    ) -> list[Statement[list[Handle]]]:
        """The same, by COPY where that is possible and pays: many plain jobs, on a connection of ours."""
        if borrowed or len(jobs) < COPY_FROM or not all(_PLAIN.issuperset(job) for job in jobs):
            return self.enqueue(jobs)
        lanes = {
            (job.get("queue", "default"), job["job_type"], job.get("priority", 100)) for job in jobs
        }
        copies = [
            self.statements.copy_jobs(batch, functools.partial(self._enqueue, batch, again=True))
            for batch in _batches(jobs)
        ]
        return [*copies, self.statements.announce_jobs(payload.encode_batch(sorted(lanes)))]


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
        length = len(memoryview(job["data"])) + 200
        if batch and (len(batch) >= BATCH_JOBS or size + length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += length
    if batch:
        yield batch
