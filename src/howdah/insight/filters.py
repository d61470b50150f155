"""The conditions of `--where`: `status=failed`, `age>2h`, `data.user.id=42`. Pure: text becomes SQL
with placeholders, and values become parameters. A value never becomes part of the SQL.

    condition  = name operator value
    name       = id type queue status priority attempts progress worker request_id ordering_key error
                 age older newer data.MEMBER[.MEMBER…]
    operator   = "=" "!=" "<" "<=" ">" ">=" "~"

`~` tests whether the text contains the value, ignoring case; for `error`, `=` does the same. `status` takes
several values, separated by commas. `age` compares the time since the enqueue with a duration; `older=5m`
and `newer=5m` are short for `age>5m` and `age<5m`. A value for `data` is parsed as JSON if possible, and is
a string otherwise; `42` matches the number and the string. A missing member is null."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from howdah.encoding.validation import check_option_text
from howdah.errors import InvalidOption, did_you_mean
from howdah.insight.durations import parse_duration
from howdah.model import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONDITION = re.compile(r"\s*([\w.\-]+?)\s*(!=|<=|>=|=|<|>|~)(.*)", re.DOTALL)

_TEXTS = {
    "type": "job_type",
    "queue": "queue",
    "worker": "worker_id",
    "request_id": "request_id",
    "ordering_key": "ordering_key",
}
_NUMBERS = ("priority", "attempts", "progress")
_ALIASES = {"job_type": "type", "worker_id": "worker", "last_error": "error"}
NAMES = ("id", "status", *_TEXTS, *_NUMBERS, "error", "age", "older", "newer")
_EQUAL = ("=", "!=")
_ORDER = ("=", "!=", "<", "<=", ">", ">=")


@dataclass(frozen=True, slots=True)
class Condition:
    """An SQL expression over the view `jobs`, with one `{}` for each of its values, in order."""

    name: str
    text: str
    values: tuple[Any, ...]


def conjunction(conditions: Sequence[Condition]) -> tuple[str, list[Any]]:
    """All conditions as one SQL expression with `$1` placeholders, and its parameters."""
    values: list[Any] = []
    parts = []
    for condition in conditions:
        places = []
        for value in condition.values:
            values.append(value)
            places.append(f"${len(values)}")
        parts.append(f"({condition.text.format(*places)})")
    return " AND ".join(parts) or "true", values


def any_of(name: str, wanted: Sequence[str]) -> Condition:
    """The condition that a status, type or queue is one of several values."""
    column = _TEXTS.get(name, name)
    return Condition(name, f"{column} = ANY ({{}}::text[])", (list(wanted),))


def parse_condition(text: str) -> Condition:
    """Parse one condition. `InvalidOption` says what is wrong with it and suggests a correction."""
    check_option_text(text)
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise InvalidOption(
            f'"{text}" is not a condition; write a name, an operator and a value, as in status=failed, '
            "data.path=a.png or age>2h."
        )
    name, operator, value = found[1], found[2], found[3].strip()
    name = _ALIASES.get(name, name)
    if name == "data" or name.startswith("data."):
        return _data(name, operator, value)
    if name not in NAMES:
        hint = did_you_mean(name, NAMES) or f"; use {', '.join(NAMES)} or data.MEMBER."
        raise InvalidOption(f'unknown column "{name}"{hint}')
    if name in _TEXTS:
        return _text(name, operator, value)
    if name in _NUMBERS:
        return _number(name, operator, value)
    if name == "error":
        _check_operator(name, operator, ("=", "!=", "~"))
        contains = "position(lower({}::text) IN lower(coalesce(last_error, ''))) > 0"
        return Condition(name, f"NOT {contains}" if operator == "!=" else contains, (value,))
    if name == "status":
        return _status(operator, value)
    if name == "id":
        _check_operator(name, operator, _EQUAL)
        return Condition(name, f"id {_sql(operator)} {{}}::uuid", (_uuid(value),))
    return _age(name, operator, value)


def _check_operator(name: str, operator: str, allowed: Sequence[str]) -> None:
    if operator not in allowed:
        raise InvalidOption(f'"{name}" cannot be compared with {operator}; use {" ".join(allowed)}')


def _sql(operator: str) -> str:
    return "<>" if operator == "!=" else operator


def _text(name: str, operator: str, value: str) -> Condition:
    _check_operator(name, operator, ("=", "!=", "~"))
    column = _TEXTS[name]
    if operator == "~":
        text = f"position(lower({{}}::text) IN lower(coalesce({column}, ''))) > 0"
        return Condition(name, text, (value,))
    same = "IS DISTINCT FROM" if operator == "!=" else "="
    return Condition(name, f"{column} {same} {{}}::text", (value,))


def _number(name: str, operator: str, value: str) -> Condition:
    _check_operator(name, operator, _ORDER)
    if not re.fullmatch(r"[+-]?\d{1,9}", value):
        raise InvalidOption(f'"{name}" is compared with a whole number, not "{value}".')
    return Condition(name, f"{name} {_sql(operator)} {{}}::int", (int(value),))


def parse_status(value: str) -> Status:
    """Parse the name of a status."""
    if value not in set(Status):
        hint = did_you_mean(value, Status) or f"; use {', '.join(Status)}."
        raise InvalidOption(f'unknown status "{value}"{hint}')
    return Status(value)


def _status(operator: str, value: str) -> Condition:
    _check_operator("status", operator, _EQUAL)
    wanted = [str(parse_status(each.strip())) for each in value.split(",")]
    among = "status = ANY ({}::text[])"
    return Condition("status", f"NOT {among}" if operator == "!=" else among, (wanted,))


def _uuid(value: str) -> UUID:
    try:
        return UUID(value)
    except ValueError:
        raise InvalidOption(f'"{value}" is not a complete job id.') from None


def _age(name: str, operator: str, value: str) -> Condition:
    if name != "age":
        _check_operator(name, operator, ("=",))
        operator = ">" if name == "older" else "<"
    _check_operator(name, operator, ("<", "<=", ">", ">="))
    flipped = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}[operator]
    text = f"created_at {flipped} clock_timestamp() - {{}}::interval"
    return Condition(name, text, (parse_duration(value),))


def _data(name: str, operator: str, value: str) -> Condition:
    path = name.split(".")[1:]
    if not path or not all(path):
        raise InvalidOption(
            f'"{name}" does not name a member of the data; write it as in data.user.id=42.'
        )
    if operator == "~":
        text = "position(lower({}::text) IN lower(coalesce(data #>> {}::text[], ''))) > 0"
        return Condition(name, text, (value, path))
    parsed = parse_value(value)
    if operator in _EQUAL:
        text = "coalesce(data #> {}::text[], 'null') = {}::text::jsonb OR data #>> {}::text[] = {}::text"
        if operator == "!=":
            text = f"NOT coalesce({text}, false)"
        return Condition(name, text, (path, json.dumps(parsed), path, value))
    if isinstance(parsed, bool) or not isinstance(parsed, int | float):
        raise InvalidOption(f'{operator} compares numbers; "{value}" is not a number.')
    text = (
        "CASE WHEN jsonb_typeof(data #> {}::text[]) = 'number' "
        f"THEN (data #>> {{}}::text[])::numeric {operator} {{}}::text::numeric END"
    )
    return Condition(name, text, (path, path, json.dumps(parsed)))


def parse_value(text: str) -> Any:
    """Parse a value: JSON if it can be parsed and stored, otherwise the text itself."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        # PostgreSQL rejects NaN, Infinity, 1e999, NUL characters and lone surrogates.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return text if "\\u0000" in text else value


def _refuse(name: str) -> Any:
    raise ValueError(name)
