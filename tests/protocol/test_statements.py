"""Statements: their names, and their columns against those of the database."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from howdah.protocol.statements import Filters, Statement
from howdah.protocol.worker_statements import WorkerStatements

SAMPLES: dict[str, Any] = {
    "str": "x",
    "int": 1,
    "bool": False,
    "UUID": UUID(int=0),
    "timedelta": timedelta(0),
    "Filters": Filters(),
}
METHODS = [name for name, _ in inspect.getmembers(WorkerStatements, inspect.isfunction)
           if not name.startswith("_")]  # fmt: skip


def build(name: str) -> Statement[Any]:
    """The statement that a method builds for some arguments of the annotated types."""
    method = getattr(WorkerStatements("howdah"), name)
    arguments = {
        parameter.name: _sample(parameter.annotation)
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty
    }
    statement: Statement[Any] = method(**arguments)
    return statement


def _sample(annotation: str) -> Any:
    if annotation.endswith("| None"):
        return None
    return () if "[" in annotation else SAMPLES[annotation]


@pytest.mark.parametrize("name", METHODS)
def test_a_statement_carries_the_name_of_its_function_or_method(name: str) -> None:
    statement = build(name)
    functions = re.findall(r'"howdah"\.(\w+)\(', statement.text)
    assert [statement.operation] == (functions or [name])
    if statement.resend is not None:
        assert statement.resend().operation == statement.operation
