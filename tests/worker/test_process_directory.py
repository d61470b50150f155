"""Directories of killed workers are removed when another worker starts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from howdah.worker.process_directory import make_directory

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CHILD = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from howdah.worker.process_directory import make_directory
kept = make_directory()
print(kept[0], flush=True)
time.sleep(3600)
"""


def test_the_directory_of_a_killed_worker_is_removed_and_those_of_running_workers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        first, second = (
            child.stdout.readline().decode().strip() for child in children if child.stdout
        )
        children[0].kill()
        children[0].wait()
        mine, listening = make_directory()
        listening.close()
        assert {str(path) for path in tmp_path.iterdir()} == {second, str(mine)}
        assert first != second
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
