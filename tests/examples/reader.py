"""Runs the blocks of a page from top to bottom, like a reader who types them in; see `blocks.py`."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from howdah import App, JobQueue
from howdah.embedded import resolve_url

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from blocks import Block

COMMAND_TIMEOUT_SECONDS = 240.0
_WORKER = re.compile(r"\$ (\w+=\S+ )*howdah worker ")
_PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)


class Reader:
    """Runs the blocks of one page in an empty directory."""

    def __init__(self, directory: Path, variables: dict[str, str]) -> None:
        self._directory = directory
        self._variables = variables
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._modules: list[ModuleType] = []
        self._names: set[str] = set()
        self._workers: list[BackgroundCommand] = []
        sys.path.insert(0, str(directory))

    def run(self, block: Block) -> None:
        match block.language:
            case "python" if block.file is not None:
                self._write(block, *block.file)
            case "python":
                self._python(block)
            case "console" if _WORKER.match(block.code):
                self._worker(block)
            case "console":
                self._console(block)
            case "sql":
                self._sql(block)

    def close(self) -> None:
        """Stop workers and close queues that the page left open."""
        for worker in self._workers:
            worker.stop()
        self._unload(self._names)
        sys.path.remove(str(self._directory))
        for owner in (self._namespace, *map(vars, self._modules)):
            for value in owner.values():
                if isinstance(value, JobQueue | App):
                    value.close()

    def _write(self, block: Block, name: str, append: bool) -> None:
        path = self._directory / name
        before = path.read_text() if append else ""
        path.write_text(before + ("\n\n" if append else "") + block.code)
        self._names.add(name.removesuffix(".py").replace("/", "."))
        self._unload(self._names)

    def _unload(self, names: Iterable[str]) -> None:
        """Remove these modules, so that the next import reads them again."""
        for name in names:
            module = sys.modules.pop(name, None)
            if module is not None:
                self._modules.append(module)
        importlib.invalidate_caches()

    def _python(self, block: Block) -> None:
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, self._namespace)  # noqa: S102
        if block.output is not None:
            assert matches(block.output, printed.getvalue()), f"{block}: {printed.getvalue()}"
        else:
            assert printed.getvalue().splitlines() == _PRINTED.findall(block.code), block

    def _worker(self, block: Block) -> None:
        command, _, rest = block.code.partition("\n")
        shown, interrupted, after = rest.partition("^C\n")
        worker = BackgroundCommand(command[2:], self._directory, self._environment())
        self._workers.append(worker)
        worker.wait_for(f"...{shown.strip() or 'worker started'}...")
        if interrupted:
            worker.stop()
            assert matches(f"...{after.strip()}...", worker.output()), f"{block}: {worker.output()}"

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{self._variables['PATH']}"
        return self._variables | {"PATH": path}

    def _console(self, block: Block) -> None:
        commands = [line[2:] for line in block.code.splitlines() if line.startswith("$ ")]
        expected = "".join(
            f"{line}\n" for line in block.code.splitlines() if not line.startswith("$ ")
        )
        after = self._directory / "variables"
        script = "\n".join(["set -euo pipefail", *commands, f"env -0 > {after}"])
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self._directory,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"
        assert matches(expected, done.stdout), f"{block}: {done.stdout}"
        # Variables that one block exports are set for the next ones, in Python too.
        exported = dict(pair.split("=", 1) for pair in after.read_text().split("\0") if pair)
        after.unlink()
        for name in exported.keys() - self._variables.keys() - {"_", "SHLVL", "PWD", "OLDPWD"}:
            self._variables[name] = os.environ[name] = exported[name]

    def _sql(self, block: Block) -> None:
        with psycopg.connect(resolve_url(None), autocommit=True) as conn:
            conn.execute(block.code.encode())


class BackgroundCommand:
    """A command that runs in the background."""

    def __init__(self, command: str, directory: Path, variables: dict[str, str]) -> None:
        self._log = directory / f"worker-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                cwd=directory,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, expected: str) -> None:
        deadline = time.monotonic() + COMMAND_TIMEOUT_SECONDS
        while not matches(expected, self.output()):
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            assert self._process.wait(COMMAND_TIMEOUT_SECONDS) == 0, self.output()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


def matches(expected: str, printed: str) -> bool:
    """Whether the output equals the expected text, in which `...` matches anything, including nothing."""
    pattern = ".*".join(map(re.escape, expected.split("...")))
    # A first line of `...` may match no line at all.
    return any(re.fullmatch(pattern, text, re.DOTALL) for text in (printed, "\n" + printed))
