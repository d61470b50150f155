"""The ledger: what producers, workers and the fault driver saw, one JSON object a line, in one file that all
of them append to. Each line is one `write` on a descriptor opened with O_APPEND, so no two lines mix. A process
that is killed in the middle of a `write` may leave the beginning of a line, where that crosses a page: it is
passed over, as if the process had died before it. Times are CLOCK_MONOTONIC, which processes of one host share.

Kinds of lines and what they carry besides `t`, `pid` and `kind`:

    enqueue-invoked       call, jobs: [{tag, type, queue, priority, key, n, delay, max_attempts, unique}, …]
    enqueue-acknowledged  call, ids     the database has them, in the order of the jobs
    enqueue-unknown       call          nobody heard whether it has
    enqueue-refused       call          an error before anything was written
    enqueue-rolled-back   call, ids     written, and undone by the caller's own ROLLBACK
    claim                 job, fence, attempt, most, claims, type, queue, asked (when the claim was sent),
                          durable (whether it waited for the disk)
    announce              job, fence    the worker told the database that it starts the job
    start, effect         job, fence, attempt   the handler began; it did what it is for
    beat                  job, fence, asked     the database extended the lease
    ack-invoked           job, fence, what, final   complete, fail, release or stop is being sent
    ack-accepted, ack-refused, ack-unknown          job, fence, what, final, asked
    trouble               asked, function, claimed   a worker's statement failed, as the database could not be
                          reached; when a claim was last answered (0: never), if only with nothing
    well                  asked, function   one was answered, late or after trouble
    fault                 fault, name, phase ("begin" or "end"), scope (see `Stage.fault`),
                          target (a process id), …
    ready, exit           child, role, code     a worker said that it works; a process ended
    overdue               job, fence, seconds   a lease ran out so long ago and nobody took the job back
    note                  text          anything else worth knowing
    sample                pending, due (for any worker: without those of bare queues), claimed, finished
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE = "ledger.jsonl"
LEDGER_VARIABLE = "HOWDAH_CHAOS_LEDGER"

_encoder = msgspec.json.Encoder()


class Line(msgspec.Struct, frozen=True):
    """One line: its number in the file, when, by whom, of what kind, and the rest."""

    number: int
    t: float
    pid: int
    kind: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A field, if the line has it."""
        return self.fields.get(name, default)


class Ledger:
    """The file, for writing. Safe to share among threads, and to be inherited by a fork."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self._file = os.open(
            self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )

    def write(self, kind: str, fields: Mapping[str, Any] | None = None, /, **more: Any) -> float:
        """Append a line; gives its time."""
        now = time.monotonic()
        line = {"t": now, "pid": os.getpid(), "kind": kind, **(fields or {}), **more}
        # The newline goes first, so that a beginning which somebody left stays a line of its own.
        os.write(self._file, b"\n" + _encoder.encode(line))
        return now

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def from_environment() -> Ledger | None:
    """The ledger that a child process was told to write."""
    path = os.environ.get(LEDGER_VARIABLE)
    return None if path is None else Ledger(path)


def read(path: Path | str) -> list[Line]:
    """Every line that is whole, in the order of the file."""
    with open(path, "rb") as file:
        return [line for number, text in enumerate(file, 1) if (line := _line(number, text))]


def _line(number: int, text: bytes) -> Line | None:
    try:
        fields = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None  # the first line, or a beginning
    return Line(number, fields.pop("t"), fields.pop("pid"), fields.pop("kind"), fields)
