"""The ledger: what producers, workers and the fault injector observed. All of them append to one file, one JSON
object per line. Each line is one `write` on a descriptor opened with O_APPEND, so lines never mix. A process that
is killed during a `write` may leave a partial line where the write crosses a page; readers skip it, as if the
process had been killed before it. Times are CLOCK_MONOTONIC, which all processes of one host share.

Kinds of lines, and their fields besides `t`, `pid` and `kind`:

    enqueue-invoked       call, jobs: [{tag, type, queue, priority, key, n, delay, max_attempts, unique}, …]
    enqueue-acknowledged  call, ids     committed; the ids in the order of the jobs
    enqueue-unknown       call          the outcome is unknown
    enqueue-refused       call          an error before anything was written
    enqueue-rolled-back   call, ids     written, then undone by the caller's ROLLBACK
    claim                 job, fence, attempt, most (max_attempts), claims, type, queue, asked (when the claim
                          was sent), durable (whether it waited for the disk)
    announce              job, fence    the worker wrote to the database that it starts the job
    start, effect         job, fence, attempt   the handler started; the handler did its work
    beat                  job, fence, asked     the database extended the lease
    report                job, fence, attempt   the handler is about to report an event with its fence
    ack-invoked           job, fence, what, final   complete, fail, release or stop is being sent
    ack-accepted, ack-refused, ack-unknown          job, fence, what, final, asked
    trouble               asked, function, claimed   a worker's statement failed because the database was
                          unreachable; `claimed`: when a claim last got a reply, even an empty one (0: never)
    well                  asked, function   a statement got a reply, late or after trouble
    fault                 fault, name, phase ("begin" or "end"), scope (see `RunContext.fault`),
                          target (a process id), …
    ready, exit           child, role, code     a process logged that it started; a process exited
    overdue               job, fence, seconds   a stale job that is not recovered, and how long its lease is expired
    note                  text          any other fact
    sample                pending, due (without the jobs of bare queue workers), claimed, finished
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
    """One line: its number in the file, time, process, kind, and other fields."""

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
    """The file, opened for writing. Threads may share it, and forked processes may inherit it."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self._file = os.open(
            self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )

    def write(self, kind: str, fields: Mapping[str, Any] | None = None, /, **more: Any) -> float:
        """Append a line and return its time."""
        now = time.monotonic()
        line = {"t": now, "pid": os.getpid(), "kind": kind, **(fields or {}), **more}
        # The newline comes first, so that a partial line of another process stays a separate line.
        os.write(self._file, b"\n" + _encoder.encode(line))
        return now

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def from_environment() -> Ledger | None:
    """The ledger named by the environment of this process, if any."""
    path = os.environ.get(LEDGER_VARIABLE)
    return None if path is None else Ledger(path)


def read(path: Path | str) -> list[Line]:
    """Every complete line, in the order of the file."""
    with open(path, "rb") as file:
        return [line for number, text in enumerate(file, 1) if (line := _line(number, text))]


def _line(number: int, text: bytes) -> Line | None:
    try:
        fields = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None  # the empty first line, or a partial line
    return Line(number, fields.pop("t"), fields.pop("pid"), fields.pop("kind"), fields)
