"""Charts as SVG, without a library. Bar charts: one bar per peer, labeled with its median, its spread drawn as a
whisker. Line charts: one line per series, over named steps."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, ROW, TOP, BAR = 760, 190, 110, 30, 58, 18
OURS, THEIRS, CEILING = "#d9822b", "#6b7f99", "#c3ccd8"
INK, FAINT, GRID = "#1f2933", "#6b7280", "#e5e7eb"


@dataclass(frozen=True)
class Bar:
    """The figure of one peer."""

    label: str
    median: float
    low: float
    high: float
    colour: str = THEIRS


def bars(title: str, unit: str, entries: list[Bar]) -> str:
    """A horizontal bar chart that starts at zero; the axis ends at the highest value."""
    most = max((entry.high for entry in entries), default=1.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / most
    bottom = TOP + ROW * len(entries)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{bottom + 34}" rx="6" fill="white"/>',
        f'<text x="16" y="26" font-size="16" font-weight="600" fill="{INK}">{escape(title)}</text>',
        f'<text x="16" y="44" font-size="12" fill="{FAINT}">{escape(unit)}</text>',
    ]
    for value in _ticks(most):
        x = LEFT + value * scale
        out += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom}" stroke="{GRID}"/>',
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" font-size="11" fill="{FAINT}">'
            f"{value:,.10g}</text>",
        ]
    for number, entry in enumerate(entries):
        out += _row(entry, TOP + ROW * number + ROW / 2, scale)
    out.append(f'<line x1="{LEFT}" x2="{LEFT}" y1="{TOP - 4}" y2="{bottom}" stroke="{FAINT}"/>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _row(entry: Bar, middle: float, scale: float) -> list[str]:
    length = max(1.0, entry.median * scale)
    low, high = LEFT + entry.low * scale, LEFT + entry.high * scale
    weight = "600" if entry.colour == OURS else "400"
    label = f"{entry.median:,.0f}" if entry.median >= 100 else f"{entry.median:,.2f}"
    out = [
        f'<text x="{LEFT - 12}" y="{middle + 4:.1f}" text-anchor="end" font-weight="{weight}" '
        f'fill="{INK}">{escape(entry.label)}</text>',
        f'<rect x="{LEFT}" y="{middle - BAR / 2:.1f}" width="{length:.1f}" height="{BAR}" rx="2" '
        f'fill="{entry.colour}"/>',
    ]
    if high - low >= 1:
        out.append(
            f'<path d="M{low:.1f} {middle - 4:.1f}v8m0 -4H{high:.1f}m0 -4v8" fill="none" '
            f'stroke="{INK}" stroke-width="1.2"/>'
        )
    out.append(
        f'<text x="{max(LEFT + length, high) + 8:.1f}" y="{middle + 4:.1f}" font-weight="{weight}" '
        f'fill="{INK}">{label}</text>'
    )
    return out


def _ticks(most: float) -> list[float]:
    """About five round numbers, starting at zero."""
    size = 10.0 ** (len(f"{most:.0f}") - 1) if most >= 1 else 0.1
    while most / size < 1:
        size /= 10
    step = next(
        size * share for share in (0.1, 0.2, 0.25, 0.5, 1, 2, 5) if most / (size * share) <= 6
    )
    return [step * n for n in range(int(most / step) + 1)]


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────

HEIGHT, INDENT, LEGEND = 320, 80, 150
SERIES = (OURS, THEIRS, "#2f6f4f", "#8a4f7d")


@dataclass(frozen=True)
class Frame:
    """Converts values to coordinates."""

    most: float
    steps: int

    def x(self, step: int) -> float:
        return INDENT + 10 + step * (WIDTH - INDENT - 20 - LEGEND) / max(1, self.steps - 1)

    def y(self, value: float) -> float:
        return HEIGHT - 40 - value / self.most * (HEIGHT - 40 - TOP)


def lines(title: str, unit: str, labels: list[str], series: dict[str, list[float | None]]) -> str:
    """A line chart that starts at zero, one line per series; Howdah's comes first."""
    known = [value for values in series.values() for value in values if value is not None]
    frame = Frame(max(known, default=1.0) or 1.0, len(labels))
    end = frame.x(len(labels) - 1) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="white"/>',
        f'<text x="16" y="26" font-size="16" font-weight="600" fill="{INK}">{escape(title)}</text>',
        f'<text x="16" y="44" font-size="12" fill="{FAINT}">{escape(unit)}</text>',
    ]
    for value in _ticks(frame.most):
        y = frame.y(value)
        out += [
            f'<line x1="{INDENT}" x2="{end:.0f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>',
            f'<text x="{INDENT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{FAINT}">{value:,.10g}</text>',
        ]
    for n, label in enumerate(labels):
        out.append(
            f'<text x="{frame.x(n):.1f}" y="{HEIGHT - 18}" text-anchor="middle" fill="{FAINT}">{escape(label)}</text>'
        )
    for number, (name, values) in enumerate(series.items()):
        colour = SERIES[number % len(SERIES)]
        points = [(frame.x(n), frame.y(v)) for n, v in enumerate(values) if v is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        y = TOP + 12 + 22 * number
        out += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points),
            f'<line x1="{end + 16:.0f}" x2="{end + 34:.0f}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>',
            f'<text x="{end + 40:.0f}" y="{y}" fill="{INK}">{escape(name)}</text>',
        ]
    return "\n".join([*out, "</svg>"]) + "\n"
