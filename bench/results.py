"""The measured rounds, with their medians and spreads. Every figure of the report comes from `bench/results.json`,
which is written after each round.

    {"howdah": {…}, "machine": {…}, "postgres": {…}, "redis": {…}, "versions": {…}, "skipped": {…},
     "rounds": [{"workload": …, "peer": …, "round": 1, "figures": {"jobs_per_second": 1.0}, "facts": {…}}]}
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"
# The figures that other pages quote: workload and figure of Howdah's rounds.
SUMMARY = {
    "jobs_per_second": ("drain-async", "jobs_per_second"),
    "pickup_p50_ms": ("pickup-idle", "call_p50_ms"),
    "commit_p50_ms": ("pickup-commit", "commit_p50_ms"),
    "bulk_enqueues_per_second": ("enqueue-bulk", "jobs_per_second"),
    "concurrent_enqueues_per_second": ("enqueue-64", "jobs_per_second"),
}


@dataclass(frozen=True)
class Summary:
    """The summary of one figure over its rounds."""

    median: float
    low: float
    high: float
    rounds: int


class Results:
    """All results, in a file. A workload that runs again replaces its older rounds."""

    def __init__(self, path: Path = RESULTS) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.content.setdefault("rounds", [])

    @property
    def rounds(self) -> list[dict[str, Any]]:
        rounds: list[dict[str, Any]] = self.content["rounds"]
        return rounds

    def describe(self, **facts: Any) -> None:
        """Set facts about the whole run: machine, versions, settings, skipped peers."""
        self.content.update(facts)

    def leave_out(self, what: str, why: str) -> None:
        """Record what has no figures, and why; of a long text only the first and the last line."""
        lines = [line.strip() for line in why.splitlines() if line.strip()] or ["?"]
        short = lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"
        self.content.setdefault("skipped", {})[what] = short

    def forget(self, workload: str) -> None:
        """Drop the rounds of a workload, and of its parts: `a` has the parts `a-b` and `a-c`."""
        kept = [r for r in self.rounds if not f"{r['workload']}-".startswith(f"{workload}-")]
        self.content["rounds"] = kept

    def record(
        self,
        workload: str,
        peer: str,
        number: int,
        figures: dict[str, float],
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Add one round and save."""
        self.rounds.append(
            {
                "workload": workload,
                "peer": peer,
                "round": number,
                "figures": figures,
                "facts": facts or {},
            }
        )
        self.save()

    def peers(self, workload: str) -> list[str]:
        """The peers of a workload, in the order of their first rounds."""
        return list(dict.fromkeys(r["peer"] for r in self.rounds if r["workload"] == workload))

    def values(self, workload: str, peer: str, figure: str) -> list[float]:
        return list(self.by_round(workload, peer, figure).values())

    def by_round(self, workload: str, peer: str, figure: str) -> dict[int, float]:
        """A figure, by the numbers of the rounds that have it."""
        return {
            r["round"]: r["figures"][figure]
            for r in self.rounds
            if (r["workload"], r["peer"]) == (workload, peer) and figure in r["figures"]
        }

    def summary(self, workload: str, peer: str, figure: str) -> Summary | None:
        """Median and spread of a figure, if it was measured."""
        values = self.values(workload, peer, figure)
        if not values:
            return None
        return Summary(statistics.median(values), min(values), max(values), len(values))

    def ratios(
        self, workload: str, peer: str, other: str, figure: str, base: str = ""
    ) -> Summary | None:
        """The peer's figure divided by the other's, in the same workload or in a base workload, round by round:
        rounds with equal numbers ran close in time."""
        mine = self.by_round(workload, peer, figure)
        theirs = self.by_round(base or workload, other, figure)
        ratios = [mine[n] / theirs[n] for n in mine if theirs.get(n)]
        if not ratios:
            return None
        return Summary(statistics.median(ratios), min(ratios), max(ratios), len(ratios))

    def save(self) -> None:
        quoted = {}
        for name, (workload, figure) in SUMMARY.items():
            found = self.summary(workload, "howdah", figure)
            if found is not None:
                quoted[name] = round(found.median, 3)
        self.content = {"howdah": quoted} | {
            key: value for key, value in self.content.items() if key != "howdah"
        }
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the sample does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
