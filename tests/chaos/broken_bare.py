"""A bare queue worker that acknowledges its jobs before it does their work."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from howdah.chaos.processes.bare_queue_worker import BareQueueWorker, main
from howdah.chaos.processes.environment import required_ledger
from howdah.errors import LeaseLost

if TYPE_CHECKING:
    from howdah.model import Job


def acknowledge_first(self: BareQueueWorker, job: Job) -> None:
    self._record("start", job)
    with contextlib.suppress(LeaseLost):
        self._queue.complete(job)
    self._record("effect", job)
    self._claimed.pop(job.id)


BareQueueWorker._run_job = acknowledge_first  # type: ignore[method-assign]
required_ledger().write("note", text="broken: acknowledges first")
main()
