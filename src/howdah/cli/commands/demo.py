"""`howdah demo`: shows in half a minute that no job is lost when a worker is killed.

It starts an embedded server and worker processes, and removes them at the end. Everything on the screen is
read from the database while the workers run. One of them is killed with SIGKILL in the middle of a job. The
totals at the end are a query."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from howdah.cli.demo_app import app, encode_video, notify, thumbnail
from howdah.cli.options import connect, json_lines_option
from howdah.cli.stopping import ignore_stops, stoppable
from howdah.embedded import EmbeddedServer
from howdah.errors import EmbeddedServerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.database.connection import Connection


QUICK, FLAKY, LONG = 10_000, 200, 4
KILL_AT_PERCENT = 30  # progress of a job at which its worker is killed
# Without progress for this long, the remaining jobs count as lost.
STALL_SECONDS = float(os.environ.get("HOWDAH_DEMO_STALL_SECONDS", "30"))
START_TIMEOUT_SECONDS = 60.0
FRAME_SECONDS = 0.1


@dataclass(slots=True)
class State:
    """The state of the run that is not in the database."""

    workers: dict[int, subprocess.Popen[bytes]]
    began: float = field(default_factory=time.monotonic)
    enqueued: int = 0
    killed_pid: int | None = None
    killed_job: str | None = None
    last_counts: tuple[int, int] = (0, 0)
    progressed_at: float = 0.0
    rates: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Counts:
    """Jobs by state at one time."""

    ended: int
    waiting: int
    claimed: int
    jobs_per_second: int

    def sentence(self) -> str:
        """The counts on one line of constant width."""
        return (
            f"{self.ended:>6,} ended  {self.waiting:>6,} waiting  {self.claimed:>4,} claimed  "
            f"{self.jobs_per_second:>7,} jobs/s"
        )


@click.command()
@click.option("--pause", is_flag=True, help="Wait for Enter before everything is removed.")
@click.option(
    "--without-recovery",
    is_flag=True,
    help="Turn recovery off: the jobs of the killed worker are lost.",
)
@json_lines_option
def demo(pause: bool, without_recovery: bool, as_json: bool) -> None:
    """Run 10,000 jobs, kill a worker, and see that no job is lost.

    Starts a PostgreSQL server in a temporary directory and two worker processes, and removes them at the end.
    """
    printer = Printer(as_json=as_json)
    with stoppable(), _temporary_server(printer) as url, connect(url) as conn:
        lost = Demo(printer, conn, url).run(recover=not without_recovery)
        if pause:
            printer.print(
                f"\n[dim]The database is still running:[/] {url}\nPress Enter to remove it.",
                "waiting", url=url,
            )  # fmt: skip
            sys.stdin.readline()
    printer.print(
        "\nThe server and its data were removed. Next: [bold]howdah db start[/] creates a database that stays; "
        "continue with the README.",
        "removed",
    )
    raise SystemExit(1 if lost else 0)


class Printer:
    """Prints what happens, as sentences or as JSON objects."""

    def __init__(self, *, as_json: bool) -> None:
        self.console = Console(highlight=False, quiet=as_json)
        self._as_json = as_json

    def print(self, text: str | Table, event: str, **facts: object) -> None:
        """Print the text, or the event as JSON."""
        self.console.print(text)
        if self._as_json:
            click.echo(json.dumps({"event": event, **facts}))


class Demo:
    """The run, on one database."""

    def __init__(self, printer: Printer, conn: Connection, url: str) -> None:
        self._printer = printer
        self._console = printer.console
        self._conn = conn
        self._url = url

    def run(self, *, recover: bool) -> int:
        """Run the demo and print the totals. Returns how many jobs were lost."""
        os.environ["HOWDAH_DATABASE_URL"] = self._url
        app.queue.pending()  # creates the schema
        if not recover:
            self._conn.execute(
                "UPDATE howdah.maintenance SET due_at = 'infinity' WHERE duty IN ('recover', 'late')"
            )
        with self._workers() as workers:
            self._wait_for(workers)
            state = State(workers)
            self._enqueue(state)
            with self._screen() as show:
                while not self._is_over(state):
                    self._maybe_kill(state)
                    show(state)
                    time.sleep(FRAME_SECONDS)
                show(state)
            return self._print_totals(state)

    def _enqueue(self, state: State) -> None:
        handles = thumbnail.enqueue_many([(n,) for n in range(QUICK)])
        handles += notify.enqueue_many([(n,) for n in range(FLAKY)])
        for n in range(LONG):
            # One by one, so that both workers get some.
            handles.append(encode_video.enqueue(f"video-{n}"))
            time.sleep(2 * FRAME_SECONDS)
        state.enqueued = len(handles)
        state.rates.append((state.began, 0))
        app.queue.close()
        self._printer.print(
            f"[bold]{state.enqueued:,} jobs[/] enqueued: {QUICK:,} short ones, {FLAKY} that fail once, "
            f"{LONG} long ones. Two workers: pid {', '.join(map(str, state.workers))}.",
            "enqueued", jobs=state.enqueued, workers=list(state.workers),
        )  # fmt: skip

    def _wait_for(self, workers: dict[int, subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while (self._one("SELECT count(*) FROM howdah.workers") or (0,))[0] < len(workers):
            if time.monotonic() > deadline or any(w.poll() is not None for w in workers.values()):
                raise EmbeddedServerError(
                    "the workers of the demo did not start; see the messages above."
                )
            time.sleep(FRAME_SECONDS)

    # ── the run ───────────────────────────────────────────────────────────────────────────────────

    def _maybe_kill(self, state: State) -> None:
        """Kill the worker of a long job in the middle of the job, with SIGKILL."""
        if state.killed_pid is not None:
            return
        row = self._one(
            "SELECT j.id, w.pid FROM howdah.live_jobs j JOIN howdah.workers w USING (worker_id) "
            "WHERE j.job_type = 'encode_video' AND j.progress >= %s ORDER BY j.progress LIMIT 1",
            KILL_AT_PERCENT,
        )
        if row is None or row[1] not in state.workers:
            return
        state.killed_job, state.killed_pid = str(row[0]), row[1]
        state.workers[row[1]].send_signal(signal.SIGKILL)
        self._printer.print(
            f"[red]kill -9 {state.killed_pid}[/], in the middle of job [bold]{state.killed_job}[/]. "
            "Its lease expires in two seconds.",
            "killed", pid=state.killed_pid, job_id=state.killed_job,
        )  # fmt: skip

    def _is_over(self, state: State) -> bool:
        live, progress = self._one(
            "SELECT count(*), coalesce(sum(progress), 0) FROM howdah.live_jobs"
        ) or (0, 0)
        # A slow machine takes longer, so only a run without any progress is over.
        if (live, progress) != state.last_counts:
            state.last_counts, state.progressed_at = (live, progress), time.monotonic()
        stalled = time.monotonic() - state.progressed_at > STALL_SECONDS
        return (live == 0 and state.killed_pid is not None) or stalled

    def _one(self, text: str, *parameters: Any) -> tuple[Any, ...] | None:
        return self._conn.execute(text.encode(), parameters or None).fetchone()

    # ── the screen ────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _screen(self) -> Iterator[Any]:
        if not self._console.is_terminal:
            printed_at = 0.0

            def line(state: State) -> None:
                nonlocal printed_at
                if time.monotonic() - printed_at > 1:
                    printed_at = time.monotonic()
                    counts = self._counts(state)
                    self._printer.print(counts.sentence(), "progress", **asdict(counts))

            yield line
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            yield lambda state: live.update(self._frame(state), refresh=True)

    def _read_counts(self) -> tuple[int, int, int, int]:
        row = self._one(
            "SELECT count(*) FILTER (WHERE status = 'pending'), count(*) FILTER (WHERE status <> 'pending'), "
            "(SELECT count(*) FROM howdah.finished_jobs), "
            "(SELECT count(*) FROM howdah.finished_jobs WHERE status <> 'completed') FROM howdah.live_jobs"
        )
        return row or (0, 0, 0, 0)

    def _counts(self, state: State) -> Counts:
        waiting, claimed, ended, _ = self._read_counts()
        now = time.monotonic()
        state.rates.append((now, ended))
        # The rate of the last two seconds, or since the start.
        while len(state.rates) > 2 and state.rates[1][0] < now - 2:
            del state.rates[0]
        (t0, n0), (t1, n1) = state.rates[0], state.rates[-1]
        rate = (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0
        return Counts(ended, waiting, claimed, round(rate))

    def _frame(self, state: State) -> Group:
        width = max(20, min(50, self._console.width - 30))
        summary = self._counts(state).sentence()
        ended = state.rates[-1][1]
        bars = Table.grid(padding=(0, 1))
        bars.add_row("all jobs", ProgressBar(state.enqueued, ended, width=width), f"{ended:,}")
        rows = self._conn.execute(
            "SELECT data ->> 'name', progress, current_stage, status, pid FROM howdah.jobs "
            "LEFT JOIN howdah.workers USING (worker_id) WHERE job_type = 'encode_video' ORDER BY seq"
        ).fetchall()
        for name, percent, stage, status, pid in rows:
            where = f"{stage or ''} on {pid}" if status in ("claimed", "running") else status
            if pid is not None and pid == state.killed_pid and status in ("claimed", "running"):
                where = f"worker {pid} was killed"
            bars.add_row(name, ProgressBar(100, percent, width=width), where)
        return Group(Text(summary), bars)

    def _print_totals(self, state: State) -> int:
        row = self._one(
            "SELECT count(*), count(*) FILTER (WHERE status = 'completed'), "
            "count(*) FILTER (WHERE status = 'failed'), "
            "count(*) FILTER (WHERE attempts > 1 AND job_type = 'notify'), "
            "count(*) FILTER (WHERE last_error LIKE 'the lease expired%%'), "
            "count(*) FILTER (WHERE status NOT IN ('completed', 'failed', 'cancelled')) FROM howdah.jobs"
        )
        there, completed, failed, retried, recovered, unfinished = row or (0, 0, 0, 0, 0, 0)
        lost = state.enqueued - there + unfinished
        counts = {
            "enqueued": state.enqueued, "completed": completed, "failed": failed,
            "retried": retried, "recovered": recovered,
        }  # fmt: skip
        table = Table.grid(padding=(0, 2))
        for name, number in counts.items():
            table.add_row(name, f"{number:,}")
        table.add_row("lost", Text(f"{lost:,}", style="bold red" if lost else "bold green"))
        seconds = round(time.monotonic() - state.began, 1)
        self._console.print(f"\nCounted in the database after {seconds} s:")
        self._printer.print(table, "counted", **counts, lost=lost, seconds=seconds)
        if state.killed_job is not None:
            self._print_killed_job(state)
        return int(lost)

    def _print_killed_job(self, state: State) -> None:
        row = self._one(
            "SELECT status, attempts, worker_id FROM howdah.jobs WHERE id = %s", state.killed_job
        )
        if row is not None:
            status, attempts, worker_id = row
            self._printer.print(
                f"Job {state.killed_job}, whose worker {state.killed_pid} was killed: [bold]{status}[/] "
                f"at attempt {attempts}" + (f" by worker {worker_id}." if worker_id else "."),
                "rescued" if status == "completed" else "left",
                job_id=state.killed_job, status=status, attempts=attempts, worker_id=worker_id,
            )  # fmt: skip

    @contextlib.contextmanager
    def _workers(self) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
        command = [
            sys.executable,
            "-m",
            "howdah",
            "worker",
            "howdah.cli.demo_app:app",
            "--log-level",
            "error",
        ]
        started = [subprocess.Popen(command, process_group=0) for _ in range(2)]  # noqa: S603
        try:
            yield {process.pid: process for process in started}
        finally:
            ignore_stops()
            for process in started:
                process.terminate()
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                process.wait()


@contextlib.contextmanager
def _temporary_server(printer: Printer) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="howdah-demo-") as name:
        # As root, the server runs as another account, which must be able to enter the directory.
        Path(name).chmod(0o755)
        server = EmbeddedServer(Path(name) / "pg18")
        try:
            printer.print("Starting PostgreSQL in a temporary directory ...", "starting")
            yield server.start()
        finally:
            ignore_stops()
            server.remove()
