"""A PostgreSQL server whose clock can be set while it runs, by libfaketime (Debian's package)."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import fake_clock
from embedded_servers import SETTINGS

from howdah.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class ServerClockFile:
    """The file from which the server's processes read how wrong their clock is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0)

    def set(self, seconds: int) -> None:
        """Make the clock wrong by so many seconds, for all backends at once."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(f"{seconds:+d}\n")
        draft.chmod(0o644)  # the server's account reads it
        draft.rename(self.path)


def library() -> Path | None:
    """The variant for processes without threads: a server takes the time in signal handlers, where the mutex of the
    other variant could deadlock."""
    found = fake_clock.library()
    plain = None if found is None else found.with_name("libfaketime.so.1")
    return plain if plain is not None and plain.exists() else None


@contextlib.contextmanager
def server_with_clock(
    directory: Path, *, bin_directory: Path | None = None
) -> Iterator[tuple[EmbeddedServer, ServerClockFile]]:
    """A running server and its clock. The monotonic clock stays right."""
    found = library()
    assert found is not None, fake_clock.MISSING
    clock = ServerClockFile(directory / "clock")
    preload = {
        "LD_PRELOAD": str(found),
        "FAKETIME_TIMESTAMP_FILE": str(clock.path),
        "FAKETIME_NO_CACHE": "1",  # otherwise each backend jumps at another time
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    server = EmbeddedServer(
        directory / "pg",
        settings=SETTINGS | {"max_connections": "100"},
        bin_directory=bin_directory,
    )
    try:
        with _environment(preload):
            server.start()
        yield server, clock
    finally:
        server.remove()


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """Variables of this process, which the server inherits when it is started."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
