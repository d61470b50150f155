"""The measurement itself, step by step: the server, pick-up with an idle worker, three ways to enqueue,
and one worker process on what they piled up."""

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


# What each step takes of the time; the rest is for the schema and for starting two workers.
STEPS = {
    "server": 0.04,
    "pick-up": 0.2,
    "one caller": 0.13,
    "64 callers": 0.13,
    "in bulk": 0.13,
    "one worker": 0.22,
}
BULK = 1000
DATA = {"note": "x" * 80}
WARM_UP = 10
PATIENCE = 60.0  # for a process that starts on a busy machine
STOP_PATIENCE = 5.0
FRAME = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a step is, from 0 to 1, and its figure so far."""

    step: str
    share: float
    text: str = ""


Tell: TypeAlias = "Callable[[Progress], None]"


class Bench:
    """One measurement of the database at `url`, in a schema that is there; about `seconds` long."""

    def __init__(self, url: str, conn: Connection, schema: str, seconds: float, tell: Tell) -> None:
        self._url = url
        self._conn = conn
        self._schema = schema
        self._seconds = seconds
        self._tell = tell

    async def run(self) -> Figures:
        """Measure everything."""
        server = self._server()
        queue = AsyncJobQueue(self._url, schema=self._schema, create=False)
        try:
            async with self._worker("ping") as reports:
                pick_up = await self._pick_up(queue, reports)
            one = await self._enqueue("one caller", lambda: self._single(queue))
            many = await self._enqueue("64 callers", lambda: self._single(queue), CALLERS)
            bulk = await self._enqueue("in bulk", lambda: self._many(queue))
        finally:
            await queue.close()
        worker = await self._drain(one.jobs + many.jobs + bulk.jobs)
        return Figures(
            server=server, pick_up=pick_up, one_caller=one, many_callers=many, bulk=bulk,
            worker=worker,
        )  # fmt: skip

    # ── the steps ─────────────────────────────────────────────────────────────────────────────────

    def _server(self) -> Server:
        self._tell(Progress(step="server", share=0))
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
        self._tell(Progress(step="server", share=1, text=text))
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
        for _ in range(WARM_UP):  # the first waits for the worker to start
            await asyncio.gather(queue.enqueue("ping", queue="ping"), reports.next())
        began = time.monotonic()
        shown = 0.0
        while (now := time.monotonic()) < began + seconds or len(taken) < 10:
            _, (started, _, _) = await asyncio.gather(
                queue.enqueue("ping", queue="ping"), reports.next()
            )
            taken.append(started - now)
            if now - shown > FRAME:
                shown = now
                text = f"p50 {milliseconds(statistics.median(taken))}"
                self._tell(Progress(step="pick-up", share=(now - began) / seconds, text=text))
            # Until it sleeps again, and not in step with anything.
            await asyncio.sleep(random.uniform(0.002, 0.006))  # noqa: S311
        taken.sort()
        found = Latency(
            samples=len(taken), p50=statistics.median(taken), p99=taken[int(len(taken) * 0.99)]
        )
        text = f"p50 {milliseconds(found.p50)}, p99 {milliseconds(found.p99)}"
        self._tell(Progress(step="pick-up", share=1, text=text))
        return found

    async def _single(self, queue: AsyncJobQueue) -> int:
        await queue.enqueue("work", DATA, queue="work")
        return 1

    async def _many(self, queue: AsyncJobQueue) -> int:
        jobs = [{"job_type": "work", "data": DATA, "queue": "work"} for _ in range(BULK)]
        return len(await queue.enqueue_many(jobs))

    async def _enqueue(
        self, step: str, send: Callable[[], Awaitable[int]], callers: int = 1
    ) -> Rate:
        """Enqueue for as long as the step takes; at least once."""
        jobs = 0
        seconds = self._seconds * STEPS[step]
        began, cpu = time.monotonic(), time.process_time()

        async def call() -> None:
            nonlocal jobs
            while True:
                added = await send()
                jobs += added  # not in one: what other callers add meanwhile would be lost
                if time.monotonic() >= began + seconds:
                    return

        calls = [asyncio.create_task(call()) for _ in range(callers)]
        try:
            while waiting := [each for each in calls if not each.done()]:
                passed = time.monotonic() - began
                self._tell(_rate(step, min(1.0, passed / seconds), jobs, passed))
                done, _ = await asyncio.wait(waiting, timeout=FRAME)
                for each in done:
                    each.result()
        finally:
            for each in calls:
                each.cancel()
        passed = time.monotonic() - began
        self._tell(_rate(step, 1, jobs, passed))
        return Rate(jobs=jobs, seconds=passed, cpu=(time.process_time() - cpu) / passed)

    async def _drain(self, backlog: int) -> Rate:
        """Let a worker process have the backlog; what counts is what the database has as completed."""
        seconds = self._seconds * STEPS["one worker"]
        async with self._worker("work") as reports:
            first = last = shown = await reports.next()
            while last[0] - first[0] < seconds and last[2] + tasks.EVERY <= backlog:
                last = await reports.next()
                passed = last[0] - first[0]
                if last[0] - shown[0] > FRAME:
                    shown = last
                    self._tell(_rate("one worker", passed / seconds, last[2] - first[2], passed))
        jobs, span = self._conn.execute(
            "SELECT count(*), extract(epoch FROM max(completed_at) - min(completed_at))::float8 "
            f"FROM {quote_schema(self._schema)}.finished_jobs "
            "WHERE job_type = 'work' AND status = 'completed'".encode()
        ).fetchone() or (0, 0.0)
        self._tell(_rate("one worker", 1, jobs, span or 0.0))
        cpu = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0
        return Rate(jobs=jobs, seconds=span or 0.0, cpu=cpu)

    # ── the worker ────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def _worker(self, queue: str) -> AsyncIterator[Reports]:
        """A worker process on one queue, and what it reports."""
        reading, writing = os.pipe()
        environment = os.environ | {
            "HOWDAH_DATABASE_URL": self._url,
            "HOWDAH_SUPERVISOR": str(os.getpid()),  # it stops when we die
            tasks.SCHEMA: self._schema,
            tasks.PIPE: str(writing),
        }
        command = [sys.executable, "-m", "howdah", "worker", f"{tasks.__name__}:app"]
        command += ["--queues", queue, "--log-level", "error", "--grace", "0"]
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command, started in a moment
                command, env=environment, pass_fds=[writing], process_group=0,
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip
            os.close(writing)
            reports = Reports(reading, process, said)
            try:
                yield reports
            finally:
                _end(process)
                reports.close()


def _rate(step: str, share: float, jobs: int, seconds: float) -> Progress:
    text = f"{jobs / seconds:,.0f} jobs/s" if seconds else ""
    return Progress(step=step, share=share, text=text)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.terminate()
        process.wait(STOP_PATIENCE)
    except subprocess.TimeoutExpired:
        pass  # it has nothing that anybody will miss
    finally:
        process.kill()
        process.wait()


Report: TypeAlias = tuple[float, float, int]


class Reports:
    """The reading end of the worker's pipe."""

    def __init__(self, pipe: int, process: subprocess.Popen[bytes], said: Any) -> None:
        self._pipe = pipe
        self._process = process
        self._said = said
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
        """The next report; an error if the worker is gone or silent."""
        try:
            async with asyncio.timeout(PATIENCE):
                report = await self._waiting.get()
        except TimeoutError:
            raise HowdahError(f"the worker took no job within {PATIENCE:g} s.") from None
        if report is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            self._said.seek(0)
            words = self._said.read().decode(errors="replace").strip()
            raise HowdahError(f"the worker ended with status {self._process.poll()}: {words}")
        return report

    def close(self) -> None:
        """Close the pipe."""
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
