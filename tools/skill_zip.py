"""Packs the skill into a reproducible zip file: sorted names, fixed times and permissions.

python tools/skill_zip.py dist/postgres-job-queue.zip
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from howdah.skill import NAME, shipped_files

EARLIEST_TIME = (1980, 1, 1, 0, 0, 0)  # that a zip file can store


def pack(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in shipped_files().items():
            entry = zipfile.ZipInfo(f"{NAME}/{path}", EARLIEST_TIME)
            entry.create_system = 3  # Unix, on every platform
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_STORED  # compressors differ from version to version
            archive.writestr(entry, data)


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
    print(sys.argv[1])
