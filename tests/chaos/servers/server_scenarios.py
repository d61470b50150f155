"""Scenarios with faults of the server, of a pooler, or of other sessions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import disturbances
import psycopg
from embedded_servers import running_server, wait_until_up, workspace
from pooler import Pooler, pooler
from replicas import Replicas, replicas
from small_disk import Part, SmallDisk, server_on_small_disk

from children import until
from howdah.chaos import ledger
from howdah.chaos.history import History
from howdah.chaos.scenario import Fault, Place, RunContext, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from random import Random

    from howdah.chaos.checker import Finding
    from howdah.embedded import EmbeddedServer


T = TypeVar("T")


def while_loaded(run: RunContext, condition: Callable[[], T | None]) -> T | None:
    """The value of the condition once it is true, or None if the load ends first."""
    while run.supervisor.producers():
        if value := condition():
            return value
        run.sleep(0.02)
    return None


class FailOver(Scenario):
    """The primary server crashes under load; its synchronous standby takes over."""

    name = "fail over"
    about = "kill -9 of the primary, a synchronous standby promoted"
    min_seconds = 10.0
    synchronous: ClassVar[bool] = True
    pair: Replicas

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with workspace("pair") as home, replicas(home, synchronous=self.synchronous) as self.pair:
            # The checker uses the proxy too, since the proxy leads to the standby after the failover.
            yield Place(self.pair.url, self.pair.url)

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        return [Fault(round(seconds * random.uniform(0.4, 0.6), 2), "fail over")]

    def inject(self, run: RunContext, fault: Fault) -> None:
        with run.fault(fault.name, scope="server"):
            self.pair.fail_over()


class FailOverByName(FailOver):
    """The same, with clients whose URL names both servers and that connect to the writable one."""

    name = "fail over by name"
    about = "the same, with both servers named in the URL"

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with super().place(common, directory):
            yield Place(self.pair.urls, self.pair.urls)


class FailOverWithLoss(FailOver):
    """The standby is asynchronous and behind: what only the primary had is lost. The checker must report exactly
    these jobs; the disk of the crashed primary shows which they are."""

    name = "fail over with loss"
    about = "the same with an asynchronous standby that lags behind; lost jobs are reported by id"
    synchronous = False
    lost: frozenset[str] = frozenset()
    """Jobs on the crashed primary that the promoted standby does not have."""
    undone: frozenset[str] = frozenset()
    """Jobs that the standby has in an earlier state, or not at all."""
    reported: frozenset[str] = frozenset()
    """Jobs that the checker reports as lost."""

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        (fault,) = super().schedule(random, seconds)
        return [Fault(fault.at, fault.name, {"behind": round(random.uniform(0.3, 1), 2)})]

    def inject(self, run: RunContext, fault: Fault) -> None:
        self.pair.pause_replication()
        # The standby is behind by some time and by at least one acknowledged enqueue.
        known = _acknowledged(run)
        while_loaded(run, lambda: _acknowledged(run) - known)
        run.sleep(fault.detail["behind"])
        run.wait_for_busy_workers()
        with run.fault(fault.name, scope="server"):
            self.pair.promote()
            at_promotion = self.pair.jobs_of(self.pair.standby)
            self.pair.redirect_to_standby()
        before = self.pair.jobs_of_crashed_primary()
        self.lost = frozenset(before.keys() - at_promotion.keys())
        self.undone = frozenset(job for job in before if at_promotion.get(job) != before[job])

    def excused(self, run: RunContext, findings: Sequence[Finding]) -> Sequence[Finding]:
        self.reported = frozenset(
            f.job for f in findings if f.promise == "P1" and f.job in self.lost
        )
        return [finding for finding in findings if finding.job in self.undone]

    def findings(self, run: RunContext) -> list[str]:
        wrong = [] if self.reported else ["the standby was not behind: nothing was lost"]
        unreported = (self.lost & _acknowledged(run)) - self.reported
        return wrong + [f"job {job} was lost and is not reported" for job in unreported]


def _acknowledged(run: RunContext) -> set[str]:
    return {job for job, _, _ in History(ledger.read(run.ledger.path)).acknowledged()}


class DiskFull(Scenario):
    """The disk becomes full, and has free space again after a while."""

    name = "disk full"
    about = "disk full for data, then space freed"
    min_seconds = 16.0
    first_seconds = 3.0
    every_seconds = 12.0
    part: ClassVar[Part] = "data"
    scope: ClassVar[str] = "connection"
    """Statements fail; the server keeps running."""
    server: EmbeddedServer
    disk: SmallDisk

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with (
            workspace("disk") as home,
            server_on_small_disk(home, self.part, megabytes=512) as (self.server, self.disk),
        ):
            with psycopg.connect(self.server.url, autocommit=True) as conn:
                conn.execute("CREATE TABLE public.ballast (filler text)")
            yield Place(self.server.url, self.server.url)

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return self.name, {"seconds": round(random.uniform(0.5, 2), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        with run.fault(fault.name, scope=self.scope):
            self.disk.fill()
            until(self._is_full, "the server has no free space")
            run.sleep(fault.detail["seconds"])
            self.disk.free()
            wait_until_up(self.server)

    def _is_full(self) -> bool:
        """Fill the pages that the server has allocated, too."""
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
            return True  # the server panicked
        return False


class WalFull(DiskFull):
    """No free space for the WAL: the server panics, and restarts when there is space."""

    name = "WAL full"
    about = "disk full for the WAL: the server panics; then space freed"
    part = "wal"
    scope = "server"


class Pooled(Scenario):
    """All connections go through PgBouncer in transaction mode, which is restarted and killed."""

    name = "pooler"
    about = "PgBouncer in transaction mode, restarted and killed"
    min_seconds = 18.0
    first_seconds = 2.0
    every_seconds = 5.0
    pooler: Pooler

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with (
            workspace("pooler") as home,
            pooler(home, common.checker, connections=10) as self.pooler,
        ):
            yield Place(self.pooler.url, common.checker, common.schema)

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        (name,) = self.draw_in_turn(random, ["restart the pooler", "kill the pooler"])
        return name, {"down": round(random.uniform(0, 1), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        with run.fault(fault.name, scope="connection"):
            if fault.name.startswith("kill"):
                self.pooler.kill()
            else:
                self.pooler.stop()
            run.sleep(fault.detail["down"])
            self.pooler.start()


class Neighbours(Scenario):
    """Other sessions in the same database."""

    name = "neighbours"
    about = "a long-running transaction, a DDL lock, REINDEX, connections exhausted"
    min_seconds = 28.0
    first_seconds = 2.0
    every_seconds = 5.0
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
        with (
            workspace("host") as home,
            running_server(home / "pg", max_connections="80") as self.server,
        ):
            yield Place(self.server.url, self.server.url)

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        (name,) = self.draw_in_turn(random, self.KINDS)
        return name, {"seconds": round(random.uniform(1, 3.5), 2)}

    def inject(self, run: RunContext, fault: Fault) -> None:
        url, seconds = run.place.checker, fault.detail["seconds"]
        match fault.name:
            case "hold a transaction":
                with (
                    disturbances.held_transaction(url),
                    run.fault(fault.name, scope="neighbour"),
                ):
                    run.sleep(seconds)
            case "lock for DDL":
                with (
                    run.fault(fault.name, scope="delay"),
                    disturbances.ddl_lock(url) as pid,
                ):
                    while_loaded(run, lambda: disturbances.waiting_for(url, pid))
                    run.sleep(seconds)
            case "no connection left":
                with (
                    run.fault(fault.name, scope="connection"),
                    disturbances.no_connection_left(url),
                ):
                    run.sleep(seconds)
            case "REINDEX":
                with run.fault(fault.name, scope="delay"):
                    disturbances.reindex(url, concurrently=False)
            case _:
                with run.fault(fault.name, scope="neighbour"):
                    disturbances.reindex(url, concurrently=True)

    def findings(self, run: RunContext) -> list[str]:
        if disturbances.indexes_are_valid(run.place.checker):
            return []
        return ["a REINDEX left an invalid index"]
