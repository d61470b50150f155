"""How durations are written for people."""

from __future__ import annotations

from datetime import timedelta

import pytest

from howdah.insight.explain import describe


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0 ms"), (0.25, "250 ms"), (0.9999, "1.0 s"), (3.21, "3.2 s"), (42.4, "42 s"),
        (59.99, "1 min"), (150, "2 min"), (3600, "1 h"), (7500, "2 h 5 min"), (3 * 86400, "3 days"),
        (-5, "0 ms"),
    ],
)  # fmt: skip
def test_durations_are_described_as_people_do(seconds: float, text: str) -> None:
    assert describe(timedelta(seconds=seconds)) == text
