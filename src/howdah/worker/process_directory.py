"""The directory in which a worker meets the processes of its handlers. Who starts a new one removes what
workers have left that were killed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from pathlib import Path

PREFIX = "howdah-worker-"


def make_directory() -> tuple[Path, socket.socket]:
    """A directory of our own, and the socket `reports` in it."""
    _sweep()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(directory / "reports"))
    return directory, listening


def _sweep() -> None:
    # Nobody listens to the socket of a process that is gone, whatever has its number now.
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller,
        ):
            try:
                caller.connect(str(left / "reports"))
            except ConnectionRefusedError:
                shutil.rmtree(left, ignore_errors=True)
