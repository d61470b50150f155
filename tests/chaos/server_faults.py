"""Faults of the server and of the way to it, on a PostgreSQL of the scenario's own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import psycopg
from faulty_proxy import Wire

from howdah.chaos.scenario import Fault, Place, Scenario, Stage
from howdah.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

SETTINGS = {
    "fsync": "off",  # the machine does not crash; processes do, and that needs no fsync
    "max_connections": "200",
}
UP_PATIENCE = 60.0


class KillServer(Scenario):
    """kill -9 of the postmaster, and a new start."""

    name = "kill server"
    about = "kill -9 of the postmaster, then a restart"
    first = 3.0
    every = 8.0
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

    def strike(self, stage: Stage, fault: Fault) -> None:
        pid = self.server.pid()
        assert pid is not None, "there is no server to kill"
        with stage.fault(fault.name, scope="server"):
            os.kill(pid, signal.SIGKILL)
            stage.sleep(fault.detail["down"])
            self.server.start()
            assert self.server.pid() != pid, "the server survived its kill"


class KillBackends(Scenario):
    """kill -9 of single backends, on which the whole server starts anew."""

    name = "kill backends"
    about = "kill -9 of single backends, after which PostgreSQL restarts"
    first = 2.0
    every = 6.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill backend", {"backend": random.randrange(1000)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        with contextlib.suppress(psycopg.Error):
            with psycopg.connect(stage.place.checker, autocommit=True) as conn:
                pids = [pid for (pid,) in conn.execute(_BACKENDS).fetchall()]
            if not pids:
                return
            with stage.fault(fault.name, scope="server"):
                os.kill(pids[fault.detail["backend"] % len(pids)], signal.SIGKILL)
                time.sleep(0.2)
                wait_until_up(stage.place.checker)


class TerminateBackends(Scenario):
    """Every connection is ended by the server, again and again."""

    name = "terminate backends"
    about = "all backends terminated every 2 s"
    first = every = 2.0

    def strike(self, stage: Stage, fault: Fault) -> None:
        with (
            contextlib.suppress(psycopg.Error),
            psycopg.connect(stage.place.checker, autocommit=True) as conn,
            stage.fault(fault.name, scope="connection"),
        ):
            conn.execute(f"SELECT pg_terminate_backend(pid) FROM ({_BACKENDS}) AS b".encode())


class BadNetwork(Scenario):
    """Lines that are cut, slow, or swallow everything."""

    name = "bad network"
    about = "a proxy that cuts, delays and black-holes connections"
    least = 15.0
    first = 2.0
    every = 5.0
    wire: Wire

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        self.wire = Wire(common.checker)
        try:
            yield Place(self.wire.url, common.checker, common.schema)
        finally:
            self.wire.close()

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        (name,) = self.deal(random, ["cut connections", "slow connections", "black hole"])
        detail = {"seconds": round(random.uniform(0.5, 3), 2)}
        return name, {} if name.startswith("cut") else detail

    def strike(self, stage: Stage, fault: Fault) -> None:
        with stage.fault(fault.name, scope="connection"):
            match fault.name:
                case "cut connections":
                    self.wire.cut()
                case "slow connections":
                    self.wire.slow_down(0.1)
                    stage.sleep(fault.detail["seconds"])
                    self.wire.slow_down(0)
                case _:
                    self.wire.black_hole(True)
                    stage.sleep(fault.detail["seconds"])
                    self.wire.black_hole(False)


_BACKENDS = """
    SELECT pid FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
      AND datname = current_database()
    ORDER BY pid
"""


def wait_until_up(url: str) -> None:
    """Until the server takes connections."""
    give_up = time.monotonic() + UP_PATIENCE
    while True:
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.OperationalError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)
        else:
            return


SERVER: tuple[type[Scenario], ...] = (KillServer, KillBackends, TerminateBackends, BadNetwork)
