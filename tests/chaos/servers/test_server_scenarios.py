"""Servers that fail, under load: nothing is lost, nothing ends twice, and work resumes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_clock
import pooler
import pytest
import small_disk
from client_scenarios import CutCommits, RollingUpgrade, Stalls, WrongClocks
from commit_cuts import CALLS
from server_scenarios import (
    DiskFull,
    FailOver,
    FailOverByName,
    FailOverWithLoss,
    Neighbours,
    Pooled,
    WalFull,
)

from howdah.chaos import ledger
from howdah.chaos.history import History

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Play
    from howdah.chaos.run import Verdict

pytestmark = pytest.mark.slow


def assert_kept(verdict: Verdict, *struck: str) -> None:
    """Every promise was kept, though these faults found jobs in the middle."""
    assert [str(finding) for finding in verdict.findings] == []
    assert (verdict.notes, verdict.missed) == ([], [])
    assert verdict.acknowledged > 100
    assert [name for name in struck if not verdict.hits.get(name)] == []


@pytest.mark.parametrize("scenario", [FailOver, FailOverByName])
def test_a_synchronous_standby_that_takes_over_has_everything(
    play: Play, scenario: type[FailOver]
) -> None:
    assert_kept(play(scenario()), "fail over")


def test_what_an_asynchronous_standby_lacks_is_reported_by_id(play: Play, tmp_path: Path) -> None:
    scenario = FailOverWithLoss()
    verdict = play(scenario)
    assert_kept(verdict, "fail over")
    # What the checker says is gone, against what is on the dead primary's disk and was acknowledged.
    acknowledged = {
        job for job, _, _ in History(ledger.read(tmp_path / ledger.FILE)).acknowledged()
    }
    gone = {f.job for f in verdict.excused if f.what == "was acknowledged and is gone"}
    assert gone == scenario.lost & acknowledged
    assert gone


no_disk = pytest.mark.skipif(bool(small_disk.why_not()), reason=str(small_disk.why_not()))


@no_disk
@pytest.mark.parametrize("scenario", [DiskFull, WalFull])
def test_a_disk_that_ran_full_loses_nothing(play: Play, scenario: type[DiskFull]) -> None:
    assert_kept(play(scenario()), scenario.name)


@pytest.mark.skipif(pooler.PROGRAM is None, reason=pooler.MISSING)
def test_a_pooler_may_be_restarted_and_killed(play: Play) -> None:
    assert_kept(play(Pooled()), "restart the pooler", "kill the pooler")


@pytest.mark.skipif(fake_clock.library() is None, reason=fake_clock.MISSING)
@pytest.mark.parametrize("hour", [fake_clock.HOUR, -fake_clock.HOUR])
def test_the_clocks_of_workers_and_producers_do_not_matter(play: Play, hour: int) -> None:
    assert_kept(play(WrongClocks(hour)), "kill worker")


def test_what_others_do_to_the_database_costs_nothing_but_time(play: Play) -> None:
    verdict = play(Neighbours())
    assert_kept(verdict, "lock for DDL", "no connection left", "REINDEX", "REINDEX CONCURRENTLY")
    assert verdict.planned["hold a transaction"]


def test_an_answer_that_never_came_is_asked_for_again_and_nothing_is_done_twice(
    play: Play,
) -> None:
    scenario = CutCommits()
    verdict = play(scenario)
    assert_kept(verdict, *(f"cut {called}" for called in CALLS))
    counts = scenario.cutter.counts()
    assert sum(counts.values()) >= 100
    assert all(counts[called, committed] for called in CALLS for committed in (True, False))


def test_old_workers_go_on_while_the_next_release_migrates_and_takes_over(play: Play) -> None:
    assert_kept(play(RollingUpgrade()), "replace worker")


def test_an_event_loop_that_stands_still_costs_no_lease(play: Play) -> None:
    assert_kept(play(Stalls(), lease=1.0), "stall")
