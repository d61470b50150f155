"""Every code block of the README and of the documentation runs."""

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
        # Set first, so that the test's end restores what a page exported.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="howdah-examples-") as name:
        Path(name).chmod(0o755)
        monkeypatch.chdir(name)
        yield Path(name)
        EmbeddedServer(Path(name) / ".howdah/pg18").remove()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    unknown = [
        str(block) for block in blocks(page) if not block.reason and block.language not in LANGUAGES
    ]
    assert unknown == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_reader_can_follow_the_page(
    page: Path,
    directory: Path,
    make_database: Callable[[str | None], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to_follow = [block for block in blocks(page) if not block.reason]
    variables = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    if to_follow and not any("howdah db start" in block.code for block in to_follow):
        # A page that starts no server takes one for granted.
        variables["DATABASE_URL"] = make_database(None)
        monkeypatch.setenv("DATABASE_URL", variables["DATABASE_URL"])
    reader = Reader(directory, variables)
    try:
        for block in to_follow:
            reader.follow(block)
    finally:
        reader.leave()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    missing = [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor not in anchors(page.parent / link if link else page)
    ]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links: lower case, no punctuation, hyphens for blanks."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}
