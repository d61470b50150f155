"""The ledger survives the kill of its writers; equal seeds give equal schedules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from random import Random
from typing import TYPE_CHECKING

import pytest
from server_faults import SERVER_SCENARIOS

from howdah.chaos import ledger
from howdah.chaos.process_faults import PROCESS_SCENARIOS
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


def test_killed_writers_leave_only_complete_lines_in_the_ledger(tmp_path: Path) -> None:
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
    # Each writer may have left one partial line.
    assert len(lines) >= path.read_bytes().count(b"\n") - len(writers)
    for pid in {line.pid for line in lines}:
        mine = [line for line in lines if line.pid == pid]
        assert [line["n"] for line in mine] == list(range(1, len(mine) + 1))
        assert all(len(line["text"]) == line["n"] % 3000 for line in mine)
        assert [line.t for line in mine] == sorted(line.t for line in mine)


def test_a_partial_line_does_not_affect_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    writer = ledger.Ledger(path)
    writer.write("note", text="before")
    with path.open("ab") as file:
        file.write(b'\n{"t":1.0,"pid":7,"kind":"cla')
    writer.write("note", text="after")
    writer.close()
    assert [line["text"] for line in ledger.read(path)] == ["before", "after"]


@pytest.mark.parametrize(
    "kind", [*PROCESS_SCENARIOS, *SERVER_SCENARIOS], ids=lambda kind: kind.name
)
def test_equal_seeds_give_equal_schedules(kind: type) -> None:
    schedules = [[str(fault) for fault in kind().schedule(Random(seed), 60)] for seed in (1, 1, 2)]
    assert schedules[0] == schedules[1]
    assert len(schedules[0]) > 5
    assert schedules[0] != schedules[2] or kind.name == "rolling restarts"


def test_the_schedule_of_fault_points_contains_every_point() -> None:
    (kind,) = [each for each in PROCESS_SCENARIOS if each.name == "fault points"]
    faults = kind().schedule(Random(1), kind.min_seconds)
    assert {point for fault in faults for point in fault.detail["points"]} == set(POINTS)
