"""Builds of Howdah of different versions, side by side: copies of the package, each with migrations of its
own, that a process is pointed to by PYTHONPATH."""

from __future__ import annotations

import shutil
from pathlib import Path

import howdah
from howdah import sql

PACKAGE = Path(howdah.__file__).parent


def older_build(directory: Path, version: int) -> Path:
    """The package as it would be with the migrations up to this version alone."""
    home = _copy(directory)
    for folder in (home / "howdah" / "sql" / "migrations").iterdir():
        if folder.is_dir() and int(folder.name.partition("_")[0]) > version:
            shutil.rmtree(folder)
    return home


def newer_build(directory: Path, text: str, *, oldest_code: int) -> Path:
    """The package of the next release, with one migration more."""
    home = _copy(directory)
    number = sql.latest_version() + 1
    folder = home / "howdah" / "sql" / "migrations" / f"{number:04d}_next"
    folder.mkdir()
    (folder / "10_next.sql").write_text(text)
    module = home / "howdah" / "sql" / "__init__.py"
    source = module.read_text()
    changed = source.replace("_OLDEST_CODE = {", f"_OLDEST_CODE = {{{number}: {oldest_code}, ", 1)
    assert changed != source
    module.write_text(changed)
    return home


def _copy(directory: Path) -> Path:
    directory.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, directory / "howdah", ignore=ignored)
    return directory


def pointing_to(home: Path) -> dict[str, str]:
    """The environment of a process that runs this build."""
    return {"PYTHONPATH": str(home)}
