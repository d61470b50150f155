"""Finds the directory of an embedded server: `.howdah/pg18` in the current or a parent directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOME = ".howdah"
SERVER = "pg18"


def find_directory(start: Path | None = None) -> Path | None:
    """The `.howdah/pg18` of an existing server, in the current or a parent directory."""
    directories = (home / SERVER for home in _homes(start))
    return next((each for each in directories if os.path.lexists(each / "cluster")), None)


def default_directory() -> Path:
    """The directory of an existing server, else `pg18` in the nearest `.howdah`, else in a new one here."""
    return find_directory() or next(_homes(), Path.cwd() / HOME) / SERVER


def _homes(start: Path | None = None) -> Iterator[Path]:
    here = (start or Path.cwd()).absolute()
    for directory in (here, *here.parents):
        home = directory / HOME
        # Like git, ignore a directory of another user, for example in /tmp.
        if os.path.isdir(home) and home.stat().st_uid in (os.geteuid(), 0):
            yield home
