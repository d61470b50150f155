"""Follows a page from top to bottom, as somebody would who types in what it says; see `blocks.py`."""

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

PATIENCE = 240.0
_WORKER = re.compile(r"\$ (\w+=\S+ )*howdah worker ")
_PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)


class Reader:
    """Somebody who follows the page in an empty directory."""

    def __init__(self, directory: Path, variables: dict[str, str]) -> None:
        self._directory = directory
        self._variables = variables
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._modules: list[ModuleType] = []
        self._names: set[str] = set()
        self._workers: list[BackgroundCommand] = []
        sys.path.insert(0, str(directory))

    def follow(self, block: Block) -> None:
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

    def leave(self) -> None:
        """Close what the page left open."""
        for worker in self._workers:
            worker.stop()
        self._forget(self._names)
        sys.path.remove(str(self._directory))
        for owner in (self._namespace, *map(vars, self._modules)):
            for value in owner.values():
                if isinstance(value, JobQueue | App):
                    value.close()

    def _write(self, block: Block, name: str, more: bool) -> None:
        path = self._directory / name
        before = path.read_text() if more else ""
        path.write_text(before + ("\n\n" if more else "") + block.code)
        self._names.add(name.removesuffix(".py").replace("/", "."))
        self._forget(self._names)

    def _forget(self, names: Iterable[str]) -> None:
        """Have these modules read anew by whoever imports them next."""
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
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"
        assert matches(expected, done.stdout), f"{block}: {done.stdout}"
        # What one block exports the next ones see, in Python too.
        exported = dict(pair.split("=", 1) for pair in after.read_text().split("\0") if pair)
        after.unlink()
        for name in exported.keys() - self._variables.keys() - {"_", "SHLVL", "PWD", "OLDPWD"}:
            self._variables[name] = os.environ[name] = exported[name]

    def _sql(self, block: Block) -> None:
        with psycopg.connect(resolve_url(None), autocommit=True) as conn:
            conn.execute(block.code.encode())


class BackgroundCommand:
    """A command that goes on while the page is read."""

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
        give_up = time.monotonic() + PATIENCE
        while not matches(expected, self.output()):
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < give_up, self.output()
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            assert self._process.wait(PATIENCE) == 0, self.output()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


def matches(expected: str, printed: str) -> bool:
    """Whether something was printed as it is shown, where `...` is anything, also nothing."""
    pattern = ".*".join(map(re.escape, expected.split("...")))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None
