"""The parts of a run: a ledger that survives its writers, schedules that a seed decides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from random import Random
from typing import TYPE_CHECKING

import pytest
from server_faults import SERVER

from howdah.chaos import ledger
from howdah.chaos.process_faults import WORKERS
from howdah.execution.fault_points import POINTS

if TYPE_CHECKING:
    from pathlib import Path

WRITER = """
import sys
from howdah.chaos.ledger import Ledger
ledger = Ledger(sys.argv[1])
n = 0
while True:
    n += 1
    ledger.write("sample", n=n, text="x" * (n % 3000))
"""


def test_lines_of_writers_that_are_killed_are_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(4)]
    try:
        while not path.exists() or path.stat().st_size < 2_000_000:
            time.sleep(0.05)
    finally:
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
    lines = ledger.read(path)
    # Each writer may have left one beginning.
    assert len(lines) >= path.read_bytes().count(b"\n") - len(writers)
    for pid in {line.pid for line in lines}:
        mine = [line for line in lines if line.pid == pid]
        assert [line["n"] for line in mine] == list(range(1, len(mine) + 1))
        assert all(len(line["text"]) == line["n"] % 3000 for line in mine)
        assert [line.t for line in mine] == sorted(line.t for line in mine)


def test_the_beginning_of_a_line_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    writer = ledger.Ledger(path)
    writer.write("note", text="before")
    with path.open("ab") as file:
        file.write(b'\n{"t":1.0,"pid":7,"kind":"cla')
    writer.write("note", text="after")
    writer.close()
    assert [line["text"] for line in ledger.read(path)] == ["before", "after"]


@pytest.mark.parametrize("kind", [*WORKERS, *SERVER], ids=lambda kind: kind.name)
def test_a_seed_decides_the_schedule(kind: type) -> None:
    schedules = [[str(fault) for fault in kind().schedule(Random(seed), 60)] for seed in (1, 1, 2)]
    assert schedules[0] == schedules[1]
    assert len(schedules[0]) > 5
    assert schedules[0] != schedules[2] or kind.name == "rolling restarts"


def test_every_fault_point_has_its_turn() -> None:
    (kind,) = [each for each in WORKERS if each.name == "fault points"]
    faults = kind().schedule(Random(1), kind.least)
    assert {point for fault in faults for point in fault.detail["points"]} == set(POINTS)
