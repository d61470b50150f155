"""Faults of the server and of its connections. Some scenarios start their own PostgreSQL server."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from faulty_proxy import FaultyProxy

from howdah.chaos.scenario import Fault, Place, RunContext, Scenario
from howdah.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

SETTINGS = {
    "fsync": "off",  # only processes crash here, not the machine, which needs no fsync
    "max_connections": "200",
}
UP_TIMEOUT_SECONDS = 60.0


class KillServer(Scenario):
    """kill -9 of the postmaster, then a restart."""

    name = "kill server"
    about = "kill -9 of the postmaster, then a restart"
    first_seconds = 3.0
    every_seconds = 8.0
    server: EmbeddedServer

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        self.server = EmbeddedServer(directory / "pg", settings=SETTINGS)
        try:
            url = self.server.start()
            yield Place(url, url, common.schema)
        finally:
            self.server.remove()

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return self.name, {"down": round(random.uniform(0, 1.5), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        pid = self.server.pid()
        assert pid is not None, "no server to kill"
        with run.fault(fault.name, scope="server"):
            os.kill(pid, signal.SIGKILL)
            run.sleep(fault.detail["down"])
            self.server.start()
            assert self.server.pid() != pid, "the server survived its kill"


class KillBackends(Scenario):
    """kill -9 of single backends; the server then restarts all backends."""

    name = "kill backends"
    about = "kill -9 of single backends, after which PostgreSQL restarts"
    first_seconds = 2.0
    every_seconds = 6.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill backend", {"backend": random.randrange(1000)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        with contextlib.suppress(psycopg.Error):
            with psycopg.connect(run.place.checker, autocommit=True) as conn:
                pids = [pid for (pid,) in conn.execute(_BACKENDS).fetchall()]
            if not pids:
                return
            with run.fault(fault.name, scope="server"):
                backend = pids[fault.detail["backend"] % len(pids)]
                os.kill(backend, signal.SIGKILL)
                # The postmaster restarts the server as soon as it has reaped the backend.
                run.wait_until(lambda: not Path(f"/proc/{backend}").exists(), UP_TIMEOUT_SECONDS)
                wait_until_up(run.place.checker)


class TerminateBackends(Scenario):
    """The server terminates every connection, repeatedly."""

    name = "terminate backends"
    about = "all backends terminated every 2 s"
    first_seconds = every_seconds = 2.0

    def inject(self, run: RunContext, fault: Fault) -> None:
        with (
            contextlib.suppress(psycopg.Error),
            psycopg.connect(run.place.checker, autocommit=True) as conn,
            run.fault(fault.name, scope="connection"),
        ):
            conn.execute(f"SELECT pg_terminate_backend(pid) FROM ({_BACKENDS}) AS b".encode())


class BadNetwork(Scenario):
    """Connections that are cut, slow, or drop everything."""

    name = "bad network"
    about = "a proxy that cuts, delays and black-holes connections"
    min_seconds = 15.0
    first_seconds = 2.0
    every_seconds = 5.0
    proxy: FaultyProxy

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        self.proxy = FaultyProxy(common.checker)
        try:
            yield Place(self.proxy.url, common.checker, common.schema)
        finally:
            self.proxy.close()

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        (name,) = self.draw_in_turn(random, ["cut connections", "slow connections", "black hole"])
        detail = {"seconds": round(random.uniform(0.5, 3), 2)}
        return name, {} if name.startswith("cut") else detail

    def inject(self, run: RunContext, fault: Fault) -> None:
        with run.fault(fault.name, scope="connection"):
            match fault.name:
                case "cut connections":
                    self.proxy.cut()
                case "slow connections":
                    self.proxy.slow_down(0.1)
                    run.sleep(fault.detail["seconds"])
                    self.proxy.slow_down(0)
                case _:
                    self.proxy.black_hole(True)
                    run.sleep(fault.detail["seconds"])
                    self.proxy.black_hole(False)


class ReadOnlyFlips(Scenario):
    """The server is read-only for a while, as a demoted primary is. Sessions that began then stay so."""

    name = "read-only flips"
    about = "the server becomes read-only and every connection is terminated, then it can be written again"
    first_seconds = 2.0
    every_seconds = 6.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "read-only server", {"seconds": round(random.uniform(0.5, 3), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        with (
            psycopg.connect(run.place.checker, autocommit=True) as conn,
            run.fault(fault.name, scope="server"),
        ):
            conn.execute("SET default_transaction_read_only = off")
            database = f"ALTER DATABASE {conn.info.dbname}"
            conn.execute(f"{database} SET default_transaction_read_only = on".encode())
            try:
                conn.execute(f"SELECT pg_terminate_backend(pid) FROM ({_BACKENDS}) AS b".encode())
                run.sleep(fault.detail["seconds"])
            finally:
                conn.execute(f"{database} RESET default_transaction_read_only".encode())


_BACKENDS = """
    SELECT pid FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
      AND datname = current_database()
    ORDER BY pid
"""


def wait_until_up(url: str) -> None:
    """Wait until the server accepts connections."""
    deadline = time.monotonic() + UP_TIMEOUT_SECONDS
    while True:
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


SERVER_SCENARIOS: tuple[type[Scenario], ...] = (
    KillServer,
    KillBackends,
    TerminateBackends,
    BadNetwork,
    ReadOnlyFlips,
)
