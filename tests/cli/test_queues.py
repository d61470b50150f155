"""`howdah queues` and `howdah workers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stage import Run


@pytest.fixture
def database(wiped: str) -> str:
    return wiped


def test_queues_shows_what_waits_and_runs(look: Run, read_json: Any) -> None:
    lines = [line.split() for line in look("queues").stdout.splitlines()]
    assert lines[0][:5] == ["TYPE", "QUEUE", "DUE", "SCHEDULED", "BLOCKED"]
    found = {
        (each["queue"], each["job_type"]): each for each in read_json(look("queues", "--json"))
    }
    resize = found["default", "resize"]
    assert (resize["due"], resize["scheduled"], resize["running"]) == (1, 1, 0)
    assert resize["mean_wait"] == pytest.approx(0.1)
    export = found["mail", "export"]
    assert (export["due"], export["blocked"], export["running"]) == (0, 1, 1)


def test_workers_are_listed(look: Run, act: Run, read_json: Any) -> None:
    heading, line = look("workers").stdout.splitlines()
    assert heading.split() == ["WORKER", "STATE", "RUNNING", "SEEN", "UP", "QUEUES", "TYPES"]
    assert line.startswith("worker-1  busy")
    assert "1/8" in line
    [worker] = read_json(look("workers", "--json"))
    assert (worker["worker_id"], worker["host"], worker["alive"]) == (
        "worker-1",
        "db.example.com",
        True,
    )
    nobody = act("workers")
    assert (nobody.exit_code, nobody.stdout) == (0, "")
    assert nobody.stderr == "No worker is running. Start one with `howdah worker MODULE:APP`.\n"
