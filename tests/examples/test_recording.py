"""The README contains the recording that `make recording` wrote."""

from __future__ import annotations

from tools import ROOT, load

record_demo = load("record_demo")


def test_the_readme_contains_the_recording() -> None:
    readme = (ROOT / "README.md").read_text()
    recording = (ROOT / "docs/demo.txt").read_text()
    assert record_demo.with_recording(readme, recording) == readme


def test_the_recording_reports_no_lost_job() -> None:
    lines = (ROOT / "docs/demo.txt").read_text().splitlines()
    assert ["lost", "0"] in [line.split() for line in lines]
