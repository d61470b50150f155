"""One run of a claimed job in this process, its lease, and the context of its handler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from howdah.context import Context, RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    from howdah.context import Sink
    from howdah.model import Job
    from howdah.protocol.worker_statements import Claimed
    from howdah.task import Task


@dataclass(slots=True, eq=False)
class Lease:
    """A lease: `left` of its runs are in flight, and of the others the database has rejected the outcomes of `rejected`."""

    id: UUID
    left: int = 0
    rejected: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether no job in the database has this lease: its row can be removed."""
        return not self.left and not self.rejected


@dataclass(slots=True, eq=False)
class Run(RunState):
    """A claimed job: prefetched, running, or waiting to be acknowledged.

    It has a `lease` while it is in flight: from its claim until its acknowledgement, or until this process has claimed
    the same job again. `started` and `buffered` are times of `time.monotonic`. A run is `finishing` from when the
    completer has its outcome, `is_acknowledged` from when that is written or has no lease, and `dirty` while reports of
    its handler are buffered. `size` is about how many bytes its acknowledgement moves; it is `in_doubt` if an
    acknowledgement was sent and not answered, and was rejected `rejections` times although its lease is held. If it is
    in doubt and its lease is gone, it is `sent_again` once: the first may have been written. `last_event` is the number
    of its last event, 0 if it has none."""

    id: UUID
    lease_id: UUID
    job: Claimed
    task: Task[..., Any]
    started: float | None = None
    finishing: bool = False
    dirty: bool = False
    size: int = 0
    in_doubt: bool = False
    rejections: int = 0
    sent_again: bool = False
    is_acknowledged: bool = False
    last_event: int = 0
    buffered: float = 0.0
    on_acknowledged: Callable[[], None] | None = None
    lease: Lease | None = None


def make_context(
    task: Task[..., Any],
    job: Claimed | Job,
    *,
    data: Any,
    sink: Sink | None,
    run: RunState | None = None,
    resources: Mapping[str, Any] | None = None,
) -> Context:
    """The context of one run of a claimed job. `data` is decoded, or a `msgspec.Raw` of JSON text."""
    return Context(
        id=job.id,
        job_type=job.job_type,
        queue=job.queue,
        data=data,
        attempt=job.attempts,
        max_attempts=job.max_attempts,
        request_id=job.request_id,
        idempotency_key=job.idempotency_key,
        lease_id=job.lease_id,
        timeout=task.options.timeout,
        sink=sink,
        resources=resources,
        run=run,
    )
