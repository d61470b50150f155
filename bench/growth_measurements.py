"""Measurements of a queue in a given state: single claims, the throughput of workers, the cost of idle workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg

from bench import howdah_checks
from bench.adapter_process import AdapterError
from bench.results import percentile
from bench.services import cpu_seconds
from howdah.protocol.worker_statements import WorkerStatements

if TYPE_CHECKING:
    from bench.adapter_process import AdapterProcess
    from bench.ledger import Ledger
    from bench.peers import Peer
    from bench.workloads import Figures, Testbed

BATCH_JOBS = 10  # the default of claim_job_batch
LEASE = timedelta(seconds=30)
ROUND_SECONDS = 30.0  # a slower worker is measured by what it did in this time
SPARE_JOBS = 5000
PAGE_SAMPLES = 20
WARM_UP_CLAIMS = 20
HISTORY = "SELECT count(*) FROM howdah.finished_jobs"


def claims(testbed: Testbed, database: str, job_types: list[str], number: int) -> Figures:
    """Claims one after the other, each batch completed before the next: the time of the claim, with and without its
    durable commit."""
    return asyncio.run(_claims(testbed.postgres.url(database), job_types, number))


async def _claims(url: str, job_types: list[str], number: int) -> Figures:
    statements = WorkerStatements("howdah")
    claim = statements.claim("growth", job_types, BATCH_JOBS, LEASE, ["default"], False)
    connection = await asyncpg.connect(url)
    claim_times: list[float] = []
    durable_times: list[float] = []
    try:
        prepared = await connection.prepare(claim.text)
        for n in range(number + WARM_UP_CLAIMS):
            began = time.perf_counter()
            async with connection.transaction():
                started = time.perf_counter()
                rows = await prepared.fetch(*claim.parameters)
                claimed = time.perf_counter()
            ended = time.perf_counter()
            if len(rows) < BATCH_JOBS:
                raise AssertionError(f"claim {n} found {len(rows)} of {BATCH_JOBS} jobs")
            if n >= WARM_UP_CLAIMS:  # plans and caches are warm
                claim_times.append((claimed - started) * 1000)
                durable_times.append((ended - began) * 1000)
            done = statements.complete_jobs(
                [row["id"] for row in rows], [row["lease_id"] for row in rows], [None] * len(rows)
            )
            await connection.fetch(done.text, *done.parameters)
        pages = [await _pages(connection, job_types) for _ in range(PAGE_SAMPLES)]
    finally:
        await connection.close()
    return {
        "claim_p50_ms": percentile(claim_times, 0.5),
        "claim_p99_ms": percentile(claim_times, 0.99),
        "durable_claim_p50_ms": percentile(durable_times, 0.5),
        "durable_claim_p99_ms": percentile(durable_times, 0.99),
        "claim_pages": percentile(pages, 0.5),
        "claim_pages_most": max(pages),
    }


async def _pages(connection: asyncpg.Connection, job_types: list[str]) -> float:
    """The number of pages that a claim reads: a figure that does not depend on other load on the machine."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        explained = await connection.fetchval(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM howdah.claim_job_batch("
            "'growth', $1::text[], $2::int, '30 s')",
            job_types,
            BATCH_JOBS,
        )
    finally:
        await transaction.rollback()
    plan = json.loads(explained)[0]["Plan"]
    return float(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def throughput(
    testbed: Testbed,
    peer: Peer,
    database: str,
    jobs: int,
    highest: int,
    handler: str = "async",
    processes: int = 1,
) -> Figures:
    """Jobs per second of worker processes on a backlog that is larger than the round."""
    is_ours = peer.name.startswith("howdah")
    before = testbed.postgres.value(HISTORY, database=database) if is_ours else 0
    with contextlib.ExitStack() as stack:
        path, ledger = stack.enter_context(testbed.ledger(highest + SPARE_JOBS))
        request: dict[str, Any] = {
            "database": database,
            "handler": handler,
            "jobs": jobs,
            "ledger": str(path),
        }
        workers = [
            stack.enter_context(testbed.launch(peer, "work", **request)) for _ in range(processes)
        ]
        for worker in workers:
            worker.expect("ready")
        wal, served = testbed.postgres.wal_position(), cpu_seconds(testbed.postgres.pid)
        samples = _sample(testbed, workers, ledger, jobs)
        executed = max(1, ledger.executed)
        figures = {
            "wal_bytes_per_job": (testbed.postgres.wal_position() - wal) / executed,
            "server_cpu_us": (cpu_seconds(testbed.postgres.pid) - served) * 1e6 / executed,
        }
        for worker in workers:
            # Other peers may take long to stop, during a claim that scans a million dead entries.
            with contextlib.suppress(*(() if is_ours else (AdapterError,))):
                worker.stop()
        if is_ours:
            _check(testbed, database, before, ledger)
        return figures | {"jobs_per_second": _rate(samples)}


def _sample(
    testbed: Testbed, workers: list[AdapterProcess], ledger: Ledger, jobs: int
) -> list[tuple[float, int]]:
    """Pairs of time and number of started handlers, until enough have started or the time is over."""
    deadline = time.monotonic() + ROUND_SECONDS
    samples: list[tuple[float, int]] = []
    while not samples or (samples[-1][1] < jobs and samples[-1][0] < deadline):
        for worker in workers:
            worker.check()
        samples.append((time.monotonic(), ledger.executed))
        testbed.show(f"{samples[-1][1]:,} of {jobs:,}")
        time.sleep(0.01)
    return samples


def _rate(samples: list[tuple[float, int]]) -> float:
    """Without the first tenth, in which the claim batches still grow."""
    ended, last = samples[-1]
    began, first = next((at, count) for at, count in samples if count >= last // 10)
    return (last - first) / (ended - began) if ended > began else 0.0


def _check(testbed: Testbed, database: str, before: int, ledger: Ledger) -> None:
    """Raise unless every job that ran is in the history, durably. A stale acknowledgement must be rejected."""
    after = testbed.postgres.value(HISTORY, database=database)
    if after - before != ledger.executed:
        raise AssertionError(
            f"{ledger.executed:,} handlers ran, {after - before:,} are in the history"
        )
    names = ("fsync", "synchronous_commit", "full_page_writes")
    found = {name: testbed.postgres.value(f"SHOW {name}", database=database) for name in names}
    if set(found.values()) != {"on"}:
        raise AssertionError(f"not durable: {found}")
    testbed.checked = {
        "history_rows": after - before,
        **found,
        "stale_acknowledgement": howdah_checks.stale_acknowledgement(testbed.postgres, database),
    }


def idle(
    testbed: Testbed, peer: Peer, database: str, workers: int, processes: int, seconds: float
) -> Figures:
    """The cost of idle workers for the server, without the cost of the idle server."""
    without_workers = _load(testbed, database, seconds / 2)
    with contextlib.ExitStack() as stack:
        path, _ = stack.enter_context(testbed.ledger(SPARE_JOBS))
        handler = f"workers:{workers // processes}"
        request: dict[str, Any] = {
            "database": database,
            "handler": handler,
            "jobs": 0,
            "ledger": str(path),
        }
        for _ in range(processes):
            stack.enter_context(testbed.launch(peer, "work", **request)).expect("ready")
        idle_workers = testbed.postgres.value(
            "SELECT count(*) FROM howdah.workers WHERE idle", database=database
        )
        if idle_workers != workers // processes * processes:
            raise AdapterError(f"{idle_workers} of {workers} workers are idle")
        time.sleep(min(8.0, seconds / 2))  # until their poll interval is steady
        figures = _load(testbed, database, seconds)
        connections = testbed.postgres.value(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()",
            database=database,
        )
    return {
        "server_core_percent": 100 * (figures["cores"] - without_workers["cores"]),
        "transactions_per_second": figures["transactions"] - without_workers["transactions"],
        "connections": connections,
        "workers": idle_workers,
    }


def _load(testbed: Testbed, database: str, seconds: float) -> Figures:
    commits = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    began, used = time.monotonic(), cpu_seconds(testbed.postgres.pid)
    before = testbed.postgres.value(commits, database=database)
    time.sleep(seconds)
    after = testbed.postgres.value(commits, database=database)
    passed = time.monotonic() - began
    return {
        "cores": (cpu_seconds(testbed.postgres.pid) - used) / passed,
        "transactions": (after - before) / passed,
    }
