"""What was to be reached, and whether the results reach it. The figures are the results' own; only the reason
why a bar was missed is written by hand, in `reasons.toml`, and it is told only while the bar is missed."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import growth, peers

if TYPE_CHECKING:
    from bench.results import Results, Summary

REASONS = Path(__file__).parent / "reasons.toml"
TITLES = {peer.name: peer.title for peer in peers.PEERS}
CEILINGS = {peer.name for peer in peers.PEERS if peer.is_ceiling}
MOST_DEAD = f"growth-held-{growth.DEAD[-1]}"
BEST = "the best peer"


@dataclass(frozen=True)
class Bar:
    """One goal: a figure of Howdah's, by itself or over another's, and where it has to lie."""

    key: str
    """Its name in `reasons.toml`."""
    label: str
    workload: str
    figure: str
    goal: float
    at_least: bool = True
    unit: str = "×"
    over: str = ""
    """Whose figure it is divided by: a peer's, the best peer's, or nobody's."""
    base: str = ""
    """The other workload that it is compared with, if it is one of Howdah's own."""

    def goal_told(self) -> str:
        sign = ">=" if self.at_least else "<=" if self.unit == "×" else "<"
        return f"{sign} {self.goal:g} {self.unit}"

    def reached(self, found: Summary) -> bool:
        if self.at_least:
            return found.median >= self.goal
        return found.median <= self.goal if self.unit == "×" else found.median < self.goal


BARS = (
    Bar("drain-graphile", "no-op jobs, over Graphile Worker", "drain-async", "jobs_per_second", 3, over="graphile"),
    Bar("drain-pgqueuer", "no-op jobs, over PgQueuer", "drain-async", "jobs_per_second", 4, over="pgqueuer"),
    Bar("drain-celery", "no-op jobs, over Celery", "drain-async", "jobs_per_second", 20, over="celery"),
    Bar("drain-bare", "no-op jobs, over the bare loop", "drain-async", "jobs_per_second", 0.7, over="bare"),
    Bar("pickup-call", "pick-up p50 from the call, over the best peer", "pickup-idle", "call_p50_ms", 0.6, False, over=BEST),
    Bar("pickup-commit", "pick-up p50 from COMMIT", "pickup-commit", "commit_p50_ms", 1, False, "ms"),
    Bar("bulk", "bulk enqueues, over the best peer", "enqueue-bulk", "jobs_per_second", 3, over=BEST),
    Bar("callers-64", "64 callers at once, over the best peer", "enqueue-64", "jobs_per_second", 5, over=BEST),
    Bar("growth-claims", "claim p99 with 5M waiting, 1M scheduled, 1M blocked, 10M finished, over 10k waiting", "growth-full", "claim_p99_ms", 2, False, over="howdah", base="growth-full-base"),
    Bar("growth-held", "throughput with 1M dead entries behind an open transaction, over none", MOST_DEAD, "jobs_per_second", 0.8, over="howdah", base=f"{MOST_DEAD}-free"),
    Bar("idle", "100 idle workers, load on the server", f"growth-idle-{growth.IDLE}", "server_core_percent", 5, False, "% of a core"),
)  # fmt: skip


def measured(results: Results, bar: Bar) -> tuple[Summary | None, str]:
    """What the results say of a bar, and over whom."""
    if not bar.over:
        return results.summary(bar.workload, "howdah", bar.figure), ""
    other = best_peer(results, bar.workload, bar.figure) if bar.over == BEST else bar.over
    if other is None:
        return None, ""
    found = results.ratios(bar.workload, "howdah", other, bar.figure, bar.base)
    return found, TITLES[other] if bar.over == BEST else ""


def best_peer(results: Results, workload: str, figure: str) -> str | None:
    """Who did best, Howdah and the ceilings aside."""
    found = {
        peer: summary.median
        for peer in results.peers(workload)
        if peer != "howdah"
        and peer not in CEILINGS
        and (summary := results.summary(workload, peer, figure)) is not None
    }
    choose = min if figure.endswith("_ms") else max
    return choose(found, key=lambda peer: found[peer]) if found else None


def chapter(results: Results) -> str:
    """Every bar in a table, then why those were missed that were."""
    reasons = tomllib.loads(REASONS.read_text()) if REASONS.exists() else {}
    lines = ["## Goals", "", "| | goal | measured | |", "|---|---|---|---|"]
    missed = []
    scale = results.content.get("growth", {}).get("scale", 1.0)
    for bar in BARS:
        found, whom = measured(results, bar)
        label = f"{bar.label} ({whom})" if whom else bar.label
        if scale != 1 and bar.base:
            label += f", **all numbers times {scale:g}**"
        if found is None:
            lines.append(f"| {label} | {bar.goal_told()} | – | not measured |")
            continue
        digits = 1 if bar.unit.startswith("%") else 2
        told = f"{found.median:.{digits}f} {bar.unit}"
        if found.rounds > 1:
            told += f" [{found.low:.{digits}f} … {found.high:.{digits}f}]"
        reached = bar.reached(found)
        verdict = "reached" if reached else "**missed**"
        lines.append(f"| {label} | {bar.goal_told()} | {told} | {verdict} |")
        if not reached:
            why = " ".join(reasons.get(bar.key, {}).get("why", "not explained yet").split())
            missed.append(f"- **{label}**: {told}, the goal is {bar.goal_told()}. Why: {why}")
    if missed:
        lines += ["", "### Missed", "", *missed]
    return "\n".join(lines)
