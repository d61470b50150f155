"""One round of each workload, for any peer. Each function returns the figures of the round.

A round starts with a fresh copy of the peer's empty database and a checkpoint, and ends with a check of the ledger:
every job must have run exactly once."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.adapter_process import HOME, AdapterError, AdapterProcess
from bench.howdah_checks import PROBE_JOBS, prove
from bench.ledger import Ledger
from bench.results import percentile
from bench.services import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.peers import Peer
    from bench.services import Postgres, Redis

Figures = dict[str, float]
STALL_SECONDS = 60.0  # without a started handler
SPARE_JOBS = PROBE_JOBS  # ledger entries for the probes of howdah_checks


@dataclass
class Testbed:
    """The servers that rounds run on."""

    postgres: Postgres
    redis: Redis | None
    show: Callable[[str], None] = lambda _: None
    checked: dict[str, Any] = field(default_factory=dict)
    """What this round proved; stored with its figures."""

    def setup(self, peer: Peer) -> None:
        """Create the peer's empty database, which every round copies."""
        if peer.service == "postgres":
            self.postgres.recreate(f"empty_{peer.name}")
            with self.launch(peer, "setup", database=f"empty_{peer.name}") as process:
                process.expect("done")

    def prepare(self, peer: Peer) -> None:
        """Create a fresh database for a round."""
        if peer.service == "postgres":
            self.postgres.recreate(f"bench_{peer.name}", f"empty_{peer.name}")
            self.postgres.checkpoint()
        elif self.redis is not None:
            self.redis.flush()

    def vacuum(self, peer: Peer) -> None:
        """What autovacuum would have done by the time a backlog has grown."""
        if peer.service == "postgres":
            self.postgres.query("VACUUM ANALYZE", database=f"bench_{peer.name}")
            self.postgres.checkpoint()

    def launch(
        self, peer: Peer, verb: str, database: str | None = None, **request: Any
    ) -> AdapterProcess:
        """Start an adapter process of the peer."""
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

    def queued(self, peer: Peer) -> int:
        """The number of jobs in the peer's queue."""
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
        seen, changed_at = -1, time.monotonic()
        while (executed := ledger.executed) < jobs:
            process.check()
            if executed != seen:
                seen, changed_at = executed, time.monotonic()
                self.show(f"{executed:,} of {jobs:,}")
            elif time.monotonic() - changed_at > STALL_SECONDS:
                raise AdapterError(f"{process.name} stalled at {executed:,} of {jobs:,} jobs")
            time.sleep(0.02)


def repeated(peer: Peer, ledger: Ledger, jobs: int) -> Figures:
    """Check that every job ran. Howdah's jobs must have run once; for other peers, return how many ran again."""
    times = ledger.check(jobs, once=peer.is_ours)
    return {"repeated": float(times)} if times else {}


def enqueue(
    testbed: Testbed, peer: Peer, jobs: int, how: str = "bulk", processes: int = 1, **options: Any
) -> Figures:
    """Enqueue so many jobs in one way, and measure the rate."""
    share = jobs // processes
    with contextlib.ExitStack() as stack:
        producers = [
            stack.enter_context(
                testbed.launch(peer, "enqueue", first=n * share, jobs=share, how=how, **options)
            )
            for n in range(processes)
        ]
        for producer in producers:
            producer.expect("ready")
        server = testbed.server_pid(peer)
        before, served = testbed.postgres.wal_position(), cpu_seconds(server)
        for producer in producers:
            producer.go()
        replies = [producer.expect("done", 300) for producer in producers]
    taken = max(t["ended"] for t in replies) - min(t["started"] for t in replies)
    jobs = share * processes
    figures = {
        "jobs_per_second": jobs * 1e9 / taken,
        "client_cpu_us": sum(t["cpu"] for t in replies) * 1e6 / jobs,
        "server_cpu_us": (cpu_seconds(server) - served) * 1e6 / jobs,
    }
    if peer.service == "postgres":
        figures["wal_bytes_per_job"] = (testbed.postgres.wal_position() - before) / jobs
    return figures


def enqueue_only(
    testbed: Testbed, peer: Peer, jobs: int, how: str, processes: int = 1, callers: int = 1
) -> Figures:
    """Enqueue, and count the jobs afterwards. Howdah's jobs are also run, to prove what it promises."""
    testbed.prepare(peer)
    jobs -= jobs % processes
    figures = enqueue(testbed, peer, jobs, how, processes, callers=callers)
    if peer.is_ours:
        with (
            testbed.ledger(jobs + SPARE_JOBS) as (path, ledger),
            testbed.launch(peer, "work", handler="async", jobs=jobs, ledger=str(path)) as worker,
        ):
            worker.expect("ready")
            testbed.wait(worker, ledger, jobs)
            more = prove(testbed, peer, jobs, how=how, callers=callers)
            worker.stop()
            repeated(peer, ledger, jobs + more)
    elif (there := testbed.queued(peer)) != jobs:
        raise AssertionError(f"{jobs:,} jobs were enqueued and {there:,} exist")
    return figures


def drain(
    testbed: Testbed, peer: Peer, jobs: int, handler: str = "async", payload: int = 100
) -> dict[str, Figures]:
    """Fill the queue, then run one worker until it is empty. Returns the figures of both."""
    testbed.prepare(peer)
    filled = enqueue(testbed, peer, jobs, handler=handler, payload=payload)
    testbed.vacuum(peer)
    with (
        testbed.ledger(jobs + SPARE_JOBS) as (path, ledger),
        testbed.launch(peer, "work", handler=handler, jobs=jobs, ledger=str(path)) as worker,
    ):
        worker.expect("ready")
        server = testbed.server_pid(peer)
        wal, used, served = (
            testbed.postgres.wal_position(),
            worker.cpu_seconds(),
            cpu_seconds(server),
        )
        testbed.wait(worker, ledger, jobs)
        used, served = worker.cpu_seconds() - used, cpu_seconds(server) - served
        figures = {"client_cpu_us": used * 1e6 / jobs, "server_cpu_us": served * 1e6 / jobs}
        if peer.service == "postgres":
            figures["wal_bytes_per_job"] = (testbed.postgres.wal_position() - wal) / jobs
        more = 0
        if peer.is_ours:
            more = prove(testbed, peer, jobs, handler, payload=payload)
        worker.stop()
        figures["jobs_per_second"] = ledger.rate(0, jobs)
        figures |= repeated(peer, ledger, jobs + more)
    return {"drain": figures, "fill": filled}


def pickup(
    testbed: Testbed,
    peer: Peer,
    samples: int,
    how: str = "single",
    load: float = 0.0,
    pause: float = 0.001,
) -> Figures:
    """The time from an enqueue to the start of its handler, in a worker that is idle or has other work."""
    testbed.prepare(peer)
    warm_up = 100
    others = int(load * 120)  # enough for two minutes; the stream is stopped earlier
    with contextlib.ExitStack() as stack:
        path, ledger = stack.enter_context(testbed.ledger(warm_up + samples + others + SPARE_JOBS))
        shared = {"ledger": str(path), "handler": "async"}
        worker = stack.enter_context(testbed.launch(peer, "work", jobs=0, **shared))
        worker.expect("ready")
        sampler = stack.enter_context(
            testbed.launch(
                peer, "sample", first=0, jobs=warm_up + samples, how=how, pause=pause, **shared
            )
        )
        sampler.expect("ready")
        stream = None
        if load:
            first = warm_up + samples
            options: dict[str, Any] = {"rate": load, "batch": max(1, int(load / 100))}
            stream = stack.enter_context(
                testbed.launch(peer, "stream", first=first, jobs=others, **options, **shared)
            )
            stream.expect("ready")
            stream.go()
            time.sleep(1)
        sampler.go()
        sampled = sampler.expect("done", 300)
        jobs, more = warm_up + samples, 0
        if stream is not None:
            stream.stop()
            jobs += stream.expect("done")["sent"]
            testbed.wait(worker, ledger, jobs)
        if peer.is_ours:
            more = prove(testbed, peer, jobs, how=how)
        worker.stop()
        figures: Figures = {"samples": samples} | repeated(peer, ledger, jobs + more)
        starts = list(ledger.starts[warm_up : warm_up + samples])
    for name in ("called", "committed"):
        if sampled[name]:
            times = sampled[name][warm_up:]
            waits = [(start - at) / 1e6 for start, at in zip(starts, times, strict=True)]
            short = name.removesuffix("ed").replace("committ", "commit")
            for share, label in ((0.5, "p50"), (0.99, "p99"), (0.999, "p999")):
                figures[f"{short}_{label}_ms"] = percentile(waits, share)
    return figures


PROGRESS_REPORTS = 100  # per job of the progress workload
BACKLOG_JOBS = 5000  # fewer for slow peers


def steady(testbed: Testbed, peer: Peer, seconds: float) -> Figures:
    """Enqueue and drain at the same time with about `BACKLOG_JOBS` pending jobs, and measure the cost per job."""
    testbed.prepare(peer)
    backlog = min(BACKLOG_JOBS, peer.drain // 4)
    most = int(seconds * 40_000)
    with contextlib.ExitStack() as stack:
        path, ledger = stack.enter_context(testbed.ledger(most + SPARE_JOBS))
        shared = {"ledger": str(path), "handler": "async"}
        worker = stack.enter_context(testbed.launch(peer, "work", jobs=most, **shared))
        worker.expect("ready")
        options: dict[str, Any] = {"backlog": backlog, "batch": min(200, backlog // 2)}
        stream = stack.enter_context(
            testbed.launch(peer, "stream", first=0, jobs=most, **options, **shared)
        )
        stream.expect("ready")
        server = testbed.server_pid(peer)

        def state() -> tuple[float, ...]:
            wal = testbed.postgres.wal_position()
            times = (cpu_seconds(server), worker.cpu_seconds(), stream.cpu_seconds())
            return (time.monotonic(), ledger.executed, wal, *times)

        stream.go()
        time.sleep(min(5.0, seconds / 4))  # until the rates are steady
        before = state()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            worker.check()
            testbed.show(f"{end - time.monotonic():.0f} s to go, {ledger.executed:,} jobs")
            time.sleep(0.2)
        passed, jobs, wal, server_cpu, worker_cpu, producer_cpu = (
            now - then for now, then in zip(state(), before, strict=True)
        )
        stream.stop()
        sent = stream.expect("done")["sent"]
        testbed.wait(worker, ledger, sent)
        sizes = testbed.postgres.sizes(f"bench_{peer.name}") if peer.service == "postgres" else {}
        more = 0
        if peer.is_ours:
            more = prove(testbed, peer, sent)
        worker.stop()
        twice = repeated(peer, ledger, sent + more)
    figures: Figures = {
        "jobs_per_second": jobs / passed,
        "seconds": passed,
        "server_cpu_us": server_cpu * 1e6 / jobs,
        "worker_cpu_us": worker_cpu * 1e6 / jobs,
        "producer_cpu_us": producer_cpu * 1e6 / jobs,
        "jobs": float(sent),
    }
    if peer.service == "postgres":
        figures["wal_bytes_per_job"] = wal / jobs
        for name, size in sizes.items():
            figures |= {name: float(size), f"{name}_per_job": size / sent}
    return twice | figures
