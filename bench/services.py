"""The servers that peers are measured on: one PostgreSQL with a database per peer, and one Redis. Both are durable,
listen only on this machine, and are removed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import asyncpg

from howdah.embedded import EmbeddedServer
from howdah.embedded.binaries import find_binaries

if TYPE_CHECKING:
    from collections.abc import Iterator

# All other settings are PostgreSQL's defaults. Every round starts with an explicit checkpoint: one that happens
# during a round by chance says nothing about a peer.
POSTGRES_SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "max_connections": "300",
}
# The append-only file is Redis's own durable mode. `everysec` is its default and what its documentation
# recommends; a crash loses up to a second of acknowledged jobs, which PostgreSQL does not.
REDIS_SETTINGS = {"appendonly": "yes", "appendfsync": "everysec", "save": ""}


class Postgres:
    """A running PostgreSQL for benchmarks. Use as a context manager."""

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.settings = POSTGRES_SETTINGS | (settings or {})
        self._home = Path(tempfile.mkdtemp(prefix="howdah-bench-"))
        self._home.chmod(0o755)
        self._server = EmbeddedServer(self._home / "pg", settings=self.settings)

    def __enter__(self) -> Postgres:
        try:
            self._server.start()
        except BaseException:  # also SystemExit
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._server.remove()
        shutil.rmtree(self._home, ignore_errors=True)

    def url(self, database: str = "howdah") -> str:
        """The URL of a database, as libpq, asyncpg and node-postgres all read it."""
        host = quote(str(self._server.socket_directory), safe="")
        return f"postgresql://howdah@/{database}?host={host}&port=5432"

    @property
    def environment(self) -> dict[str, str]:
        """The address of the server as libpq variables."""
        return {
            "PGHOST": str(self._server.socket_directory),
            "PGPORT": "5432",
            "PGUSER": "howdah",
        }

    @property
    def pid(self) -> int:
        pid = self._server.pid()
        if pid is None:
            raise RuntimeError("the PostgreSQL of the benchmarks is not running")
        return pid

    def program(self, name: str) -> str | None:
        """The path of a program of the same PostgreSQL, or of the system's."""
        own = find_binaries().directory / name
        return str(own) if own.exists() else shutil.which(name)

    def query(self, sql: str, *parameters: Any, database: str = "howdah") -> list[Any]:
        """Run one statement on a new connection."""

        async def run() -> list[Any]:
            connection = await asyncpg.connect(self.url(database))
            try:
                return list(await connection.fetch(sql, *parameters))
            finally:
                await connection.close()

        return asyncio.run(run())

    def value(self, sql: str, *parameters: Any, database: str = "howdah") -> Any:
        return self.query(sql, *parameters, database=database)[0][0]

    def recreate(self, database: str, template: str = "template0") -> None:
        """Drop a database and create it as a copy of its template."""
        self.query(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')
        self.query(f'CREATE DATABASE "{database}" TEMPLATE "{template}"')

    def drop(self, database: str) -> None:
        self.query(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')

    def checkpoint(self) -> None:
        self.query("CHECKPOINT")

    def wal_position(self) -> int:
        """The number of bytes of WAL written so far."""
        return int(self.value("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))

    def sizes(self, database: str) -> dict[str, int]:
        """The current bytes in tables and in indexes."""
        row = self.query(
            "SELECT coalesce(sum(pg_table_size(c.oid)), 0), coalesce(sum(pg_indexes_size(c.oid)), 0) "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema')",
            database=database,
        )[0]
        return {"table_bytes": int(row[0]), "index_bytes": int(row[1])}

    def facts(self) -> dict[str, str]:
        """The version and the relevant settings, read from the server."""
        names = [*self.settings, "wal_level", "wal_sync_method", "autovacuum"]
        rows = self.query(
            "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY ($1)", names
        )
        settings = {row[0]: row[1] for row in rows}
        version = str(self.value("SHOW server_version"))
        return {"version": version} | {name: settings[name] for name in names}


class Redis:
    """A running Redis with its append-only file on. Use as a context manager."""

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="howdah-bench-redis-"))
        self._socket = self._home / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("redis-server") is not None

    def __enter__(self) -> Redis:
        program = shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("redis-server is not installed")
        options = {"port": "0", "unixsocket": str(self._socket), "dir": str(self._home)}
        arguments = [part for k, v in (options | REDIS_SETTINGS).items() for part in (f"--{k}", v)]
        try:
            self._process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
            deadline = time.monotonic() + 30
            while self._command("PING") != "PONG":
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError("redis-server did not start")
                time.sleep(0.02)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the Redis of the benchmarks is not running")
        return self._process.pid

    @property
    def socket(self) -> str:
        return str(self._socket)

    def flush(self) -> None:
        self._command("FLUSHALL")

    def count(self, command: str) -> int:
        """The integer reply of a command."""
        return int((self._command(command) or "").lstrip(":"))

    def facts(self) -> dict[str, str]:
        lines = (self._command("INFO server") or "").splitlines()
        info = dict(line.split(":", 1) for line in lines if ":" in line)
        return {"version": info.get("redis_version", "?")} | REDIS_SETTINGS

    def _command(self, command: str) -> str | None:
        """Send one inline command to Redis; the reply is one line or one bulk string."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.settimeout(30)
            link.connect(str(self._socket))
            link.sendall(f"{command}\r\n".encode())
            file = link.makefile("rb")
            first = file.readline().decode().strip()
            if first.startswith("$"):
                return file.read(int(first[1:])).decode()
            return first.lstrip("+-")
        return None


TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants, including those that exited and were waited for."""
    return sum(_cpu_of_one(each) for each in _tree(pid))


def _cpu_of_one(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / TICKS  # utime, stime, cutime, cstime


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _tree(int(child))
