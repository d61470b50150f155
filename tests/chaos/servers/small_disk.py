"""A server whose disk becomes full: its data or its WAL are on a small file system in memory.

A full data disk is an error of the statement that needed space. A full WAL disk is a panic: the server closes every
connection, and restarts only when there is space. Both happen in production."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Literal, TypeAlias

from embedded_servers import SETTINGS

from howdah.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Part: TypeAlias = Literal["data", "wal"]


def unavailable_because() -> str | None:
    """Why a small file system cannot be mounted here, or None."""
    if os.geteuid() != 0:
        return "mounting a small file system needs root"
    probe = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
    )
    return None if probe.returncode == 0 else "mounting is not permitted here"


class SmallDisk:
    """A separate file system, and a file that can take all of its space."""

    def __init__(self, mount_point: Path, megabytes: int) -> None:
        self._mount_point = mount_point
        self._filler = mount_point / "filler"
        mount_point.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "tmpfs"]
        subprocess.run([*command, str(mount_point)], check=True)

    def fill(self) -> int:
        """Take all free space; returns the number of bytes."""
        taken = 0
        with open(self._filler, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                taken += file.write(bytes(4096))
        return taken

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def unmount(self) -> None:
        subprocess.run(["umount", str(self._mount_point)], check=True)


@contextlib.contextmanager
def server_on_small_disk(
    directory: Path, part: Part, megabytes: int = 96
) -> Iterator[tuple[EmbeddedServer, SmallDisk]]:
    """A running server whose data or WAL are on a disk that can be filled."""
    wal_size = {"max_wal_size": "48MB", "min_wal_size": "32MB", "wal_recycle": "off"}
    server = EmbeddedServer(directory / "pg", settings=SETTINGS | wal_size)
    server.start()
    server.stop()
    cluster = directory / "pg" / "cluster"
    place = cluster / {"data": "base", "wal": "pg_wal"}[part]
    disk = SmallDisk(directory / "disk", megabytes)
    try:
        moved = directory / "disk" / place.name
        subprocess.run(["cp", "-a", str(place), str(moved)], check=True)
        shutil.rmtree(place)
        place.symlink_to(moved)
        server.start()
        yield server, disk
    finally:
        server.stop("immediate")
        disk.unmount()
        server.remove()
