"""Plays a scenario and judges it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

from howdah.chaos.run import Load, perform
from howdah.chaos.scenario import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

    from howdah.chaos.run import Verdict
    from howdah.chaos.scenario import Scenario


class Play(Protocol):
    """Plays a scenario for as long as it needs."""

    def __call__(self, scenario: Scenario, **load: Any) -> Verdict: ...


@pytest.fixture
def play(tmp_path: Path, request: pytest.FixtureRequest) -> Play:
    def run(scenario: Scenario, **load: Any) -> Verdict:
        # Only where it is wanted: most scenarios have a server of their own.
        common = _LateDatabase(lambda: request.getfixturevalue("database"))
        return perform(
            scenario, common, tmp_path, 1, Load(**{"seconds": 0.0, "rate": 120.0} | load)  # type: ignore[arg-type]
        )  # fmt: skip

    return run


class _LateDatabase:
    """A place that is made when somebody asks where it is."""

    schema = "howdah"

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> str:
        return self._make()

    def connect(self) -> psycopg.Connection[Any]:
        return Place(self.database, self.checker).connect()
