"""The Python reference documents every name that `howdah` exports, with its current signature."""

from __future__ import annotations

import inspect
import re

import pytest
from tools import ROOT, load

import howdah

reference = load("python_reference")
PAGE = (ROOT / "docs/reference/python.md").read_text()
SECTIONS = reference.sections(PAGE)
ERRORS = {
    name: (base, text)
    for name, base, text in re.findall(
        r"^\| `(\w+)` \| `?(\w+)`? \| (.+) \|$", PAGE[PAGE.index("\n## Errors") :], re.MULTILINE
    )
}
METHODS = {
    name: method
    for name, method in inspect.getmembers(howdah.JobQueue, inspect.isfunction)
    if not name.startswith("_")
}


def test_exactly_the_public_names_are_documented() -> None:
    assert sorted([*SECTIONS, *ERRORS]) == sorted(howdah.__all__)


def test_the_signatures_equal_those_of_the_code() -> None:
    assert reference.with_signatures(PAGE) == PAGE, "run `python tools/python_reference.py`"


@pytest.mark.parametrize("name", SECTIONS)
def test_every_class_and_function_has_a_signature(name: str) -> None:
    value = getattr(howdah, name)
    is_twin = name == "AsyncJobQueue"  # its methods are those of JobQueue, see below
    needs = (inspect.isclass(value) or inspect.isfunction(value)) and not is_twin
    assert ("```pyi" in SECTIONS[name]) == needs


@pytest.mark.parametrize("name", ERRORS)
def test_the_table_of_errors_has_the_base_and_attributes_of_each_error(name: str) -> None:
    error = getattr(howdah, name)
    base, text = ERRORS[name]
    assert error.__bases__[0].__name__ == base
    for attribute in re.findall(r"`\.(\w+)`", text):
        source = "".join(
            inspect.getsource(c) for c in error.__mro__ if c.__module__ == "howdah.errors"
        )
        assert f"self.{attribute}" in source


@pytest.mark.parametrize("name", METHODS)
def test_the_async_queue_has_the_same_methods(name: str) -> None:
    twin = getattr(howdah.AsyncJobQueue, name)
    assert inspect.iscoroutinefunction(twin)
    assert inspect.signature(twin) == inspect.signature(METHODS[name])
