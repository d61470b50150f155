"""A producer whose enqueues ignore the caller's transaction."""

from __future__ import annotations

from typing import Any

from howdah.chaos.processes.environment import required_ledger
from howdah.chaos.processes.producer import main
from howdah.queue import JobQueue

_enqueue_many = JobQueue.enqueue_many


def without_connection(self: JobQueue, jobs: Any, *, conn: Any = None) -> Any:
    return _enqueue_many(self, jobs)


JobQueue.enqueue_many = without_connection  # type: ignore[method-assign]
required_ledger().write("note", text="broken: ignores the caller's transaction")
main()
