"""Runs every code block of the README and of the documentation, and checks links."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from blocks import LANGUAGES, blocks
from reader import Reader

from howdah.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory to work in, and no database in the environment."""
    for name in ("HOWDAH_DATABASE_URL", "DATABASE_URL"):
        # Set first, so that the end of the test removes what a page exported.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="howdah-examples-") as name:
        Path(name).chmod(0o755)
        monkeypatch.chdir(name)
        yield Path(name)
        EmbeddedServer(Path(name) / ".howdah/pg18").remove()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_has_a_runnable_language_or_a_reason(page: Path) -> None:
    unknown = [
        str(block) for block in blocks(page) if not block.reason and block.language not in LANGUAGES
    ]
    assert unknown == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_blocks_of_a_page_run_from_top_to_bottom(
    page: Path,
    directory: Path,
    make_database: Callable[[str | None], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to_run = [block for block in blocks(page) if not block.reason]
    variables = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    if to_run and not any("howdah db start" in block.code for block in to_run):
        # A page that starts no server assumes a database.
        variables["DATABASE_URL"] = make_database(None)
        monkeypatch.setenv("DATABASE_URL", variables["DATABASE_URL"])
    reader = Reader(directory, variables)
    try:
        for block in to_run:
            reader.run(block)
    finally:
        reader.close()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_between_pages_has_a_target(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_to_a_heading_has_a_target(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    missing = [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor not in anchors(page.parent / link if link else page)
    ]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}
