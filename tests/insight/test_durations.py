"""Parsing and formatting of durations."""

from __future__ import annotations

from datetime import timedelta

import pytest

from howdah import InvalidOption
from howdah.insight.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0 ms"), (0.25, "250 ms"), (0.9999, "1.0 s"), (3.21, "3.2 s"), (42.4, "42 s"),
        (59.99, "1 min"), (150, "2 min"), (3600, "1 h"), (7500, "2 h 5 min"), (3 * 86400, "3 days"),
        (-5, "0 ms"),
    ],
)  # fmt: skip
def test_durations_are_formatted_in_a_readable_unit(seconds: float, text: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("5min", 300), ("2h", 7200), ("7d", 604800), ("1w", 604800),
     ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), (" 5 m ", 300), ("0s", 0)],
)  # fmt: skip
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "5 minutes", "5m!", "1e9s", "٥m²"])
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_duration(text)
    assert str(caught.value) == f'"{text}" is not a duration; write it as 30s, 5m, 2h or 7d.'


def test_a_duration_over_a_hundred_years_is_rejected() -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_duration("99999999d")
    assert str(caught.value) == '"99999999d" is longer than a hundred years.'
