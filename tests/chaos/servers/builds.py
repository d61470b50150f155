"""The build of the next release, beside this one: a copy of the package with one more table step, which a process
runs if PYTHONPATH points to it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import howdah
from next_release import write_next_release

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE = Path(howdah.__file__).parent


def newer_build(
    directory: Path, step: str, *, edits: Mapping[str, Mapping[str, str]], oldest_code: int
) -> Path:
    """The package of the next release, with this table step and these edits of function files."""
    directory.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, directory / "howdah", ignore=ignored)
    write_next_release(
        directory / "howdah" / "sql", step=step, edits=edits, oldest_code=oldest_code
    )
    return directory


def pointing_to(home: Path) -> dict[str, str]:
    """The environment of a process that runs this build."""
    return {"PYTHONPATH": str(home)}
