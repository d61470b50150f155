"""The performance goals, and whether the results reach them. The figures come from the results. Only the reason why
a goal was missed is written by hand, in `reasons.toml`, and it is printed only while the goal is missed."""

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
class Goal:
    """One goal: a figure of Howdah, absolute or divided by another figure, and its limit."""

    key: str
    """Its key in `reasons.toml`."""
    label: str
    workload: str
    figure: str
    target: float
    at_least: bool = True
    unit: str = "×"
    over: str = ""
    """The peer whose figure it is divided by, `BEST`, or "" for an absolute figure."""
    base: str = ""
    """The workload of Howdah that it is compared with, if it is compared with itself."""

    def formatted(self) -> str:
        sign = ">=" if self.at_least else "<=" if self.unit == "×" else "<"
        return f"{sign} {self.target:g} {self.unit}"

    def reached(self, found: Summary) -> bool:
        if self.at_least:
            return found.median >= self.target
        return found.median <= self.target if self.unit == "×" else found.median < self.target


GOALS = (
    Goal("drain-graphile", "no-op jobs, compared with Graphile Worker", "drain-async", "jobs_per_second", 3, over="graphile"),
    Goal("drain-pgqueuer", "no-op jobs, compared with PgQueuer", "drain-async", "jobs_per_second", 4, over="pgqueuer"),
    Goal("drain-celery", "no-op jobs, compared with Celery", "drain-async", "jobs_per_second", 20, over="celery"),
    Goal("drain-bare", "no-op jobs, compared with the bare loop", "drain-async", "jobs_per_second", 0.7, over="bare"),
    Goal("pickup-call", "pick-up p50 from the call, compared with the best peer", "pickup-idle", "call_p50_ms", 0.6, False, over=BEST),
    Goal("pickup-commit", "pick-up p50 from COMMIT", "pickup-commit", "commit_p50_ms", 1, False, "ms"),
    Goal("bulk", "bulk enqueues, compared with the best peer", "enqueue-bulk", "jobs_per_second", 3, over=BEST),
    Goal("callers-64", "64 concurrent callers, compared with the best peer", "enqueue-64", "jobs_per_second", 5, over=BEST),
    Goal("growth-claims", "claim p99 with 5M pending, 1M scheduled, 1M blocked, 10M finished, compared with 10k pending", "growth-full", "claim_p99_ms", 2, False, over="howdah", base="growth-full-base"),
    Goal("growth-held", "throughput with 1M dead entries behind an open transaction, compared with none", MOST_DEAD, "jobs_per_second", 0.8, over="howdah", base=f"{MOST_DEAD}-free"),
    Goal("idle", "100 idle workers, server CPU", f"growth-idle-{growth.IDLE}", "server_core_percent", 5, False, "% of a core"),
)  # fmt: skip


def measured(results: Results, goal: Goal) -> tuple[Summary | None, str]:
    """The measured value of a goal, and the title of the peer if it is the best peer."""
    if not goal.over:
        return results.summary(goal.workload, "howdah", goal.figure), ""
    other = best_peer(results, goal.workload, goal.figure) if goal.over == BEST else goal.over
    if other is None:
        return None, ""
    found = results.ratios(goal.workload, "howdah", other, goal.figure, goal.base)
    return found, TITLES[other] if goal.over == BEST else ""


def best_peer(results: Results, workload: str, figure: str) -> str | None:
    """The best peer, without Howdah and the ceilings."""
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
    """A table of all goals, then the reasons of the missed ones."""
    reasons = tomllib.loads(REASONS.read_text()) if REASONS.exists() else {}
    lines = ["## Goals", "", "| | goal | measured | |", "|---|---|---|---|"]
    missed = []
    scale = results.content.get("growth", {}).get("scale", 1.0)
    for goal in GOALS:
        found, whom = measured(results, goal)
        label = f"{goal.label} ({whom})" if whom else goal.label
        if scale != 1 and goal.base:
            label += f", **all numbers times {scale:g}**"
        if found is None:
            lines.append(f"| {label} | {goal.formatted()} | – | not measured |")
            continue
        digits = 1 if goal.unit.startswith("%") else 2
        figure = f"{found.median:.{digits}f} {goal.unit}"
        if found.rounds > 1:
            figure += f" [{found.low:.{digits}f} … {found.high:.{digits}f}]"
        reached = goal.reached(found)
        verdict = "reached" if reached else "**missed**"
        lines.append(f"| {label} | {goal.formatted()} | {figure} | {verdict} |")
        if not reached:
            why = " ".join(reasons.get(goal.key, {}).get("why", "not explained yet").split())
            missed.append(f"- **{label}**: {figure}, the goal is {goal.formatted()}. Why: {why}")
    if missed:
        lines += ["", "### Missed", "", *missed]
    return "\n".join(lines)
