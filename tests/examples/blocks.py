"""Reads the code blocks of a Markdown page, and runs them from top to bottom as a reader would.

    python    executed in one namespace; `print(x)  # 3` also checks what was printed
    console   lines after `$ ` go to one bash script; what follows them must be printed, `...` is anything
    sql       run on the database, in autocommit mode

A block is left out only under `<!-- not run: reason -->`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from howdah import JobQueue

LANGUAGES = ("python", "console", "sql")
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = [
        Block(
            page=page.name,
            line=text.count("\n", 0, match.start("code")) + 1,
            language=match["language"],
            code=match["code"],
            reason=match["reason"],
        )
        for match in _BLOCK.finditer(text)
    ]
    assert text.count("```") == 2 * len(found), f"a block of {page.name} is not read"
    return found


class Reader:
    """Somebody who follows the page in an empty directory."""

    def __init__(self, directory: Path, variables: dict[str, str]) -> None:
        self._directory = directory
        self._variables = variables
        self._namespace: dict[str, Any] = {"__name__": "__main__"}

    def follow(self, block: Block) -> None:
        match block.language:
            case "python":
                self._python(block)
            case "console":
                self._console(block)
            case "sql":
                self._sql(block)

    def leave(self) -> None:
        """Close what the page left open."""
        for value in self._namespace.values():
            if isinstance(value, JobQueue):
                value.close()

    def _python(self, block: Block) -> None:
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, self._namespace)  # noqa: S102
        assert printed.getvalue().splitlines() == _PRINTED.findall(block.code), block

    def _console(self, block: Block) -> None:
        commands = [line[2:] for line in block.code.splitlines() if line.startswith("$ ")]
        expected = "".join(
            f"{line}\n" for line in block.code.splitlines() if not line.startswith("$ ")
        )
        after = self._directory / "variables"
        script = "\n".join(["set -euo pipefail", *commands, f"env -0 > {after}"])
        path = f"{Path(sys.executable).parent}:{self._variables['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self._directory,
            env=self._variables | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{block}: {done.stderr}"
        pattern = ".*".join(map(re.escape, expected.split("...")))
        assert re.fullmatch(pattern, done.stdout), f"{block}: {done.stdout}"
        # What one block exports the next ones see, in Python too.
        exported = dict(pair.split("=", 1) for pair in after.read_text().split("\0") if pair)
        after.unlink()
        for name in exported.keys() - self._variables.keys() - {"_", "SHLVL", "PWD", "OLDPWD"}:
            self._variables[name] = os.environ[name] = exported[name]

    def _sql(self, block: Block) -> None:
        with psycopg.connect(self._variables["DATABASE_URL"], autocommit=True) as conn:
            conn.execute(block.code.encode())
