"""The directory that a worker shares with its task processes. A worker that makes a new one removes the directories
of workers that were killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

PREFIX = "howdah-worker-"
SOCKET_PATH_BYTES = 103  # the least limit of the systems that have such sockets
NAME_BYTES = len(f"/{PREFIX}12345678/child-4194304")
SHORT_PARENT = "/tmp"  # noqa: S108 - the directory is made by mkdtemp, for this user only


def make_directory() -> tuple[Path, socket.socket]:
    """A new directory, and the bound socket `reports` in it."""
    _remove_stale()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_parent()))
    try:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.bind(str(directory / "reports"))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory, listening


def _parent() -> str:
    """The directory for temporary files, unless the path of a socket in it would be too long."""
    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual)) + NAME_BYTES <= SOCKET_PATH_BYTES
    return usual if is_short else SHORT_PARENT


def _remove_stale() -> None:
    # The socket of a killed process refuses connections. Its pid proves nothing: it may be in use again.
    for directory in Path(_parent()).glob(f"{PREFIX}*"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe,
        ):
            try:
                probe.connect(str(directory / "reports"))
            except ConnectionRefusedError:
                shutil.rmtree(directory, ignore_errors=True)
