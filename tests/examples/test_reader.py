"""The reader detects errors on a page."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from blocks import LANGUAGES, blocks
from reader import Reader, matches

if TYPE_CHECKING:
    from pathlib import Path


def run_page(directory: Path, text: str) -> None:
    page = directory / "page.md"
    page.write_text(text)
    reader = Reader(directory, {"PATH": os.environ["PATH"]})
    try:
        for block in blocks(page):
            reader.run(block)
    finally:
        reader.close()


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1 + 1)  # 2\n```\n",
        "```python\nfor n in range(2):\n    print(n)\n```\n\n```text\n0\n1\n```\n",
        "```python\nprint('a long story')\n```\n\n```text\na ... story\n```\n",
        "```console\n$ echo hello\nhello\n```\n",
        "```python\n# one.py\nx = 1\n```\n```python\nfrom one import x\n\nprint(x)  # 1\n```\n",
    ],
)
def test_a_correct_page_passes(tmp_path: Path, text: str) -> None:
    run_page(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1 + 1)  # 3\n```\n",
        "```python\nprint(1 + 1)\n```\n",
        "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n",
        "```console\n$ echo hello\nhullo\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ howdah worker nosuch:app\n... worker started ...\n```\n",
    ],
)
def test_a_wrong_page_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError):
        run_page(tmp_path, text)


def test_a_continued_file_is_imported_again(tmp_path: Path) -> None:
    use = "```python\nimport two\n\nprint(vars(two).get('y'))  # {}\n```\n"
    run_page(
        tmp_path,
        "```python\n# two.py\nx = 1\n```\n"
        + use.format("None")
        + "```python\n# two.py, continued\ny = x + 1\n```\n"
        + use.format("2"),
    )


def test_a_text_block_without_a_python_block_needs_a_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ true\n```\n\n```text\nanything\n```\n")
    assert [block.language for block in blocks(page)] == ["console", "text"]
    assert "text" not in LANGUAGES


def test_three_dots_match_anything_including_line_breaks() -> None:
    assert matches("a ... z\n", "a b\nc z\n")
    assert not matches("a ... z\n", "a b c\n")
