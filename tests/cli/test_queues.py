"""`howdah queues` and `howdah workers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stage import Run


def test_queues_counts_waiting_and_running_jobs(run_on_shop: Run, read_json: Any) -> None:
    lines = [line.split() for line in run_on_shop("queues").stdout.splitlines()]
    assert lines[0][:5] == ["TYPE", "QUEUE", "DUE", "SCHEDULED", "BLOCKED"]
    found = {
        (each["queue"], each["job_type"]): each
        for each in read_json(run_on_shop("queues", "--json"))
    }
    resize = found["default", "resize"]
    assert (resize["due"], resize["scheduled"], resize["running"]) == (1, 1, 0)
    assert resize["mean_wait"] == pytest.approx(0.1)
    export = found["mail", "export"]
    assert (export["due"], export["blocked"], export["running"]) == (0, 1, 1)


def test_workers_lists_registered_workers(run_on_shop: Run, read_json: Any) -> None:
    heading, line = run_on_shop("workers").stdout.splitlines()
    assert heading.split() == ["WORKER", "STATE", "RUNNING", "SEEN", "UP", "QUEUES", "TYPES"]
    assert line.startswith("worker-1  busy")
    assert "1/8" in line
    [worker] = read_json(run_on_shop("workers", "--json"))
    assert (worker["worker_id"], worker["host"], worker["alive"]) == (
        "worker-1",
        "db.example.com",
        True,
    )


def test_workers_says_how_to_start_one_if_there_is_none(run: Run) -> None:
    result = run("workers")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "No worker is running. Start one with `howdah worker MODULE:APP`.\n"


def test_queues_of_an_empty_database_is_a_note(run: Run) -> None:
    result = run("queues")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (
        result.stderr == "No job is waiting or running, and none ended in the last five minutes.\n"
    )
