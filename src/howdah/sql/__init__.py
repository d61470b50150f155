"""The SQL that makes a schema, as data.

- `tables/NNNN_name.sql`: numbered table steps, which run once and go forward only.
- `functions/*.sql`: the current text of every function, which every migration runs again.
- `access/`: `roles.sql` records which roles have privileges, `grants.sql` grants them. Both may run any number
  of times.

This module only reads the files. `howdah.database.migrate` runs them; `howdah.protocol.statements` calls the
functions.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

RELEASED: dict[int, str] = {}
"""The functions hash of every released version. After a release, a change of a function needs a new version."""

_OLDEST_CODE = re.compile(r"^-- oldest code: (\d+)$", re.MULTILINE)
_DROPS = re.compile(r"^-- drops: (.+)$", re.MULTILINE)
_AFTER_FUNCTIONS = re.compile(r"^-- after functions$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStep:
    """One step forward. `oldest_code` is the lowest schema version whose code still works with it."""

    version: int
    name: str
    oldest_code: int
    drops: tuple[str, ...]
    """The signatures of functions that this step removes."""
    text: str
    text_after_functions: str
    """What needs functions: triggers, and calls that fill tables."""

    @property
    def label(self) -> str:
        return f"{self.version:04}_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The SQL of one build of Howdah."""

    steps: tuple[TableStep, ...]
    functions: str

    @property
    def version(self) -> int:
        """The schema version that this build makes and needs."""
        return self.steps[-1].version

    @property
    def functions_hash(self) -> str:
        """Changes with the functions, but not with the comments between them."""
        lines = [each for each in self.functions.splitlines() if each and not each.startswith("--")]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def pending(self, version: int) -> list[TableStep]:
        """The steps that a schema of this version lacks."""
        return [step for step in self.steps if step.version > version]


def read_release(directory: Traversable) -> Release:
    """The SQL in a directory that is laid out like this package."""
    return Release(
        steps=tuple(_parse_step(name, text) for name, text in _read(directory / "tables")),
        functions="\n".join(text for _, text in _read(directory / "functions")),
    )


def _read(directory: Traversable) -> list[tuple[str, str]]:
    found = [entry for entry in directory.iterdir() if entry.name.endswith(".sql")]
    return [
        (entry.name.removesuffix(".sql"), entry.read_text("utf-8"))
        for entry in sorted(found, key=lambda entry: entry.name)
    ]


def _parse_step(label: str, text: str) -> TableStep:
    number, _, name = label.partition("_")
    oldest_code = _OLDEST_CODE.search(text)
    if oldest_code is None:
        raise ValueError(f'{label}.sql has no line "-- oldest code: VERSION"')
    before, *after = _AFTER_FUNCTIONS.split(text)
    return TableStep(
        version=int(number),
        name=name,
        oldest_code=int(oldest_code[1]),
        drops=tuple(_DROPS.findall(text)),
        text=before,
        text_after_functions="".join(after),
    )


@cache
def release() -> Release:
    """The SQL of this build."""
    return read_release(files(__name__))


def latest_version() -> int:
    """The schema version that this code is written for."""
    return release().version


@cache
def script(name: str) -> str:
    """One of the other files, for example "access/grants" or "catalog"."""
    return (files(__name__) / f"{name}.sql").read_text("utf-8")
