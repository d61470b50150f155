"""One run: set up a schema, start workers and producers, let scenarios strike, wait until every job has ended,
and check."""

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
from howdah.chaos.processes.producer import PRIORITIES
from howdah.chaos.processes.supervisor import BARE, EFFECTS, ChaosError, Crew
from howdah.chaos.scenario import Fault, Scenario, Stage
from howdah.database import connection
from howdah.database.connection import Connection, DatabaseError
from howdah.protocol.schema_name import quote_schema
from howdah.queue import JobQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from howdah.chaos.scenario import Place

SAMPLE = 0.5
CONCURRENCY = 16
GRACE = 5.0
OVERDUE = 5.0
LANES = ("chaos.quick", "chaos.nap", "chaos.thread", BARE)
_SAMPLES = """
    SELECT (SELECT count(*) FROM {s}.live_jobs WHERE status = 'pending'),
           (SELECT count(*) FROM {s}.live_jobs
            WHERE status = 'pending' AND blockers = 0 AND run_at < clock_timestamp()
              AND job_type <> '{bare}'),
           (SELECT count(*) FROM {s}.live_jobs WHERE status = 'claimed'),
           (SELECT count(*) FROM {s}.finished_jobs)
"""
_OVERDUE = """
    SELECT id::text, lease_id::text, extract(epoch FROM clock_timestamp() - lease_expires_at)::float8
    FROM {s}.live_jobs
    WHERE status = 'claimed' AND lease_expires_at < clock_timestamp() - make_interval(secs => %s)
"""
_ROWS = """
    SELECT id::text, seq, status, job_type, queue, priority, attempts, max_attempts, claims,
           lease_id::text, ordering_key, data ->> 'tag', last_error
    FROM {s}.jobs
"""


@dataclass(frozen=True, slots=True)
class Load:
    """How much, and for how long."""

    seconds: float = 20.0
    rate: float = 150.0
    """Jobs a second, of all producers together."""
    producers: int = 2
    workers: int | None = None
    """None: as many as the scenario asks for."""
    bare: int = 1
    """Workers with a loop of their own on a bare queue."""
    lease: float = 2.0
    misfits: bool = False
    """With handlers that kill their worker, stall it, fork, crash and eat up memory."""
    processes: bool = False
    """With tasks that run in processes."""
    backlog: int = 1000
    patience: float = 60.0
    """Seconds without the end of a job, after that of the load, until the rest is given up."""


@dataclass(slots=True)
class Verdict:
    """What came of a run."""

    scenario: str
    seed: int
    seconds: float
    findings: list[Finding]
    acknowledged: int
    """Jobs whose enqueue was acknowledged."""
    statuses: dict[str, int]
    executions: int
    hits: dict[str, int]
    """Faults that hit somebody with a job in hand, by name."""
    planned: dict[str, int]
    recoveries: dict[str, list[float]]
    """Seconds until what was in flight was claimed again, or work resumed, by the fault's name."""
    notes: list[str] = field(default_factory=list)
    """What a scenario itself found wrong."""
    missed: list[str] = field(default_factory=list)
    """What the run was to show and did not: faults that hit nobody with a job in hand."""
    excused: list[Finding] = field(default_factory=list)
    """What the fault was bound to bring about: the loss, by id, where an asynchronous standby took over."""

    @property
    def passed(self) -> bool:
        return not self.findings and not self.notes

    def broken(self) -> dict[str, int]:
        """How many findings there are of each promise."""
        return {
            promise: sum(finding.promise == promise for finding in self.findings)
            for promise in sorted({finding.promise for finding in self.findings})
        }


class Run:
    """A scenario on a place, with a seed."""

    def __init__(
        self,
        scenario: Scenario,
        place: Place,
        directory: Path,
        seed: int,
        load: Load,
        *,
        show: Callable[[str, dict[str, Any]], None] = lambda what, facts: None,
        tell: Callable[[str], None] = lambda text: None,
        sabotage: Callable[[Connection, str], None] | None = None,
        crew: dict[str, Any] | None = None,
    ) -> None:
        self.scenario = scenario
        self.place = place
        self.directory = directory
        self.seed = seed
        self.load = load = replace(load, seconds=max(load.seconds, scenario.least))
        self.ledger = ledgers.Ledger(directory / ledgers.FILE)
        self._show = show
        self._tell = tell
        self._sabotage = sabotage
        self._crew = {"environment": scenario.environment, **(crew or {})}
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
        """All of it; leaves no process behind, however it ends."""
        for part, schedule in self.schedules:
            self._tell(f"{part.name}: {'; '.join(str(fault).strip() for fault in schedule)}")
        self._prepare()
        crew = Crew(
            self.place, self.directory, self.ledger, lease=self.load.lease,
            worker_options=["--concurrency", str(CONCURRENCY), "--grace", str(GRACE)], **self._crew,
        )  # fmt: skip
        stage = Stage(
            self.place, self.directory, Random(self.seed), self.ledger, crew, self.load.lease  # noqa: S311
        )  # fmt: skip
        try:
            crew.man(self.load.workers or self.scenario.workers, self.load.bare)
            self._produce(crew)
            drained = self._strike(stage)
            crew.dismiss("worker")
            crew.dismiss("bare")
        finally:
            stage.stopping.set()
            crew.close()
            self.ledger.close()
        if self._failure is not None:
            raise self._failure
        return self._judge(stage, drained=drained)

    def _prepare(self) -> None:
        with contextlib.closing(JobQueue(self.place.checker, schema=self.place.schema)) as queue:
            queue.pending()  # makes the schema
        with self.place.connect() as conn:
            conn.execute(
                f"CREATE TABLE IF NOT EXISTS {self._schema}.{EFFECTS} (job_id uuid, tag text)".encode()
            )
            # A lane that is being made hides its first job for a moment, which is not the order meant.
            conn.execute(
                f"SELECT {self._schema}.add_lane('default', t, p) "
                "FROM unnest(%s::text[]) AS t, unnest(%s::int[]) AS p".encode(),
                (list(LANES), list(PRIORITIES)),
            )
            if self._sabotage is not None:
                self._sabotage(conn, self._schema)

    def _produce(self, crew: Crew) -> None:
        each = self.load.rate / self.load.producers
        options = ["--misfits"] if self.load.misfits else []
        options += ["--processes"] if self.load.processes else []
        options += ["--bare"] if self.load.bare else []
        crew.produce(
            self.load.producers, "--seed", str(self.seed), "--rate", str(each),
            "--backlog", str(self.load.backlog), *options,
        )  # fmt: skip

    def _strike(self, stage: Stage) -> bool:
        """Let the scenarios strike, then wait for every job to end; whether all did."""
        began = time.monotonic()
        threads = [
            threading.Thread(target=self._follow, args=(stage, part, schedule, began), daemon=True)
            for part, schedule in self.schedules
        ]
        looking = threading.Thread(target=self._look, args=(stage,), daemon=True)
        for thread in (*threads, looking):
            thread.start()
        while time.monotonic() < began + self.load.seconds and self._failure is None:
            time.sleep(0.1)
        # A fault that is under way, such as a worker that is yet to reach its fault point, needs work.
        for thread in threads:
            thread.join(60)
        stage.crew.dismiss("producer")
        drained = self._failure is None and self._drain()
        stage.stopping.set()
        looking.join(10)
        return drained

    def _follow(
        self, stage: Stage, scenario: Scenario, schedule: Sequence[Fault], began: float
    ) -> None:
        try:
            for fault in schedule:
                if stage.sleep(began + fault.at - time.monotonic()):
                    return
                # One that comes too late, as those before it took their time, is left out.
                if time.monotonic() > began + self.load.seconds:
                    return
                stage.await_busy()
                self._show("fault", {"fault": str(fault)})
                scenario.strike(stage, fault)
        except BaseException as error:
            self._failure = self._failure or error

    def _drain(self) -> bool:
        fewest, moved = math.inf, time.monotonic()
        while time.monotonic() < moved + self.load.patience and self._failure is None:
            with contextlib.suppress(DatabaseError), self.place.connect() as conn:
                (left,) = conn.execute(
                    f"SELECT count(*) FROM {self._schema}.live_jobs".encode()
                ).fetchone() or (0,)
                if left == 0:
                    return True
                if left < fewest:
                    fewest, moved = left, time.monotonic()
            time.sleep(0.2)
        return False

    def _look(self, stage: Stage) -> None:
        """Sample the queue, and note leases that nobody takes back."""
        conn: Connection | None = None
        while not stage.sleep(SAMPLE):
            try:
                if conn is None or conn.closed:
                    conn = self.place.connect()
                row = conn.execute(_SAMPLES.format(s=self._schema, bare=BARE).encode()).fetchone()
                for job, fence, seconds in conn.execute(
                    _OVERDUE.format(s=self._schema).encode(), (OVERDUE,)
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
                self._show("sample", self._facts | {"exits": dict(stage.crew.exits)})
        if conn is not None:
            conn.close()

    # ── judging ───────────────────────────────────────────────────────────────────────────────────

    def _judge(self, stage: Stage, *, drained: bool) -> Verdict:
        history = History(ledgers.read(self.ledger.path))
        database = read_database(self.place)
        findings = Checker(history, database, lease=self.load.lease).check()
        excused = set(self.scenario.excused(stage, findings))
        findings = [finding for finding in findings if finding not in excused]
        notes = self.scenario.findings(stage)
        if not drained:
            notes.append("some jobs had not ended when the run's patience was over")
        acknowledged = len({job for job, _, _ in history.acknowledged()})
        if not acknowledged:
            notes.append("no job was ever acknowledged: nothing was shown")
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
    """Run a scenario where it wants to be run."""
    with scenario.place(common, directory) as place:
        return Run(scenario, place, directory, seed, load, **more).run()


def read_database(place: Place) -> Database:
    """What the checker needs of the database."""
    schema = quote_schema(place.schema)
    with connection.connect(place.checker, timeout=10) as conn:
        rows = [Row(*row) for row in conn.execute(_ROWS.format(s=schema).encode())]
        errors = conn.execute(
            f"SELECT job_id::text, attempt FROM {schema}.job_events WHERE kind = 'error'".encode()
        ).fetchall()
        effects = conn.execute(
            f"SELECT job_id::text, count(*)::int FROM {schema}.{EFFECTS} GROUP BY 1".encode()
        ).fetchall()
    return Database(rows, [(job, attempt) for job, attempt in errors], dict(effects))


__all__ = ["ChaosError", "Load", "Run", "Verdict", "perform"]
