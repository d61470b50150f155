"""What the number of job types costs a worker: `python -m bench.job_types`.

One worker with 10 job types and one with 1,000, by turns. Prints the median time from the call to the start of a single
job, and the time and CPU per job of a backlog of all types. Fails if 1,000 types take more than three times as long."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psycopg

from bench.herd import SETTINGS, backends, cpu_seconds, fork_worker, start_one_by_one
from howdah import JobQueue
from howdah.embedded import EmbeddedServer

FEW, MANY = 10, 1000
BAR = 3.0
SINGLE_JOBS = 100
BACKLOG_JOBS = 30_000
ROUNDS = 3


def run_backlog(
    queue: JobQueue, conn: psycopg.Connection[tuple[int]], schema: str, types: int, jobs: int
) -> float:
    """The seconds from the enqueue of jobs of all types to the end of the last one."""
    began = time.monotonic()
    queue.enqueue_many((f"type {1 + n % (types - 1)}", None) for n in range(jobs))
    live = f"SELECT count(*) FROM {schema}.live_jobs"
    while conn.execute(live.encode()).fetchone() != (0,):
        time.sleep(0.02)
    return time.monotonic() - began


def measure(server: EmbeddedServer, schema: str, types: int) -> tuple[float, float, float]:
    """Seconds to the start of a single job, and the seconds and CPU seconds of a backlog. Prints them per job."""
    queue = JobQueue(server.url, schema=schema)
    queue.pending()
    reading, writing = os.pipe()
    pid = fork_worker(server.url, schema, writing, types)
    conn = psycopg.connect(server.url, autocommit=True)
    try:
        while conn.execute(f"SELECT count(*) FROM {schema}.workers WHERE idle").fetchone() != (1,):
            time.sleep(0.1)
        start_one_by_one(queue, reading, 20)  # the sessions have their plans afterwards
        late = statistics.median(start_one_by_one(queue, reading, SINGLE_JOBS))
        # The worker knows afterwards how long the jobs of each type take, and prefetches them.
        run_backlog(queue, conn, schema, types, 4 * types)
        processes = [pid, *backends(conn)]
        cpu = cpu_seconds(processes)
        took = run_backlog(queue, conn, schema, types, BACKLOG_JOBS)
        cpu = cpu_seconds(processes) - cpu
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        conn.close()
        queue.close()
        os.close(reading)
        os.close(writing)
    print(
        f"{types:5} types: single job {1000 * late:.2f} ms; backlog {1e6 * took / BACKLOG_JOBS:.0f} µs and "
        f"{1e6 * cpu / BACKLOG_JOBS:.0f} µs of CPU per job",
        flush=True,
    )
    return late, took, cpu


def main() -> None:
    """Measure both by turns and compare the medians."""
    with tempfile.TemporaryDirectory(prefix="howdah-types-") as directory:
        Path(directory).chmod(0o755)
        server = EmbeddedServer(Path(directory) / "pg", settings=SETTINGS)
        server.start()
        figures: dict[int, list[tuple[float, float, float]]] = {FEW: [], MANY: []}
        try:
            for number in range(ROUNDS):
                for types, found in figures.items():
                    found.append(measure(server, f"types_{types}_{number}", types))
        finally:
            server.stop("immediate")
    few, many = (
        [statistics.median(each) for each in zip(*figures[types], strict=True)]
        for types in (FEW, MANY)
    )
    ratios = [b / a for a, b in zip(few, many, strict=True)]
    names = ("single job", "backlog, time", "backlog, CPU")
    for name, ratio in zip(names, ratios, strict=True):
        print(f"{name}: {ratio:.2f} × (at most {BAR:g})")
    sys.exit(max(ratios) > BAR)


if __name__ == "__main__":
    main()
