"""The index of the decisions names every decision, and what a decision governs exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
INDEX = (ROOT / "docs/decisions/README.md").read_text()
FUNCTIONS = "\n".join(path.read_text() for path in (ROOT / "src/howdah/sql").rglob("*.sql"))


def expand(glob: str) -> list[str]:
    """The alternatives of `{a,b}`, which pathlib does not know."""
    found = re.search(r"\{([^}]*)\}", glob)
    if found is None:
        return [glob]
    before, after = glob[: found.start()], glob[found.end() :]
    return [each for part in found[1].split(",") for each in expand(before + part + after)]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda path: path.stem[:4])
def test_the_index_has_a_row_with_the_title_and_date_of_the_decision(page: Path) -> None:
    text = page.read_text()
    number, title = re.match(r"# (\d{4})\. (.*)", text).groups()
    (date,) = re.findall(r"\*\*Date:\*\* (\S+)", text)
    (status,) = re.findall(r"\*\*Status:\*\* (accepted|superseded by)", text)
    row = f"| {number} | [{title}]({page.name}) | {date} | {status}"
    assert [line for line in INDEX.splitlines() if line.startswith(row)], row


@pytest.mark.parametrize("page", DECISIONS, ids=lambda path: path.stem[:4])
def test_every_file_and_function_that_a_decision_governs_exists(page: Path) -> None:
    (governs,) = re.findall(r"\*\*Governs:\*\*(.*?)\n\n", page.read_text(), re.DOTALL)
    named = re.findall(r"`([^`]+)`", governs)
    assert named
    for name in named:
        if "/" in name or name.endswith(".toml"):
            missing = [each for each in expand(name) if not list(ROOT.glob(each))]
            assert not missing, f"{page.name} governs {missing}, which match no file"
        elif re.fullmatch(r"[a-z_]+", name):
            assert f"FUNCTION {name}(" in FUNCTIONS, f"{page.name} governs {name}"
