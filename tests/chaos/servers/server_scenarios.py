"""Scenarios whose fault is the server's, or something between it and its clients."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar

import disturbances
import psycopg
from machines import come_up, machine
from pooler import Pooler, pooler
from replicas import Replicas, replicas
from small_disk import Part, SmallDisk, cramped

from children import until
from howdah.chaos.scenario import Fault, Place, Scenario, Stage, regularly

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from random import Random

    from howdah.embedded import EmbeddedServer


class FailOver(Scenario):
    """The primary's machine dies in the middle; its synchronous standby takes over."""

    name = "fail over"
    about = "kill -9 of the primary, a synchronous standby promoted"
    synchronous: ClassVar[bool] = True
    pair: Replicas

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with replicas(directory, synchronous=self.synchronous) as self.pair:
            # Whoever looks goes through the gate as well, as there is another server behind it later.
            yield Place(self.pair.url, self.pair.url)

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        return [Fault(round(seconds * random.uniform(0.4, 0.6), 2), "fail over")]

    def strike(self, stage: Stage, fault: Fault) -> None:
        with stage.fault(fault.name, scope="server"):
            self.pair.fail_over()


class FailOverByName(FailOver):
    """The same, with clients that name both servers and look for the one that can write."""

    name = "fail over by name"
    about = "the same, with both servers named in the URL"

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with super().place(common, directory):
            yield Place(self.pair.urls, self.pair.urls)


class DiskFull(Scenario):
    """The disk runs full, and there is room again a little later."""

    name = "disk full"
    about = "no room for data, then room again"
    part: ClassVar[Part] = "data"
    server: EmbeddedServer
    disk: SmallDisk

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with cramped(directory, self.part, megabytes=512) as (self.server, self.disk):
            with psycopg.connect(self.server.url, autocommit=True) as conn:
                conn.execute("CREATE TABLE public.ballast (filler text)")
            yield Place(self.server.url, self.server.url)

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        return [
            Fault(at, self.name, {"seconds": round(random.uniform(0.5, 2), 2)})
            for at in regularly(random, seconds, every=12, first=3)
        ]

    def strike(self, stage: Stage, fault: Fault) -> None:
        with stage.fault(fault.name, scope="server"):
            self.disk.fill()
            until(self._is_full, "the server is out of room")
            stage.sleep(fault.detail["seconds"])
            self.disk.free()
            come_up(self.server)

    def _is_full(self) -> bool:
        """Write until there is no room, also none in pages that the server has already."""
        try:
            with psycopg.connect(self.server.url, autocommit=True) as conn:
                conn.execute(
                    "INSERT INTO public.ballast SELECT repeat(md5(n::text), 60) "
                    "FROM generate_series(1, 20000) AS n"
                )
                conn.execute("TRUNCATE public.ballast")
        except psycopg.errors.DiskFull:
            return True
        except psycopg.OperationalError:
            return True  # it panicked
        return False


class WalFull(DiskFull):
    """There is no room for the WAL: the server panics, and is up again when there is."""

    name = "WAL full"
    about = "no room for the WAL: the server panics; then room again"
    part = "wal"


class Pooled(Scenario):
    """PgBouncer in transaction mode in front of everything, restarted and killed."""

    name = "pooler"
    about = "PgBouncer in transaction mode, restarted and killed"
    pooler: Pooler

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        directory.chmod(0o755)
        with pooler(directory, common.checker, connections=10) as self.pooler:
            yield Place(self.pooler.url, common.checker, common.schema)

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        return [
            Fault(at, random.choice(["restart the pooler", "kill the pooler"]), {"down": down})
            for at in regularly(random, seconds, every=5, first=2)
            if (down := round(random.uniform(0, 1), 2)) is not None
        ]

    def strike(self, stage: Stage, fault: Fault) -> None:
        with stage.fault(fault.name, scope="connection"):
            if fault.name.startswith("kill"):
                self.pooler.kill()
            else:
                self.pooler.stop()
            stage.sleep(fault.detail["down"])
            self.pooler.start()


class Neighbours(Scenario):
    """What others do to a database that is not ours alone."""

    name = "neighbours"
    about = "a held transaction, a DDL lock, REINDEX, no connection left"
    server: EmbeddedServer
    KINDS = (
        "hold a transaction",
        "lock for DDL",
        "REINDEX",
        "REINDEX CONCURRENTLY",
        "no connection left",
    )

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with machine(directory / "pg", max_connections="80") as self.server:
            yield Place(self.server.url, self.server.url)

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        kinds = list(self.KINDS)
        random.shuffle(kinds)
        return [
            Fault(at, kinds[n % len(kinds)], {"seconds": round(random.uniform(1, 3.5), 2)})
            for n, at in enumerate(regularly(random, seconds, every=5, first=2))
        ]

    def strike(self, stage: Stage, fault: Fault) -> None:
        url, seconds = stage.place.checker, fault.detail["seconds"]
        match fault.name:
            case "hold a transaction":
                with disturbances.held_transaction(url) as pid:
                    # It may disturb nobody: the ledger has it as a fault of the one who holds it.
                    with stage.fault(fault.name, scope="worker", target=pid):
                        stage.sleep(seconds)
            case "lock for DDL":
                with (
                    stage.fault(fault.name, scope="server"),
                    disturbances.ddl_lock(url) as pid,
                ):
                    until(lambda: disturbances.waiting_for(url, pid), "somebody waits for the lock")
                    stage.sleep(seconds)
            case "no connection left":
                with (
                    stage.fault(fault.name, scope="server"),
                    disturbances.no_connection_left(url),
                ):
                    stage.sleep(seconds)
            case _:
                with stage.fault(fault.name, scope="server"):
                    disturbances.reindex(url, concurrently=fault.name.endswith("CONCURRENTLY"))

    def findings(self, stage: Stage) -> list[str]:
        if disturbances.indexes_are_valid(stage.place.checker):
            return []
        return ["a REINDEX has left an index that is not valid"]
