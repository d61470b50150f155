"""The recording in the README is the one that `make recording` made."""

from __future__ import annotations

from tools import ROOT, load

record_demo = load("record_demo")


def test_the_readme_shows_what_was_recorded() -> None:
    readme = (ROOT / "README.md").read_text()
    recording = (ROOT / "docs/demo.txt").read_text()
    assert record_demo.with_recording(readme, recording) == readme


def test_the_recording_ends_with_nothing_lost() -> None:
    lines = (ROOT / "docs/demo.txt").read_text().splitlines()
    assert ["lost", "0"] in [line.split() for line in lines]
