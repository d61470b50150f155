"""One round of each kind of work, for any peer. Each gives the figures of that round.

A round begins with a fresh copy of the peer's empty database and a checkpoint, and ends with a ledger that
must show every job executed exactly once."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.adapter_process import HOME, AdapterError, AdapterProcess
from bench.howdah_checks import PROBES, prove
from bench.ledger import Ledger
from bench.results import percentile
from bench.services import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.peers import Peer
    from bench.services import Postgres, Redis

Figures = dict[str, float]
STALLED = 60.0  # seconds without a handler
SPARE = PROBES  # places in a ledger for the jobs that prove things


@dataclass
class Stage:
    """What a round is played on."""

    postgres: Postgres
    redis: Redis | None
    show: Callable[[str], None] = lambda _: None
    checked: dict[str, Any] = field(default_factory=dict)
    """What this round has proven; kept with its figures."""

    def setup(self, peer: Peer) -> None:
        """Make the peer's empty database, of which every round has a copy."""
        if peer.service == "postgres":
            self.postgres.recreate(f"empty_{peer.name}")
            with self.launch(peer, "setup", database=f"empty_{peer.name}") as process:
                process.expect("done")

    def prepare(self, peer: Peer) -> None:
        """A fresh start for a round."""
        if peer.service == "postgres":
            self.postgres.recreate(f"bench_{peer.name}", f"empty_{peer.name}")
            self.postgres.checkpoint()
        elif self.redis is not None:
            self.redis.flush()

    def settle(self, peer: Peer) -> None:
        """What autovacuum would have done by the time a backlog has built up."""
        if peer.service == "postgres":
            self.postgres.query("VACUUM ANALYZE", database=f"bench_{peer.name}")
            self.postgres.checkpoint()

    def launch(
        self, peer: Peer, verb: str, database: str | None = None, **request: Any
    ) -> AdapterProcess:
        """Start one of the peer's processes."""
        environment = dict(peer.environment)
        if peer.service == "postgres":
            name = database or f"bench_{peer.name}"
            url = self.postgres.url(name)
            environment |= self.postgres.environment | {"PGDATABASE": name}
        elif self.redis is not None:
            url = self.redis.socket
        else:
            raise AdapterError("no Redis")
        message = {"verb": verb, "database": url, **request}
        return AdapterProcess(peer.name, peer.command(), message, environment)

    def waiting(self, peer: Peer) -> int:
        """How many jobs are in the peer's queue."""
        if peer.service == "postgres" or self.redis is None:
            return int(self.postgres.value(peer.counted, database=f"bench_{peer.name}"))
        return self.redis.count(peer.counted)

    def server_pid(self, peer: Peer) -> int:
        if peer.service == "postgres" or self.redis is None:
            return self.postgres.pid
        return self.redis.pid

    @contextlib.contextmanager
    def ledger(self, jobs: int) -> Iterator[tuple[Path, Ledger]]:
        shared = Path("/dev/shm")  # noqa: S108
        home = shared if shared.is_dir() else HOME
        path = home / f"howdah-bench-{os.getpid()}.ledger"
        try:
            yield path, Ledger.create(path, jobs)
        finally:
            path.unlink(missing_ok=True)

    def wait(self, process: AdapterProcess, ledger: Ledger, jobs: int) -> None:
        """Wait until so many handlers have started."""
        seen, moved = -1, time.monotonic()
        while (executed := ledger.executed) < jobs:
            process.check()
            if executed != seen:
                seen, moved = executed, time.monotonic()
                self.show(f"{executed:,} of {jobs:,}")
            elif time.monotonic() - moved > STALLED:
                raise AdapterError(f"{process.name} stalled at {executed:,} of {jobs:,} jobs")
            time.sleep(0.02)


def repeated(peer: Peer, ledger: Ledger, jobs: int) -> Figures:
    """Check that every job ran. Howdah's ran once; of a peer it is told how many ran again, if any did."""
    times = ledger.check(jobs, once=peer.is_ours)
    return {"repeated": float(times)} if times else {}


def enqueue(
    stage: Stage, peer: Peer, jobs: int, how: str = "bulk", processes: int = 1, **options: Any
) -> Figures:
    """Enqueue so many jobs in one way, and tell how many a second."""
    share = jobs // processes
    with contextlib.ExitStack() as stack:
        producers = [
            stack.enter_context(
                stage.launch(peer, "enqueue", first=n * share, jobs=share, how=how, **options)
            )
            for n in range(processes)
        ]
        for producer in producers:
            producer.expect("ready")
        server = stage.server_pid(peer)
        before, served = stage.postgres.wal_position(), cpu_seconds(server)
        for producer in producers:
            producer.go()
        told = [producer.expect("done", 300) for producer in producers]
    taken = max(t["ended"] for t in told) - min(t["started"] for t in told)
    jobs = share * processes
    figures = {
        "jobs_per_second": jobs * 1e9 / taken,
        "client_cpu_us": sum(t["cpu"] for t in told) * 1e6 / jobs,
        "server_cpu_us": (cpu_seconds(server) - served) * 1e6 / jobs,
    }
    if peer.service == "postgres":
        figures["wal_bytes_per_job"] = (stage.postgres.wal_position() - before) / jobs
    return figures


def enqueue_only(
    stage: Stage, peer: Peer, jobs: int, how: str, processes: int = 1, callers: int = 1
) -> Figures:
    """Enqueue, and count what is there afterwards. Howdah's jobs are also run, to prove what it promises."""
    stage.prepare(peer)
    jobs -= jobs % processes
    figures = enqueue(stage, peer, jobs, how, processes, callers=callers)
    if peer.is_ours:
        with (
            stage.ledger(jobs + SPARE) as (path, ledger),
            stage.launch(peer, "work", handler="async", jobs=jobs, ledger=str(path)) as worker,
        ):
            worker.expect("ready")
            stage.wait(worker, ledger, jobs)
            more = prove(stage, peer, jobs, how=how, callers=callers)
            worker.stop()
            repeated(peer, ledger, jobs + more)
    elif (there := stage.waiting(peer)) != jobs:
        raise AssertionError(f"of {jobs:,} jobs that were enqueued {there:,} are there")
    return figures


def drain(
    stage: Stage, peer: Peer, jobs: int, handler: str = "async", payload: int = 100
) -> dict[str, Figures]:
    """Fill the queue, then let one worker empty it. Gives the figures of both."""
    stage.prepare(peer)
    filled = enqueue(stage, peer, jobs, handler=handler, payload=payload)
    stage.settle(peer)
    with (
        stage.ledger(jobs + SPARE) as (path, ledger),
        stage.launch(peer, "work", handler=handler, jobs=jobs, ledger=str(path)) as worker,
    ):
        worker.expect("ready")
        server = stage.server_pid(peer)
        wal, used, served = stage.postgres.wal_position(), worker.cpu_seconds(), cpu_seconds(server)
        stage.wait(worker, ledger, jobs)
        used, served = worker.cpu_seconds() - used, cpu_seconds(server) - served
        figures = {"client_cpu_us": used * 1e6 / jobs, "server_cpu_us": served * 1e6 / jobs}
        if peer.service == "postgres":
            figures["wal_bytes_per_job"] = (stage.postgres.wal_position() - wal) / jobs
        more = 0
        if peer.is_ours:
            more = prove(stage, peer, jobs, handler, payload=payload)
        worker.stop()
        figures["jobs_per_second"] = ledger.rate(0, jobs)
        figures |= repeated(peer, ledger, jobs + more)
    return {"drain": figures, "fill": filled}


def pickup(
    stage: Stage,
    peer: Peer,
    samples: int,
    how: str = "single",
    load: float = 0.0,
    pause: float = 0.001,
) -> Figures:
    """How long from an enqueue to the start of its handler, on a worker that waits or has other work."""
    stage.prepare(peer)
    warm_up = 100
    others = int(load * 120)  # enough for two minutes; the stream is stopped before
    with contextlib.ExitStack() as stack:
        path, ledger = stack.enter_context(stage.ledger(warm_up + samples + others + SPARE))
        shared = {"ledger": str(path), "handler": "async"}
        worker = stack.enter_context(stage.launch(peer, "work", jobs=0, **shared))
        worker.expect("ready")
        sampler = stack.enter_context(
            stage.launch(
                peer, "sample", first=0, jobs=warm_up + samples, how=how, pause=pause, **shared
            )
        )
        sampler.expect("ready")
        stream = None
        if load:
            first = warm_up + samples
            options: dict[str, Any] = {"rate": load, "batch": max(1, int(load / 100))}
            stream = stack.enter_context(
                stage.launch(peer, "stream", first=first, jobs=others, **options, **shared)
            )
            stream.expect("ready")
            stream.go()
            time.sleep(1)
        sampler.go()
        told = sampler.expect("done", 300)
        jobs, more = warm_up + samples, 0
        if stream is not None:
            stream.stop()
            jobs += stream.expect("done")["sent"]
            stage.wait(worker, ledger, jobs)
        if peer.is_ours:
            more = prove(stage, peer, jobs, how=how)
        worker.stop()
        figures: Figures = {"samples": samples} | repeated(peer, ledger, jobs + more)
        starts = list(ledger.starts[warm_up : warm_up + samples])
    for name in ("called", "committed"):
        if told[name]:
            times = told[name][warm_up:]
            waits = [(start - at) / 1e6 for start, at in zip(starts, times, strict=True)]
            short = name.removesuffix("ed").replace("committ", "commit")
            for share, label in ((0.5, "p50"), (0.99, "p99"), (0.999, "p999")):
                figures[f"{short}_{label}_ms"] = percentile(waits, share)
    return figures


REPORTS = 100  # of progress, in each job that reports any
BACKLOG = 5000  # fewer for those who would be busy with it for long


def steady(stage: Stage, peer: Peer, seconds: float) -> Figures:
    """Enqueue and drain at once for so long, about `BACKLOG` jobs waiting, and what a job costs."""
    stage.prepare(peer)
    backlog = min(BACKLOG, peer.drain // 4)
    most = int(seconds * 40_000)
    with contextlib.ExitStack() as stack:
        path, ledger = stack.enter_context(stage.ledger(most + SPARE))
        shared = {"ledger": str(path), "handler": "async"}
        worker = stack.enter_context(stage.launch(peer, "work", jobs=most, **shared))
        worker.expect("ready")
        options: dict[str, Any] = {"backlog": backlog, "batch": min(200, backlog // 2)}
        stream = stack.enter_context(
            stage.launch(peer, "stream", first=0, jobs=most, **options, **shared)
        )
        stream.expect("ready")
        server = stage.server_pid(peer)

        def state() -> tuple[float, ...]:
            wal = stage.postgres.wal_position()
            times = (cpu_seconds(server), worker.cpu_seconds(), stream.cpu_seconds())
            return (time.monotonic(), ledger.executed, wal, *times)

        stream.go()
        time.sleep(min(5.0, seconds / 4))  # it takes a while to become steady
        before = state()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            worker.check()
            stage.show(f"{end - time.monotonic():.0f} s to go, {ledger.executed:,} jobs")
            time.sleep(0.2)
        passed, jobs, wal, served, worked, sent = (
            now - then for now, then in zip(state(), before, strict=True)
        )
        stream.stop()
        told = stream.expect("done")
        stage.wait(worker, ledger, told["sent"])
        sizes = stage.postgres.sizes(f"bench_{peer.name}") if peer.service == "postgres" else {}
        more = 0
        if peer.is_ours:
            more = prove(stage, peer, told["sent"])
        worker.stop()
        twice = repeated(peer, ledger, told["sent"] + more)
    figures: Figures = {
        "jobs_per_second": jobs / passed,
        "seconds": passed,
        "server_cpu_us": served * 1e6 / jobs,
        "worker_cpu_us": worked * 1e6 / jobs,
        "producer_cpu_us": sent * 1e6 / jobs,
        "jobs": float(told["sent"]),
    }
    if peer.service == "postgres":
        figures["wal_bytes_per_job"] = wal / jobs
        for name, size in sizes.items():
            figures |= {name: float(size), f"{name}_per_job": size / told["sent"]}
    return twice | figures
