"""Parsing of conditions. tests/cli/test_jobs.py tests which jobs they match."""

from __future__ import annotations

import pytest

from howdah.insight.filters import any_of, conjunction, parse_condition, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [("400", 400), ("1.5", 1.5), ("true", True), ("null", None), ('"42"', "42"), ("[1]", [1]),
     ("a.png", "a.png"), ("", ""), ("NaN", "NaN"), ("1e999", "1e999"), ("01234", "01234"),
     ('"\\ud800"', '"\\ud800"'), ("[" * 5000, "[" * 5000)],
)  # fmt: skip
def test_a_value_is_json_if_possible_and_a_string_otherwise(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_values_never_become_part_of_the_sql() -> None:
    hostile = "'; DROP TABLE jobs; --"
    conditions = [
        parse_condition(f"type={hostile}"),
        parse_condition(f"data.a.b={hostile}"),
        any_of("status", [hostile]),
    ]
    text, values = conjunction(conditions)
    assert "DROP" not in text
    assert text.count("$") == len(values) == 6
    assert conjunction([]) == ("true", [])
