"""Runs a scenario and checks it."""

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


class RunScenario(Protocol):
    """Runs a scenario for its minimum time."""

    def __call__(self, scenario: Scenario, **load: Any) -> Verdict: ...


@pytest.fixture
def run_scenario(tmp_path: Path, request: pytest.FixtureRequest) -> RunScenario:
    def run(scenario: Scenario, **load: Any) -> Verdict:
        # Created on demand: most scenarios start their own server.
        common = _LazyPlace(lambda: request.getfixturevalue("database"))
        return perform(
            scenario, common, tmp_path, 1, Load(**{"seconds": 0.0, "rate": 120.0} | load)  # type: ignore[arg-type]
        )  # fmt: skip

    return run


class _LazyPlace:
    """A place whose database is created on first use."""

    schema = "howdah"

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> str:
        return self._make()

    def connect(self) -> psycopg.Connection[Any]:
        return Place(self.database, self.checker).connect()
