"""The outcomes that wait to be written, and how many of them go into one statement: bounded by count and by size,
and by half as many after a statement that was too much for the server."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from howdah.outcome import Completed, Failed, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from howdah.execution.run import Run

Finished: TypeAlias = "tuple[Run, Outcome]"

MAX_OUTCOMES = 8000  # of one batch; a busy worker prefetches as many jobs
MAX_BYTES = (
    4 << 20
)  # of one batch: the server writes so much in a fraction of the statement timeout
STATEMENT_TIMEOUT_SECONDS = 4.0  # work resumes within 5 s, also after a connection has gone silent
MAX_TIMEOUT_SECONDS = 60.0  # of a single outcome that takes long to write


def size_of(run: Run, outcome: Outcome) -> int:
    """About how many bytes the acknowledgement moves: what is sent, and the data, which the server moves."""
    size = len(run.job.data)
    if type(outcome) is Completed:
        if outcome.result is not None:
            size += len(outcome.result)
    elif type(outcome) is Failed:
        size += len(outcome.error) + len(outcome.traceback or "")
    return size


class OutcomeQueue:
    """One queue of outcomes, from which one task writes."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.timeout = STATEMENT_TIMEOUT_SECONDS
        """Seconds to wait for the answer to the next statement."""
        self._outcomes: deque[Finished] = deque()
        self._most = MAX_OUTCOMES

    def put(self, finished: Finished) -> None:
        """Add an outcome."""
        self._outcomes.append(finished)
        self.arrived.set()

    def put_back(self, group: Iterable[Finished]) -> None:
        """Write outcomes again, before all others. Those that wait already are not added."""
        waiting = {run for run, _ in self._outcomes}
        self._outcomes.extendleft(
            reversed([finished for finished in group if finished[0] not in waiting])
        )
        self.arrived.set()

    def take(self) -> list[Finished]:
        """The next batch, from the front."""
        batch: list[Finished] = []
        outcomes, most, size = self._outcomes, self._most, 0
        while outcomes and len(batch) < most:
            size += outcomes[0][0].size
            if size > MAX_BYTES and batch:
                break
            batch.append(outcomes.popleft())
        if not outcomes:
            self.arrived.clear()
        return batch

    def shrink(self, count: int) -> None:
        """A statement with so many outcomes was too much for the server."""
        self._most = max(1, min(self._most, count) // 2)
        if count == 1:
            self.timeout = min(2 * self.timeout, MAX_TIMEOUT_SECONDS)

    def grow(self) -> None:
        """A statement has succeeded."""
        self._most = min(2 * self._most, MAX_OUTCOMES)
        self.timeout = STATEMENT_TIMEOUT_SECONDS
