"""PostgreSQL servers that belong to one test and can be crashed."""

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

# Only processes crash in tests, not the machine, which needs no fsync.
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
def running_server(directory: Path, **settings: str) -> Iterator[EmbeddedServer]:
    """A running server in a directory."""
    server = EmbeddedServer(directory, settings=SETTINGS | settings)
    server.start()
    try:
        yield server
    finally:
        server.remove()


def crash(server: EmbeddedServer) -> None:
    """`kill -9` of the postmaster and all of its children, like a power failure.

    The postmaster is killed first, since it would restart children that exit."""
    pid = server.pid()
    assert pid is not None, "the server is not running"
    children = offspring(pid)
    for each in (pid, *children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    until(lambda: not any(map(is_alive, (pid, *children))), "the processes of the server exited")


def wait_until_up(server: EmbeddedServer) -> None:
    """Wait until a crashed server accepts connections; start it if its postmaster exited.

    After a crash the postmaster recovers the data. If that fails it exits, and in production a service manager
    would start it again."""

    def answers() -> bool:
        with contextlib.suppress(EmbeddedServerError):
            server.start(timeout=5)
        try:
            psycopg.connect(server.url).close()
        except psycopg.OperationalError:
            return False
        return True

    until(answers, "the server is up")


def server_socket(server: EmbeddedServer) -> Path:
    return server.socket_directory / ".s.PGSQL.5432"


@contextlib.contextmanager
def stopped(server: EmbeddedServer) -> Iterator[None]:
    """SIGSTOP of the postmaster and all of its children during the block, like a machine that swaps or whose disk
    hangs: connections stay open, new ones are accepted by the kernel, and nothing is answered.

    The postmaster is stopped first, since it would start children that are not stopped."""
    pid = server.pid()
    assert pid is not None, "the server is not running"
    os.kill(pid, signal.SIGSTOP)
    processes = [pid, *offspring(pid)]
    try:
        for each in processes[1:]:
            os.kill(each, signal.SIGSTOP)
        yield
    finally:
        for each in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)
