"""What one job costs while many workers are idle: `python -m bench.herd [WORKERS ...]`.

Enqueues one job at a time and waits for its start. Prints the median time from the call to the start, the CPU time of
all processes (workers and server) and the claims, each per job."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

import psycopg

from howdah import App, JobQueue, Worker
from howdah.embedded import EmbeddedServer

JOBS = 200
SETTINGS = {"max_connections": "400", "track_functions": "pl", "fsync": "off"}
CLAIMS = (
    "SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname = 'claim_job_batch'"
)


def _work(url: str, schema: str, started: int, types: int) -> None:
    app = App(url, schema=schema)

    @app.task
    async def note() -> None:
        os.write(started, struct.pack("d", time.monotonic()))

    async def nothing() -> None:
        pass

    for number in range(1, types):
        app.task(name=f"type {number}")(nothing)
    asyncio.run(Worker(app, concurrency=4).run())


def fork_worker(url: str, schema: str, started: int, types: int = 1) -> int:
    """Start a worker with this number of job types. The task `note` writes the time of its start."""
    pid = os.fork()
    if pid == 0:
        try:
            _work(url, schema, started, types)
        finally:
            os._exit(0)
    return pid


def cpu_seconds(pids: list[int]) -> float:
    """The CPU time of these processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def backends(conn: psycopg.Connection[tuple[int]]) -> list[int]:
    """The process ids of the server's sessions."""
    return [pid for (pid,) in conn.execute("SELECT pid FROM pg_stat_activity")]


def start_one_by_one(queue: JobQueue, reading: int, jobs: int) -> list[float]:
    """The seconds from each call to the start of its job."""
    late = []
    for _ in range(jobs):
        began = time.monotonic()
        queue.enqueue("note")
        ready, _, _ = select.select([reading], [], [], 30)
        if not ready:
            raise TimeoutError("the job did not start within 30 s")
        late.append(struct.unpack("d", os.read(reading, 8))[0] - began)
        time.sleep(0.005)
    return late


def measure(server: EmbeddedServer, name: str, workers: int) -> str:
    """One line of figures for this number of idle workers."""
    url = server.url
    queue = JobQueue(url, schema=name)
    queue.pending()
    reading, writing = os.pipe()
    pids = [fork_worker(url, name, writing) for _ in range(workers)]
    conn = psycopg.connect(url, autocommit=True)
    try:
        idle = f"SELECT count(*) FROM {name}.workers WHERE idle"
        while conn.execute(idle).fetchone() != (workers,):
            time.sleep(0.2)
        time.sleep(7)  # the first polls after a start are quick
        start_one_by_one(queue, reading, 8 * workers)  # every session has its plans afterwards
        measured = [*pids, *backends(conn)]
        cpu, claims = cpu_seconds(measured), _claims(conn)
        late = start_one_by_one(queue, reading, JOBS)
        time.sleep(1.5)  # the statistics of functions arrive late
        cpu, claims = cpu_seconds(measured) - cpu, _claims(conn) - claims
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        for pid in pids:
            os.waitpid(pid, 0)
        conn.close()
        queue.close()
        os.close(reading)
        os.close(writing)
    ordered = sorted(late)
    return (
        f"{workers:4} workers: p50 {1000 * statistics.median(late):.1f} ms, "
        f"p99 {1000 * ordered[int(0.99 * JOBS)]:.1f} ms, "
        f"CPU {1000 * cpu / JOBS:.1f} ms, {claims / JOBS:.2f} claims per job"
    )


def _claims(conn: psycopg.Connection[tuple[int]]) -> int:
    return sum(int(calls) for (calls,) in conn.execute(CLAIMS))


def main() -> None:
    """Measure each number of workers that was given."""
    with tempfile.TemporaryDirectory(prefix="howdah-herd-") as directory:
        Path(directory).chmod(0o755)
        server = EmbeddedServer(Path(directory) / "pg", settings=SETTINGS)
        server.start()
        try:
            for number in [int(text) for text in sys.argv[1:]] or [1, 50]:
                print(measure(server, f"herd_{number}", number), flush=True)
        finally:
            server.stop("immediate")


if __name__ == "__main__":
    main()
