"""Which handlers ran, how often, and when: a file that the processes of a round share as mapped memory.

Handlers mark the number of their job; an empty queue proves nothing. Layout, in 64-bit integers: `PROCESSES`
counters, one for each process that runs handlers, then one start time for each job (nanoseconds of the monotonic
clock, which all processes of a machine share; 0: never ran)."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROCESSES = 64


class Ledger:
    """The shared memory. Handlers call `mark`."""

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "r+b")  # noqa: SIM115
        self._map = mmap.mmap(self._file.fileno(), 0)
        self._cells = memoryview(self._map).cast("q")
        self.starts = self._cells[PROCESSES:]
        self._counter = -1
        self._count = 0
        os.register_at_fork(after_in_child=self._reset_counter)

    @classmethod
    def create(cls, path: Path, jobs: int) -> Ledger:
        """A new ledger, all zero."""
        with path.open("wb") as file:
            file.truncate(8 * (PROCESSES + jobs))
        return cls(path)

    def mark(self, number: int) -> None:
        """Record that the handler of this job starts now."""
        self.starts[number] = time.monotonic_ns()
        if self._counter < 0:
            self._reserve_counter()
        self._count += 1
        self._cells[self._counter] = self._count

    def _reserve_counter(self) -> None:
        """Reserve a counter for this process."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        self._counter = next(n for n in range(PROCESSES) if self._cells[n] == 0)
        self._cells[self._counter] = 1
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _reset_counter(self) -> None:
        self._counter, self._count = -1, 0

    @property
    def executed(self) -> int:
        """The number of handlers started, in all processes."""
        return sum(self._cells[:PROCESSES])

    def check(self, jobs: int, *, once: bool = True) -> int:
        """Raise unless all jobs ran, each exactly once if `once`. Returns the number of additional runs."""
        missing = sum(not start for start in self.starts[:jobs])
        if missing or self.executed < jobs or (once and self.executed > jobs):
            raise AssertionError(
                f"of {jobs:,} jobs {missing:,} never ran; {self.executed:,} handlers were executed"
            )
        return self.executed - jobs

    def rate(self, first: int, jobs: int) -> float:
        """Jobs per second, from the first start of a handler to the last."""
        starts = self.starts[first : first + jobs]
        return (jobs - 1) * 1e9 / max(1, max(starts) - min(starts))
