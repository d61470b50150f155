"""What is measured of a queue in some state: claims one by one, a worker's throughput, idle workers."""

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
    from bench.workloads import Figures, Stage

BATCH = 10  # of a claim: the default of claim_job_batch
LEASE = timedelta(seconds=30)
DEADLINE = 30.0  # seconds that a worker gets; one that is slower is told by what it did
SPARE = 5000
PAGES = 20
HISTORY = "SELECT count(*) FROM howdah.finished_jobs"


def claims(stage: Stage, database: str, job_types: list[str], number: int) -> Figures:
    """Claims by themselves, one after the other, each batch completed before the next: how long the claim
    takes, and how long with its durable commit."""
    return asyncio.run(_claims(stage.postgres.url(database), job_types, number))


async def _claims(url: str, job_types: list[str], number: int) -> Figures:
    statements = WorkerStatements("howdah")
    claim = statements.claim("growth", job_types, BATCH, LEASE, ["default"], False)
    connection = await asyncpg.connect(url)
    alone: list[float] = []
    durable: list[float] = []
    try:
        prepared = await connection.prepare(claim.text)
        for n in range(number + 20):
            began = time.perf_counter()
            async with connection.transaction():
                started = time.perf_counter()
                rows = await prepared.fetch(*claim.parameters)
                claimed = time.perf_counter()
            ended = time.perf_counter()
            if len(rows) < BATCH:
                raise AssertionError(f"claim {n} found {len(rows)} of {BATCH} jobs")
            if n >= 20:  # plans and caches are warm
                alone.append((claimed - started) * 1000)
                durable.append((ended - began) * 1000)
            done = statements.complete_jobs(
                [row["id"] for row in rows], [row["lease_id"] for row in rows], [None] * len(rows)
            )
            await connection.fetch(done.text, *done.parameters)
        pages = [await _pages(connection, job_types) for _ in range(PAGES)]
    finally:
        await connection.close()
    return {
        "claim_p50_ms": percentile(alone, 0.5),
        "claim_p99_ms": percentile(alone, 0.99),
        "durable_claim_p50_ms": percentile(durable, 0.5),
        "durable_claim_p99_ms": percentile(durable, 0.99),
        "claim_pages": percentile(pages, 0.5),
        "claim_pages_most": max(pages),
    }


async def _pages(connection: asyncpg.Connection, job_types: list[str]) -> float:
    """How many pages a claim looks at: a figure that no neighbour on the machine can change."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        told = await connection.fetchval(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM howdah.claim_job_batch("
            "'growth', $1::text[], $2::int, '30 s')",
            job_types,
            BATCH,
        )
    finally:
        await transaction.rollback()
    plan = json.loads(told)[0]["Plan"]
    return float(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def throughput(
    stage: Stage,
    peer: Peer,
    database: str,
    jobs: int,
    highest: int,
    handler: str = "async",
    processes: int = 1,
) -> Figures:
    """Jobs a second of worker processes on a backlog that outlasts them."""
    is_ours = peer.name.startswith("howdah")
    before = stage.postgres.value(HISTORY, database=database) if is_ours else 0
    with contextlib.ExitStack() as stack:
        path, ledger = stack.enter_context(stage.ledger(highest + SPARE))
        request: dict[str, Any] = {
            "database": database,
            "handler": handler,
            "jobs": jobs,
            "ledger": str(path),
        }
        workers = [
            stack.enter_context(stage.launch(peer, "work", **request)) for _ in range(processes)
        ]
        for worker in workers:
            worker.expect("ready")
        wal, served = stage.postgres.wal_position(), cpu_seconds(stage.postgres.pid)
        seen = _watch(stage, workers, ledger, jobs)
        executed = max(1, ledger.executed)
        figures = {
            "wal_bytes_per_job": (stage.postgres.wal_position() - wal) / executed,
            "server_cpu_us": (cpu_seconds(stage.postgres.pid) - served) * 1e6 / executed,
        }
        for worker in workers:
            # Others may take long to stop, with a claim under way that walks over a million dead entries.
            with contextlib.suppress(*(() if is_ours else (AdapterError,))):
                worker.stop()
        if is_ours:
            _check(stage, database, before, ledger)
        return figures | {"jobs_per_second": _rate(seen)}


def _watch(
    stage: Stage, workers: list[AdapterProcess], ledger: Ledger, jobs: int
) -> list[tuple[float, int]]:
    """How many handlers had started at which moments, until enough have or the time is up."""
    end = time.monotonic() + DEADLINE
    seen: list[tuple[float, int]] = []
    while not seen or (seen[-1][1] < jobs and seen[-1][0] < end):
        for worker in workers:
            worker.check()
        seen.append((time.monotonic(), ledger.executed))
        stage.show(f"{seen[-1][1]:,} of {jobs:,}")
        time.sleep(0.01)
    return seen


def _rate(seen: list[tuple[float, int]]) -> float:
    """Less the first tenth: until then claims are still growing."""
    ended, last = seen[-1]
    began, first = next((at, count) for at, count in seen if count >= last // 10)
    return (last - first) / (ended - began) if ended > began else 0.0


def _check(stage: Stage, database: str, before: int, ledger: Ledger) -> None:
    """Everything that ran is in history, durably, and a stale acknowledgement is refused."""
    after = stage.postgres.value(HISTORY, database=database)
    if after - before != ledger.executed:
        raise AssertionError(f"{ledger.executed:,} handlers ran, {after - before:,} are in history")
    names = ("fsync", "synchronous_commit", "full_page_writes")
    found = {name: stage.postgres.value(f"SHOW {name}", database=database) for name in names}
    if set(found.values()) != {"on"}:
        raise AssertionError(f"not durable: {found}")
    stage.checked = {
        "history_rows": after - before,
        **found,
        "stale_acknowledgement": howdah_checks.be_refused(stage.postgres, database),
    }


def idle(
    stage: Stage, peer: Peer, database: str, workers: int, processes: int, seconds: float
) -> Figures:
    """What idle workers cost the server, beyond what it costs to be there."""
    alone = _load(stage, database, seconds / 2)
    with contextlib.ExitStack() as stack:
        path, _ = stack.enter_context(stage.ledger(SPARE))
        handler = f"workers:{workers // processes}"
        request: dict[str, Any] = {
            "database": database,
            "handler": handler,
            "jobs": 0,
            "ledger": str(path),
        }
        for _ in range(processes):
            stack.enter_context(stage.launch(peer, "work", **request)).expect("ready")
        there = stage.postgres.value(
            "SELECT count(*) FROM howdah.workers WHERE idle", database=database
        )
        if there != workers // processes * processes:
            raise AdapterError(f"{there} of {workers} workers are there and idle")
        time.sleep(min(8.0, seconds / 2))  # until their polls have settled
        figures = _load(stage, database, seconds)
        connections = stage.postgres.value(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()",
            database=database,
        )
    return {
        "server_core_percent": 100 * (figures["cores"] - alone["cores"]),
        "transactions_per_second": figures["transactions"] - alone["transactions"],
        "connections": connections,
        "workers": there,
    }


def _load(stage: Stage, database: str, seconds: float) -> Figures:
    commits = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    began, used = time.monotonic(), cpu_seconds(stage.postgres.pid)
    before = stage.postgres.value(commits, database=database)
    time.sleep(seconds)
    after = stage.postgres.value(commits, database=database)
    passed = time.monotonic() - began
    return {
        "cores": (cpu_seconds(stage.postgres.pid) - used) / passed,
        "transactions": (after - before) / passed,
    }
