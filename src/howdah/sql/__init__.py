"""The SQL contract as data: numbered migrations, each a folder of files that are applied together.

Beside them stand the two scripts about roles: `roles.sql` says who has rights, `grants.sql` gives them, and
both can be run any number of times.

This module only reads them. `howdah.database.migrate` applies them; `howdah.protocol.statements` calls what they make.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One forward step. `oldest_code` is the lowest schema version whose code still works with it."""

    version: int
    name: str
    oldest_code: int
    text: str


# From here on old code breaks; until then old and new code run side by side during a deploy.
_OLDEST_CODE = {1: 1, 2: 1, 3: 1}


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations, oldest first."""
    steps = []
    for folder in sorted(
        (entry for entry in (files(__name__) / "migrations").iterdir() if entry.is_dir()),
        key=lambda entry: entry.name,
    ):
        number, _, name = folder.name.partition("_")
        parts = sorted(
            (part for part in folder.iterdir() if part.name.endswith(".sql")), key=lambda p: p.name
        )
        text = "\n".join(part.read_text("utf-8") for part in parts)
        version = int(number)
        steps.append(
            Migration(version=version, name=name, oldest_code=_OLDEST_CODE[version], text=text)
        )
    return tuple(steps)


@cache
def script(name: str) -> str:
    """One of the scripts about roles: "roles" or "grants"."""
    return (files(__name__) / f"{name}.sql").read_text("utf-8")


def latest_version() -> int:
    """The schema version that this code is written for."""
    return migrations()[-1].version
