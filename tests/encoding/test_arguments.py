"""Arguments are decoded from JSON in one pass if they fit, and one by one otherwise, with the same result."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from howdah.context import Context
from howdah.encoding.arguments import Arguments
from howdah.errors import InvalidJob


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Box:
    width: int
    label: str = "none"


def plain(number: int, text: str) -> None: ...
def defaults(number: int, text: str = "x", *, flag: bool = False) -> None: ...
def with_context(ctx: Context, number: int) -> None: ...
def rich(at: datetime, of: UUID, box: Box, colour: Colour, path: Path, sum_: Decimal) -> None: ...
def loose(anything, number: float = 1.5) -> None: ...  # type: ignore[no-untyped-def]
def nested(pairs: dict[int, list[Box]], maybe: timedelta | None = None) -> None: ...
def variadic(first: int, *rest: int, **named: str) -> None: ...
def nothing() -> None: ...


ID = "018f2b5c-0000-7000-8000-000000000000"
RICH = {
    "at": "2026-01-02T03:04:05Z", "of": ID, "box": {"width": 1}, "colour": "red", "path": "a/b",
    "sum_": "1.10",
}  # fmt: skip
CASES: list[tuple[Callable[..., None], Any]] = [
    (plain, {"number": 1, "text": "ä\u2028"}),
    (plain, {"text": "x", "number": 2**80}),
    (plain, {"number": 1}),
    (plain, {"number": "1", "text": "x"}),
    (plain, {"number": 1.0, "text": "x"}),
    (plain, {"number": 1, "text": "x", "more": 1}),
    (plain, {"number": True, "text": "x"}),
    (plain, [1, "x"]),
    (plain, None),
    (defaults, {"number": 1}),
    (defaults, {"number": 1, "flag": True}),
    (defaults, {"number": 1, "text": None}),
    (with_context, {"number": 1}),
    (with_context, {"number": 1, "ctx": 2}),
    (rich, RICH),
    (rich, {**RICH, "colour": "blue"}),
    (rich, {**RICH, "box": {"width": "wide"}}),
    (rich, {**RICH, "sum_": 1.25}),
    (loose, {"anything": {"a": [1, None, 1e300]}}),
    (loose, {"anything": 1, "number": 2}),
    (nested, {"pairs": {"1": [{"width": 3, "label": "b"}]}, "maybe": "P1D"}),
    (nested, {"pairs": {"one": []}}),
    (variadic, {"first": 1, "rest": [2, 3], "named": {"a": "b"}}),
    (nothing, {}),
    (nothing, {"x": 1}),
]


@pytest.mark.parametrize(("function", "data"), CASES)
def test_both_ways_of_decoding_arguments_have_the_same_result(
    function: Callable[..., None], data: Any
) -> None:
    arguments = Arguments.of(function, function.__name__, Context)
    ends: list[Any] = []
    for given in (data, msgspec.Raw(msgspec.json.encode(data))):
        try:
            ends.append(arguments.unpack(given, "the context"))
        except InvalidJob as error:
            ends.append(str(error))
    assert ends[0] == ends[1]


def test_arguments_that_fit_are_decoded_in_one_pass() -> None:
    for function, data in (
        (plain, {"number": 1, "text": "x"}),
        (defaults, {"number": 1}),
        (rich, RICH),
    ):
        arguments = Arguments.of(function, function.__name__, Context)
        assert arguments._decode_fast(msgspec.json.encode(data)) is not None


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1, 2), {}), ((1,), {"number": 1}), ((), {"number": 1}), ((1, "x", "y"), {}), ((1, object()), {}),
     ((float("nan"), "x"), {}), ((1,), {"text": "x", "more": 2})],
)  # fmt: skip
def test_a_call_that_does_not_fit_is_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=r"plain|argument"):
        Arguments.of(plain, "plain", Context).pack(args, kwargs)


@pytest.mark.parametrize(
    "args",
    [(1, "x"), (2**80, ""), (True, "x"), (1, Colour.RED), ("1", "x"), (1,), (1.0, "x"), (1, None),
     (-1, "ä\u2028\x00")],
)  # fmt: skip
def test_the_shortcut_for_exact_types_has_the_same_result(args: tuple[Any, ...]) -> None:
    quick = Arguments.of(plain, "plain", Context)
    ends: list[Any] = []
    for arguments in (
        quick,
        replace(quick, exact_types=None),
        replace(quick, exact_types=None, fast_decoder=None),
    ):
        try:
            ends.append(arguments.pack(args, {}))
        except InvalidJob as error:
            ends.append(str(error))
    assert ends[0] == ends[1] == ends[2]
    assert quick.exact_types == [int, str]
