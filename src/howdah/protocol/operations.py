"""Turns the calls of a queue into statements: checks the caller's input, and remembers the fences of claimed
jobs. `JobQueue` and `AsyncJobQueue` run the statements. No I/O."""

from __future__ import annotations

import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec

from howdah.encoding import payload, validation
from howdah.errors import InvalidOption, JobLocked, JobNotFound, LeaseLost, NotClaimed
from howdah.model import Claim, Event, Job, JobRef, Seconds, Status
from howdah.protocol.filters import Filters
from howdah.protocol.job_refs import spread, to_id, to_refs
from howdah.protocol.new_jobs import NewJobs
from howdah.protocol.settling import Settled, settle

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from howdah.protocol.settling import Steps
    from howdah.protocol.statements import Statement

_NO_FILTERS = Filters()
FIND_OPTIONS = tuple(each.name for each in fields(Filters) if each.name != "ids")
FENCES_LIMIT = 100_000  # fences that a queue remembers


class Operations(NewJobs):
    """The operations of a queue, without I/O."""

    def __init__(
        self,
        *,
        schema: str,
        lease: Seconds,
        worker_id: str | None,
        keep: Seconds | None,
        payload_limit: int,
        idempotency_ttl: Seconds,
    ) -> None:
        super().__init__(
            schema=schema, keep=keep, payload_limit=payload_limit, idempotency_ttl=idempotency_ttl
        )
        self.lease = validation.to_lease(lease)
        if worker_id is not None:
            validation.check_option(validation.check_name, worker_id, "worker_id", 100)
        self._worker_id = worker_id
        self._fences: OrderedDict[UUID, UUID] = OrderedDict()

    @property
    def worker_id(self) -> str:
        """The name under which this process claims. A forked child has another one."""
        return self._worker_id or f"{socket.gethostname()[:60]}:{os.getpid()}"

    # ── claiming and acknowledging ────────────────────────────────────────────────────────────────

    def claim(
        self,
        job_types: str | Sequence[str] | None,
        batch_size: int,
        lease: Seconds | None,
        queues: str | Sequence[str],
        *,
        started: bool = False,
    ) -> Statement[list[Job]]:
        """Claim jobs and remember their fences."""
        validation.check_option(validation.check_integer, batch_size, "batch_size", 1, 10_000)
        statement = self.statements.claim_job_batch(
            self.worker_id,
            None if job_types is None else _texts(job_types, "job_types"),
            batch_size,
            self.lease if lease is None else validation.to_lease(lease),
            _texts(queues, "queues"),
            started=started,
        )
        return statement.then(self._remember)

    def _remember(self, jobs: list[Job]) -> list[Job]:
        self._fences.update((job.id, job.lease_id) for job in jobs if job.lease_id is not None)
        while len(self._fences) > FENCES_LIMIT:
            self._fences.popitem(last=False)
        return jobs

    def _fence(self, ref: JobRef) -> tuple[UUID, UUID]:
        if isinstance(ref, Claim):
            return ref.id, ref.lease_id
        if isinstance(ref, Job) and ref.lease_id is not None and not ref.status.is_final:
            return ref.id, ref.lease_id
        job_id = to_id(ref)
        fence = self._fences.get(job_id)
        if fence is None:
            raise NotClaimed(job_id)
        return job_id, fence

    def _fenced(self, refs: JobRef | Iterable[JobRef]) -> tuple[list[UUID], list[UUID]]:
        pairs = [self._fence(ref) for ref in to_refs(refs)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _settle(
        self,
        ids: list[UUID],
        fences: list[UUID],
        build: Callable[[Sequence[int]], Statement[list[UUID]]],
        *,
        forget: bool,
    ) -> Steps:
        """Acknowledge jobs. Raises `LeaseLost` or `JobLocked` for those that were not accepted."""
        settled = yield from settle(self.statements, ids, fences, build)
        self._check(ids, fences, settled, forget=forget)
        return settled

    def _held(self, ids: list[UUID], fences: list[UUID]) -> Callable[[list[UUID]], None]:
        """A check that raises `LeaseLost` for jobs that are not among those it is given."""

        def check(held: list[UUID]) -> None:
            lost = Settled(frozenset(ids).difference(held))
            self._check(ids, fences, lost, forget=False)

        return check

    def _check(
        self, ids: list[UUID], fences: list[UUID], settled: Settled, *, forget: bool
    ) -> None:
        for job_id, fence in zip(ids, fences, strict=True):
            is_used_up = job_id in settled.lost or (forget and job_id not in settled.locked)
            # If this queue has claimed the job again, the newer fence stays.
            if is_used_up and self._fences.get(job_id) == fence:
                self._fences.pop(job_id, None)
        if settled.locked:
            raise JobLocked(sorted(settled.locked), lost=sorted(settled.lost))
        if settled.lost:
            raise LeaseLost(sorted(settled.lost), in_doubt=settled.in_doubt)

    # `on_caller_connection`: the fences are kept, because the caller's transaction may still roll back.

    def complete(
        self, jobs: JobRef | Iterable[JobRef], result: Any, *, on_caller_connection: bool = False
    ) -> Steps:
        """Complete one job with its result, or several with a list of results (or none)."""
        ids, fences = self._fenced(jobs)
        results = [
            None if each is None else payload.clean_json(each)
            for each in spread(jobs, result, len(ids), "result")
        ]

        def build(at: Sequence[int]) -> Statement[list[UUID]]:
            return self.statements.complete_jobs(
                [ids[n] for n in at], [fences[n] for n in at], [results[n] for n in at]
            )

        return self._settle(ids, fences, build, forget=not on_caller_connection)

    def fail(
        self,
        jobs: JobRef | Iterable[JobRef],
        reason: BaseException | str,
        retry: bool,
        run_at: datetime | None,
        delay: Seconds | None,
        *,
        on_caller_connection: bool = False,
    ) -> Steps:
        """Fail jobs, to be retried at once, at `run_at`, after `delay`, or not at all."""
        if run_at is not None and delay is not None:
            raise InvalidOption("run_at and delay exclude each other; give one of them.")
        if not retry and (run_at is not None or delay is not None):
            raise InvalidOption("retry=False and a time to retry at exclude each other.")
        if run_at is not None:
            run_at = validation.check_option(validation.check_time, run_at, "run_at")
        retry_in = None
        if retry and run_at is None:
            retry_in = validation.to_timedelta(0 if delay is None else delay, "delay")
        ids, fences = self._fenced(jobs)
        error = payload.format_error(reason)

        def build(at: Sequence[int]) -> Statement[list[UUID]]:
            count = len(at)
            return self.statements.fail_jobs(
                [ids[n] for n in at], [fences[n] for n in at],
                [error] * count, [run_at] * count, [retry_in] * count,
            )  # fmt: skip

        return self._settle(ids, fences, build, forget=not on_caller_connection)

    def release(
        self,
        jobs: JobRef | Iterable[JobRef],
        delay: Seconds | None,
        *,
        on_caller_connection: bool = False,
    ) -> Steps:
        """Release jobs: the attempt does not count."""
        ids, fences = self._fenced(jobs)
        due_in = validation.to_timedelta(0 if delay is None else delay, "delay")

        def build(at: Sequence[int]) -> Statement[list[UUID]]:
            return self.statements.release_jobs(
                [ids[n] for n in at], [fences[n] for n in at], due_in
            )

        return self._settle(ids, fences, build, forget=not on_caller_connection)

    def extend(self, jobs: JobRef | Iterable[JobRef], lease: Seconds | None) -> Statement[None]:
        """Extend leases to `lease` from now."""
        ids, fences = self._fenced(jobs)
        until = self.lease if lease is None else validation.to_lease(lease)
        statement = self.statements.extend_jobs(ids, fences, until)
        return statement.then(_mine).then(self._held(ids, fences))

    def progress(
        self, jobs: JobRef | Iterable[JobRef], percent: float | None, stage: str | None
    ) -> Statement[None]:
        """Report the progress of jobs."""
        ids, fences = self._fenced(jobs)
        n = len(ids)
        if stage is not None:
            stage = payload.clean_text(stage, payload.STAGE_LIMIT)
        statement = self.statements.report_progress(
            ids, fences, [payload.clean_percent(percent)] * n, [stage] * n
        )
        return statement.then(_mine).then(self._held(ids, fences))

    def event(self, jobs: JobRef | Iterable[JobRef], kind: str, data: Any) -> Steps:
        """Append an event to the stream of each job."""
        ids, fences = self._fenced(jobs)
        kind = payload.clean_text(kind, 100) or "event"
        text = payload.clean_json({} if data is None else data)
        number = secrets.randbits(63)  # so that a statement that is sent again writes it once

        def build(at: Sequence[int]) -> Statement[list[UUID]]:
            return self.statements.add_events(
                [ids[n] for n in at],
                [fences[n] for n in at],
                [kind] * len(at),
                [text] * len(at),
                [number] * len(at),
            )

        return self._settle(ids, fences, build, forget=False)

    # ── reading and operating ─────────────────────────────────────────────────────────────────────

    def recover_stale_jobs(self, timeout: Seconds | None, limit: int) -> Statement[int]:
        """Return stale jobs to the queue."""
        interval = None if timeout is None else validation.to_timedelta(timeout, "timeout")
        validation.check_option(validation.check_integer, limit, "limit", 1, 2**31 - 1)
        return self.statements.recover_stale_jobs(interval, limit)

    def cancel(self, jobs: JobRef | Iterable[JobRef]) -> Statement[dict[UUID, str]]:
        """Cancel jobs."""
        return self.statements.cancel_jobs([to_id(ref) for ref in to_refs(jobs)])

    def retry(self, jobs: JobRef | Iterable[JobRef]) -> Statement[list[UUID]]:
        """Reopen finished jobs."""
        return self.statements.retry_jobs([to_id(ref) for ref in to_refs(jobs)])

    def pending(self, queue: str | None, job_type: str | None) -> Statement[int]:
        """Count pending jobs."""
        return self.statements.pending_count(*_names(queue=queue, job_type=job_type))

    def counts(self, queue: str | None, job_type: str | None) -> Statement[dict[Status, int]]:
        """Count jobs by status."""
        return self.statements.counts(*_names(queue=queue, job_type=job_type))

    def get(self, job: JobRef) -> Statement[Job]:
        """One job in its current state."""
        job_id = to_id(job)

        def found(job: Job | None) -> Job:
            if job is None:
                raise JobNotFound(job_id)
            return _unfenced(job)

        return self.statements.get(job_id).then(found)

    def events(self, job: JobRef, after: int) -> Statement[list[Event]]:
        """A job's events."""
        validation.check_option(validation.check_integer, after, "after", 0, 2**63 - 1)
        return self.statements.events(to_id(job), after)

    def find(
        self,
        limit: int,
        before: JobRef | None,
        data: Mapping[str, Any] | None,
        unknown: Mapping[str, Any],
        **options: Any,
    ) -> Statement[list[Job]]:
        """Jobs that match, newest first."""
        for name in unknown:
            raise InvalidOption.unknown(name, (*FIND_OPTIONS, "limit"), "filter")
        validation.check_option(validation.check_integer, limit, "limit", 1, 10_000)
        for name, value in options.items():
            if getattr(_NO_FILTERS, name) == ():
                options[name] = () if value is None else _texts(value, name)
            else:
                _names(**{name: value})
        options["status"] = [str(status) for status in options["status"]]
        for status in options["status"]:
            if status not in set(Status):
                raise InvalidOption.unknown(status, Status, "status")
        filters = Filters(
            data=None if data is None else _contained(data),
            before=None if before is None else to_id(before),
            **options,
        )
        statement = self.statements.find(filters, limit)
        return statement.then(lambda jobs: [_unfenced(job) for job in jobs])

    def clear(self, older_than: Seconds, statuses: str | Sequence[str] | None) -> Statement[int]:
        """Remove finished jobs."""
        final = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)
        wanted = final if statuses is None else _texts(statuses, "statuses")
        for status in wanted:
            if status not in final:
                raise InvalidOption.unknown(status, final, "final status")
        return self.statements.clear_finished(
            validation.to_timedelta(older_than, "older_than"), wanted
        )


def _names(**names: str | None) -> list[str | None]:
    """Check texts to search for. Each may be None."""
    for name, text in names.items():
        if text is not None:
            validation.check_option(validation.check_name, text, name, payload.KEY_LIMIT)
    return list(names.values())


def _contained(data: Mapping[str, Any]) -> str:
    raw = validation.check_option(payload.encode_data, data)
    return bytes(memoryview(raw)).decode()


def _unfenced(job: Job) -> Job:
    # The fence belongs to the claim; reading a job does not permit to acknowledge it.
    return job if job.lease_id is None else msgspec.structs.replace(job, lease_id=None)


def _texts(value: str | Sequence[str], name: str) -> list[str]:
    if not isinstance(value, Iterable):
        raise InvalidOption(f"{name} must be a string or a list of them, not {value!r:.80}.")
    texts = [value] if isinstance(value, str) else list(value)
    return [validation.check_option(validation.check_name, text, name) for text in texts]


def _mine(answers: list[tuple[UUID, bool, bool, bool]]) -> list[UUID]:
    return [job_id for job_id, _, mine, _ in answers if mine]
