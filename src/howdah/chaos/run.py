"""One run: create a schema, start workers and producers, inject faults, wait until every job has ended, and check."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from howdah.chaos import fault_hits
from howdah.chaos import ledger as ledgers
from howdah.chaos.checker import Checker, Finding
from howdah.chaos.history import Database, History, Row
from howdah.chaos.process_faults import Mixed
from howdah.chaos.processes.environment import BARE, EFFECTS, REPORT
from howdah.chaos.processes.producer import PRIORITIES
from howdah.chaos.processes.supervisor import ChaosError, Supervisor
from howdah.chaos.scenario import Fault, RunContext, Scenario
from howdah.database import connection
from howdah.database.connection import Connection, DatabaseError
from howdah.protocol.schema_name import quote_schema
from howdah.queue import JobQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from howdah.chaos.scenario import Place

SAMPLE_SECONDS = 0.5
CONCURRENCY = 16
GRACE_SECONDS = 5.0
OVERDUE_SECONDS = 5.0
ORDERED_TYPES = ("chaos.quick", "chaos.nap", "chaos.thread", BARE)
_SAMPLES = """
    SELECT (SELECT count(*) FROM {s}.live_jobs WHERE status = 'pending'),
           (SELECT count(*) FROM {s}.live_jobs
            WHERE status = 'pending' AND blockers = 0 AND run_at < clock_timestamp()
              AND job_type <> '{bare}'),
           (SELECT count(*) FROM {s}.live_jobs WHERE status = 'claimed'),
           (SELECT count(*) FROM {s}.finished_jobs)
"""
_OVERDUE = """
    SELECT j.id::text, j.lease_id::text, extract(epoch FROM clock_timestamp() - e.expires_at)::float8
    FROM (SELECT unnest(l.job_ids) AS id, l.lease_id, l.expires_at
          FROM {s}.leases AS l
          WHERE l.expires_at < clock_timestamp() - make_interval(secs => %s)) AS e
    JOIN {s}.live_jobs AS j ON j.id = e.id AND j.lease_id = e.lease_id
"""
_ROWS = """
    SELECT id::text, seq, status, job_type, queue, priority, attempts, max_attempts, claims,
           lease_id::text, ordering_key, data ->> 'tag', last_error
    FROM {s}.jobs
"""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run: how many jobs, by which processes, for how long."""

    seconds: float = 20.0
    rate: float = 150.0
    """Jobs per second, of all producers together."""
    producers: int = 2
    workers: int | None = None
    """None: the number that the scenario sets."""
    bare: int = 1
    """The number of bare queue workers."""
    lease: float = 2.0
    harmful: bool = False
    """Include handlers that kill their worker, block it, fork, crash and use up memory."""
    processes: bool = False
    """Include tasks that run in processes."""
    backlog: int = 1000
    drain_timeout: float = 60.0
    """After the load ends: seconds without the end of any job until the run stops waiting for the rest."""


@dataclass(slots=True)
class Verdict:
    """The result of a run."""

    scenario: str
    seed: int
    seconds: float
    findings: list[Finding]
    acknowledged: int
    """Jobs whose enqueue was acknowledged."""
    statuses: dict[str, int]
    executions: int
    hits: dict[str, int]
    """The number of faults that hit a job in flight, by name."""
    planned: dict[str, int]
    recoveries: dict[str, list[float]]
    """Seconds until jobs in flight were claimed again, or until work resumed, by fault name."""
    notes: list[str] = field(default_factory=list)
    """Problems that the scenario itself found."""
    missed: list[str] = field(default_factory=list)
    """What the run failed to exercise: faults that hit no job in flight."""
    excused: list[Finding] = field(default_factory=list)
    """Findings that the fault must cause: the loss, by id, when an asynchronous standby took over."""

    @property
    def passed(self) -> bool:
        return not self.findings and not self.notes

    def broken(self) -> dict[str, int]:
        """The number of findings per promise."""
        return {
            promise: sum(finding.promise == promise for finding in self.findings)
            for promise in sorted({finding.promise for finding in self.findings})
        }


class Run:
    """One scenario, run on one place with one seed."""

    def __init__(
        self,
        scenario: Scenario,
        place: Place,
        directory: Path,
        seed: int,
        load: Load,
        *,
        show: Callable[[str, dict[str, Any]], None] = lambda what, facts: None,
        log: Callable[[str], None] = lambda text: None,
        modify_schema: Callable[[Connection, str], None] | None = None,
        supervisor: dict[str, Any] | None = None,
    ) -> None:
        self.scenario = scenario
        self.place = place
        self.directory = directory
        self.seed = seed
        self.load = load = replace(load, seconds=max(load.seconds, scenario.min_seconds))
        self.ledger = ledgers.Ledger(directory / ledgers.FILE)
        self._show = show
        self._log = log
        self._modify_schema = modify_schema
        self._supervisor = {"environment": scenario.environment, **(supervisor or {})}
        self._schema = quote_schema(place.schema)
        self._failure: BaseException | None = None
        self._facts: dict[str, Any] = {}
        parts = scenario.parts if isinstance(scenario, Mixed) else [scenario]
        self.schedules: list[tuple[Scenario, Sequence[Fault]]] = [
            (part, part.schedule(Random(f"{part.name} {seed}"), load.seconds))  # noqa: S311
            for part in parts
        ]

    # ── the run ───────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Verdict:
        """Run and check. No process outlives this call, even if it raises."""
        for part, schedule in self.schedules:
            self._log(f"{part.name}: {'; '.join(str(fault).strip() for fault in schedule)}")
        self._prepare()
        supervisor = Supervisor(
            self.place, self.directory, self.ledger, lease=self.load.lease,
            worker_options=["--concurrency", str(CONCURRENCY), "--grace", str(GRACE_SECONDS)],
            **self._supervisor,
        )  # fmt: skip
        context = RunContext(
            self.place, self.directory, Random(self.seed), self.ledger, supervisor,  # noqa: S311
            self.load.lease,
        )  # fmt: skip
        try:
            supervisor.run_workers(self.load.workers or self.scenario.workers, self.load.bare)
            self._start_producers(supervisor)
            drained = self._inject_faults(context)
            supervisor.stop("worker")
            supervisor.stop("bare")
        finally:
            context.stopping.set()
            supervisor.close()
            self.ledger.close()
        if self._failure is not None:
            raise self._failure
        return self._verdict(context, drained=drained)

    def _prepare(self) -> None:
        with contextlib.closing(JobQueue(self.place.checker, schema=self.place.schema)) as queue:
            queue.pending()  # creates the schema
        with self.place.connect() as conn:
            conn.execute(
                f"CREATE TABLE IF NOT EXISTS {self._schema}.{EFFECTS} (job_id uuid, tag text)".encode()
            )
            # A lane that is being created hides its first job for a moment, which is not a violation of P7.
            conn.execute(
                f"SELECT {self._schema}.add_lane('default', t, p) "
                "FROM unnest(%s::text[]) AS t, unnest(%s::int[]) AS p".encode(),
                (list(ORDERED_TYPES), list(PRIORITIES)),
            )
            if self._modify_schema is not None:
                self._modify_schema(conn, self._schema)

    def _start_producers(self, supervisor: Supervisor) -> None:
        each = self.load.rate / self.load.producers
        options = ["--harmful"] if self.load.harmful else []
        options += ["--processes"] if self.load.processes else []
        options += ["--bare"] if self.load.bare else []
        supervisor.run_producers(
            self.load.producers, "--seed", str(self.seed), "--rate", str(each),
            "--backlog", str(self.load.backlog), *options,
        )  # fmt: skip

    def _inject_faults(self, context: RunContext) -> bool:
        """Run all schedules, then wait for every job to end; returns whether all did."""
        began = time.monotonic()
        threads = [
            threading.Thread(
                target=self._run_schedule, args=(context, part, schedule, began), daemon=True
            )
            for part, schedule in self.schedules
        ]
        sampling = threading.Thread(target=self._sample_queue, args=(context,), daemon=True)
        for thread in (*threads, sampling):
            thread.start()
        while time.monotonic() < began + self.load.seconds and self._failure is None:
            time.sleep(0.1)
        # A fault in progress needs load: a worker must still reach its fault point.
        for thread in threads:
            thread.join(60)
        context.supervisor.stop("producer")
        drained = self._failure is None and self._wait_until_drained()
        context.stopping.set()
        sampling.join(10)
        return drained

    def _run_schedule(
        self, context: RunContext, scenario: Scenario, schedule: Sequence[Fault], began: float
    ) -> None:
        try:
            for fault in schedule:
                if context.sleep(began + fault.at - time.monotonic()):
                    return
                # Earlier faults may have delayed this one beyond the end of the load; then it is skipped.
                if time.monotonic() > began + self.load.seconds:
                    return
                context.wait_for_busy_workers()
                self._show("fault", {"fault": str(fault)})
                scenario.inject(context, fault)
        except BaseException as error:
            self._failure = self._failure or error

    def _wait_until_drained(self) -> bool:
        fewest, changed_at = math.inf, time.monotonic()
        while time.monotonic() < changed_at + self.load.drain_timeout and self._failure is None:
            with contextlib.suppress(DatabaseError), self.place.connect() as conn:
                (left,) = conn.execute(
                    f"SELECT count(*) FROM {self._schema}.live_jobs".encode()
                ).fetchone() or (0,)
                if left == 0:
                    return True
                if left < fewest:
                    fewest, changed_at = left, time.monotonic()
            time.sleep(0.2)
        return False

    def _sample_queue(self, context: RunContext) -> None:
        """Record samples of the queue, and stale jobs that are not recovered."""
        conn: Connection | None = None
        while not context.sleep(SAMPLE_SECONDS):
            try:
                if conn is None or conn.closed:
                    conn = self.place.connect()
                row = conn.execute(_SAMPLES.format(s=self._schema, bare=BARE).encode()).fetchone()
                for job, fence, seconds in conn.execute(
                    _OVERDUE.format(s=self._schema).encode(), (OVERDUE_SECONDS,)
                ).fetchall():
                    self.ledger.write("overdue", job=job, fence=fence, seconds=seconds)
            except DatabaseError:
                if conn is not None:
                    conn.close()
                continue
            if row is not None:
                names = ("pending", "due", "claimed", "finished")
                self._facts = dict(zip(names, row, strict=True))
                self.ledger.write("sample", self._facts)
                self._show("sample", self._facts | {"exits": dict(context.supervisor.exits)})
        if conn is not None:
            conn.close()

    # ── checking ──────────────────────────────────────────────────────────────────────────────────

    def _verdict(self, context: RunContext, *, drained: bool) -> Verdict:
        history = History(ledgers.read(self.ledger.path))
        database = read_database(self.place)
        findings = Checker(history, database, lease=self.load.lease).check()
        excused = set(self.scenario.excused(context, findings))
        findings = [finding for finding in findings if finding not in excused]
        notes = self.scenario.findings(context)
        if not drained:
            notes.append(f"no job ended for {self.load.drain_timeout:g} s, and some have not ended")
        acknowledged = len({job for job, _, _ in history.acknowledged()})
        if not acknowledged:
            notes.append("no enqueue was acknowledged: the run proves nothing")
        statuses: dict[str, int] = {}
        for row in database.rows:
            statuses[row.status] = statuses.get(row.status, 0) + 1
        planned: dict[str, int] = {}
        for _, schedule in self.schedules:
            for fault in schedule:
                planned[fault.name] = planned.get(fault.name, 0) + 1
        return Verdict(
            scenario=self.scenario.name,
            seed=self.seed,
            seconds=self.load.seconds,
            findings=findings,
            acknowledged=acknowledged,
            statuses=statuses,
            executions=sum(bool(x.starts) for leases in history.jobs.values() for x in leases),
            hits=fault_hits.count(history, self.load.lease),
            planned=planned,
            recoveries=fault_hits.recovery_times(history),
            notes=notes,
            missed=self.scenario.missed(history, planned, self.load.lease),
            excused=sorted(excused, key=str),
        )


def perform(
    scenario: Scenario, common: Place, directory: Path, seed: int, load: Load, **more: Any
) -> Verdict:
    """Run a scenario on the place that it sets up."""
    with scenario.place(common, directory) as place:
        return Run(scenario, place, directory, seed, load, **more).run()


def read_database(place: Place) -> Database:
    """What the checker reads from the database."""
    schema = quote_schema(place.schema)
    with connection.connect(place.checker, timeout=10) as conn:
        rows = [Row(*row) for row in conn.execute(_ROWS.format(s=schema).encode())]
        errors = conn.execute(
            f"SELECT job_id::text, attempt FROM {schema}.job_events WHERE kind = 'error'".encode()
        ).fetchall()
        effects = conn.execute(
            f"SELECT job_id::text, count(*)::int FROM {schema}.{EFFECTS} GROUP BY 1".encode()
        ).fetchall()
        reports = conn.execute(
            f"SELECT job_id::text, data ->> 'fence' FROM {schema}.job_events WHERE kind = %s".encode(),
            (REPORT,),
        ).fetchall()
    return Database(
        rows,
        [(job, attempt) for job, attempt in errors],
        dict(effects),
        frozenset((job, fence) for job, fence in reports),
    )


__all__ = ["ChaosError", "Load", "Run", "Verdict", "perform"]
