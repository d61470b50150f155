"""`python -m bench.soak`: the run. Exits with 1 if a curve grows without a bound or a count is wrong."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from bench.growth_data import held_transaction
from bench.machine import describe
from bench.services import Postgres
from bench.soak import report
from bench.soak.counts import wrong_counts
from bench.soak.curves import Curve, curves, only_counts
from bench.soak.load import EXECUTOR_KINDS, LOADS, scaled
from bench.soak.samples import Sample, Sampler
from howdah import JobQueue

if TYPE_CHECKING:
    from bench.soak.verdicts import Phase

SETTINGS = {
    "shared_preload_libraries": "pg_stat_statements",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "5min",
    # More often than the default of a minute, so that each phase has several vacuums of every table.
    "autovacuum_naptime": "10s",
    "shared_buffers": "256MB",
}
MINUTES, HELD_MINUTES = 30.0, 6.0
SAMPLE_SECONDS = 5.0
MIN_SAMPLES = 60
MIN_PHASE_SECONDS = 45.0
"""Sizes and times of a phase with fewer than four vacuums say nothing."""
WORKERS = 2
PRODUCERS = 2
START_TIMEOUT_SECONDS = 60.0
WARM_TIMEOUT_SECONDS = 30.0
DRAIN_TIMEOUT_SECONDS = 120.0
STOP_TIMEOUT_SECONDS = 90.0
DOCS = Path(__file__).parents[2] / "docs"


@dataclass
class Child:
    """A process of the load."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """SIGTERM; fails if the process ends with an error."""
        self.process.send_signal(signal.SIGTERM)
        if code := self.process.wait(STOP_TIMEOUT_SECONDS):
            raise RuntimeError(f"{self.name} ended with {code}: {self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


@dataclass
class Soak:
    """One run."""

    minutes: float
    held: float
    load: str
    rate: float | None
    home: Path
    counts_only: bool = False
    children: list[Child] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run(self) -> list[Curve]:
        """Run the load and judge it."""
        with Postgres(SETTINGS) as postgres:
            url = postgres.url()
            with contextlib.closing(JobQueue(url)) as queue:
                queue.pending()  # creates the schema
            with psycopg.connect(url, autocommit=True) as conn:
                conn.execute("CREATE EXTENSION pg_stat_statements")
            try:
                self._start(url)
                self._wait_until_warm(url)
                began = self._sample_phases(postgres)
                self._finish(url)
            finally:
                for child in self.children:
                    if child.process.poll() is None:
                        child.process.kill()
                        child.process.wait()
        found = curves(self.samples, self._claimer_times, began)
        phases = [minutes for minutes in (self.held, self._rest) if minutes]
        is_short = min(phases) * 60 < MIN_PHASE_SECONDS
        return only_counts(found) if is_short or self.counts_only else found

    @property
    def _rest(self) -> float:
        """Minutes before the transaction is held, and after it."""
        return (self.minutes - self.held) / (2 if self.held else 1)

    @property
    def _claimer_times(self) -> Path:
        return self.home / "claims.jsonl"

    # ── processes ─────────────────────────────────────────────────────────────────────────────────

    def _start(self, url: str) -> None:
        for number in range(1, WORKERS + 1):
            self._launch(url, f"worker {number}", "howdah", "worker", "bench.soak.app:app")
        self._launch(url, "claimer", "bench.soak.claimer", "--times", str(self._claimer_times))
        self._wait_until_started()
        share = sum(scaled(LOADS[self.load], self.rate).values()) / PRODUCERS
        for number in range(1, PRODUCERS + 1):
            self._launch(
                url, f"producer {number}", "bench.soak.producer", "--load", self.load, "--rate",
                str(share), "--number", str(number), "--counts", str(self._counts_file(number)),
            )  # fmt: skip
        self._wait_until_started()

    def _launch(self, url: str, name: str, module: str, *arguments: str) -> None:
        log = self.home / f"{name.replace(' ', '-')}.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HOWDAH_")}
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=inherited | {"HOWDAH_DATABASE_URL": url},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.children.append(Child(name, process, log))

    def _wait_until_started(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        for child in self.children:
            while b"started" not in child.log.read_bytes():
                if time.monotonic() > deadline or child.process.poll() is not None:
                    raise RuntimeError(f"{child.name} did not start: {child.tail()}")
                time.sleep(0.05)

    def _wait_until_warm(self, url: str) -> None:
        """Wait until each worker has run a job in each executor, so that its pools, threads and processes are there: they
        are no leak. A busy worker may leave the few jobs of a kind to the other one, so this wait has a limit."""
        kinds = EXECUTOR_KINDS & LOADS[self.load].keys()
        types = [f"soak.{kind}" for kind in kinds]
        deadline = time.monotonic() + WARM_TIMEOUT_SECONDS
        with psycopg.connect(url, autocommit=True) as conn:
            while time.monotonic() < deadline:
                ((warm,),) = conn.execute(
                    "SELECT count(DISTINCT (worker_id, job_type)) FROM howdah.finished_jobs "
                    "WHERE job_type = ANY (%s) AND status = 'completed'",
                    (types,),
                ).fetchall()
                if warm >= WORKERS * len(types):
                    return
                time.sleep(0.2)

    def _counts_file(self, number: int) -> Path:
        return self.home / f"producer-{number}.json"

    # ── phases ────────────────────────────────────────────────────────────────────────────────────

    def _sample_phases(self, postgres: Postgres) -> float:
        sampler = Sampler(
            postgres.url(),
            {c.name: (c.process.pid, c.log) for c in self.children if c.name.startswith("worker")},
            postgres.pid,
        )
        try:
            self._sample(sampler, "before", self._rest)
            if self.held:
                with held_transaction(postgres, "howdah"):
                    self._sample(sampler, "held", self.held)
                self._sample(sampler, "after", self._rest)
        finally:
            sampler.close()
        return sampler.began

    def _sample(self, sampler: Sampler, phase: Phase, minutes: float) -> None:
        every = min(SAMPLE_SECONDS, self.minutes * 60 / MIN_SAMPLES)
        until = time.monotonic() + minutes * 60
        while (now := time.monotonic()) < until:
            for child in self.children:
                if child.process.poll() is not None:
                    raise RuntimeError(f"{child.name} ended: {child.tail()}")
            sample = sampler.read(phase)
            self.samples.append(sample)
            if len(self.samples) % 12 == 1:
                live = sample.rows.get("live_jobs", 0)
                print(
                    f"{sample.t / 60:5.1f} min  {phase:6}  {sample.enqueued:>9,} jobs  {live:>6,} live",
                    flush=True,
                )
            time.sleep(max(0.0, now + every - time.monotonic()))

    def _finish(self, url: str) -> None:
        """Stop the producers, wait until every job has ended, and count."""
        for child in self.children:
            if child.name.startswith("producer"):
                child.stop()
        produced: Counter[str] = Counter()
        for number in range(1, PRODUCERS + 1):
            produced.update(json.loads(self._counts_file(number).read_text()))
        with psycopg.connect(url, autocommit=True) as conn:
            deadline = time.monotonic() + DRAIN_TIMEOUT_SECONDS
            while time.monotonic() < deadline:
                ((left,),) = conn.execute("SELECT count(*) FROM howdah.live_jobs").fetchall()
                if not left:
                    break
                time.sleep(0.2)
            self.wrong = wrong_counts(conn, produced)
        for child in self.children:
            if child.process.poll() is None:
                child.stop()


def main() -> None:
    """Run, write the page, and exit with 0 if nothing grows and every count is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument(
        "--held", type=float, help="minutes to hold a transaction; a fifth of the run if not given"
    )
    parser.add_argument("--load", choices=LOADS, default="mixed")
    parser.add_argument("--rate", type=float, help="jobs per second in all")
    parser.add_argument("--report", type=Path, default=DOCS / "soak.md")
    parser.add_argument("--no-report", action="store_true")
    parser.add_argument("--json", type=Path, help="write verdicts and counts for programs")
    parser.add_argument(
        "--counts-only", action="store_true", help="fail only for what a short run can prove"
    )
    options = parser.parse_args()
    held = options.minutes * HELD_MINUTES / MINUTES if options.held is None else options.held
    if not 0 <= held < options.minutes:
        parser.error("--held must be less than --minutes")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    home = Path(tempfile.mkdtemp(prefix="howdah-soak-"))
    soak = Soak(
        options.minutes, held, options.load, options.rate, home, counts_only=options.counts_only
    )
    machine = describe()
    done = False
    try:
        found = soak.run()
        done = True
    finally:
        if done:
            shutil.rmtree(home, ignore_errors=True)
        else:
            print(f"The logs are in {home}.", file=sys.stderr)
    failed = [curve for curve in found if curve.verdict.failed]
    for curve in found:
        print(f"{curve.verdict.kind:10} {curve.name}: {curve.verdict.words}")
    for sentence in soak.wrong:
        print(f"wrong: {sentence}")
    facts = report.Facts(options.minutes, held, options.load, soak.samples[-1].enqueued, machine)
    if not options.no_report:
        report.write(options.report, found, soak.wrong, facts)
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(found, soak.wrong, facts), indent=1))
    print(f"{len(failed)} curves grow, {len(soak.wrong)} counts are wrong.")
    raise SystemExit(1 if failed or soak.wrong else 0)


if __name__ == "__main__":
    main()
