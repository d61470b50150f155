"""Which faults hit a job in flight, and that a run reports those that did not."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from test_checker import JOB, LEASE, Story, killed

from howdah.chaos import fault_hits
from howdah.chaos.history import History
from howdah.chaos.ledger import Ledger
from howdah.chaos.process_faults import FaultPoints, is_enqueueing
from howdah.chaos.scenario import Scenario
from howdah.execution.fault_points import POINTS

if TYPE_CHECKING:
    from pathlib import Path


def counted(story: Story) -> dict[str, int]:
    return fault_hits.count(History(story.lines), LEASE)


def fault(story: Story, begin: float, end: float, **fields: Any) -> Story:
    about = {"fault": begin, **fields}
    return story.line(begin, "fault", 1, phase="begin", **about).line(
        end, "fault", 1, phase="end", **about
    )


def claimed() -> Story:
    return Story().enqueue(0, JOB).claim(1, "a").line(1.1, "start", job=JOB, fence="a", attempt=1)


def test_a_kill_hits_if_a_job_was_in_flight_and_the_signal_ended_the_worker() -> None:
    assert counted(killed(claimed(), 2)) == {"kill worker": 1}
    assert counted(killed(claimed().ack(1.5, "a"), 2)) == {}  # no job was in flight any more
    left = claimed().line(2.1, "exit", 1, child=10, role="worker", code=0)
    assert counted(fault(left, 2, 2.1, name="kill worker", scope="worker", target=10)) == {}


@pytest.mark.parametrize(("seconds", "found"), [(2.5, {"pause worker": 1}), (1.5, {})])
def test_a_pause_hits_only_if_it_outlasts_the_lease(seconds: float, found: dict[str, int]) -> None:
    about = {"name": "pause worker", "scope": "worker", "target": 10}
    assert counted(fault(claimed(), 2, 2 + seconds, **about)) == found


@pytest.mark.parametrize("scope", ["server", "connection", "delay", "neighbour"])
def test_a_fault_without_a_target_hits_if_any_worker_has_a_job_in_flight(scope: str) -> None:
    assert counted(fault(claimed(), 2, 3, name="it", scope=scope)) == {"it": 1}
    assert counted(fault(claimed().ack(1.5, "a"), 2, 3, name="it", scope=scope)) == {}


def test_a_producer_is_hit_only_during_a_call() -> None:
    about = {"name": "kill producer", "scope": "producer", "target": 1}
    for jobs, found in (([], {"kill producer": 1}), ([JOB], {})):
        story = Story().line(1, "enqueue-invoked", 1, call="c", jobs=[])
        if jobs:
            story.line(1.1, "enqueue-acknowledged", 1, call="c", ids=jobs)
        story.line(2.1, "exit", 1, child=1, role="producer", code=-9)
        assert counted(fault(story, 2, 2.1, **about)) == found


def test_a_handler_that_kills_its_worker_counts_if_other_jobs_were_in_flight() -> None:
    story = claimed().claim(1, "k", job="bad", type="chaos.killer")
    story.line(1.2, "start", job="bad", fence="k", attempt=1)
    story.line(1.3, "exit", 1, child=10, role="worker", code=-9)
    assert counted(story) == {fault_hits.KILLED_BY_OWN_JOB: 1, "chaos.killer": 1}


def test_a_fault_without_a_hit_is_reported() -> None:
    history = History(killed(claimed(), 2).lines)
    planned = ["kill worker", "pause worker"]
    missed = Scenario().missed(history, planned, LEASE)
    assert missed == ['no "pause worker" hit a job in the middle']


def test_every_scheduled_fault_point_that_was_not_reached_is_reported() -> None:
    scenario = FaultPoints()
    scenario.schedule(Random(1), scenario.min_seconds)
    story = claimed().line(2.1, "exit", 1, child=10, role="victim", code=-9)
    about = {"name": "kill at fault point", "scope": "worker", "target": 10, "point": "after-claim"}
    history = History(fault(story, 1.5, 2.1, **about).lines)
    missed = scenario.missed(history, ["kill at fault point"], LEASE)
    assert len(missed) == len(POINTS) - 1
    assert not any("after-claim" in line for line in missed)


def test_a_producer_is_enqueueing_until_its_last_call_got_a_reply(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    ledger = Ledger(path)
    ledger.write("enqueue-invoked", call="c", jobs=[])
    assert is_enqueueing(path, os.getpid())
    assert not is_enqueueing(path, 1)
    ledger.write("enqueue-acknowledged", call="c", ids=[])
    assert not is_enqueueing(path, os.getpid())
    ledger.close()
