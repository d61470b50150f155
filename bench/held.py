"""`python -m bench.held --minutes 30`: claims of one job at 1,000 jobs a second while a transaction stays open.

Prints the mean time of a claim and of a run of the duty `sweep` for each minute, before and while the transaction is
open, and fails if either of them more than doubles. `--writes` lets the open transaction enqueue a job first."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import asyncpg

from howdah import JobQueue
from howdah.embedded import EmbeddedServer

TYPES = 8
PRODUCERS = 3  # each waits for the disk
CLAIMERS = 4
BAR = 2.0
ENQUEUE = "SELECT howdah.enqueue_job($1::text)"
CLAIM = (
    "SELECT id, lease_id FROM howdah.claim_runs($1::text, $2::text[], 1, '1 minute', '{default}')"
)
COMPLETE = "SELECT howdah.complete_runs(ARRAY[$1::uuid], ARRAY[$2::uuid])"
SWEEP = "SELECT last_run_at, extract(epoch FROM took)::float8 FROM howdah.maintenance WHERE duty = 'sweep'"


@dataclass
class Load:
    """Enqueues, claims and completes one job at a time, and runs the duties."""

    url: str
    rate: float
    claims: list[float] = field(default_factory=list)
    sweeps: list[float] = field(default_factory=list)

    async def enqueue(self, number: int) -> None:
        connection = await asyncpg.connect(self.url)
        began, sent = time.monotonic(), 0
        while True:
            while sent < (time.monotonic() - began) * self.rate / PRODUCERS:
                await connection.execute(ENQUEUE, f"type {(number + sent) % TYPES}")
                sent += 1
            await asyncio.sleep(0.002)

    async def claim(self, number: int) -> None:
        connection = await asyncpg.connect(self.url)
        types = [f"type {n}" for n in range(TYPES)]
        while True:
            began = time.perf_counter()
            rows = await connection.fetch(CLAIM, f"claimer {number}", types)
            if rows:
                self.claims.append(time.perf_counter() - began)
                await connection.fetch(COMPLETE, rows[0]["id"], rows[0]["lease_id"])
            else:
                await asyncio.sleep(0.005)

    async def maintain(self) -> None:
        connection = await asyncpg.connect(self.url)
        last = None
        while True:
            await connection.execute("SELECT * FROM howdah.run_maintenance()")
            at, took = await connection.fetchrow(SWEEP)
            if at != last and took is not None:
                last = at
                self.sweeps.append(took)
            await asyncio.sleep(0.5)

    def take(self) -> tuple[int, float, float]:
        """The number of claims since the last call, and the mean milliseconds of a claim and of a sweep."""
        means = [1000 * fmean(times) if times else 0.0 for times in (self.claims, self.sweeps)]
        count = len(self.claims)
        self.claims.clear()
        self.sweeps.clear()
        return count, means[0], means[1]


async def measure(url: str, options: argparse.Namespace) -> bool:
    """Whether claims and sweeps stayed below the bar."""
    load = Load(url, options.rate)
    tasks = [
        asyncio.create_task(work)
        for work in (
            load.maintain(),
            *map(load.enqueue, range(PRODUCERS)),
            *map(load.claim, range(CLAIMERS)),
        )
    ]
    holder = await asyncpg.connect(url)
    await asyncio.sleep(5)  # plans and caches are warm
    load.take()
    before, last = (0.0, 0.0), (0.0, 0.0)
    for minute in range(options.before + options.minutes):
        if minute == options.before:
            await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await holder.fetch(ENQUEUE if options.writes else "SELECT $1::text", "held")
        await asyncio.sleep(options.seconds)
        count, claim, sweep = load.take()
        state = "held" if minute >= options.before else "free"
        print(
            f"{state} {minute:3}  {count:7} claims  {claim:7.3f} ms a claim  {sweep:8.2f} ms a sweep",
            flush=True,
        )
        if minute < options.before:
            before = (claim, sweep)
        last = (claim, sweep)
    for task in tasks:
        task.cancel()
    failures = [
        each
        for each in await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(each, Exception)
    ]
    if failures:
        raise failures[0]
    ratios = [after / max(earlier, 0.001) for earlier, after in zip(before, last, strict=True)]
    print(f"last / before: claim {ratios[0]:.2f} ×, sweep {ratios[1]:.2f} × (bar: {BAR:.0f} ×)")
    return max(ratios) <= BAR


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.held", description=__doc__)
    parser.add_argument(
        "--minutes", type=int, default=30, help="how long the transaction stays open"
    )
    parser.add_argument("--before", type=int, default=2, help="minutes to measure before that")
    parser.add_argument(
        "--seconds", type=float, default=60, help="the length of a minute, for a trial"
    )
    parser.add_argument("--rate", type=float, default=1000, help="jobs per second")
    parser.add_argument(
        "--writes", action="store_true", help="the open transaction has enqueued a job"
    )
    parser.add_argument(
        "--pg-bin", type=Path, default=None, help="bin directory of another PostgreSQL"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(
            Path(directory) / "pg",
            settings={"shared_buffers": "256MB"},
            bin_directory=options.pg_bin,
        )
        server.start()
        try:
            queue = JobQueue(server.url)
            queue.pending()  # creates the schema
            queue.close()
            return 0 if asyncio.run(measure(server.url, options)) else 1
        finally:
            server.stop("immediate")
            server.remove()


if __name__ == "__main__":
    sys.exit(main())
