"""`howdah demo`: what the queue promises, shown in half a minute, from nothing and leaving nothing behind.

Everything on the screen is read from the database while real worker processes work; one of them is
killed with SIGKILL in the middle of a job, and the count at the end is a query."""

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
VICTIM_AT = 30  # percent of its job at which a worker is killed
PATIENCE = float(os.environ.get("HOWDAH_DEMO_PATIENCE", "30"))  # with jobs that stand still
START_PATIENCE = 60.0
FRAME = 0.1


@dataclass(slots=True)
class Story:
    """What happened so far, besides what the database says."""

    workers: dict[int, subprocess.Popen[bytes]]
    began: float = field(default_factory=time.monotonic)
    enqueued: int = 0
    killed_pid: int | None = None
    killed_job: str | None = None
    seen: tuple[int, int] = (0, 0)
    moved: float = 0.0
    rates: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Now:
    """How things stand."""

    ended: int
    waiting: int
    claimed: int
    jobs_per_second: int

    def sentence(self) -> str:
        """On one line of the same shape each time."""
        return (
            f"{self.ended:>6,} ended  {self.waiting:>6,} waiting  {self.claimed:>4,} claimed  "
            f"{self.jobs_per_second:>7,} jobs/s"
        )


@click.command()
@click.option("--pause", is_flag=True, help="Wait for Enter before everything is removed.")
@click.option(
    "--without-recovery", is_flag=True, help="Switch recovery off, to see what it is good for."
)
@json_lines_option
def demo(pause: bool, without_recovery: bool, as_json: bool) -> None:
    """See 10,000 jobs run, a worker killed, and nothing lost.

    Starts a PostgreSQL in a temporary directory and two worker processes, and removes all of it.
    """
    voice = Voice(as_json=as_json)
    with stoppable(), _temporary_server(voice) as url, connect(url) as conn:
        lost = Demo(voice, conn, url).run(recover=not without_recovery)
        if pause:
            voice.say(
                f"\n[dim]The database still runs:[/] {url}\nPress Enter to remove it.",
                "waiting", url=url,
            )  # fmt: skip
            sys.stdin.readline()
    voice.say(
        "\nNothing is left of it. Next: [bold]howdah db start[/] gives you a queue that stays; the README "
        "goes on from there.",
        "removed",
    )
    raise SystemExit(1 if lost else 0)


class Voice:
    """Tells a person in sentences what happens, or a program in objects."""

    def __init__(self, *, as_json: bool) -> None:
        self.console = Console(highlight=False, quiet=as_json)
        self._as_json = as_json

    def say(self, text: str | Table, event: str, **facts: object) -> None:
        """Say it, in the way that was asked for."""
        self.console.print(text)
        if self._as_json:
            click.echo(json.dumps({"event": event, **facts}))


class Demo:
    """The run, on one database."""

    def __init__(self, voice: Voice, conn: Connection, url: str) -> None:
        self._voice = voice
        self._console = voice.console
        self._conn = conn
        self._url = url

    def run(self, *, recover: bool) -> int:
        """Run it and print the count; how many jobs were lost."""
        os.environ["HOWDAH_DATABASE_URL"] = self._url
        app.queue.pending()  # makes the schema
        if not recover:
            self._conn.execute(
                "UPDATE howdah.maintenance SET due_at = 'infinity' WHERE duty IN ('recover', 'sweep')"
            )
        with self._workers() as workers:
            self._wait_for(workers)
            story = Story(workers)
            self._enqueue(story)
            with self._screen() as show:
                while not self._is_over(story):
                    self._maybe_kill(story)
                    show(story)
                    time.sleep(FRAME)
                show(story)
            return self._count(story)

    def _enqueue(self, story: Story) -> None:
        handles = thumbnail.enqueue_many([(n,) for n in range(QUICK)])
        handles += notify.enqueue_many([(n,) for n in range(FLAKY)])
        for n in range(LONG):
            # One by one, so that both workers get some.
            handles.append(encode_video.enqueue(f"video-{n}"))
            time.sleep(2 * FRAME)
        story.enqueued = len(handles)
        story.rates.append((story.began, 0))
        app.queue.close()
        self._voice.say(
            f"[bold]{story.enqueued:,} jobs[/] enqueued: {QUICK:,} quick ones, {FLAKY} that fail at first, "
            f"{LONG} long ones. Two workers: pid {', '.join(map(str, story.workers))}.",
            "enqueued", jobs=story.enqueued, workers=list(story.workers),
        )  # fmt: skip

    def _wait_for(self, workers: dict[int, subprocess.Popen[bytes]]) -> None:
        give_up = time.monotonic() + START_PATIENCE
        while (self._one("SELECT count(*) FROM howdah.workers") or (0,))[0] < len(workers):
            if time.monotonic() > give_up or any(w.poll() is not None for w in workers.values()):
                raise EmbeddedServerError(
                    "the demo's workers did not start; see the messages above."
                )
            time.sleep(FRAME)

    # ── what happens ──────────────────────────────────────────────────────────────────────────────

    def _maybe_kill(self, story: Story) -> None:
        """Kill the worker of a long job that is under way: no warning, no clean-up, no goodbye."""
        if story.killed_pid is not None:
            return
        row = self._one(
            "SELECT j.id, w.pid FROM howdah.live_jobs j JOIN howdah.workers w USING (worker_id) "
            "WHERE j.job_type = 'encode_video' AND j.progress >= %s ORDER BY j.progress LIMIT 1",
            VICTIM_AT,
        )
        if row is None or row[1] not in story.workers:
            return
        story.killed_job, story.killed_pid = str(row[0]), row[1]
        story.workers[row[1]].send_signal(signal.SIGKILL)
        self._voice.say(
            f"[red]kill -9 {story.killed_pid}[/], in the middle of job [bold]{story.killed_job}[/]. "
            "Its lease ends in two seconds.",
            "killed", pid=story.killed_pid, job_id=story.killed_job,
        )  # fmt: skip

    def _is_over(self, story: Story) -> bool:
        live, progress = self._one(
            "SELECT count(*), coalesce(sum(progress), 0) FROM howdah.live_jobs"
        ) or (0, 0)
        # On a slow machine it takes longer; given up are jobs of which nothing is heard any more.
        if (live, progress) != story.seen:
            story.seen, story.moved = (live, progress), time.monotonic()
        stands_still = time.monotonic() - story.moved > PATIENCE
        return (live == 0 and story.killed_pid is not None) or stands_still

    def _one(self, text: str, *parameters: Any) -> tuple[Any, ...] | None:
        return self._conn.execute(text.encode(), parameters or None).fetchone()

    # ── what is shown ─────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _screen(self) -> Iterator[Any]:
        if not self._console.is_terminal:
            said = 0.0

            def line(story: Story) -> None:
                nonlocal said
                if time.monotonic() - said > 1:
                    said = time.monotonic()
                    now = self._now(story)
                    self._voice.say(now.sentence(), "progress", **asdict(now))

            yield line
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            yield lambda story: live.update(self._frame(story), refresh=True)

    def _counts(self) -> tuple[int, int, int, int]:
        row = self._one(
            "SELECT count(*) FILTER (WHERE status = 'pending'), count(*) FILTER (WHERE status <> 'pending'), "
            "(SELECT count(*) FROM howdah.finished_jobs), "
            "(SELECT count(*) FROM howdah.finished_jobs WHERE status <> 'completed') FROM howdah.live_jobs"
        )
        return row or (0, 0, 0, 0)

    def _now(self, story: Story) -> Now:
        waiting, claimed, ended, _ = self._counts()
        now = time.monotonic()
        story.rates.append((now, ended))
        # Over the last two seconds, or since the beginning.
        while len(story.rates) > 2 and story.rates[1][0] < now - 2:
            del story.rates[0]
        (t0, n0), (t1, n1) = story.rates[0], story.rates[-1]
        rate = (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0
        return Now(ended, waiting, claimed, round(rate))

    def _frame(self, story: Story) -> Group:
        width = max(20, min(50, self._console.width - 30))
        summary = self._now(story).sentence()
        ended = story.rates[-1][1]
        bars = Table.grid(padding=(0, 1))
        bars.add_row("all jobs", ProgressBar(story.enqueued, ended, width=width), f"{ended:,}")
        rows = self._conn.execute(
            "SELECT data ->> 'name', progress, current_stage, status, pid FROM howdah.jobs "
            "LEFT JOIN howdah.workers USING (worker_id) WHERE job_type = 'encode_video' ORDER BY seq"
        ).fetchall()
        for name, percent, stage, status, pid in rows:
            where = f"{stage or ''} on {pid}" if status in ("claimed", "running") else status
            if pid is not None and pid == story.killed_pid and status in ("claimed", "running"):
                where = f"its worker {pid} is dead"
            bars.add_row(name, ProgressBar(100, percent, width=width), where)
        return Group(Text(summary), bars)

    def _count(self, story: Story) -> int:
        row = self._one(
            "SELECT count(*), count(*) FILTER (WHERE status = 'completed'), "
            "count(*) FILTER (WHERE status = 'failed'), "
            "count(*) FILTER (WHERE attempts > 1 AND job_type = 'notify'), "
            "count(*) FILTER (WHERE last_error LIKE 'the lease expired%%'), "
            "count(*) FILTER (WHERE status NOT IN ('completed', 'failed', 'cancelled')) FROM howdah.jobs"
        )
        there, completed, failed, retried, recovered, unended = row or (0, 0, 0, 0, 0, 0)
        lost = story.enqueued - there + unended
        counts = {
            "enqueued": story.enqueued, "completed": completed, "failed": failed,
            "retried": retried, "recovered": recovered,
        }  # fmt: skip
        table = Table.grid(padding=(0, 2))
        for name, number in counts.items():
            table.add_row(name, f"{number:,}")
        table.add_row("lost", Text(f"{lost:,}", style="bold red" if lost else "bold green"))
        seconds = round(time.monotonic() - story.began, 1)
        self._console.print(f"\nCounted in the database after {seconds} s:")
        self._voice.say(table, "counted", **counts, lost=lost, seconds=seconds)
        if story.killed_job is not None:
            self._tell_fate(story)
        return int(lost)

    def _tell_fate(self, story: Story) -> None:
        row = self._one(
            "SELECT status, attempts, worker_id FROM howdah.jobs WHERE id = %s", story.killed_job
        )
        if row is not None:
            status, attempts, worker_id = row
            self._voice.say(
                f"Job {story.killed_job}, whose worker {story.killed_pid} was killed: [bold]{status}[/] "
                f"at attempt {attempts}" + (f" by worker {worker_id}." if worker_id else "."),
                "rescued" if status == "completed" else "left",
                job_id=story.killed_job, status=status, attempts=attempts, worker_id=worker_id,
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
def _temporary_server(voice: Voice) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="howdah-demo-") as name:
        Path(name).chmod(0o755)  # root's server runs as another account, which must get in
        server = EmbeddedServer(Path(name) / "pg18")
        try:
            voice.say("Starting a PostgreSQL in a temporary directory ...", "starting")
            yield server.start()
        finally:
            ignore_stops()
            server.remove()
