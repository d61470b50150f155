"""A producer whose enqueues do not join its transactions."""

from __future__ import annotations

from typing import Any

from howdah.chaos.ledger import from_environment
from howdah.chaos.processes.producer import main
from howdah.queue import JobQueue

_enqueue_many = JobQueue.enqueue_many


def alone(self: JobQueue, jobs: Any, *, conn: Any = None) -> Any:
    return _enqueue_many(self, jobs)


JobQueue.enqueue_many = alone  # type: ignore[method-assign]
ledger = from_environment()
assert ledger is not None
ledger.write("note", text="broken: enqueues by itself")
main()
