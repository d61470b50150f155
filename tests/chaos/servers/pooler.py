"""Debian's PgBouncer in transaction mode, which can be restarted and killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from children import until

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
MISSING = "PgBouncer is not installed (apt-get install pgbouncer)"


class Pooler:
    """One PgBouncer in front of one database. It keeps its port across restarts."""

    def __init__(self, directory: Path, database: str, *, connections: int = 4) -> None:
        parts = urlsplit(database)
        name = parts.path.lstrip("/")
        host = Path(parse_qs(parts.query)["host"][0])
        # PgBouncer refuses to run as root, and only root and the server's account may use the server's socket.
        self._account = host.owner() if os.geteuid() == 0 else None
        self._port = _free_port()
        self.url = f"postgresql://howdah@127.0.0.1:{self._port}/{name}"
        self._log = directory / "pgbouncer.log"
        self._settings = directory / "pgbouncer.ini"
        self._settings.write_text(
            f"[databases]\n{name} = host={host} port=5432 user=howdah\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self._port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = transaction\ndefault_pool_size = {connections}\n"
            "max_client_conn = 200\nserver_login_retry = 1\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(PROGRAM), "-q", str(self._settings)], user=self._account, stderr=log
            )
        until(self._answers, "the pooler accepts connections")

    def stop(self) -> int:
        """Stop at once, like `systemctl restart` after its timeout: clients lose their connections."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        return self._end(signal.SIGKILL)

    def _end(self, number: int) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        return process.wait(30)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            socket.create_connection(("127.0.0.1", self._port), 1).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def pooler(directory: Path, database: str, *, connections: int = 4) -> Iterator[Pooler]:
    pooler = Pooler(directory, database, connections=connections)
    pooler.start()
    try:
        yield pooler
    finally:
        pooler.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
