"""The SQL of the next release, for tests of upgrades: that of this build with one more table step, a parameter
more for `claim_job_batch` and another body for `head_margin`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from howdah import sql
from howdah.sql import read_release

if TYPE_CHECKING:
    from collections.abc import Mapping

    from howdah.sql import Release

SQL = Path(sql.__file__).parent
VERSION = sql.latest_version() + 1
LABEL = f"{VERSION:04}_next"

DROPS = "claim_job_batch(text, text[], int, interval, text[], boolean, timestamptz, boolean)"
STEP = f"""
-- drops: {DROPS}
ALTER TABLE lanes ADD COLUMN next_release text NOT NULL DEFAULT 'yes';
"""
EDITS = {
    "claim.sql": {
        "p_suspects_alone boolean DEFAULT true)": "p_suspects_alone boolean DEFAULT true,\n"
        "    p_next_release text DEFAULT NULL)"
    },
    "lanes.sql": {"RETURN interval '250 milliseconds';": "RETURN interval '2 seconds';"},
}


def write_next_release(
    directory: Path,
    *,
    step: str = STEP,
    edits: Mapping[str, Mapping[str, str]] = EDITS,
    oldest_code: int = 1,
) -> None:
    """Turn a copy of the package's SQL into that of the next release."""
    header = f"-- what the next release adds\n-- oldest code: {oldest_code}\n"
    (directory / "tables" / f"{LABEL}.sql").write_text(header + step)
    for name, replacements in edits.items():
        file = directory / "functions" / name
        text = file.read_text()
        for old, new in replacements.items():
            assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times"
            text = text.replace(old, new)
        file.write_text(text)


def next_release(
    directory: Path,
    *,
    step: str = STEP,
    edits: Mapping[str, Mapping[str, str]] = EDITS,
    oldest_code: int = 1,
) -> Release:
    """The SQL of the next release, made in an empty directory."""
    copy = directory / "sql"
    shutil.copytree(SQL, copy, ignore=shutil.ignore_patterns("__pycache__"))
    write_next_release(copy, step=step, edits=edits, oldest_code=oldest_code)
    return read_release(copy)
