"""The base class of the readers in this package: each writes its own read-only SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from howdah.protocol.schema_name import quote_schema
from howdah.protocol.statements import Statement, Statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.protocol.statements import Rows

T = TypeVar("T")


class Runner(Protocol):
    """Runs statements: a `Store`, or a single connection."""

    def run(self, statement: Statement[T]) -> T:
        """Run one statement and decode its rows."""


class QueueReader:
    """Runs SQL on one schema: `{s}` stands for its quoted name."""

    def __init__(self, runner: Runner, schema: str) -> None:
        self._run = runner.run
        self._statements = Statements(schema)
        self._s = quote_schema(schema)

    def _fetch(self, text: str, *parameters: Any, decode: Callable[[Rows], T]) -> T:
        return self._run(Statement("insight", text.replace("{s}", self._s), parameters, decode))
