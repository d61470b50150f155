"""The curves of a soak: what each is made of, and the rule that it must satisfy."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.soak import verdicts
from bench.soak.samples import STATEMENTS
from bench.soak.verdicts import Point, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.soak.samples import Sample, Usage

MB = 2**20
HISTORY = ("finished_jobs", "job_events")
"""Tables that grow with what users keep; their indexes have the same prefix."""
LOG_BYTES_PER_SECOND = 1000.0
"""Of one worker: a few lines a second at most, whatever fails."""
DEAD_SLACK_ROWS = 40_000
"""What the load leaves dead between two vacuums of a table, with room for a late one."""

DUTY_SLACK_MS = 2.0
CALLS, ROWS = 0, 2
"""Positions in `Sample.statements`."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve with its verdict. `counted`: it means something in a run of a minute on a busy machine."""

    name: str
    unit: str
    points: Sequence[Point]
    verdict: Verdict
    counted: bool = False

    def mean(self, phase: str) -> float | None:
        """The mean of a phase."""
        values = [point.value for point in self.points if point.phase == phase]
        return sum(values) / len(values) if values else None


def curves(samples: Sequence[Sample], claimer: Path, began: float) -> list[Curve]:
    """Every curve of a run that began at a monotonic time; `claimer` has the times of single claims."""
    return [
        *_sizes(samples), *_dead(samples), *_statements(samples), *_single_claims(samples, claimer, began),
        *_duties(samples), *_cpu(samples), *_wal(samples), *_processes(samples),
    ]  # fmt: skip


def only_counts(found: Sequence[Curve]) -> list[Curve]:
    """The curves of a run whose phases are too short for sizes and times."""
    short = Verdict("not judged", "the run is too short")
    return [curve if curve.counted else replace(curve, verdict=short) for curve in found]


def _sizes(samples: Sequence[Sample]) -> Iterator[Curve]:
    small = [name for name in samples[-1].sizes if max(s.sizes.get(name, 0) for s in samples) < MB]
    points = [Point(s.t, sum(s.sizes.get(n, 0) for n in small) / MB, s.phase) for s in samples]
    name = f"size of {len(small)} relations under 1 MB"
    yield Curve(name, "MB", points, verdicts.steady(points, slack=1.0))
    for name in sorted(samples[-1].sizes.keys() - set(small)):
        table = next((each for each in HISTORY if name.startswith(each)), None)
        if table is None:
            points = [Point(s.t, s.sizes.get(name, 0) / MB, s.phase) for s in samples]
            yield Curve(f"size of {name}", "MB", points, verdicts.steady(points, slack=1.0))
        else:
            points = [
                Point(s.t, s.sizes.get(name, 0) / s.rows[table], s.phase)
                for s in samples
                if s.rows.get(table)
            ]
            verdict = verdicts.per_row(points, "the retention of the history")
            yield Curve(f"size of {name} per row", "bytes", points, verdict)


def _dead(samples: Sequence[Sample]) -> Iterator[Curve]:
    for name in sorted(samples[-1].dead):
        points = [Point(s.t, s.dead.get(name, 0), s.phase) for s in samples]
        if max(point.value for point in points) > 1000:
            verdict = verdicts.dead_rows(points, DEAD_SLACK_ROWS)
            yield Curve(f"dead rows of {name}", "rows", points, verdict)


def _statements(samples: Sequence[Sample]) -> Iterator[Curve]:
    for name in STATEMENTS:
        per_call, per_row = (
            [
                Point(after.t, (b[1] - a[1]) / (b[position] - a[position]), after.phase)
                for before, after in itertools.pairwise(samples)
                if (a := before.statements.get(name)) and (b := after.statements.get(name))
                if b[position] > a[position]
            ]
            for position in (CALLS, ROWS)
        )
        if per_call:
            verdict = verdicts.batched(per_call, per_row)
            yield Curve(f"mean time of {name}", "ms", per_call, verdict)


def _single_claims(samples: Sequence[Sample], claimer: Path, began: float) -> Iterator[Curve]:
    """The times that the client measured."""
    lines = [json.loads(line) for line in claimer.read_text().splitlines()]
    for figure in ("mean", "p95"):
        points = [Point(x["t"] - began, x[figure], _phase(samples, x["t"] - began)) for x in lines]
        name = f"claim of one job, {figure}, client"
        yield Curve(name, "ms", points, verdicts.duration(points))


def _phase(samples: Sequence[Sample], t: float) -> str:
    return next((sample.phase for sample in reversed(samples) if sample.t <= t), "before")


def _duties(samples: Sequence[Sample]) -> Iterator[Curve]:
    for name in sorted(samples[-1].duties):
        runs = {s.duties[name][0]: (s, s.duties[name][1]) for s in samples if name in s.duties}
        points = [Point(sample.t, took, sample.phase) for sample, took in runs.values()]
        if len(points) >= verdicts.MIN_POINTS:
            # Only the sweep reads what a held transaction keeps; the others take about a millisecond.
            verdict = verdicts.single_runs(points, slack=0.0 if name == "sweep" else DUTY_SLACK_MS)
            yield Curve(f"time of {name}", "ms", points, verdict)


def _cpu(samples: Sequence[Sample]) -> Iterator[Curve]:
    """What other programs of the machine do not change, unlike a time."""
    for name in samples[-1].cpu:
        points = [
            Point(b.t, (b.cpu[name] - a.cpu[name]) * 1e6 / (b.enqueued - a.enqueued), b.phase)
            for a, b in itertools.pairwise(samples)
            if b.enqueued > a.enqueued
        ]
        yield Curve(f"CPU of the {name} per job", "µs", points, verdicts.duration(points))


def _wal(samples: Sequence[Sample]) -> Iterator[Curve]:
    points = [
        Point(b.t, (b.wal - a.wal) / (b.enqueued - a.enqueued), b.phase)
        for a, b in itertools.pairwise(samples)
        if b.enqueued > a.enqueued
    ]
    yield Curve("WAL per job", "bytes", points, verdicts.duration(points))


def _processes(samples: Sequence[Sample]) -> Iterator[Curve]:
    figures: list[tuple[str, str, Callable[[Usage], float], float]] = [
        ("memory", "MB", lambda usage: usage.memory / MB, 10.0),
        ("descriptors", "open", lambda usage: usage.descriptors, 6.0),
        ("threads", "threads", lambda usage: usage.threads, 6.0),
    ]
    for name in samples[-1].processes:
        for what, unit, figure, slack in figures:
            points = [Point(s.t, figure(s.processes[name]), s.phase) for s in samples]
            verdict = verdicts.steady(points, slack)
            yield Curve(f"{what} of {name}", unit, points, verdict, counted=what != "memory")
        points = [
            Point(b.t, (b.processes[name].log - a.processes[name].log) / (b.t - a.t), b.phase)
            for a, b in itertools.pairwise(samples)
        ]
        verdict = verdicts.at_most(points, LOG_BYTES_PER_SECOND, "bytes of log a second")
        yield Curve(f"log of {name}", "bytes/s", points, verdict, counted=True)
