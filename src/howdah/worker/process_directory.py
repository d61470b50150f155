"""The directory that a worker shares with its task processes. A worker that makes a new one removes the directories
of workers that were killed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from pathlib import Path

PREFIX = "howdah-worker-"


def make_directory() -> tuple[Path, socket.socket]:
    """A new directory, and the bound socket `reports` in it."""
    _remove_stale()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(directory / "reports"))
    return directory, listening


def _remove_stale() -> None:
    # The socket of a killed process refuses connections. Its pid proves nothing: it may be in use again.
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe,
        ):
            try:
                probe.connect(str(directory / "reports"))
            except ConnectionRefusedError:
                shutil.rmtree(directory, ignore_errors=True)
