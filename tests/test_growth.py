"""The growth benchmarks: the rows that they fill queues with, and the chapter of the report."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest
from bench.growth_data import Filler
from bench.results import Results

from bench import growth, growth_data, growth_report

if TYPE_CHECKING:
    from pathlib import Path

    from howdah.embedded import EmbeddedServer


class Postgres:
    """The server of the tests, with the interface of the benchmarks' `Postgres`."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    def url(self, database: str) -> str:
        return self._server.url.replace("/howdah?", f"/{database}?")

    def query(self, sql: str, *parameters: Any, database: str) -> list[Any]:
        async def run() -> list[Any]:
            connection = await asyncpg.connect(self.url(database))
            try:
                return list(await connection.fetch(sql, *parameters))
            finally:
                await connection.close()

        return asyncio.run(run())

    def value(self, sql: str, *parameters: Any, database: str) -> Any:
        return self.query(sql, *parameters, database=database)[0][0]


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


@pytest.fixture
def queue_database(server: EmbeddedServer, database: str) -> tuple[Any, str]:
    return Postgres(server), psycopg.conninfo.conninfo_to_dict(database)["dbname"]


def test_filled_rows_equal_those_of_the_sql_functions(queue_database: tuple[Any, str]) -> None:
    Filler(*queue_database).check()


@pytest.mark.parametrize(
    ("statement", "right", "wrong"),
    [
        ("BLOCKED", "(n >= $4)::int", "0"),
        ("SCHEDULED", "interval '1 day'", "interval '0'"),
        ("FINISHED", "'7 days'", "'8 days'"),
        ("PENDING", "'number', n", "'number', n + 1"),
    ],
)
def test_a_filled_row_that_differs_from_the_sql_functions_is_reported(
    queue_database: tuple[Any, str],
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    right: str,
    wrong: str,
) -> None:
    text = getattr(growth_data, statement)
    assert right in text
    monkeypatch.setattr(growth_data, statement, text.replace(right, wrong))
    with pytest.raises(AssertionError, match="the functions write"):
        Filler(*queue_database).check()


def test_jobs_completed_during_an_open_transaction_are_counted_as_dead_entries(
    queue_database: tuple[Any, str],
) -> None:
    postgres, database = queue_database
    Filler(postgres, database).pending("async", 0, 3000)
    with growth_data.held_transaction(postgres, database):
        assert growth_data.dead_entries(postgres, "howdah", database) == 0
        growth_data.churn(postgres, "howdah", database, 2500, "async")
        assert growth_data.dead_entries(postgres, "howdah", database) == 2500
    assert postgres.value("SELECT count(*) FROM howdah.live_jobs", database=database) == 500
    assert postgres.value("SELECT count(*) FROM howdah.finished_jobs", database=database) == 2500


# ── the chapter ───────────────────────────────────────────────────────────────────────────────────


def test_without_rounds_the_chapter_is_empty(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    assert growth_report.chapter(results) == ""
    assert growth_report.plots(results) == {}


def test_the_chapter_compares_figures_with_goals(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    for number, p99 in enumerate((3.0, 5.0, 4.0), 1):
        results.record("growth-full-base", "howdah", number, {"claim_p99_ms": 2.0})
        results.record("growth-full", "howdah", number, {"claim_p99_ms": p99})
        for state, rate in (
            ("0", 700.0),
            ("1000000-free", 1000.0 * number),
            ("1000000", 900.0 * number),
        ):
            for peer, share in (("howdah", 1), ("pgqueuer", 2)):
                figures = {"jobs_per_second": rate / share}
                results.record(f"growth-held-{state}", peer, number, figures)
    text = growth_report.chapter(results)
    assert "| 4.00 [3.00 … 5.00] |" in text
    assert "in the same rounds: **2.00 ×** (goal: at most 2)" in text
    assert (
        "Howdah with 1M dead entries divided by its control: **0.90 ×** (goal: at least 0.8)"
        in text
    )
    assert "PgQueuer with 1M dead entries divided by its control: **0.90 ×**." in text
    assert "Idle workers" not in text
    drawn = growth_report.plots(results)["growth-held.svg"]
    assert drawn.count("<polyline") == 2
    assert len(growth.DEAD) == 4
