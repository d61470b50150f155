"""A loop on a bare queue that acknowledges first and works later."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from howdah.chaos.ledger import from_environment
from howdah.chaos.processes.bare_queue_worker import Bare, main
from howdah.errors import LeaseLost

if TYPE_CHECKING:
    from howdah.model import Job


def work(self: Bare, job: Job) -> None:
    self._note("start", job)
    with contextlib.suppress(LeaseLost):
        self._queue.complete(job)
    self._note("effect", job)
    self._mine.pop(job.id)


Bare._work = work  # type: ignore[method-assign]
ledger = from_environment()
assert ledger is not None
ledger.write("note", text="broken: acknowledges first")
main()
