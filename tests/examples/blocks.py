"""Parses the code blocks of a Markdown page. The languages, and how `reader.py` runs them:

    python    executed in one namespace; `print(x)  # 3` checks the printed text, and so does a `text` block directly
              after it, in which `...` matches anything
              `# shop.py` as the first line: written to that file instead; `# shop.py, continued`: appended to it
    console   lines after `$ ` are one bash script; the other lines must be its output, `...` matches anything
              `$ howdah worker …` alone runs in the background, until `^C` or the end of the page
    sql       run on the database, in autocommit mode
    pyi       signatures, compared with the code by test_python_reference.py

A block is skipped only after `<!-- not run: reason -->`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LANGUAGES = ("python", "console", "sql", "pyi")
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_CAPTION = re.compile(r"# (?P<name>[\w/]+\.py)(?P<continued>, continued)?\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    reason: str | None
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def prints(self) -> bool:
        """Whether it is executed, so that its output can be checked."""
        return self.language == "python" and self.file is None and self.reason is None

    @property
    def file(self) -> tuple[str, bool] | None:
        """The file that it is written to, and whether it is appended."""
        found = _CAPTION.match(self.code) if self.language == "python" else None
        return (found["name"], found["continued"] is not None) if found else None


def blocks(page: Path) -> list[Block]:
    """Every block of a page. A `text` block directly after a `python` block is its output."""
    text = page.read_text()
    found: list[Block] = []
    fences = end = 0
    for match in _BLOCK.finditer(text):
        fences += 2
        block = Block(
            page=page.name,
            line=text.count("\n", 0, match.start("code")) + 1,
            language=match["language"],
            code=match["code"],
            reason=match["reason"],
        )
        is_output = found and found[-1].prints and not text[end : match.start()].strip()
        end = match.end()
        if block.language == "text" and not block.reason and is_output:
            found[-1] = replace(found[-1], output=block.code)
        else:
            found.append(block)
    assert text.count("```") == fences, f"a block of {page.name} was not parsed"
    return found
