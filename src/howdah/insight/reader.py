"""Runs read-only statements that are written where they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from howdah.protocol.schema_name import quote_schema
from howdah.protocol.statements import Statement, Statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.protocol.statements import Rows

T = TypeVar("T")


class Runner(Protocol):
    """Who runs statements: a `Store`, or a single connection."""

    def run(self, statement: Statement[T]) -> T:
        """Run one statement and read its answer."""


class QueueReader:
    """Statements made up on the spot, on one schema: `{s}` stands for its name."""

    def __init__(self, runner: Runner, schema: str) -> None:
        self._run = runner.run
        self._statements = Statements(schema)
        self._s = quote_schema(schema)

    def _fetch(self, text: str, *parameters: Any, decode: Callable[[Rows], T]) -> T:
        return self._run(Statement(text.replace("{s}", self._s), parameters, decode))
