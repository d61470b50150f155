"""docs/soak.md: a table with every curve, its verdict, and plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.plots import lines
from howdah import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.soak.curves import Curve

STEPS = 24
"""The number of steps of a plot; each is the mean of its samples."""
LABELS = 8
PLOTS = {
    "soak-sizes.svg": (
        "Size of the live tables and indexes", "MB",
        ("size of live_jobs", "size of live_jobs_pending", "size of idempotency_keys", "size of lanes"),
    ),
    "soak-dead.svg": ("Dead rows", "rows", ("dead rows of live_jobs", "dead rows of lanes")),
    "soak-times.svg": (
        "Mean time of a statement, by pg_stat_statements", "ms",
        ("mean time of claim_runs", "mean time of complete_runs", "mean time of enqueue_jobs"),
    ),
    "soak-duties.svg": (
        "Time of the maintenance duties", "ms",
        ("time of sweep", "time of recover", "time of prune", "time of keys"),
    ),
    "soak-memory.svg": ("Memory of the workers", "MB", ("memory of worker 1", "memory of worker 2")),
}  # fmt: skip
HEAD = """\
# Soak

`make soak` generates this page. It runs a mixed load for half an hour on a temporary PostgreSQL, holds a transaction
open for a part of it, reads every relation, statement, duty and process every few seconds, and judges every curve. Do
not edit this page by hand.

{minutes:g} minutes of the load "{load}", {jobs:,} jobs ({rate:,.0f} per second), a transaction held open for {held:g}
minutes. Howdah {version}, Python {python}, {cores} cores ({processor}), {measured_on}.

{verdict}

- *flat*: the last third of a phase lies at most a quarter above its first third. For times: at most twice the mean
  before while the transaction is held, and one and a half times after it. A statement whose calls handle as many rows
  as have piled up is slower only if its time per call and its time per row are.
- *bounded*: it grows up to the named bound. For times: more than twice the mean before while the transaction is held, and
  the last third of that phase at most a quarter above its first third.
- *growing*: neither; `make soak` fails.
- *not judged*: the phases of the run are too short for sizes and times.

The means of the three phases: before the transaction is held, while it is held, and after.

"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was run."""

    minutes: float
    held: float
    load: str
    jobs: int
    machine: dict[str, str | int | float]


def write(path: Path, found: Sequence[Curve], wrong: Sequence[str], facts: Facts) -> None:
    """Write the page, and its plots beside it."""
    path.write_text(page(found, wrong, facts))
    folder = path.parent / "plots"
    folder.mkdir(exist_ok=True)
    for name, drawing in plots(found).items():
        (folder / name).write_text(drawing)


def page(found: Sequence[Curve], wrong: Sequence[str], facts: Facts) -> str:
    """The page as Markdown."""
    growing = sum(curve.verdict.failed for curve in found)
    verdict = "**No curve grows, and every count is right.**"
    if growing or wrong:
        verdict = f"**{growing} curves grow, {len(wrong)} counts are wrong.**"
    text = HEAD.format(
        minutes=facts.minutes, load=facts.load, jobs=facts.jobs, held=facts.held,
        rate=facts.jobs / facts.minutes / 60, version=__version__, verdict=verdict, **facts.machine,
    )  # fmt: skip
    text += (
        "| curve | unit | before | held | after | verdict | |\n|---|---|---:|---:|---:|---|---|\n"
    )
    for curve in found:
        means = " | ".join(_figure(curve.mean(phase)) for phase in ("before", "held", "after"))
        verdict = f"**{curve.verdict.kind}**" if curve.verdict.failed else curve.verdict.kind
        text += f"| {curve.name} | {curve.unit} | {means} | {verdict} | {curve.verdict.words} |\n"
    if wrong:
        text += "\n## Wrong counts\n\n" + "".join(f"- {sentence}\n" for sentence in wrong)
    text += "\n## Plots\n\nOver the minutes of the run.\n"
    drawn = plots(found)
    return text + "".join(
        f"\n![{title}](plots/{name})\n" for name, (title, _, _) in PLOTS.items() if name in drawn
    )


def plots(found: Sequence[Curve]) -> dict[str, str]:
    """The SVG files, by name."""
    by_name = {curve.name: curve for curve in found}
    drawn = {}
    for file, (title, unit, names) in PLOTS.items():
        chosen = [by_name[name] for name in names if name in by_name]
        if chosen:
            drawn[file] = _plot(title, unit, chosen)
    return drawn


def _plot(title: str, unit: str, chosen: Sequence[Curve]) -> str:
    end = max(point.t for curve in chosen for point in curve.points)
    step = end / STEPS
    labels = [f"{n * step / 60:.3g}" if n % (STEPS // LABELS) == 0 else "" for n in range(STEPS)]
    series = {_short(curve.name): _means(curve, step) for curve in chosen}
    return lines(title, unit, labels, series)


def _means(curve: Curve, step: float) -> list[float | None]:
    buckets: list[list[float]] = [[] for _ in range(STEPS)]
    for point in curve.points:
        buckets[min(STEPS - 1, int(point.t / step))].append(point.value)
    return [sum(values) / len(values) if values else None for values in buckets]


def _short(name: str) -> str:
    return name.rpartition(" of ")[2]


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def as_json(found: Sequence[Curve], wrong: Sequence[str], facts: Facts) -> dict[str, Any]:
    """The result for programs."""
    return {
        "minutes": facts.minutes,
        "held": facts.held,
        "load": facts.load,
        "jobs": facts.jobs,
        "wrong": list(wrong),
        "curves": [
            {
                "name": curve.name,
                "unit": curve.unit,
                "verdict": curve.verdict.kind,
                "words": curve.verdict.words,
                "counted": curve.counted,
                **{phase: curve.mean(phase) for phase in ("before", "held", "after")},
            }
            for curve in found
        ],
    }
