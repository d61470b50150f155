"""PostgreSQL servers of a test's own, which it may cut the power of."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from children import is_alive, offspring, until
from howdah.embedded import EmbeddedServer
from howdah.errors import EmbeddedServerError

if TYPE_CHECKING:
    from collections.abc import Iterator

# The machine under the tests does not crash; processes do, and that needs no fsync.
SETTINGS = {"fsync": "off", "max_connections": "60", "shared_buffers": "32MB"}


@contextlib.contextmanager
def workspace(name: str) -> Iterator[Path]:
    """A directory that the server's account can enter."""
    directory = Path(tempfile.mkdtemp(prefix=f"howdah-{name}-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def machine(directory: Path, **settings: str) -> Iterator[EmbeddedServer]:
    """A server in a directory, running."""
    server = EmbeddedServer(directory, settings=SETTINGS | settings)
    server.start()
    try:
        yield server
    finally:
        server.remove()


def cut_power(server: EmbeddedServer) -> None:
    """`kill -9` of the postmaster and everything below it, as if the machine had gone.

    The postmaster goes first, as it would start again what it sees dying."""
    pid = server.pid()
    assert pid is not None, "the server does not run"
    below = offspring(pid)
    for each in (pid, *below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    until(lambda: not any(map(is_alive, (pid, *below))), "the server's processes are gone")


def come_up(server: EmbeddedServer) -> None:
    """Wait until a server that crashed answers; start it if it has given up by itself.

    After a crash its postmaster recovers the data; whoever runs servers has somebody to start it again
    when that fails."""

    def answers() -> bool:
        with contextlib.suppress(EmbeddedServerError):
            server.start(timeout=5)
        try:
            psycopg.connect(server.url).close()
        except psycopg.OperationalError:
            return False
        return True

    until(answers, "the server is up again")


def server_socket(server: EmbeddedServer) -> Path:
    return server.socket_directory / ".s.PGSQL.5432"
