"""Scenarios with servers that are strict or refuse: settings of the role, a read-only server, no free connection."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import disturbances
import psycopg
from embedded_servers import SETTINGS, running_server, workspace

from howdah.chaos.process_faults import KillWorkers
from howdah.chaos.scenario import Fault, Place, RunContext, Scenario
from howdah.embedded import EmbeddedServer
from howdah.embedded.binaries import OLDEST_VERSION, Binaries, _system_directories

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from random import Random

STRICT = {
    "default_transaction_isolation": "serializable",
    "statement_timeout": "1s",
    "lock_timeout": "50ms",
    "idle_in_transaction_session_timeout": "1s",
}
CONNECTIONS_AT_ONCE = 10
CONNECTIONS_PER_SECOND = 6
"""What one process may open to a server that refuses: a worker has five parts that back off, each to three seconds.
A process that retries without a pause opens more than a hundred per second."""
LOG_LINES_PER_SECOND = 10
"""Of one worker, while it is refused."""
LOG_LINES_AT_ONCE = 60


def system_binaries() -> Path | None:
    """The oldest supported PostgreSQL of this system. Debian's has JIT, the embedded one has not."""
    found = [Binaries(directory.resolve()) for directory in _system_directories()]
    usable = [each for each in found if each.version >= OLDEST_VERSION]
    return min(usable, key=lambda each: each.version).directory if usable else None


NO_SYSTEM_POSTGRESQL = "no PostgreSQL is installed on this system (apt-get install postgresql)"


class StrictSettings(KillWorkers):
    """The role and the database have settings that an administrator may have chosen for other programs."""

    name = "strict settings"
    about = "serializable, statement_timeout 1 s, lock_timeout 50 ms, idle_in_transaction_session_timeout 1 s"
    min_seconds = 15.0
    every_seconds = 5.0
    settings: ClassVar[Mapping[str, str]] = STRICT
    bin_directory: Path | None = None

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with workspace("strict") as home:
            server = EmbeddedServer(
                home / "pg",
                settings=SETTINGS | {"max_connections": "100"},
                bin_directory=self.bin_directory,
            )
            try:
                url = server.start()
                with psycopg.connect(url, autocommit=True) as conn:
                    for number, (name, value) in enumerate(self.settings.items()):
                        # Both places that an administrator uses.
                        whose = "ROLE" if number % 2 else "DATABASE"
                        conn.execute(f"ALTER {whose} howdah SET {name} = '{value}'".encode())
                yield Place(url, url)
            finally:
                server.remove()


class StrictSettingsWithJit(StrictSettings):
    """The same on the system's PostgreSQL, which compiles every plan."""

    name = "strict settings, JIT"
    about = "the same on the system's PostgreSQL, with JIT for every plan"
    # Ten seconds, since compiling the plan of any statement, in a session without LLVM, may take one.
    settings = STRICT | {"jit": "on", "jit_above_cost": "0", "statement_timeout": "10s"}

    def __init__(self) -> None:
        self.bin_directory = system_binaries()


class Refusals(Scenario):
    """The server runs and refuses: it is read-only, or has no free connection."""

    name = "refusals"
    about = "the server is read-only, or has no free connection, for some seconds"
    min_seconds = 24.0
    first_seconds = 2.0
    every_seconds = 10.0
    server: EmbeddedServer
    KINDS = ("read-only server", "connection limit")

    def __init__(self) -> None:
        self._wrong: list[str] = []

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with (
            workspace("refusals") as home,
            running_server(home / "pg", max_connections="80", log_connections="on") as self.server,
        ):
            yield Place(self.server.url, self.server.url)

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        (name,) = self.draw_in_turn(random, self.KINDS)
        return name, {"seconds": round(random.uniform(4, 6), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        url, seconds = run.place.checker, fault.detail["seconds"]
        logged = {log: _lines(log) for log in run.supervisor.logs()}
        with run.fault(fault.name, scope="connection"):
            if fault.name == "connection limit":
                with disturbances.no_connection_left(url):
                    run.sleep(seconds)
            else:
                with _read_only(url):
                    before = connections(self.server)
                    run.sleep(seconds)
                    opened = connections(self.server) - before
                self._wrong += too_many(opened, seconds)
        for log, lines in logged.items():
            more = _lines(log) - lines
            if more > LOG_LINES_AT_ONCE + LOG_LINES_PER_SECOND * seconds:
                self._wrong.append(
                    f'{log.name} has {more} lines more after "{fault.name}" of {seconds:g} s'
                )

    def findings(self, run: RunContext) -> list[str]:
        exits = [
            f"{count} processes ended: {what}"
            for what, count in run.supervisor.exits.items()
            if what.startswith(("worker", "bare")) and not what.endswith((" 0", " -9"))
        ]
        return self._wrong + exits


@contextlib.contextmanager
def _read_only(url: str) -> Iterator[None]:
    """Like a demoted primary behind an address that did not move: every new transaction is read-only."""

    def flip(value: str) -> None:
        with psycopg.connect(
            url, autocommit=True, options="-c default_transaction_read_only=off"
        ) as conn:
            conn.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}".encode())
            conn.execute("SELECT pg_reload_conf()")

    flip("on")
    try:
        yield
    finally:
        flip("off")


def connections(server: EmbeddedServer) -> Counter[str]:
    """How many connections each process of the run has opened so far, by the name that it connects with. The
    connections of its task processes count as well."""
    return Counter(_AUTHORIZED.findall(server.log_file.read_text(errors="replace")))


def too_many(opened: Mapping[str, int], seconds: float) -> list[str]:
    """The processes that opened more connections than a backoff does, as sentences."""
    return [
        f"{name} opened {count} connections to a read-only server in {seconds:g} s"
        for name, count in sorted(opened.items())
        if count > CONNECTIONS_AT_ONCE + CONNECTIONS_PER_SECOND * seconds
    ]


_AUTHORIZED = re.compile(r"connection authorized: .* application_name=(\d+-\w+)")


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n")
