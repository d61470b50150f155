"""`make matrix` and the workflow: which Pythons and PostgreSQLs they choose, and what they report."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[1]
OLD = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`tools/matrix.py` on a machine with Python 3.11 and 3.13, PostgreSQL 15 and the embedded one."""
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "tools/matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "matrix", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    pythons = {version: Path(f"/opt/python{version}") for version in ("3.11", "3.13")}
    postgresqls = [module.PostgreSQL(15, OLD), module.PostgreSQL(18, None)]
    monkeypatch.setattr(module, "find_pythons", lambda: pythons)
    monkeypatch.setattr(module, "find_postgresqls", lambda: postgresqls)
    monkeypatch.setattr(module, "set_up", lambda python, version, directory: directory / "python")
    return module


def test_the_matrix_runs_every_combination_and_names_what_is_missing(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run_tests(python: Path, postgresql: object, arguments: list[str]) -> str:
        ran.append((python, str(postgresql), arguments))
        return "passed in 9 s"

    monkeypatch.setattr(matrix, "run_tests", run_tests)
    assert matrix.main(Path("envs"), ["-k", "claim"]) == 0
    assert ran == [
        (Path(f"envs/{version}/python"), name, ["-k", "claim"])
        for version in ("3.11", "3.13")
        for name in ("PostgreSQL 15", "PostgreSQL 18 (embedded)")
    ]
    assert capsys.readouterr().out.partition("\n\n")[2].splitlines() == [
        "             PostgreSQL 15  PostgreSQL 18 (embedded)",
        "Python 3.11  passed in 9 s  passed in 9 s",
        "Python 3.13  passed in 9 s  passed in 9 s",
        "skipped: Python 3.12 is not on this machine, or lacks ensurepip",
        "skipped: Python 3.14 is not on this machine, or lacks ensurepip",
        "skipped: PostgreSQL 14 is not on this machine",
        "skipped: PostgreSQL 16 is not on this machine",
        "skipped: PostgreSQL 17 is not on this machine",
    ]


def test_one_failed_combination_fails_the_matrix_and_the_others_still_run(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter(["FAILED (exit 1) in 9 s", *["passed in 9 s"] * 3])
    monkeypatch.setattr(matrix, "run_tests", lambda *_: next(outcomes))
    assert matrix.main(Path("envs"), []) == 1
    assert "Python 3.11  FAILED (exit 1) in 9 s  passed in 9 s" in capsys.readouterr().out


def test_an_environment_that_cannot_be_installed_fails_the_matrix(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "set_up", lambda *_: None)
    assert matrix.main(Path("envs"), []) == 1
    assert "Python 3.13  not installed  not installed" in capsys.readouterr().out


def test_a_machine_without_a_usable_python_fails_the_matrix(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "find_pythons", dict)
    assert matrix.main(Path("envs"), []) == 1


def test_a_program_of_another_version_or_that_does_not_run_is_no_candidate(
    matrix: ModuleType, tmp_path: Path
) -> None:
    version = "{}.{}".format(*sys.version_info)
    shim = tmp_path / "python"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert matrix.is_usable(Path(sys.executable), version)
    assert not matrix.is_usable(Path(sys.executable), "3.99")
    assert not matrix.is_usable(shim, version)
    assert not matrix.is_usable(tmp_path / "absent", version)


def test_the_newest_python_of_pyenv_comes_first(
    matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("3.12.9", "3.12.10", "3.12-dev", "3.13.0"):
        (tmp_path / "versions" / name).mkdir(parents=True)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    _, *found = matrix.python_candidates("3.12")
    assert found == [tmp_path / f"versions/{name}/bin/python" for name in ("3.12.10", "3.12.9")]


def test_the_package_the_matrix_and_the_workflow_name_the_same_versions(matrix: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    numbers = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert tuple(numbers) == matrix.PYTHONS
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    for name, versions in (("python", matrix.PYTHONS), ("postgresql", matrix.POSTGRESQLS)):
        lists = re.findall(rf"^ +{name}: \[(.*)\]$", workflow, re.MULTILINE)
        assert lists
        assert {tuple(re.findall(r'"([\d.]+)"', each)) for each in lists} == {
            tuple(map(str, versions))
        }
