"""`howdah demo`: a minute with the queue, from nothing and leaving nothing behind.

In a terminal the table is live; piped, it is printed at each step and nothing waits.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from howdah.cli.options import connect
from howdah.embedded import EmbeddedServer
from howdah.errors import LeaseLost
from howdah.migrate import migrate
from howdah.model import BACKFILL, EXPLICIT
from howdah.queue import JobQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from howdah.model import Job

QUERY = """\
SELECT job_type, status, progress, attempts, max_attempts, worker_id,
       coalesce(result #>> '{}', last_error)
FROM howdah.jobs
ORDER BY seq"""
COLOURS = {
    "pending": "yellow",
    "claimed": "cyan",
    "running": "cyan",
    "completed": "green",
    "failed": "red",
}
RESULTS = {
    "rebuild-index": "4096 pages",
    "send-email": "sent",
    "call-service": "200 OK",
    "export": "export.csv",
}
PAUSE = 0.08
SHORT_LEASE = 0.3


@click.command()
def demo() -> None:
    """See jobs run on a PostgreSQL of their own, which is removed again."""
    console = Console(highlight=False)
    began = time.monotonic()
    with _stoppable(), _temporary_server() as server:
        console.print("Starting a PostgreSQL in a temporary directory ...")
        url = server.start()
        with connect(url) as conn, contextlib.closing(JobQueue(url, worker_id="worker-1")) as one:
            migrate(conn, "howdah")
            Demo(console, conn, one, url).run()
        console.print("\nStopping PostgreSQL and deleting its directory ...")
    console.print(f"Done in {time.monotonic() - began:.1f} s. Nothing is left of it.", style="bold")
    console.print(
        "\nThe tables above are SELECT ... FROM howdah.jobs, which you can ask any time. "
        "To have a queue that stays, run `howdah db start` and go on with the README.",
        markup=False,
    )


class Demo:
    """The acts, on one queue."""

    def __init__(
        self, console: Console, conn: psycopg.Connection[Any], queue: JobQueue, url: str
    ) -> None:
        self._console = console
        self._conn = conn
        self._queue = queue
        self._url = url
        self._live: Live | None = None

    def run(self) -> None:
        with self._act("Five jobs are enqueued; one of them twice, under one idempotency key."):
            self._enqueue()
        with self._act("worker-1 claims them, highest priority first. Two fail: one is retried."):
            while job := self._queue.claim_one():
                self._work(job)
        with self._act(
            "worker-1 takes one more and stops answering. When its lease has run out, worker-2 does "
            "the job. worker-1 comes back, and its answer is refused:"
        ):
            refusal = self._lose_a_lease()
        self._console.print(f"{type(refusal).__name__}: {refusal}", style="red", markup=False)

    def _enqueue(self) -> None:
        self._queue.enqueue("rebuild-index", priority=BACKFILL)
        for _ in range(2):
            self._queue.enqueue("send-email", {"to": "a@example.com"}, idempotency_key="welcome-7")
        self._queue.enqueue("call-service", {"url": "https://example.com"})
        self._queue.enqueue("parse-upload", {"path": "a.csv"})
        self._queue.enqueue("export", {"asked_by": "a person who waits"}, priority=EXPLICIT)

    def _work(self, job: Job) -> None:
        for percent in (25, 50, 75):
            self._queue.progress(job, percent)
            self._show(pause=PAUSE)
        if job.job_type == "parse-upload":
            self._queue.fail(job, "not a CSV file", retry=False)
        elif job.job_type == "call-service" and job.attempts == 1:
            self._queue.fail(job, "connection reset", delay=8 * PAUSE)
            self._show(pause=8 * PAUSE, always=True)
        else:
            self._queue.complete(job, RESULTS[job.job_type])
        self._show(pause=PAUSE)

    def _lose_a_lease(self) -> LeaseLost:
        self._queue.enqueue("charge-card", {"order": 1})
        [lost] = self._queue.claim(batch_size=1, lease=SHORT_LEASE)
        self._queue.progress(lost, 25)
        self._show(pause=SHORT_LEASE)
        with contextlib.closing(JobQueue(self._url, worker_id="worker-2")) as other:
            while not (job := other.claim_one()):
                time.sleep(0.05)
                other.recover_stale_jobs()
            self._work_for(other, job)
        try:
            self._queue.complete(lost, "charged a second time")
        except LeaseLost as refusal:
            return refusal
        raise AssertionError("a late worker overwrote another's result")

    def _work_for(self, queue: JobQueue, job: Job) -> None:
        queue.progress(job, 50)
        self._show(pause=2 * PAUSE)
        queue.complete(job, "charged once")
        self._show(pause=PAUSE)

    @contextlib.contextmanager
    def _act(self, title: str) -> Iterator[None]:
        self._console.print(f"\n{title}", style="bold", markup=False)
        if not self._console.is_terminal:
            yield
            self._console.print(self._table())
            return
        with Live(self._table(), console=self._console, auto_refresh=False) as self._live:
            yield
            self._show(pause=2 * PAUSE)
        self._live = None

    def _show(self, *, pause: float, always: bool = False) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif always:
            self._console.print(self._table())
        if self._live is not None or always:
            time.sleep(pause)

    def _table(self) -> Table:
        headings = ("job_type", "status", "progress", "attempts", "worker_id", "result or error")
        table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
        for name, status, progress, attempts, maximum, worker, text in self._conn.execute(QUERY):
            bar = ProgressBar(total=100, completed=progress, width=8)
            colour = COLOURS[status]
            table.add_row(name, Text(status, colour), bar, f"{attempts} of {maximum}", worker, text)
        return table


@contextlib.contextmanager
def _temporary_server() -> Iterator[EmbeddedServer]:
    with tempfile.TemporaryDirectory(prefix="howdah-demo-") as name:
        Path(name).chmod(0o755)  # root's server runs as another account, which must get in
        # Nothing has to outlive a crash of this machine.
        server = EmbeddedServer(Path(name) / "pg18", settings={"fsync": "off"})
        try:
            yield server
        finally:
            # A second Ctrl-C would leave the server behind.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            server.remove()


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Ends on SIGTERM and on a closed terminal like on Ctrl-C: through every `finally`."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
