"""Runs every block of a page of the skill, from top to bottom, in one project, as an agent would.

python    executed in one namespace, in a separate process; `print(x)  # 3` also checks the output.
          A block that begins with `# name.py` is written to that file instead.
console   lines after `$ ` are run; the lines that follow must be printed, `...` matches anything.
          `howdah worker` runs in the background until the page ends.
sql       run on the project's database, in autocommit mode
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)
_INTERPRETER = """
import contextlib, io, json, sys, traceback
sys.path.insert(0, "")
namespace = {"__name__": "__main__"}
for line in sys.stdin:
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(json.loads(line), namespace)
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([printed.getvalue().splitlines(), error]), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    place: str
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = [
        Block(
            place=f"{page.name}:{text.count(chr(10), 0, match.start(2)) + 1}",
            language=match[1],
            code=match[2],
        )
        for match in _BLOCK.finditer(text)
    ]
    assert text.count("```") == 2 * len(found), f"a block of {page.name} is not read"
    return found


class Agent:
    """Runs the blocks of a page, in a project that has the skill."""

    def __init__(self, project: Path, variables: dict[str, str]) -> None:
        self.project = project
        self.variables = variables
        self._workers: list[subprocess.Popen[bytes]] = []
        self._python: subprocess.Popen[str] | None = None

    def follow(self, block: Block) -> None:
        match block.language:
            case "python" if block.code.startswith("# ") and block.code.split("\n")[0].endswith(
                ".py"
            ):
                (self.project / block.code.split("\n")[0].removeprefix("# ")).write_text(block.code)
            case "python":
                printed, error = self._execute(block.code)
                assert error is None, f"{block.place}: {error}"
                assert printed == _PRINTED.findall(block.code), block.place
            case "console":
                self._console(block)
            case "sql":
                with psycopg.connect(self.url(), autocommit=True) as conn:
                    conn.execute(block.code.encode())
            case other:
                raise AssertionError(f"{block.place}: blocks of type {other!r} cannot be run")

    def url(self) -> str:
        return self.variables.get("DATABASE_URL") or self.run("howdah db url").strip()

    def run(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f"set -euo pipefail\n{script}"],
            cwd=self.project,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        return done.stdout

    def leave(self) -> None:
        """Stop what the page started."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            assert worker.wait(120) == 0, "a worker did not stop gracefully"
        if self._python is not None:
            with self._python as python:
                assert python.stdin
                python.stdin.close()

    def _console(self, block: Block) -> None:
        lines = block.code.splitlines()
        commands = [line[2:] for line in lines if line.startswith("$ ")]
        for worker in [each for each in commands if each.startswith("howdah worker ")]:
            self._start(worker.split())
            commands.remove(worker)
        printed = self.run("\n".join(commands))
        for line in lines:
            pattern = ".*".join(map(re.escape, line.split("...")))
            found = line.startswith("$ ") or re.search(f"^{pattern}$", printed, re.MULTILINE)
            assert found, f"{block.place}: {line!r} is not in {printed}"

    def _start(self, command: list[str]) -> None:
        log = (self.project / "worker.log").open("ab")
        with log:
            worker = subprocess.Popen(command, cwd=self.project, env=self.variables, stderr=log)
        self._workers.append(worker)

    def _execute(self, code: str) -> tuple[list[str], str | None]:
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-c", _INTERPRETER],
                cwd=self.project,
                env=self.variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin
        assert self._python.stdout
        self._python.stdin.write(f"{json.dumps(code)}\n")
        self._python.stdin.flush()
        answer: Any = json.loads(self._python.stdout.readline())
        return answer[0], answer[1]


def variables(home: Path) -> dict[str, str]:
    """An environment with this Howdah on its PATH, and no database."""
    programs = os.path.dirname(sys.executable)
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
    }
