"""The soak: its verdicts on curves that are flat, bounded or growing, its counts, and a run of half a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from bench.soak import verdicts
from bench.soak.counts import wrong_counts
from bench.soak.curves import curves, only_counts
from bench.soak.load import MIXED, scaled
from bench.soak.report import Facts, page, plots
from bench.soak.samples import Sample, Sampler, Usage, usage
from bench.soak.verdicts import Point

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah import JobQueue

ROOT = Path(__file__).parents[2]


def phases(
    before: Callable[[int], float], held: Callable[[int], float], after: Callable[[int], float]
) -> list[Point]:
    """Forty points of each phase."""
    return [
        Point(t=float(40 * position + n), value=function(n), phase=phase)
        for position, (phase, function) in enumerate({"before": before, "held": held, "after": after}.items())
        for n in range(40)
    ]  # fmt: skip


def level(value: float) -> Callable[[int], float]:
    return lambda n: value + n % 3  # noise


def test_a_curve_that_stays_at_its_level_is_flat() -> None:
    assert verdicts.steady(phases(level(50), level(50), level(52)), 1.0).kind == "flat"


def test_a_curve_that_rises_in_a_phase_without_a_held_transaction_grows() -> None:
    rising = phases(lambda n: 50 + n, level(90), level(90))
    assert verdicts.steady(rising, 1.0).failed
    rising = phases(level(50), level(50), lambda n: 50 + n)
    assert verdicts.steady(rising, 1.0).failed


def test_a_file_that_grew_only_while_the_transaction_was_held_is_bounded() -> None:
    found = verdicts.steady(phases(level(50), lambda n: 50 + 5 * n, level(250)), 1.0)
    assert (found.kind, found.words) == (
        "bounded",
        "grew while the transaction was held, and not since",
    )


def test_a_rise_at_the_start_of_a_phase_is_not_growth() -> None:
    assert (
        verdicts.steady(phases(lambda n: min(50.0, 10.0 * n), level(50), level(50)), 1.0).kind
        == "flat"
    )


def test_dead_rows_that_vacuum_removes_again_and_again_are_flat() -> None:
    saw = phases(lambda n: n % 5 * 1000.0, lambda n: n % 5 * 1000.0, lambda n: n % 5 * 1000.0)
    assert verdicts.dead_rows(saw, 100).kind == "flat"


def test_dead_rows_of_a_held_transaction_are_bounded_if_they_go_with_it() -> None:
    gone = phases(level(1000), lambda n: 10_000.0 * n, lambda n: 400_000.0 if n < 5 else 1000.0)
    assert verdicts.dead_rows(gone, 100).kind == "bounded"
    stayed = phases(level(1000), lambda n: 10_000.0 * n, level(400_000))
    assert verdicts.dead_rows(stayed, 100).failed


def test_dead_rows_that_vacuum_leaves_grow() -> None:
    assert verdicts.dead_rows(phases(lambda n: 1000.0 * n, level(0), level(0)), 100).failed


@pytest.mark.parametrize(
    ("held", "after", "kind"),
    [(1.9, 1.4, "flat"), (2.3, 1.0, "bounded"), (1.0, 1.7, "growing"), (2.3, 1.7, "growing")],
)
def test_a_time_may_double_while_the_transaction_is_held_and_must_come_back(
    held: float, after: float, kind: str
) -> None:
    points = phases(lambda n: 1.0, lambda n: held, lambda n: after)
    assert verdicts.duration(points).kind == kind


def test_a_time_that_rises_the_longer_the_transaction_is_held_grows() -> None:
    points = phases(level(1), lambda n: 1.0 + n, level(1))
    assert verdicts.duration(points).failed
    assert verdicts.single_runs(points).failed
    assert verdicts.batched(points, points).failed


@pytest.mark.parametrize(
    ("per_call", "per_row", "failed"),
    [(4.0, 0.5, False), (0.5, 4.0, False), (4.0, 2.5, True)],
    ids=["larger batches", "smaller batches", "slower"],
)
def test_a_statement_is_slower_only_if_its_calls_and_its_rows_are(
    per_call: float, per_row: float, failed: bool
) -> None:
    calls = phases(lambda n: 1.0, lambda n: 1.0, lambda n: per_call)
    rows = phases(lambda n: 1.0, lambda n: 1.0, lambda n: per_row)
    assert verdicts.batched(calls, rows).failed is failed
    # Larger batches in one phase and smaller ones in another are not a slower statement.
    later = phases(lambda n: 1.0, lambda n: per_row, lambda n: 0.1)
    assert not verdicts.batched(calls, later).failed


def test_a_run_with_short_phases_judges_only_what_can_be_counted(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("")
    found = only_counts(curves(samples(threads=lambda n: 4 + n), tmp_path / "claims", 0.0))
    assert {curve.verdict.kind for curve in found if not curve.counted} == {"not judged"}
    assert [curve.name for curve in found if curve.verdict.failed] == ["threads of worker 1"]


def test_a_single_run_that_had_to_wait_does_not_make_a_duty_slow() -> None:
    waited = phases(lambda n: 5.0, lambda n: 5.0, lambda n: 200.0 if n == 30 else 6.0)
    assert verdicts.duration(waited).failed
    assert not verdicts.single_runs(waited).failed
    assert verdicts.single_runs(phases(lambda n: 5.0, lambda n: 5.0, lambda n: 11.0)).failed
    assert not verdicts.single_runs(phases(level(1), level(1), level(3)), slack=2.0).failed


def test_a_history_is_bounded_while_its_rows_keep_their_size() -> None:
    assert (
        verdicts.per_row(phases(level(300), level(300), level(300)), "the retention").kind
        == "bounded"
    )
    assert verdicts.per_row(phases(level(300), level(400), level(600)), "the retention").failed


def test_a_log_with_more_bytes_than_its_limit_fails() -> None:
    assert (
        verdicts.at_most(phases(level(500), level(500), level(500)), 1000, "bytes").kind
        == "bounded"
    )
    assert verdicts.at_most(phases(level(5000), level(5000), level(5000)), 1000, "bytes").failed


def samples(*, threads: Callable[[int], int] = lambda n: 4) -> list[Sample]:
    """A run whose only unsteady curve may be the number of threads."""
    return [
        Sample(
            t=5.0 * n, phase="before" if n < 40 else "held" if n < 80 else "after",
            sizes={"live_jobs": 10 * 2**20, "finished_jobs": 2**20 * (n + 3)}, dead={"live_jobs": 5000},
            rows={"finished_jobs": 3000 * (n + 3)}, enqueued=1000 * n, wal=10**6 * n,
            statements={"claim_job_batch": (100 * n, 50.0 * n, 900 * n)}, duties={"sweep": (str(n), 4.0)},
            processes={"worker 1": Usage(50 * 2**20, 20, threads(n), 1000 * n)}, cpu={"server": 0.04 * n},
        )
        for n in range(120)
    ]  # fmt: skip


def test_every_curve_of_a_steady_run_passes_and_a_leak_of_threads_fails(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("")
    steady = curves(samples(), tmp_path / "claims", 0.0)
    assert [curve.name for curve in steady if curve.verdict.failed] == []
    assert {curve.name for curve in steady} >= {
        "size of live_jobs", "size of finished_jobs per row", "dead rows of live_jobs", "WAL per job",
        "mean time of claim_job_batch", "time of sweep", "memory of worker 1", "log of worker 1",
    }  # fmt: skip
    leaking = curves(samples(threads=lambda n: 4 + n), tmp_path / "claims", 0.0)
    assert [curve.name for curve in leaking if curve.verdict.failed] == ["threads of worker 1"]


def test_the_page_has_a_row_per_curve_and_names_what_grows(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("")
    found = curves(samples(threads=lambda n: 4 + n), tmp_path / "claims", 0.0)
    machine = {"processor": "one", "cores": 2, "python": "3.11", "measured_on": "today"}
    text = page(found, ["3 jobs that have not ended"], Facts(10, 2, "mixed", 119_000, machine))
    assert "**1 curves grow, 1 counts are wrong.**" in text
    row = "| threads of worker 1 | threads | 23.50 | 63.50 | 104 | **growing** | grows with time |"
    assert row in text
    assert "- 3 jobs that have not ended" in text
    assert plots(found).keys() >= {"soak-sizes.svg", "soak-memory.svg"}


def test_the_counts_are_those_of_the_producers(queue: JobQueue, database: str) -> None:
    queue.enqueue("soak.no_op", {"number": 1})
    with psycopg.connect(database, autocommit=True) as conn:
        assert wrong_counts(conn, Counter(no_op=1)) == [
            "0 of the kind no_op completed, 1 expected", "1 jobs that have not ended",
        ]  # fmt: skip
        queue.complete(queue.claim("soak.no_op")[0])
        assert wrong_counts(conn, Counter(no_op=1)) == []
        assert wrong_counts(conn, Counter(no_op=1, cancelled=1, cancels=0)) == [
            "0 of the kind cancelled cancelled, 1 expected", "0 cancels, 1 expected",
        ]  # fmt: skip


def test_a_sample_has_every_relation_and_what_a_process_uses(
    queue: JobQueue, database: str, tmp_path: Path
) -> None:
    queue.enqueue("soak.no_op", {"number": 1})
    log = tmp_path / "log"
    log.write_text("four")
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    sampler = Sampler(database, {"worker 1": (os.getpid(), log)}, os.getpid())
    try:
        sample = sampler.read("before")
    finally:
        sampler.close()
    assert sample.sizes.keys() >= {
        "live_jobs",
        "live_jobs_pending",
        "finished_jobs",
        "lanes",
        "system catalog",
    }
    assert sample.cpu["server"] > 0
    used = sample.processes["worker 1"]
    assert used.memory > 10**6
    assert used.threads >= 1
    assert used.log == 4
    assert usage(2**22 + 1, log).memory == 0


def test_a_load_keeps_its_mixture_at_another_rate() -> None:
    assert sum(MIXED.values()) == 1150
    assert scaled(MIXED, 115)["no_op"] == pytest.approx(56)


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    """What can be counted: rows, events, keys, descriptors, threads, log lines. Times need the long form."""
    result = tmp_path / "soak.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "bench.soak", "--minutes", "0.6", "--held", "0.15", "--rate", "150",
            "--counts-only", "--report", str(tmp_path / "soak.md"), "--json", str(result),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(result.read_text())
    assert found["wrong"] == []
    assert found["jobs"] > 2000
    assert (tmp_path / "plots" / "soak-times.svg").exists()
