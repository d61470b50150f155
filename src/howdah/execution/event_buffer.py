"""The events of runs that are not written yet. One run that writes many neither delays the events of the others,
nor fills the memory: a full buffer makes its handler wait."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from howdah.execution.run import Run

ReportedEvent: TypeAlias = "tuple[Run, str, str, int]"
"""An event of a run: its kind, its data as JSON text, and its number, by which the database writes it once although it
is sent again. The numbers of a run ascend, and their upper 32 bits are those of its lease."""

MAX_EVENTS, MAX_BYTES = 1000, 1 << 20  # of one statement
RUN_EVENTS = 200  # of one run in one statement: the other runs have a share too
FULL_EVENTS, FULL_BYTES = 10_000, 4 << 20  # of one run
OVERFLOW = 10  # times as much, for a handler in the event loop, which cannot wait


class _RunEvents:
    __slots__ = ("events", "size")

    def __init__(self) -> None:
        self.events: deque[tuple[str, str, int]] = deque()
        self.size = 0


class EventBuffer:
    """Not thread-safe: its owner locks it."""

    def __init__(self) -> None:
        self._runs: dict[Run, _RunEvents] = {}  # the run that had its share last is at the end
        self._most = MAX_EVENTS

    def __contains__(self, run: Run) -> bool:
        return run in self._runs

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def is_full(self, run: Run, times: int = 1) -> bool:
        """Whether a run has as many events as may wait, or `times` as many."""
        held = self._runs.get(run)
        return held is not None and (
            len(held.events) >= times * FULL_EVENTS or held.size >= times * FULL_BYTES
        )

    def add(self, run: Run, kind: str, data: str) -> None:
        """Add an event."""
        held = self._runs.get(run)
        if held is None:
            held = self._runs[run] = _RunEvents()
        # The lease is random. Python's generator is not: a handler may seed it, and each run would draw the same.
        run.last_event = (run.last_event or (run.lease_id.int & 0x7FFFFFFF) << 32) + 1
        held.events.append((kind, data, run.last_event))
        held.size += len(data)

    def take(self, share_of: Callable[[Run], int]) -> list[ReportedEvent]:
        """The next events to send in one statement: some of each run, in turn, and no more than its share."""
        batch: list[ReportedEvent] = []
        size = 0
        for run, share in [(run, share_of(run)) for run in self._runs]:
            if not share:
                continue
            held = self._runs.pop(run)
            while held.events and share and len(batch) < self._most and size < MAX_BYTES:
                kind, data, number = held.events.popleft()
                held.size -= len(data)
                size += len(data)
                share -= 1
                batch.append((run, kind, data, number))
            if held.events:
                self._runs[run] = held
            if len(batch) >= self._most or size >= MAX_BYTES:
                break
        return batch

    def put_back(self, events: list[ReportedEvent]) -> None:
        """Send events again, before the others of their runs."""
        for run, kind, data, number in reversed(events):
            held = self._runs.get(run)
            if held is None:
                held = self._runs[run] = _RunEvents()
            held.events.appendleft((kind, data, number))
            held.size += len(data)

    def remove(self, run: Run) -> int:
        """Forget the events of a run. Returns how many."""
        held = self._runs.pop(run, None)
        return 0 if held is None else len(held.events)

    def shrink(self, count: int) -> None:
        """A statement with so many events was too much for the server."""
        self._most = max(1, count // 2)

    def grow(self) -> None:
        """A statement has succeeded."""
        self._most = min(2 * self._most, MAX_EVENTS)
