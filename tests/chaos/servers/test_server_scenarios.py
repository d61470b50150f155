"""Faults of servers and clients under load: no job is lost, no job ends twice, and work resumes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_clock
import pooler
import pytest
import server_clock
import small_disk
from bare_scenarios import BareKillers
from client_scenarios import CutCommits, RollingUpgrade, Stalls, WrongClocks
from clock_scenarios import ServerClock
from commit_cuts import CALLS
from operator_scenarios import OpenCancels
from outage_scenarios import LongOutages
from server_scenarios import (
    DiskFull,
    FailOver,
    FailOverByName,
    FailOverWithLoss,
    Neighbours,
    Pooled,
    WalFull,
)
from strict_scenarios import (
    NO_SYSTEM_POSTGRESQL,
    Refusals,
    StrictSettings,
    StrictSettingsWithJit,
    system_binaries,
)

from howdah.chaos import fault_hits, ledger
from howdah.chaos.history import History

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunScenario
    from howdah.chaos.run import Verdict

pytestmark = pytest.mark.slow


def assert_kept(verdict: Verdict, *faults: str) -> None:
    """Every promise was kept, and each of these faults hit a job in flight."""
    assert [str(finding) for finding in verdict.findings] == []
    assert (verdict.notes, verdict.missed) == ([], [])
    assert verdict.acknowledged > 100
    assert [name for name in faults if not verdict.hits.get(name)] == []


@pytest.mark.parametrize("scenario", [FailOver, FailOverByName])
def test_a_failover_to_a_synchronous_standby_keeps_every_promise(
    run_scenario: RunScenario, scenario: type[FailOver]
) -> None:
    assert_kept(run_scenario(scenario()), "fail over")


def test_jobs_that_an_asynchronous_standby_lacks_are_reported_by_id(
    run_scenario: RunScenario, tmp_path: Path
) -> None:
    scenario = FailOverWithLoss()
    verdict = run_scenario(scenario)
    assert_kept(verdict, "fail over")
    # Jobs that the checker reports as gone, compared with acknowledged jobs on the crashed primary's disk.
    acknowledged = {
        job for job, _, _ in History(ledger.read(tmp_path / ledger.FILE)).acknowledged()
    }
    gone = {f.job for f in verdict.excused if f.what == "was acknowledged and is gone"}
    assert gone == scenario.lost & acknowledged
    assert gone


no_disk = pytest.mark.skipif(
    bool(small_disk.unavailable_because()), reason=str(small_disk.unavailable_because())
)


@no_disk
@pytest.mark.parametrize("scenario", [DiskFull, WalFull])
def test_a_full_disk_breaks_no_promise(run_scenario: RunScenario, scenario: type[DiskFull]) -> None:
    assert_kept(run_scenario(scenario()), scenario.name)


@pytest.mark.skipif(pooler.PROGRAM is None, reason=pooler.MISSING)
def test_restarts_and_kills_of_a_pooler_break_no_promise(run_scenario: RunScenario) -> None:
    assert_kept(run_scenario(Pooled()), "restart the pooler", "kill the pooler")


@pytest.mark.skipif(fake_clock.library() is None, reason=fake_clock.MISSING)
@pytest.mark.parametrize("hour", [fake_clock.HOUR, -fake_clock.HOUR])
def test_wrong_clocks_of_workers_and_producers_break_no_promise(
    run_scenario: RunScenario, hour: int
) -> None:
    assert_kept(run_scenario(WrongClocks(hour)), "kill worker")


def test_locks_reindexes_and_full_connection_slots_break_no_promise(
    run_scenario: RunScenario,
) -> None:
    verdict = run_scenario(Neighbours())
    assert_kept(verdict, "lock for DDL", "no connection left", "REINDEX", "REINDEX CONCURRENTLY")
    assert verdict.planned["hold a transaction"]


def test_statements_whose_reply_was_cut_are_resent_and_no_promise_is_broken(
    run_scenario: RunScenario,
) -> None:
    scenario = CutCommits()
    verdict = run_scenario(scenario)
    assert_kept(verdict, *(f"cut {called}" for called in CALLS))
    counts = scenario.cutter.counts()
    assert sum(counts.values()) >= 100
    assert all(counts[called, committed] for called in CALLS for committed in (True, False))


def test_a_rolling_upgrade_to_the_next_release_breaks_no_promise(run_scenario: RunScenario) -> None:
    assert_kept(run_scenario(RollingUpgrade()), "replace worker")


def test_a_blocked_event_loop_loses_no_lease(run_scenario: RunScenario) -> None:
    assert_kept(run_scenario(Stalls(), lease=1.0), "stall")


@pytest.mark.skipif(server_clock.library() is None, reason=fake_clock.MISSING)
@pytest.mark.parametrize("system", [False, True], ids=["embedded", "system"])
def test_jumps_of_the_servers_clock_lose_double_and_hide_no_job(
    run_scenario: RunScenario, system: bool
) -> None:
    scenario = ServerClock()
    if system:
        scenario.bin_directory = system_binaries()
        if scenario.bin_directory is None:
            pytest.skip(NO_SYSTEM_POSTGRESQL)
    verdict = run_scenario(scenario)
    assert_kept(verdict, "clock ahead", "clock back", "clock weeks ahead", "kill worker")


def test_strict_settings_of_the_role_and_the_database_break_no_promise(
    run_scenario: RunScenario,
) -> None:
    assert_kept(run_scenario(StrictSettings()), "kill worker")


@pytest.mark.skipif(system_binaries() is None, reason=NO_SYSTEM_POSTGRESQL)
def test_strict_settings_and_jit_for_every_plan_break_no_promise(run_scenario: RunScenario) -> None:
    assert_kept(run_scenario(StrictSettingsWithJit()), "kill worker")


def test_a_read_only_server_and_the_connection_limit_break_no_promise(
    run_scenario: RunScenario,
) -> None:
    assert_kept(run_scenario(Refusals()), "read-only server", "connection limit")


def test_jobs_that_kill_a_bare_loop_are_used_up_and_their_neighbours_complete(
    run_scenario: RunScenario,
) -> None:
    assert_kept(run_scenario(BareKillers()), fault_hits.KILLED_BY_OWN_JOB)


def test_jobs_of_a_cancellation_that_stays_open_and_rolls_back_run_once(
    run_scenario: RunScenario,
) -> None:
    assert_kept(run_scenario(OpenCancels()), OpenCancels.name)


def test_jobs_of_healthy_workers_run_once_although_the_server_is_away_for_longer_than_the_lease(
    run_scenario: RunScenario,
) -> None:
    assert_kept(run_scenario(LongOutages()), LongOutages.name)
