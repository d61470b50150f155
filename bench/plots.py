"""Bar charts as SVG, with no library: one bar for each peer, its median labelled, its spread drawn as a line."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, ROW, TOP = 720, 170, 120, 30, 46
OURS, THEIRS, CEILING = "#d9822b", "#6b7f99", "#c3ccd8"


@dataclass(frozen=True)
class Bar:
    """One peer's figure."""

    label: str
    median: float
    low: float
    high: float
    colour: str = THEIRS


def bars(title: str, unit: str, entries: list[Bar]) -> str:
    """A horizontal chart, longest bar as wide as the paper allows."""
    most = max((entry.high for entry in entries), default=1.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / most
    height = TOP + ROW * len(entries) + 14
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="14" y="26" font-size="15" fill="#222">{escape(title)} ({escape(unit)})</text>',
    ]
    for number, entry in enumerate(entries):
        y = TOP + ROW * number
        middle = y + ROW / 2 - 2
        length = max(1.0, entry.median * scale)
        low, high = LEFT + entry.low * scale, LEFT + entry.high * scale
        label = f"{entry.median:,.0f}" if entry.median >= 100 else f"{entry.median:,.2f}"
        out += [
            f'<text x="{LEFT - 10}" y="{middle + 4:.0f}" text-anchor="end" fill="#222">'
            f"{escape(entry.label)}</text>",
            f'<rect x="{LEFT}" y="{y + 3}" width="{length:.1f}" height="{ROW - 10}" '
            f'fill="{entry.colour}"/>',
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
            'stroke="#222" stroke-width="1.5"/>',
            f'<text x="{max(LEFT + length, high) + 8:.1f}" y="{middle + 4:.0f}" fill="#222">'
            f"{label}</text>",
        ]
    return "\n".join([*out, "</svg>"]) + "\n"
