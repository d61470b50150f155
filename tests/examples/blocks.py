"""Reads the code blocks of a Markdown page. What each kind is for, and how `reader.py` runs it:

    python    executed in one namespace; `print(x)  # 3` also checks what was printed, and so does a `text`
              block right behind it, in which `...` is anything
              `# shop.py` as the first line: written to that file instead, and `# shop.py, continued` added
    console   lines after `$ ` go to one bash script; what follows them must be printed, `...` is anything
              `$ howdah worker …` by itself runs in the background, until `^C` or the end of the page
    sql       run on the database, in autocommit mode
    pyi       signatures, compared with the code by test_python_reference.py

A block is left out only under `<!-- not run: reason -->`.
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
        """Whether it runs here, and what it prints is seen."""
        return self.language == "python" and self.file is None and self.reason is None

    @property
    def file(self) -> tuple[str, bool] | None:
        """The file that it is written to, and whether it is added to what is there."""
        found = _CAPTION.match(self.code) if self.language == "python" else None
        return (found["name"], found["continued"] is not None) if found else None


def blocks(page: Path) -> list[Block]:
    """Every block of a page. A `text` block right behind a `python` one is its output."""
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
        adjoins = found and found[-1].prints and not text[end : match.start()].strip()
        end = match.end()
        if block.language == "text" and not block.reason and adjoins:
            found[-1] = replace(found[-1], output=block.code)
        else:
            found.append(block)
    assert text.count("```") == fences, f"a block of {page.name} is not read"
    return found
