"""Directories of killed workers are removed when another worker starts."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from howdah.worker.process_directory import make_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

CHILD = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from howdah.worker.process_directory import make_directory
kept = make_directory()
print(kept[0], flush=True)
time.sleep(3600)
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """pytest's own directories have long names."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_the_directory_of_a_killed_worker_is_removed_and_those_of_running_workers_stay(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(short_path)], stdout=subprocess.PIPE)
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
        assert {str(path) for path in short_path.iterdir()} == {second, str(mine)}
        assert first != second
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def test_the_sockets_have_short_paths_although_the_directory_for_temporary_files_has_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory, listening = make_directory()
    try:
        with listening, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as child:
            child.bind(str(directory / "child-4194304"))
            child.sendto(b"progress", str(directory / "reports"))
            assert listening.recv(100) == b"progress"
    finally:
        shutil.rmtree(directory)
