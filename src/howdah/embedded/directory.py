"""Finds the directory of an embedded server: `.howdah/pg18`, here or in a parent directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOME = ".howdah"
SERVER = "pg18"


def find_directory(start: Path | None = None) -> Path | None:
    """The `.howdah/pg18` that `howdah db start` made, in this directory or above."""
    made = (home / SERVER for home in _homes(start))
    return next((place for place in made if os.path.lexists(place / "cluster")), None)


def default_directory() -> Path:
    """The one that was made, else one in the nearest `.howdah`, else in a new one right here."""
    return find_directory() or next(_homes(), Path.cwd() / HOME) / SERVER


def _homes(start: Path | None = None) -> Iterator[Path]:
    here = (start or Path.cwd()).absolute()
    for directory in (here, *here.parents):
        home = directory / HOME
        # Like git, ignore what a third party left in a directory above, such as /tmp.
        if os.path.isdir(home) and home.stat().st_uid in (os.geteuid(), 0):
            yield home
