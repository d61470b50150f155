"""Durations as people write and read them: "5m" in, "5 min" out."""

from __future__ import annotations

import re
from datetime import timedelta

from howdah.errors import InvalidOption

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)", re.IGNORECASE)
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_LONGEST = timedelta(days=36500)


def parse_duration(text: str) -> timedelta:
    """ "90s", "5m", "2h", "7d", "1.5h" or "1h30m" as a duration."""
    compact = text.strip().replace(" ", "")
    parts = _DURATION.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise InvalidOption(f'"{text}" is not a duration; write it as 30s, 5m, 2h or 7d.')
    seconds = sum(float(number) * _UNITS[unit.lower()] for number, unit in parts)
    if seconds > _LONGEST.total_seconds():
        raise InvalidOption(f'"{text}" is longer than a hundred years.')
    return timedelta(seconds=seconds)


def format_duration(duration: timedelta) -> str:
    """A duration in a readable unit: 12 ms, 3.2 s, 4 min, 2 h 5 min, 3 days."""
    seconds = max(0.0, duration.total_seconds())
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{minutes // 1440} days"
