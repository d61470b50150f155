"""Finds the running server of a data directory."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import NamedTuple

PORT = 5432  # part of the socket's file name only
PROBE_SECONDS = 3.0


class Postmaster(NamedTuple):
    """The contents of `postmaster.pid`."""

    pid: int
    socket_directory: Path
    ready: bool


def find_postmaster(cluster: Path) -> Postmaster | None:
    """The server that listens for connections, or None."""
    try:
        lines = (cluster / "postmaster.pid").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(lines) < 5 or not lines[4]:  # the server is still writing it
        return None
    # The file outlives a killed server, and its process id may belong to another process by now.
    # Only the server itself listens on the socket.
    answers = _probe(Path(lines[4]) / f".s.PGSQL.{PORT}")
    if answers is None:
        return None
    return Postmaster(int(lines[0]), Path(lines[4]), answers and lines[-1].strip() == "ready")


def _probe(address: Path) -> bool | None:
    """Whether the server at a socket answers; None if no process listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(address))
            # An SSLRequest is answered by a process that the postmaster forks. Connecting alone would
            # also succeed while the postmaster is shutting down.
            probe.sendall(struct.pack("!ii", 8, 80877103))
            return probe.recv(1) != b"" or None
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            return None
