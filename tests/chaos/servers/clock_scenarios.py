"""Scenarios in which the server's own clock is wrong for some seconds."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psycopg
from embedded_servers import workspace
from fake_clock import HOUR
from recorded_enqueue import enqueue_recorded
from server_clock import ServerClockFile, server_with_clock

from howdah import JobQueue
from howdah.chaos.scenario import Fault, Place, RunContext, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from random import Random

WEEK = 7 * 24 * HOUR
REST_SECONDS = 6.0
KILL_TIMEOUT_SECONDS = 15.0
FAILING_JOBS = 5
CORRECTION_SECONDS = 5.0
"""What was written with the wrong clock is corrected after this time."""


class ServerClock(Scenario):
    """The server's clock jumps and comes back. While it is wrong a worker is killed, so that leases, retries and
    due times that were computed with the wrong clock must be repaired by others."""

    name = "server clock"
    about = "the server's clock an hour ahead, an hour back and five weeks ahead for some seconds; workers killed meanwhile"
    workers = 3
    JUMPS = (
        ("clock ahead", HOUR, 10.0),
        ("clock back", -HOUR, 6.0),
        ("clock weeks ahead", 5 * WEEK, 4.0),
    )
    min_seconds = 2.0 + sum(seconds for _, _, seconds in JUMPS) + REST_SECONDS * len(JUMPS)
    clock: ServerClockFile
    bin_directory: Path | None = None

    def __init__(self) -> None:
        self._wrong: list[str] = []

    @contextlib.contextmanager
    def place(self, common: Place, directory: Path) -> Iterator[Place]:
        with (
            workspace("clock") as home,
            server_with_clock(home, bin_directory=self.bin_directory) as (server, self.clock),
        ):
            yield Place(server.url, server.url)

    def schedule(self, random: Random, seconds: float) -> Sequence[Fault]:
        at, faults = 2.0, []
        for name, wrong, lasting in random.sample(self.JUMPS, len(self.JUMPS)):
            faults.append(Fault(at, name, {"by": wrong, "for": lasting}))
            at += lasting + REST_SECONDS
        return faults

    def inject(self, run: RunContext, fault: Fault) -> None:
        self._enqueue_failing(run, fault)
        with run.fault(fault.name, scope="clock", by=fault.detail["by"]):
            self.clock.set(fault.detail["by"])
            try:
                run.sleep(fault.detail["for"] / 2)
                self._kill_worker(run)
                run.sleep(fault.detail["for"] / 2)
            finally:
                self.clock.set(0)
        self._check_due_times(run, fault)

    def _enqueue_failing(self, run: RunContext, fault: Fault) -> None:
        """Jobs that fail every second until after the jump: some of their retries are computed with the wrong clock,
        and nothing else about them is."""
        with contextlib.closing(JobQueue(run.place.checker, schema=run.place.schema)) as queue:
            for number in range(FAILING_JOBS):
                failures = int(fault.detail["for"]) + 2
                tag = f"failing-{fault.at}-{number}"
                enqueue_recorded(run, queue, "chaos.flaky", tag, 3 * failures, failures=failures)

    def _kill_worker(self, run: RunContext) -> None:
        if (victim := run.pick_busy_worker(0)) is not None:
            with run.fault("kill worker", scope="worker", target=victim.pid):
                victim.kill()
                victim.wait(KILL_TIMEOUT_SECONDS)

    def _check_due_times(self, run: RunContext, fault: Fault) -> None:
        """Soon after the clock is right, no job waits for a time of the wrong clock: neither new jobs nor delays and
        retries, which are seconds in this load."""
        run.wait_until(lambda: not _hidden(run), CORRECTION_SECONDS, 0.2)
        self._wrong += [f'after "{fault.name}", {job} is hidden' for job in _hidden(run)]

    def findings(self, run: RunContext) -> list[str]:
        """The scenario's own findings, and the duties that wait for a time of the wrong clock."""
        with psycopg.connect(run.place.checker, autocommit=True) as conn:
            late = conn.execute(_LATE_DUTIES).fetchall()
        return self._wrong + [f"the duty {duty} is due only at {at}" for duty, at in late]


def _hidden(run: RunContext) -> list[str]:
    """The jobs that wait for the wrong time."""
    with run.place.connect() as conn:
        return [
            f"{job_type} {job} of attempt {attempts}, created {created_at}, due {run_at}"
            for job, job_type, attempts, created_at, run_at in conn.execute(_LATE_JOBS.encode())
        ]


_LATE_JOBS = """
    SELECT id::text, job_type, attempts, created_at::text, run_at::text FROM howdah.live_jobs
    WHERE status = 'pending' AND run_at > clock_timestamp() + interval '1 minute'
"""
_LATE_DUTIES = f"""
    SELECT duty, due_at::text FROM howdah.maintenance
    WHERE due_at > clock_timestamp() + period + interval '{HOUR // 2} s'
"""
