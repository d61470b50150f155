"""Runs the tests on every supported Python and PostgreSQL of this machine, and names what it lacks.

    python tools/matrix.py .venv-matrix -m "not slow"

The first argument is the directory of the environments, one for each Python; pytest receives the rest.
Exits with 1 if a combination failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from howdah.embedded.binaries import OLDEST_VERSION, Binaries, _system_directories, find_binaries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
POSTGRESQLS = range(OLDEST_VERSION, 19)
# An interpreter without ensurepip cannot create an environment that has pip.
PROBE = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"


@dataclass(frozen=True, slots=True)
class PostgreSQL:
    """A PostgreSQL to test on."""

    version: int
    directory: Path | None
    """Its programs; None for the embedded one, which every environment has."""

    def __str__(self) -> str:
        return f"PostgreSQL {self.version}" + ("" if self.directory else " (embedded)")

    def options(self) -> list[str]:
        return [f"--pg-bin={self.directory}"] if self.directory else []


# ── discovery ─────────────────────────────────────────────────────────────────────────────────────


def python_candidates(version: str) -> Iterator[Path]:
    """Programs that may be this Python: the base of the running one, PATH, then pyenv, newest first."""
    yield Path(sys.base_prefix) / "bin" / f"python{version}"
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    numbered = [
        path for path in versions.glob(f"{version}.*") if path.name.rpartition(".")[2].isdigit()
    ]
    for path in sorted(numbered, key=lambda path: -int(path.name.rpartition(".")[2])):
        yield path / "bin/python"


def is_usable(python: Path, version: str) -> bool:
    """Whether it runs, is of this version and can create environments. A shim of pyenv may not run."""
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def find_pythons() -> dict[str, Path]:
    found = {}
    for version in PYTHONS:
        usable = (path for path in python_candidates(version) if is_usable(path, version))
        if python := next(usable, None):
            found[version] = python
    return found


def find_postgresqls() -> list[PostgreSQL]:
    """The embedded one, and one of each version that the system has."""
    installed = {}
    for directory in _system_directories():
        version = Binaries(directory.resolve()).version
        if version >= OLDEST_VERSION:
            installed.setdefault(version, PostgreSQL(version, directory.resolve()))
    return [*(installed[v] for v in sorted(installed)), PostgreSQL(find_binaries().version, None)]


def missing(pythons: Iterable[str], postgresqls: Iterable[PostgreSQL]) -> list[str]:
    """The supported versions that were not found, each with the reason."""
    versions = {each.version for each in postgresqls}
    return [
        *(
            f"Python {v} is not on this machine, or lacks ensurepip"
            for v in PYTHONS
            if v not in pythons
        ),
        *(f"PostgreSQL {v} is not on this machine" for v in POSTGRESQLS if v not in versions),
    ]


# ── running ───────────────────────────────────────────────────────────────────────────────────────


def set_up(python: Path, version: str, directory: Path) -> Path | None:
    """An environment with Howdah and what its tests need; None if that failed."""
    inside = directory / "bin/python"
    steps = [
        [inside, "-m", "pip", "install", "--quiet", "pip>=25.1"],  # older ones lack --group
        [inside, "-m", "pip", "install", "--quiet", "--editable", ".[all]", "--group", "test"],
    ]
    if not is_usable(inside, version):
        steps.insert(0, [python, "-m", "venv", "--clear", directory])
    succeeded = all(subprocess.run(step, cwd=ROOT, check=False).returncode == 0 for step in steps)
    return inside if succeeded else None


def run_tests(python: Path | None, postgresql: PostgreSQL, arguments: list[str]) -> str:
    """Runs the tests on one combination: "passed", or how it failed."""
    if python is None:
        return "not installed"
    started = time.monotonic()
    command = [python, "-m", "pytest", *arguments, *postgresql.options()]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    seconds = time.monotonic() - started
    return f"{'passed' if code == 0 else f'FAILED (exit {code})'} in {seconds:.0f} s"


def table(results: dict[tuple[str, str], str]) -> str:
    """A row for each Python, a column for each PostgreSQL."""
    columns = list(dict.fromkeys(column for _, column in results))
    names = dict.fromkeys(row for row, _ in results)
    rows = [[name, *(results[name, column] for column in columns)] for name in names]
    rows.insert(0, ["", *columns])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def main(environments: Path, arguments: list[str]) -> int:
    os.environ.pop("HOWDAH_PG_BIN", None)  # it would replace the embedded one
    pythons, postgresqls = find_pythons(), find_postgresqls()
    results: dict[tuple[str, str], str] = {}
    for version, python in pythons.items():
        print(f"── Python {version}: {python}", flush=True)
        inside = set_up(python, version, environments / version)
        for postgresql in postgresqls:
            print(f"── Python {version}, {postgresql}", flush=True)
            outcome = run_tests(inside, postgresql, arguments)
            results[f"Python {version}", str(postgresql)] = outcome
    print(f"\n{table(results)}")
    for reason in missing(pythons, postgresqls):
        print(f"skipped: {reason}")
    passed = [outcome.startswith("passed") for outcome in results.values()]
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(ROOT / sys.argv[1], sys.argv[2:]))
