"""The parts of the benchmarks that decide what a figure says: who ran, and what rounds come to."""

from __future__ import annotations

import json
import multiprocessing
from typing import TYPE_CHECKING

import pytest
from bench import bars, pgbench, plots, report
from bench.ledger import Ledger
from bench.results import Results, percentile

if TYPE_CHECKING:
    from pathlib import Path


def test_a_ledger_of_jobs_that_all_ran_once_is_accepted(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", 3)
    for number in range(3):
        ledger.mark(number)
    ledger.check(3)


def test_a_ledger_tells_a_job_that_never_ran(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", 3)
    ledger.mark(0)
    ledger.mark(2)
    with pytest.raises(AssertionError, match="of 3 jobs 1 never ran; 2 handlers were executed"):
        ledger.check(3)


def test_a_ledger_tells_a_job_that_ran_twice(tmp_path: Path) -> None:
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


def test_processes_count_in_one_ledger_without_losing_a_mark(tmp_path: Path) -> None:
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


def test_a_rate_goes_from_the_first_start_to_the_last(tmp_path: Path) -> None:
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


def test_results_are_on_disk_with_the_figures_that_pages_quote(tmp_path: Path) -> None:
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


def test_the_report_names_missed_goals_and_draws_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PAGE", tmp_path / "benchmarks.md")
    monkeypatch.setattr(report, "PLOTS", tmp_path / "plots")
    reasons = tmp_path / "reasons.toml"
    reasons.write_text(
        '[drain-celery]\nwhy = "It was too slow."\n[drain-bare]\nwhy = "Never told."\n'
    )
    monkeypatch.setattr(bars, "REASONS", reasons)
    report.write(_results(tmp_path))
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| no-op jobs, over Celery | >= 20 × | 3.00 × [2.00 … 5.00] | **missed** |" in page
    assert "the goal is >= 20 ×. Why: It was too slow." in page
    assert "| no-op jobs, over the bare loop | >= 0.7 × | – | not measured |" in page
    assert "Never told" not in page
    assert "in 0 of 3 rounds" in page
    assert "| Howdah | 40 [30 … 50] |" in page
    assert "(plots/drain-async.svg)" in page
    assert ">40.00</text>" in (tmp_path / "plots" / "drain-async.svg").read_text()


def test_bars_of_growth_compare_howdah_with_itself(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    for number, (full, base) in enumerate([(3.0, 2.0), (4.0, 1.0), (2.0, 2.0)], 1):
        results.record("growth-full", "howdah", number, {"claim_p99_ms": full})
        results.record("growth-full-base", "howdah", number, {"claim_p99_ms": base})
    results.record("growth-idle-100", "howdah", 1, {"server_core_percent": 4.96})
    told = {bar.key: bars.measured(results, bar)[0] for bar in bars.BARS}
    assert (claims := told["growth-claims"]) is not None
    assert (claims.median, claims.low, claims.high) == (1.5, 1.0, 4.0)
    page = bars.chapter(results)
    assert "over 10k waiting | <= 2 × | 1.50 × [1.00 … 4.00] | reached |" in page
    assert (
        "| 100 idle workers, load on the server | < 5 % of a core | 5.0 % of a core | reached |"
        in page
    )


def test_a_round_that_one_of_two_missed_has_no_ratio(tmp_path: Path) -> None:
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
    assert bars.best_peer(results, "pickup-idle", "call_p50_ms") == "saq"
    assert bars.best_peer(results, "pickup-idle", "jobs_per_second") == "celery"
    assert bars.best_peer(results, "enqueue-64", "jobs_per_second") is None


def test_a_plot_is_well_formed_whatever_a_peer_is_called() -> None:
    drawing = plots.bars("a < b", "s", [plots.Bar("<&>", 1.0, 0.5, 2.0)])
    assert "&lt;&amp;&gt;" in drawing
    assert "<&>" not in drawing


def test_pgbench_runs_the_statements_of_the_worker() -> None:
    script = pgbench.script()
    assert '"howdah".claim_job_batch(' in script
    assert '"howdah".complete_jobs(' in script
    assert "$" not in script
