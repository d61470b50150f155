"""Repeated log lines are counted instead of logged."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from howdah.execution import repeated_lines
from howdah.execution.repeated_lines import RepeatedLines, shape_of
from waiting import ended

if TYPE_CHECKING:
    import pytest

    from conftest import RunWorker
    from howdah import App

logger = logging.getLogger("test")


def say(lines: RepeatedLines, kind: str = "a", *, always: bool = False) -> None:
    lines.log(logger, logging.INFO, "said", kind=kind, fields={"kind": kind}, always=always)


def test_repeats_are_counted_and_summarized(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = RepeatedLines()
    for _ in range(5):
        say(lines)
    say(lines, "b")
    assert [each.kind for each in caplog.records] == ["a", "b"]  # type: ignore[attr-defined]
    say(lines, always=True)
    assert caplog.records[-1].left_out == 4  # type: ignore[attr-defined]
    say(lines)
    lines.summarize()
    assert len(caplog.records) == 3
    lines.summarize(everything=True)
    assert caplog.records[-1].message == "similar lines were left out"
    assert caplog.records[-1].left_out == 1  # type: ignore[attr-defined]


def test_a_line_is_logged_again_after_its_period(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = RepeatedLines(period=0)
    for _ in range(3):
        say(lines)
    assert len(caplog.records) == 3


def test_the_kinds_that_are_remembered_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_lines, "MAX_KINDS", 10)
    caplog.set_level(logging.INFO)
    lines = RepeatedLines()
    say(lines, "first")
    say(lines, "first")
    for n in range(20):
        say(lines, f"kind {n}")
    assert len(lines._lines) == 10
    assert sum(each.message == "similar lines were left out" for each in caplog.records) == 1


def test_errors_that_differ_in_values_have_one_shape() -> None:
    assert shape_of("KeyError: 'a'") == shape_of("KeyError: 'b'")
    assert shape_of("timeout after 3.5 s at 0x7f00") == shape_of("timeout after 12.1 s at 0x7fff")
    assert shape_of("KeyError: 'a'") != shape_of("ValueError: 'a'")


async def test_attempts_that_fail_alike_have_one_line_and_each_last_attempt_its_own(
    app: App, running_worker: RunWorker, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(max_attempts=4, retry=lambda attempt, error: 0.01)
    async def fails(n: int) -> None:
        raise ValueError(f"number {n}")

    caplog.set_level(logging.INFO)
    async with running_worker(app):
        handles = await asyncio.gather(*(fails.aenqueue(n) for n in range(20)))
        for handle in handles:
            assert (await ended(handle)).status == "failed"
    lines = [each for each in caplog.records if each.message == "job failed"]
    last = [each for each in lines if each.state == "failed"]  # type: ignore[attr-defined]
    assert len(last) == 20
    # Without the limit there would be sixty. A line of a last attempt allows no other one.
    assert len(lines) - len(last) == 1
    logged = [getattr(each, "left_out", 0) for each in caplog.records]
    assert sum(logged) == 59
