"""Scenarios whose fault is the server's, or something between it and its clients."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import disturbances
import psycopg
from embedded_servers import come_up, machine, workspace
from pooler import Pooler, pooler
from replicas import Replicas, replicas
from small_disk import Part, SmallDisk, cramped

from children import until
from howdah.chaos import ledger
from howdah.chaos.history import History
from howdah.chaos.scenario import Fault, Place, Scenario, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from random import Random

    from howdah.chaos.checker import Finding
    from howdah.embedded import EmbeddedServer


T = TypeVar("T")


def while_loaded(stage: Stage, condition: Callable[[], T | None]) -> T | None:
    """The condition's value once it is true, or None if the load ends before that."""
    while stage.crew.producers():
        if value := condition():
            return value
        stage.sleep(0.02)
    return None


class FailOver(Scenario):
    """The primary's machine dies in the middle; its synchronous standby takes over."""

    name = "fail over"
    about = "kill -9 of the primary, a synchronous standby promoted"
    least = 10.0
    synchronous: ClassVar[bool] = True
    pair: Replicas

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with workspace("pair") as home, replicas(home, synchronous=self.synchronous) as self.pair:
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


class FailOverWithLoss(FailOver):
    """The standby is asynchronous and behind: what only the primary knew is lost with it. The checker
    must name exactly that; the dead primary's disk says what it was."""

    name = "fail over with loss"
    about = "the same with an asynchronous standby that lags behind; lost jobs are reported by id"
    synchronous = False
    lost: frozenset[str] = frozenset()
    """Jobs that the dead primary had and the promoted standby has not."""
    undone: frozenset[str] = frozenset()
    """Jobs of which the standby knew an earlier state, or nothing."""
    named: frozenset[str] = frozenset()
    """Jobs of which the checker says that they were lost."""

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        (fault,) = super().schedule(random, seconds)
        return [Fault(fault.at, fault.name, {"behind": round(random.uniform(0.3, 1), 2)})]

    def strike(self, stage: Stage, fault: Fault) -> None:
        self.pair.pause_replication()
        # Behind by a time, and by at least one acknowledged enqueue.
        known = _acknowledged(stage)
        while_loaded(stage, lambda: _acknowledged(stage) - known)
        stage.sleep(fault.detail["behind"])
        stage.await_busy()
        with stage.fault(fault.name, scope="server"):
            self.pair.promote()
            at_promotion = self.pair.jobs_of(self.pair.standby)
            self.pair.lead_to_standby()
        before = self.pair.what_the_dead_primary_knew()
        self.lost = frozenset(before.keys() - at_promotion.keys())
        self.undone = frozenset(job for job in before if at_promotion.get(job) != before[job])

    def excused(self, stage: Stage, findings: Sequence[Finding]) -> Sequence[Finding]:
        self.named = frozenset(f.job for f in findings if f.promise == "P1" and f.job in self.lost)
        return [finding for finding in findings if finding.job in self.undone]

    def findings(self, stage: Stage) -> list[str]:
        wrong = [] if self.named else ["the standby was not behind: nothing was lost"]
        unnamed = (self.lost & _acknowledged(stage)) - self.named
        return wrong + [f"job {job} was lost and the report does not name it" for job in unnamed]


def _acknowledged(stage: Stage) -> set[str]:
    return {job for job, _, _ in History(ledger.read(stage.ledger.path)).acknowledged()}


class DiskFull(Scenario):
    """The disk runs full, and there is room again a little later."""

    name = "disk full"
    about = "disk full for data, then space freed"
    least = 16.0
    first = 3.0
    every = 12.0
    part: ClassVar[Part] = "data"
    scope: ClassVar[str] = "connection"
    """Statements fail; the server stays."""
    server: EmbeddedServer
    disk: SmallDisk

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with (
            workspace("disk") as home,
            cramped(home, self.part, megabytes=512) as (self.server, self.disk),
        ):
            with psycopg.connect(self.server.url, autocommit=True) as conn:
                conn.execute("CREATE TABLE public.ballast (filler text)")
            yield Place(self.server.url, self.server.url)

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return self.name, {"seconds": round(random.uniform(0.5, 2), 2)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        with stage.fault(fault.name, scope=self.scope):
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
    about = "disk full for the WAL: the server panics; then space freed"
    part = "wal"
    scope = "server"


class Pooled(Scenario):
    """PgBouncer in transaction mode in front of everything, restarted and killed."""

    name = "pooler"
    about = "PgBouncer in transaction mode, restarted and killed"
    least = 18.0
    first = 2.0
    every = 5.0
    pooler: Pooler

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with (
            workspace("pooler") as home,
            pooler(home, common.checker, connections=10) as self.pooler,
        ):
            yield Place(self.pooler.url, common.checker, common.schema)

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        (name,) = self.deal(random, ["restart the pooler", "kill the pooler"])
        return name, {"down": round(random.uniform(0, 1), 2)}

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
    about = "a long-running transaction, a DDL lock, REINDEX, connections exhausted"
    least = 28.0
    first = 2.0
    every = 5.0
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
        with workspace("host") as home, machine(home / "pg", max_connections="80") as self.server:
            yield Place(self.server.url, self.server.url)

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        (name,) = self.deal(random, self.KINDS)
        return name, {"seconds": round(random.uniform(1, 3.5), 2)}

    def strike(self, stage: Stage, fault: Fault) -> None:
        url, seconds = stage.place.checker, fault.detail["seconds"]
        match fault.name:
            case "hold a transaction":
                with (
                    disturbances.held_transaction(url),
                    stage.fault(fault.name, scope="neighbour"),
                ):
                    stage.sleep(seconds)
            case "lock for DDL":
                with (
                    stage.fault(fault.name, scope="delay"),
                    disturbances.ddl_lock(url) as pid,
                ):
                    while_loaded(stage, lambda: disturbances.waiting_for(url, pid))
                    stage.sleep(seconds)
            case "no connection left":
                with (
                    stage.fault(fault.name, scope="connection"),
                    disturbances.no_connection_left(url),
                ):
                    stage.sleep(seconds)
            case "REINDEX":
                with stage.fault(fault.name, scope="delay"):
                    disturbances.reindex(url, concurrently=False)
            case _:
                with stage.fault(fault.name, scope="neighbour"):
                    disturbances.reindex(url, concurrently=True)

    def findings(self, stage: Stage) -> list[str]:
        if disturbances.indexes_are_valid(stage.place.checker):
            return []
        return ["a REINDEX has left an index that is not valid"]
