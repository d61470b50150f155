"""Jobs, handles, statuses, priorities and ids. No I/O. Only `new_id` reads the clock, to keep ids in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeAlias
from uuid import UUID

import msgspec

EXPLICIT = 150
"""Priority of a job that a person waits for."""
DISCOVERED = 100
"""Priority of a job that the system creates; the default."""
BACKFILL = 30
"""Priority of a job that processes old data when no other job is due."""

Seconds: TypeAlias = timedelta | int | float
"""A duration: a `timedelta`, or a number of seconds."""

request_id: ContextVar[str | None] = ContextVar("howdah_request_id", default=None)
"""The id of the current request. An enqueue without `request_id=` uses it, and workers set it while they run a
job, so that all jobs that a request causes have the same id."""


class Status(StrEnum):
    """The state of a job."""

    PENDING = "pending"
    CLAIMED = "claimed"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the job is finished: it changes only if an operator retries it."""
        return self in FINAL


FINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})


class Job(msgspec.Struct, frozen=True):
    """A job in the state in which it was read. A job from `claim` has its fence, `lease_id`.

    The fields are the columns of the view `jobs`, in the same order: SELECT lists and decoders are built
    from them.
    """

    id: UUID
    seq: int
    queue: str
    job_type: str
    priority: int
    status: Status
    data: Any
    progress: int
    current_stage: str | None
    events_count: int
    worker_id: str | None
    lease_id: UUID | None
    lease_expires_at: datetime | None
    claims: int
    claimed_at: datetime | None
    run_at: datetime
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    attempts: int
    max_attempts: int
    last_error: str | None
    request_id: str | None
    traceparent: str | None
    idempotency_key: str | None
    ordering_key: str | None
    holds_key: bool
    blockers: int
    cancel_requested: bool
    keep: timedelta | None
    result: Any


class Handle(msgspec.Struct, frozen=True):
    """What `enqueue` returns. Every method that takes an id also takes a handle.

    `is_new` is False if the idempotency key was taken; `id` is then that of the first job.
    """

    id: UUID
    is_new: bool


class Claim(msgspec.Struct, frozen=True):
    """A claimed job's id and fence: enough to acknowledge it."""

    id: UUID
    lease_id: UUID


class Event(msgspec.Struct, frozen=True):
    """One entry in a job's durable stream of events, which is ordered by `event_id`."""

    job_id: UUID
    event_id: int
    at: datetime
    attempt: int
    kind: str
    data: Any


JobRef: TypeAlias = Job | Handle | Claim | UUID | str
"""A reference to a job: the job itself, its handle, its claim, or its id."""


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to be enqueued, for `enqueue_many`. Only `job_type` is required.

    `run_at` (an aware datetime) and `delay` exclude each other. `idempotency_ttl` is the lifetime of the
    idempotency key, by default that of the queue. `keep` is the retention of the finished job;
    0 removes it as soon as it is completed.
    """

    job_type: str
    data: Any = msgspec.field(default_factory=dict)
    priority: int = DISCOVERED
    queue: str = "default"
    run_at: datetime | None = None
    delay: Seconds | None = None
    max_attempts: int = 3
    idempotency_key: str | None = None
    idempotency_ttl: Seconds | None = None
    ordering_key: str | None = None
    request_id: str | None = None
    traceparent: str | None = None
    keep: Seconds | None = None


NewJobLike: TypeAlias = NewJob | Mapping[str, Any] | tuple[str, Any]
"""What `enqueue_many` takes: a `NewJob`, a mapping of its fields, or `(job_type, data)`."""


_TAIL = (1 << 62) - 1


class _Ids:
    """Makes UUIDv7 ids that strictly increase within a process, so that a batch keeps its order in the index."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def new(self, count: int) -> list[UUID]:
        # 48 bits of milliseconds and 74 random bits, without the bits of version and variant.
        noise = os.urandom(10 + 4 * (count - 1))
        steps = memoryview(noise)[10:].cast("I")
        with self._lock:
            fresh = (time.time_ns() // 1_000_000 << 74) | int.from_bytes(noise[:10]) >> 6
            if fresh <= self._last:
                fresh = self._last + 1 + int.from_bytes(noise[:4])
            ids = [_uuid7(fresh)]
            for step in steps:
                fresh += 1 + step
                ids.append(_uuid7(fresh))
            self._last = fresh
        return ids


def _uuid7(number: int) -> UUID:
    head, tail = number >> 62, number & _TAIL
    return UUID(int=(head >> 12) << 80 | 7 << 76 | (head & 0xFFF) << 64 | 2 << 62 | tail)


_ids = _Ids()
# A lock that another thread holds during the fork is never released in the child.
os.register_at_fork(after_in_child=_ids.__init__)  # type: ignore[misc]


def new_id() -> UUID:
    """A new job id: a UUIDv7 that is greater than all earlier ids of this process."""
    return _ids.new(1)[0]


def new_ids(count: int) -> list[UUID]:
    """`count` new job ids, each greater than the one before."""
    return _ids.new(count) if count else []
