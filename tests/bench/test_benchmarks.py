"""The parts of the benchmarks that decide what a figure means: the ledger, the results, the plan and the report."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from typing import TYPE_CHECKING

import pytest
from bench.ledger import Ledger
from bench.results import Results, percentile
from bench.services import Postgres

from bench import auto_tuning, goals, peers, pgbench, plan, plots, report, workloads

if TYPE_CHECKING:
    from pathlib import Path


def test_a_ledger_in_which_every_job_ran_once_is_accepted(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", 3)
    for number in range(3):
        ledger.mark(number)
    ledger.check(3)


def test_a_ledger_reports_a_job_that_never_ran(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", 3)
    ledger.mark(0)
    ledger.mark(2)
    with pytest.raises(AssertionError, match="of 3 jobs 1 never ran; 2 handlers were executed"):
        ledger.check(3)


def test_a_ledger_reports_a_job_that_ran_twice(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", 2)
    for number in (0, 1, 1):
        ledger.mark(number)
    with pytest.raises(AssertionError, match="3 handlers were executed"):
        ledger.check(2)
    assert ledger.check(2, once=False) == 1


def _mark(path: Path, first: int, jobs: int) -> None:
    ledger = Ledger(path)
    for number in range(first, first + jobs):
        ledger.mark(number)


def test_processes_share_a_ledger_without_losing_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger.create(path, 4000)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_mark, args=(path, n * 1000, 1000)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert ledger.executed == 4000
    ledger.check(4000)


def test_a_rate_is_measured_from_the_first_start_to_the_last(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", 3)
    for number, second in enumerate((5, 6, 7)):
        ledger.starts[number] = second * 10**9
    assert ledger.rate(0, 3) == pytest.approx(1.0)


def _results(path: Path) -> Results:
    results = Results(path / "results.json")
    for number, (ours, theirs) in enumerate([(30.0, 10.0), (40.0, 20.0), (50.0, 10.0)], 1):
        results.record("drain-async", "howdah", number, {"jobs_per_second": ours})
        results.record("drain-async", "celery", number, {"jobs_per_second": theirs})
    return results


def test_ratios_are_taken_round_by_round(tmp_path: Path) -> None:
    ratio = _results(tmp_path).ratios("drain-async", "howdah", "celery", "jobs_per_second")
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (3.0, 2.0, 5.0, 3)


def test_results_are_written_to_disk_with_the_figures_that_pages_quote(tmp_path: Path) -> None:
    _results(tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["howdah"] == {"jobs_per_second": 40.0}
    assert len(content["rounds"]) == 6


def test_a_workload_that_is_run_again_loses_its_older_rounds_and_no_others(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    for workload in ("enqueue-1", "enqueue-16p", "growth-held-100", "growth-full"):
        results.record(workload, "howdah", 1, {"jobs_per_second": 1.0})
    results.forget("enqueue-1")
    results.forget("growth-held")
    assert [r["workload"] for r in results.rounds] == ["enqueue-16p", "growth-full"]


def test_a_percentile_is_a_value_of_the_sample() -> None:
    values = [float(n) for n in range(1000)]
    assert percentile(values, 0.5) == 500.0
    assert percentile(values, 0.999) == 999.0
    assert percentile([7.0], 0.99) == 7.0


def test_the_report_lists_missed_goals_and_plots_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PAGE", tmp_path / "benchmarks.md")
    monkeypatch.setattr(report, "PLOTS", tmp_path / "plots")
    reasons = tmp_path / "reasons.toml"
    reasons.write_text(
        '[drain-celery]\nwhy = "It was too slow."\n[drain-bare]\nwhy = "Not printed."\n'
    )
    monkeypatch.setattr(goals, "REASONS", reasons)
    report.write(_results(tmp_path))
    page = (tmp_path / "benchmarks.md").read_text()
    assert (
        "| no-op jobs, compared with Celery | >= 20 × | 3.00 × [2.00 … 5.00] | **missed** |" in page
    )
    assert "the goal is >= 20 ×. Why: It was too slow." in page
    assert "| no-op jobs, compared with the bare loop | >= 0.7 × | – | not measured |" in page
    assert "Not printed" not in page
    assert "in 0 of 3 rounds" in page
    assert "| Howdah | 40 [30 … 50] |" in page
    assert "(plots/drain-async.svg)" in page
    assert ">40.00</text>" in (tmp_path / "plots" / "drain-async.svg").read_text()


def test_goals_of_growth_compare_howdah_with_itself(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    for number, (full, base) in enumerate([(3.0, 2.0), (4.0, 1.0), (2.0, 2.0)], 1):
        results.record("growth-full", "howdah", number, {"claim_p99_ms": full})
        results.record("growth-full-base", "howdah", number, {"claim_p99_ms": base})
    results.record("growth-idle-100", "howdah", 1, {"server_core_percent": 4.96})
    found = {goal.key: goals.measured(results, goal)[0] for goal in goals.GOALS}
    assert (claims := found["growth-claims"]) is not None
    assert (claims.median, claims.low, claims.high) == (1.5, 1.0, 4.0)
    page = goals.chapter(results)
    assert "compared with 10k pending | <= 2 × | 1.50 × [1.00 … 4.00] | reached |" in page
    assert "| 100 idle workers, server CPU | < 5 % of a core | 5.0 % of a core | reached |" in page


def test_a_round_that_only_one_of_two_peers_ran_has_no_ratio(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    for number in (1, 2, 3):
        results.record("drain-async", "howdah", number, {"jobs_per_second": 10.0 * number})
    for number in (2, 3):
        results.record("drain-async", "saq", number, {"jobs_per_second": 10.0})
    ratio = results.ratios("drain-async", "howdah", "saq", "jobs_per_second")
    assert ratio is not None
    assert (ratio.low, ratio.high, ratio.rounds) == (2.0, 3.0, 2)


def test_the_best_peer_is_neither_howdah_nor_a_ceiling(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    for peer, p50 in (("howdah", 1.0), ("bare", 0.5), ("saq", 2.0), ("celery", 3.0)):
        results.record("pickup-idle", peer, 1, {"call_p50_ms": p50, "jobs_per_second": p50})
    assert goals.best_peer(results, "pickup-idle", "call_p50_ms") == "saq"
    assert goals.best_peer(results, "pickup-idle", "jobs_per_second") == "celery"
    assert goals.best_peer(results, "enqueue-64", "jobs_per_second") is None


def test_a_plot_escapes_the_labels_of_peers() -> None:
    drawing = plots.bars("a < b", "s", [plots.Bar("<&>", 1.0, 0.5, 2.0)])
    assert "&lt;&amp;&gt;" in drawing
    assert "<&>" not in drawing


def test_pgbench_runs_the_statements_of_the_worker() -> None:
    script = pgbench.script()
    assert '"howdah".claim_runs(' in script
    assert '"howdah".complete_runs(' in script
    assert "$" not in script


def _run_plan(
    path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, minutes: float = 9.0
) -> tuple[Results, bool]:
    """Three rounds of one workload for three peers; one peer fails in its second round."""
    tried: list[str] = []

    def measure(run: plan.Run, peer: peers.Peer) -> plan.Outcome:
        tried.append(peer.name)
        if peer.name == failing and tried.count(failing) == 2:
            raise ConnectionError("the server hung up\nand more")
        return {"drain-async": {"jobs_per_second": 1.0}}

    workload = plan.Workload("drain-async", measure, ceilings=True)
    monkeypatch.setattr(plan, "WORKLOADS", [workload])
    results = Results(path / "results.json")
    options = argparse.Namespace(scale=1.0, quick=False, only=None, steady=1.0, rounds=3)
    options.minutes = minutes
    testbed = workloads.Testbed(None, None)  # type: ignore[arg-type]
    is_complete = plan.run(testbed, peers.find(["howdah", "saq", "celery"]), results, options)
    return results, is_complete


def test_a_peer_that_fails_is_left_out_and_reported_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, is_complete = _run_plan(tmp_path, monkeypatch, "saq")
    assert is_complete
    rounds = {p: results.by_round("drain-async", p, "jobs_per_second") for p in ("howdah", "saq")}
    assert (list(rounds["howdah"]), list(rounds["saq"])) == ([1, 2, 3], [1])
    text = report._left_out(Results(tmp_path / "results.json").content)
    assert text == "\n- Not measured: saq: drain-async: round 2: the server hung up: and more"


def test_a_run_in_which_howdah_fails_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, is_complete = _run_plan(tmp_path, monkeypatch, "howdah")
    assert not is_complete
    assert len(results.values("drain-async", "celery", "jobs_per_second")) == 3


def test_after_the_time_limit_each_workload_runs_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, _ = _run_plan(tmp_path, monkeypatch, "none", minutes=0.0)
    assert [r["round"] for r in results.rounds] == [1, 1, 1]
    assert "drain-async, round 3" in results.content["skipped"]


def test_the_best_settings_of_a_peer_are_chosen_and_stored_with_the_round() -> None:
    celery = peers.find(["celery"])[0]
    rates = {"prefork": 5.0, "threads": 7.0, "solo": 6.0}
    tuning = auto_tuning.AutoTuning()

    def measure() -> dict[str, float]:
        pool = os.environ["BENCH_POOL"]
        if "BENCH_THREADS" in os.environ:
            raise ConnectionError("no")
        kind = "call_p50_ms" if latency else "jobs_per_second"
        return {kind: rates[pool]}

    latency = False
    tuning.tune(celery, "drain-async", measure)
    latency = True
    tuning.tune(celery, "pickup-idle", measure)
    assert tuning.settings(celery, "steady") == {"BENCH_POOL": "threads"}
    assert tuning.settings(celery, "pickup-commit") == {"BENCH_POOL": "prefork"}
    assert tuning.settings(celery, "drain-thread") == {}
    tried = {"pool prefork": 5.0, "pool threads": 7.0, "pool solo": 6.0}
    assert tuning.facts(celery, "drain-async") == {"settings": "pool threads", "tried": tried}
    assert "BENCH_POOL" not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["fsync", "synchronous_commit"])
def test_a_round_on_a_server_that_is_not_durable_is_refused(setting: str) -> None:
    peer = peers.find(["howdah"])[0]
    with Postgres({setting: "off"}) as postgres:
        testbed = workloads.Testbed(postgres, None)
        testbed.setup(peer)
        with pytest.raises(AssertionError, match="not durable"):
            workloads.enqueue_only(testbed, peer, 100, "single")


@pytest.mark.slow
def test_a_round_stores_what_it_proved() -> None:
    peer = peers.find(["howdah"])[0]
    with Postgres() as postgres:
        testbed = workloads.Testbed(postgres, None)
        testbed.setup(peer)
        workloads.drain(testbed, peer, 300)
    assert testbed.checked == {
        "history_rows": 300,
        "fsync": "on",
        "synchronous_commit_of_acknowledgements": "on",
        "synchronous_commit_of_enqueues": "on",
        "witnessed_jobs": 256,
        "stale_acknowledgement": "refused: LeaseLost",
    }
