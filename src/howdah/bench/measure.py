"""The steps of a measurement: the server, pick-up by an idle worker, three ways to enqueue, and one worker process
that works off the jobs that they left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from howdah.async_queue import AsyncJobQueue
from howdah.bench import tasks
from howdah.bench.figures import CALLERS, Figures, Latency, Rate, Server, milliseconds
from howdah.errors import HowdahError
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from howdah.database.connection import Connection

# The share of each step; the rest is for creating the schema and starting two workers.
STEPS = {
    "server": 0.04,
    "pick-up": 0.2,
    "one caller": 0.13,
    "64 callers": 0.13,
    "in bulk": 0.13,
    "one worker": 0.22,
}
BULK_JOBS = 1000
DATA = {"note": "x" * 80}
WARM_UP_JOBS = 10
REPORT_TIMEOUT_SECONDS = 60.0  # includes the start of a process on a busy machine
STOP_TIMEOUT_SECONDS = 5.0
FRAME_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a step from 0 to 1, and its figure so far."""

    step: str
    share: float
    text: str = ""


OnProgress: TypeAlias = "Callable[[Progress], None]"


class Bench:
    """One measurement of the database at `url`, in an existing schema; takes about `seconds`."""

    def __init__(
        self, url: str, conn: Connection, schema: str, seconds: float, on_progress: OnProgress
    ) -> None:
        self._url = url
        self._conn = conn
        self._schema = schema
        self._seconds = seconds
        self._on_progress = on_progress

    async def run(self) -> Figures:
        """Run every step."""
        server = self._server()
        queue = AsyncJobQueue(self._url, schema=self._schema, create=False)
        try:
            async with self._worker("ping") as reports:
                pick_up = await self._pick_up(queue, reports)
            one = await self._enqueue("one caller", lambda: self._enqueue_one(queue))
            many = await self._enqueue("64 callers", lambda: self._enqueue_one(queue), CALLERS)
            bulk = await self._enqueue("in bulk", lambda: self._enqueue_bulk(queue))
        finally:
            await queue.close()
        worker = await self._drain(one.jobs + many.jobs + bulk.jobs)
        return Figures(
            server=server, pick_up=pick_up, one_caller=one, many_callers=many, bulk=bulk,
            worker=worker,
        )  # fmt: skip

    # ── the steps ─────────────────────────────────────────────────────────────────────────────────

    def _server(self) -> Server:
        self._on_progress(Progress(step="server", share=0))
        settings = dict(
            self._conn.execute(
                "SELECT name, setting FROM pg_settings WHERE name IN "
                "('server_version', 'fsync', 'full_page_writes', 'synchronous_commit')"
            ).fetchall()
        )
        table = f"{quote_schema(self._schema)}.flushed"
        self._conn.execute(f"CREATE TABLE {table} (at timestamptz)".encode())
        half = self._seconds * STEPS["server"] / 2
        round_trip = self._median("SELECT 1", half)
        insert = self._median(f"INSERT INTO {table} VALUES (clock_timestamp())", half)
        version = settings.pop("server_version").split()[0]
        server = Server(
            version=version, round_trip=round_trip, commit=max(0.0, insert - round_trip), **settings
        )
        text = f"PostgreSQL {version}, {milliseconds(round_trip)} away"
        self._on_progress(Progress(step="server", share=1, text=text))
        return server

    def _median(self, text: str, seconds: float) -> float:
        taken: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(taken) < 5:
            began = time.perf_counter()
            self._conn.execute(text.encode(), prepare=False)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    async def _pick_up(self, queue: AsyncJobQueue, reports: Reports) -> Latency:
        seconds = self._seconds * STEPS["pick-up"]
        taken: list[float] = []
        for _ in range(WARM_UP_JOBS):  # the first one waits until the worker has started
            await asyncio.gather(queue.enqueue("ping", queue="ping"), reports.next())
        began = time.monotonic()
        shown = 0.0
        while (now := time.monotonic()) < began + seconds or len(taken) < 10:
            _, (started, _, _) = await asyncio.gather(
                queue.enqueue("ping", queue="ping"), reports.next()
            )
            taken.append(started - now)
            if now - shown > FRAME_SECONDS:
                shown = now
                text = f"p50 {milliseconds(statistics.median(taken))}"
                self._on_progress(
                    Progress(step="pick-up", share=(now - began) / seconds, text=text)
                )
            # Until the worker is idle again; random, so as not to be in phase with its polling.
            await asyncio.sleep(random.uniform(0.002, 0.006))  # noqa: S311
        taken.sort()
        found = Latency(
            samples=len(taken), p50=statistics.median(taken), p99=taken[int(len(taken) * 0.99)]
        )
        text = f"p50 {milliseconds(found.p50)}, p99 {milliseconds(found.p99)}"
        self._on_progress(Progress(step="pick-up", share=1, text=text))
        return found

    async def _enqueue_one(self, queue: AsyncJobQueue) -> int:
        await queue.enqueue("work", DATA, queue="work")
        return 1

    async def _enqueue_bulk(self, queue: AsyncJobQueue) -> int:
        jobs = [{"job_type": "work", "data": DATA, "queue": "work"} for _ in range(BULK_JOBS)]
        return len(await queue.enqueue_many(jobs))

    async def _enqueue(
        self, step: str, send: Callable[[], Awaitable[int]], callers: int = 1
    ) -> Rate:
        """Enqueue until the time of the step is over; at least once."""
        jobs = 0
        seconds = self._seconds * STEPS[step]
        began, cpu = time.monotonic(), time.process_time()

        async def call() -> None:
            nonlocal jobs
            while True:
                added = await send()
                jobs += added  # not `jobs += await send()`, which loses what other callers add in the meantime
                if time.monotonic() >= began + seconds:
                    return

        calls = [asyncio.create_task(call()) for _ in range(callers)]
        try:
            while waiting := [each for each in calls if not each.done()]:
                passed = time.monotonic() - began
                self._on_progress(_rate(step, min(1.0, passed / seconds), jobs, passed))
                done, _ = await asyncio.wait(waiting, timeout=FRAME_SECONDS)
                for each in done:
                    each.result()
        finally:
            for each in calls:
                each.cancel()
        passed = time.monotonic() - began
        self._on_progress(_rate(step, 1, jobs, passed))
        return Rate(jobs=jobs, seconds=passed, cpu=(time.process_time() - cpu) / passed)

    async def _drain(self, backlog: int) -> Rate:
        """Run a worker process on the backlog, and count the completed jobs in the database."""
        seconds = self._seconds * STEPS["one worker"]
        async with self._worker("work") as reports:
            first = last = shown = await reports.next()
            while last[0] - first[0] < seconds and last[2] + tasks.REPORT_JOBS <= backlog:
                last = await reports.next()
                passed = last[0] - first[0]
                if last[0] - shown[0] > FRAME_SECONDS:
                    shown = last
                    self._on_progress(
                        _rate("one worker", passed / seconds, last[2] - first[2], passed)
                    )
        jobs, span = self._conn.execute(
            "SELECT count(*), extract(epoch FROM max(completed_at) - min(completed_at))::float8 "
            f"FROM {quote_schema(self._schema)}.finished_jobs "
            "WHERE job_type = 'work' AND status = 'completed'".encode()
        ).fetchone() or (0, 0.0)
        self._on_progress(_rate("one worker", 1, jobs, span or 0.0))
        cpu = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0
        return Rate(jobs=jobs, seconds=span or 0.0, cpu=cpu)

    # ── the worker ────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def _worker(self, queue: str) -> AsyncIterator[Reports]:
        """A worker process on one queue, and its reports."""
        reading, writing = os.pipe()
        environment = os.environ | {
            "HOWDAH_DATABASE_URL": self._url,
            "HOWDAH_SUPERVISOR": str(os.getpid()),  # the worker stops when this process exits
            tasks.SCHEMA_VARIABLE: self._schema,
            tasks.PIPE_VARIABLE: str(writing),
        }
        command = [sys.executable, "-m", "howdah", "worker", f"{tasks.__name__}:app"]
        command += ["--queues", queue, "--log-level", "error", "--grace", "0"]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command, quick to start
                command, env=environment, pass_fds=[writing], process_group=0,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            os.close(writing)
            reports = Reports(reading, process, log)
            try:
                yield reports
            finally:
                _stop(process)
                reports.close()


def _rate(step: str, share: float, jobs: int, seconds: float) -> Progress:
    text = f"{jobs / seconds:,.0f} jobs/s" if seconds else ""
    return Progress(step=step, share=share, text=text)


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        process.terminate()
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        pass  # killed below: its jobs are not needed any more
    finally:
        process.kill()
        process.wait()


Report: TypeAlias = tuple[float, float, int]


class Reports:
    """The reading end of the worker's pipe."""

    def __init__(self, pipe: int, process: subprocess.Popen[bytes], log: Any) -> None:
        self._pipe = pipe
        self._process = process
        self._log = log
        self._waiting: asyncio.Queue[Report | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe, False)
        self._loop.add_reader(pipe, self._read)

    def _read(self) -> None:
        data = os.read(self._pipe, 1024 * tasks.REPORT.size)
        for report in tasks.REPORT.iter_unpack(data):
            self._waiting.put_nowait(report)
        if not data:
            self._loop.remove_reader(self._pipe)
            self._waiting.put_nowait(None)

    async def next(self) -> Report:
        """The next report; raises if the worker exited or does not report in time."""
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_SECONDS):
                report = await self._waiting.get()
        except TimeoutError:
            raise HowdahError(
                f"the worker took no job within {REPORT_TIMEOUT_SECONDS:g} s."
            ) from None
        if report is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            self._log.seek(0)
            output = self._log.read().decode(errors="replace").strip()
            raise HowdahError(f"the worker ended with status {self._process.poll()}: {output}")
        return report

    def close(self) -> None:
        """Close the pipe."""
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
