"""Writes the figures in the decision table of the skill. They come only from bench/results.json.

Without that file, or without an entry in it, the table has no figure. `--check` changes nothing and exits with 1 if
the table is outdated.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "src/howdah/skill/postgres-job-queue/SKILL.md"
RESULTS = ROOT / "bench/results.json"
# First cell of a row: the path of the figure in the results, and its format.
FIGURES = {
    "Sub-millisecond latency": (
        "howdah.pickup_p50_ms",
        "{:.1f} ms from the call to the start, idle worker",
    ),
    "Under 1,000 jobs/s": ("howdah.jobs_per_second", "{:,.0f} jobs/s with one worker process"),
    "Over 10,000 jobs/s": ("howdah.bulk_enqueues_per_second", "{:,.0f} jobs/s enqueued in bulk"),
}
MEASURED = re.compile(r" Measured: [^|]*?\.(?= \|$)")


def find(results: Any, path: str) -> float | None:
    """The number at a dotted path, or None."""
    for member in path.split("."):
        results = results.get(member) if isinstance(results, dict) else None
    return None if isinstance(results, bool) or not isinstance(results, int | float) else results


def fill(page: str, results: Any) -> str:
    """The page with exactly the figures of the results."""
    lines = []
    for line in page.splitlines(keepends=True):
        row = line.rstrip("\n")
        path, text = FIGURES.get(row.strip("|").split("|")[0].strip(), ("", ""))
        if path:
            figure = find(results, path)
            row = MEASURED.sub("", row)
            if figure is not None:
                row = f"{row.removesuffix(' |')} Measured: {text.format(figure)}. |"
        lines.append(row + line[len(line.rstrip("\n")) :])
    return "".join(lines)


def main() -> int:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    page = PAGE.read_text()
    filled = fill(page, results)
    missing = [path for path, _ in FIGURES.values() if find(results, path) is None]
    if missing and RESULTS.exists():
        print(f"{RESULTS.name} has no number at {', '.join(missing)}", file=sys.stderr)
    if "--check" in sys.argv[1:]:
        return int(filled != page)
    if filled != page:
        PAGE.write_text(filled)
    return int(bool(missing) and RESULTS.exists())


if __name__ == "__main__":
    sys.exit(main())
