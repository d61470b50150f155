"""The rules that a curve of a soak must satisfy. Pure functions over the points of one curve.

A run has three phases: before a transaction is held open, while it is held, and after. The start of each phase is
left out: caches fill, and vacuum needs a while to remove what the transaction kept."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Kind = Literal["flat", "bounded", "growing", "not judged"]
Phase = Literal["before", "held", "after"]
PHASES: tuple[Phase, ...] = ("before", "held", "after")
SETTLING_SHARE = 0.25
"""The share of a phase that is left out at its start."""
MIN_POINTS = 6
STEADY_FACTOR = 1.25
"""A curve whose last third lies above its first third by less than this is flat."""
HELD_BAR = 2.0
"""Times while a transaction is held may reach this multiple of those before."""
AFTER_BAR = 1.5


@dataclass(frozen=True, slots=True)
class Point:
    """The value of a curve at a time, in a phase."""

    t: float
    value: float
    phase: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a curve did, in words."""

    kind: Kind
    words: str

    @property
    def failed(self) -> bool:
        return self.kind == "growing"


def phase_values(points: Sequence[Point], phase: Phase) -> list[float]:
    """The values of a phase without its start."""
    values = [point.value for point in points if point.phase == phase]
    return values[int(len(values) * SETTLING_SHARE) :]


def grows(values: Sequence[float], slack: float, level: Callable[[Sequence[float]], float]) -> bool:
    """Whether the last third lies above the first third. `slack` is a difference that does not matter."""
    if len(values) < MIN_POINTS:
        return False
    third = len(values) // 3
    return level(values[-third:]) > STEADY_FACTOR * level(values[:third]) + slack


def steady(points: Sequence[Point], slack: float) -> Verdict:
    """A size or a resource: it must not grow, except while the transaction is held. Files keep the size that they
    reached then."""
    before, after = phase_values(points, "before"), phase_values(points, "after")
    if grows(before, slack, median) or grows(after, slack, median):
        return Verdict("growing", "grows with time")
    if before and after and median(after) > STEADY_FACTOR * median(before) + slack:
        return Verdict("bounded", "grew while the transaction was held, and not since")
    return Verdict("flat", "does not grow")


def dead_rows(points: Sequence[Point], slack: float) -> Verdict:
    """Dead rows: vacuum removes them again and again, except while the transaction is held."""
    before, after = phase_values(points, "before"), phase_values(points, "after")
    if grows(before, slack, max) or grows(after, slack, max):
        return Verdict("growing", "vacuum does not keep up")
    if before and after and max(after) > 2 * max(before) + slack:
        return Verdict("growing", "stayed after the transaction ended")
    held = [point.value for point in points if point.phase == "held"]
    if held and max(held) > 2 * max(before, default=0.0) + slack:
        return Verdict("bounded", "by the length of the transaction: gone after it ended")
    return Verdict("flat", "vacuum keeps up")


def per_row(points: Sequence[Point], what: str) -> Verdict:
    """The bytes per kept row of a history: the history grows with what is kept, and its rows do not."""
    values = phase_values(points, "before") + phase_values(points, "after")
    if not values:
        return Verdict("flat", "has no rows")
    if grows(values, 0.0, median):
        return Verdict("growing", f"more bytes per row: {values[0]:,.0f}, then {values[-1]:,.0f}")
    return Verdict("bounded", f"by {what}: {median(values):,.0f} bytes for each row kept")


def duration(points: Sequence[Point]) -> Verdict:
    """A mean time: it may rise while the transaction is held, and must come back."""
    return _time(points, fmean, 0.0)


def single_runs(points: Sequence[Point], slack: float = 0.0) -> Verdict:
    """The same for a time of which a phase has only some tens of single measurements: their median, since one that
    had to wait for the processor would decide the mean. `slack` is a difference that does not matter."""
    return _time(points, median, slack)


def _time(
    points: Sequence[Point], level: Callable[[Sequence[float]], float], slack: float
) -> Verdict:
    levels = _levels(points, level)
    slow = _slow_phases(levels, slack)
    if not slow:
        return Verdict("flat", _ratios(levels))
    return _while_held(_ratios(levels), slow, grows(phase_values(points, "held"), slack, level))


def _while_held(ratios: str, slow: set[Phase], is_rising: bool) -> Verdict:
    """A time above the bar, but only while the transaction is held. Dead entries of the last seconds are read again
    and again; their number follows from the rate, and must not from the length of the transaction."""
    if slow == {"held"} and not is_rising:
        return Verdict(
            "bounded", f"by the jobs of the last seconds: {ratios}, not more the longer it was held"
        )
    return Verdict("growing", ratios)


def batched(calls: Sequence[Point], rows: Sequence[Point]) -> Verdict:
    """The mean times per call and per row of a statement that handles as many rows as have piled up. A call costs
    a + b × rows. More rows at once raise the time per call, fewer raise the time per row; only if both are above the
    bar of a phase, or rise within it, has a or b grown."""
    per_call, per_row = _levels(calls, fmean), _levels(rows, fmean)
    if not (slow := _slow_phases(per_call)):
        return Verdict("flat", _ratios(per_call))
    ratios = f"{_ratios(per_call)}; per row {_ratios(per_row)}"
    if not (slow := slow & _slow_phases(per_row)):
        return Verdict("flat", ratios)
    is_rising = all(grows(phase_values(each, "held"), 0.0, fmean) for each in (calls, rows))
    return _while_held(ratios, slow, is_rising)


def _levels(
    points: Sequence[Point], level: Callable[[Sequence[float]], float]
) -> dict[Phase, float]:
    return {phase: level(values) for phase in PHASES if (values := phase_values(points, phase))}


def _slow_phases(levels: dict[Phase, float], slack: float = 0.0) -> set[Phase]:
    before = levels.get("before")
    return {
        phase
        for phase, bar in BARS.items()
        if before and levels.get(phase, 0.0) > bar * before + slack
    }


def _ratios(levels: dict[Phase, float]) -> str:
    if not (before := levels.get("before")):
        return "did not run"
    ratios = [f"{levels[p] / before:.2f} × {name}" for p, name in NAMES.items() if p in levels]
    return ", ".join(ratios) or "no transaction was held"


BARS: dict[Phase, float] = {"held": HELD_BAR, "after": AFTER_BAR}
NAMES: dict[Phase, str] = {"held": "while the transaction was held", "after": "after it"}


def at_most(points: Sequence[Point], limit: float, what: str) -> Verdict:
    """A rate with a limit."""
    mean = fmean(point.value for point in points) if points else 0.0
    kind: Kind = "growing" if mean > limit else "bounded"
    return Verdict(kind, f"mean {mean:,.0f}, at most {limit:,.0f} {what}")
