"""The checker detects broken builds. For each promise there is a build without one guard, in the database or in a
process: a short run must report it, and the healthy build must pass the same run."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from python_path import with_python_path
from recorded_enqueue import enqueue_recorded
from server_faults import KillServer

from howdah import JobQueue
from howdah.chaos import ledger
from howdah.chaos.history import History
from howdah.chaos.process_faults import Calm, FaultPoints, KillWorkers
from howdah.chaos.run import CONCURRENCY, Load, Verdict, perform
from howdah.chaos.scenario import Place, Scenario
from howdah.protocol.schema_name import quote_schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from howdah.chaos.processes.supervisor import Child
    from howdah.chaos.scenario import Fault, RunContext

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
sys.path.append(str(HERE / "servers"))
from bare_scenarios import BareKillers  # noqa: E402
from operator_scenarios import OpenCancels  # noqa: E402
from outage_scenarios import LongOutages  # noqa: E402

START_TIMEOUT_SECONDS = 30.0
SCENARIO = ""
LOAD = Load(seconds=7, rate=120, workers=3, lease=2, drain_timeout=25, backlog=400)


class KillAfterClaim(FaultPoints):
    """Workers are killed with prefetched jobs that have not started."""

    name = "kill after claim"
    first_seconds = 0.5
    every_seconds = 1.5
    min_seconds = 7.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill at fault point", {"points": ("after-claim",), "time": 1}


class KillOne(KillWorkers):
    """One worker is killed; the others could recover its jobs."""

    name = "kill one"
    every_seconds = 1000.0


class LateAcknowledgement(Scenario):
    """A worker stops before it sends outcomes, and goes on when another worker holds the leases of the same jobs.
    Some of its jobs are running then, and report events as soon as it goes on."""

    name = "late acknowledgement"
    first_seconds = 0.5
    every_seconds = 1000.0
    min_seconds = 12.0

    def inject(self, run: RunContext, fault: Fault) -> None:
        with contextlib.ExitStack() as paused:
            for worker in run.supervisor.workers():
                paused.enter_context(run.fault(fault.name, scope="worker", target=worker.pid))
                paused.callback(worker.resume)
                worker.pause()
            # So that nobody else claims the naps.
            enqueue_naps(run)
            late = run.supervisor.start_worker(
                role="victim", HOWDAH_FAULT="before-acknowledge:stop:3"
            )
            paused.enter_context(run.fault(fault.name, scope="worker", target=late.pid))
            paused.callback(late.resume)
            run.wait_until(lambda: is_stopped(late), START_TIMEOUT_SECONDS)
            run.sleep(run.lease)
            # Nobody else is running who would recover the jobs. The next worker claims all of them.
            run.wait_until(lambda: recover(run, late), 2 * run.lease, poll=0.1)
            second = run.supervisor.start_worker(
                "--concurrency", "1000", role="victim", HOWDAH_FAULT="after-claim:stop:1"
            )
            paused.enter_context(run.fault(fault.name, scope="worker", target=second.pid))
            paused.callback(second.resume)
            run.wait_until(lambda: is_stopped(second), START_TIMEOUT_SECONDS)
            resumed = time.monotonic()
            late.resume()
            run.wait_until(lambda: has_acknowledged(run, late, resumed), run.lease)


def enqueue_naps(run: RunContext) -> None:
    """More jobs of the highest priority than a worker has slots. They end one after the other."""
    with contextlib.closing(JobQueue(run.place.checker, schema=run.place.schema)) as queue:
        for n in range(2 * CONCURRENCY):
            enqueue_recorded(run, queue, "chaos.nap", f"late-{n}", 5, seconds=0.2 + n / 50)


def is_stopped(worker: Child) -> bool:
    """Whether the process has stopped itself, or has ended."""
    try:
        state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "T"


def recover(run: RunContext, worker: Child) -> bool:
    """Recover stale jobs; returns whether the worker has no claimed job any more."""
    with run.place.connect() as conn:
        conn.execute(f"SELECT {quote_schema(run.place.schema)}.recover_stale_jobs()".encode())
    return not run.jobs_in_flight().get(worker.pid)


def has_acknowledged(run: RunContext, worker: Child, since: float) -> bool:
    """Whether the worker has received the reply to an acknowledgement that it sent since then."""
    return any(
        line.pid == worker.pid
        and line.kind in ("ack-accepted", "ack-refused")
        and line["asked"] > since
        for line in ledger.read(Path(run.ledger.path))
    )


class CrashServer(KillServer):
    """The server crashes a few times."""

    name = "crash server"
    every_seconds = 2.0


@dataclass(frozen=True, slots=True)
class Build:
    """A build without a guard: how it is made, the run that detects it, and the promise that it breaks."""

    lacks: str
    promise: str
    """Or SCENARIO: the scenario itself reports it."""
    scenario: type[Scenario] = Calm
    edits: dict[str, dict[str, str]] = field(default_factory=dict)
    """Text to replace, by SQL function."""
    script: str = ""
    worker: str = ""
    """HOWDAH_BROKEN of the worker; see broken_app.py."""
    producer: bool = False
    bare: bool = False
    load: Load = LOAD


NO_FENCE = {
    "lock_leased": {
        "(j.id, j.lease_id) IN": "(j.id) IN",
        "SELECT a.id, a.lease_id FROM unnest": "SELECT a.id FROM unnest",
        "j.lease_id = u.lease_id": "true",
    },
    "finish_jobs": {"AND (p_lease_ids IS NULL OR j.lease_id = a.lease_id)": ""},
}
# A new queue counts as overdue for ten seconds, in which recovery would excuse leases.
NO_EXCUSE = {"excuse_leases": {"NOT l.is_excused": "false"}}


def of_claims(edits: dict[str, str]) -> dict[str, dict[str, str]]:
    """The edits, in the claim of the contract and in that of a worker."""
    return {"claim_job_batch": edits, "claim_runs": edits}


# Without the lock, a second worker claims the same rows while the first one sleeps between read and update.
NO_LOCK = of_claims(
    {
        "FOR UPDATE SKIP LOCKED))": ")) AND (SELECT pg_sleep(0.05) IS NOT NULL)",
        # A row that another transaction has updated meanwhile has another ctid.
        "j.ctid = ANY": "j.id = ANY",
        "SELECT p.ctid": "SELECT p.id",
    }
)
BUILDS = [
    Build(
        "the fence of an acknowledgement", "P3", LateAcknowledgement, NO_FENCE | NO_EXCUSE,
        load=Load(seconds=14, rate=120, workers=2, lease=2, drain_timeout=25, backlog=400),
    ),
    Build(
        "the fence of a report", "P3", LateAcknowledgement,
        edits={"add_events": {
            ":= lock_leased(p_ids, p_lease_ids, p_wait)": ":= p_ids",
            "ON j.id = e.id AND j.lease_id = e.lease_id": "ON j.id = e.id",
        }} | NO_EXCUSE,
        worker="keep lost runs",
        load=Load(seconds=14, rate=120, workers=2, lease=2, drain_timeout=25, backlog=400),
    ),
    Build("the lock of a claim", "P3", edits=NO_LOCK),
    # A crash of the server excuses claims that it undid, and no others.
    Build("the lock of a claim, on a server that crashes", "P3", CrashServer, NO_LOCK),
    Build(
        "leases: rescue goes by age", "P3",
        edits={
            "first_expired": {"l.expires_at BETWEEN p_from AND p_until": "true"},
            "lock_leases": {
                "l.expires_at BETWEEN p_from AND p_until": "true",
                "p_timeout IS NULL OR l.claimed_at <= clock_timestamp() - p_timeout":
                    "l.claimed_at <= clock_timestamp() - interval '0.2 s'",
            },
            **NO_EXCUSE,
        },
        script="UPDATE maintenance SET period = '0.1 s' WHERE duty = 'recover'",
    ),
    Build("work: it is acknowledged first", "P6", worker="acknowledge first"),
    Build("work: a bare queue acknowledges first", "P6", bare=True),
    Build("one transaction for row and completion", "P6", worker="two transactions"),
    Build(
        "the cap on attempts", "P4",
        edits={
            "fail_jobs": {"AND j.attempts < j.max_attempts": "AND j.attempts < j.max_attempts + 2"},
            **of_claims({"AND p.attempts < p.max_attempts": ""}),
        },
    ),
    Build(
        "the refund of an attempt that never began", "P8", KillAfterClaim,
        edits={"requeue_jobs": {
            "(j.started_at IS NULL AND j.claims - j.attempts < 10))::int": "false)::int",
        }},
    ),
    Build(
        "the suspicion of a bare loop's killer", SCENARIO, BareKillers,
        edits={"claim_job_batch": {
            "IF p_suspects_alone AND": "IF false AND",
            "ELSE p.claims = p.attempts OR NOT p_suspects_alone END": "ELSE true END",
        }},
        load=Load(seconds=18, rate=60, workers=1, bare=2, lease=2, drain_timeout=25, backlog=400),
    ),
    Build(
        "heartbeats of locked jobs", SCENARIO, OpenCancels,
        edits={
            "extend_leases": {
                "WHERE e.lease_id = ANY (p_lease_ids)":
                    "WHERE e.lease_id = ANY (p_lease_ids) AND NOT EXISTS (\n"
                    "    SELECT FROM live_jobs AS j WHERE j.lease_id = e.lease_id AND j.id <> ALL (ARRAY (\n"
                    "        SELECT k.id FROM live_jobs AS k WHERE k.lease_id = ANY (p_lease_ids)\n"
                    "        FOR NO KEY UPDATE SKIP LOCKED)))",
            },
            "recover_leases": {"interval '1 second'": "interval '0.1 s'"},
            **NO_EXCUSE,
        },
        # So that recovery comes before the next heartbeat.
        script="UPDATE maintenance SET period = '0.1 s' WHERE duty = 'recover'",
        load=Load(seconds=14, rate=60, workers=2, lease=2, drain_timeout=25, backlog=100),
    ),
    Build(
        "the excuse for missed heartbeats", SCENARIO, LongOutages,
        edits={"overdue_since": {"'00:00:06'": "'06:00:00'", "'00:00:10'": "'00:00:00'"}},
        # So that recovery comes before the next heartbeat.
        script="UPDATE maintenance SET period = '0.1 s' WHERE duty = 'recover'",
        load=Load(seconds=16, rate=60, workers=2, lease=2, drain_timeout=25, backlog=100),
    ),
    Build("the caller's transaction", "P5", producer=True),
    Build(
        "recovery", "P9", KillOne,
        script="UPDATE maintenance SET due_at = 'infinity' WHERE duty IN ('recover', 'late')",
        load=Load(seconds=7, rate=120, workers=3, lease=2, drain_timeout=20, backlog=400),
    ),
    Build(
        "claims that go on", "P9",
        edits=of_claims({
            "\nBEGIN\n": "\nBEGIN\n    IF (SELECT count(*) > 200 FROM finished_jobs) THEN RETURN; END IF;\n",
        }),
        load=Load(seconds=7, rate=120, workers=3, lease=2, drain_timeout=4, backlog=400),
    ),
    Build(
        "the order of a lane", "P7",
        edits=of_claims({"ORDER BY p.run_at, p.id": "ORDER BY p.run_at DESC, p.id"}),
        load=Load(seconds=7, rate=200, workers=1, lease=2, drain_timeout=25, backlog=400),
    ),
    Build(
        "the order of a key", "P7",
        edits={"enqueue_jobs": {"(i.ordering_key IS NOT NULL)::int": "0"}},
    ),
    Build(
        "jobs that were tried more than once", "P1",
        edits={"finish_jobs": {
            "WHERE NOT v_completed OR r.keep": "WHERE r.attempts = 1 AND true OR r.keep",
            "r.keep IS NULL OR": "false OR",
        }},
    ),
    Build(
        "an end that stays", "P2",
        edits={"finish_jobs": {
            "DELETE FROM live_jobs AS j\n        USING unnest":
                "UPDATE live_jobs AS j SET status = 'pending', lease_id = NULL, worker_id = NULL\n"
                "        FROM unnest",
        }},
        load=Load(seconds=5, rate=40, workers=2, lease=2, drain_timeout=8, backlog=400),
    ),
]  # fmt: skip


@pytest.fixture
def run_build(database: str) -> Callable[..., tuple[Verdict, History]]:
    def run(build: Build, *, healthy: bool = False) -> tuple[Verdict, History]:
        supervisor: dict[str, Any] = {"environment": {"PYTHONPATH": with_python_path(HERE)}}
        if not healthy and build.worker:
            supervisor["app"] = "broken_app:app"
            supervisor["environment"]["HOWDAH_BROKEN"] = build.worker
        if not healthy and build.producer:
            supervisor["producer"] = "broken_producer"
        if not healthy and build.bare:
            supervisor["bare"] = "broken_bare"

        def modify_schema(conn: psycopg.Connection[Any], schema: str) -> None:
            if not healthy:
                break_functions(conn, schema, build)

        # A broken build may leave jobs that never end; waiting longer for them is useless.
        load = replace(build.load, drain_timeout=120) if healthy else build.load
        with tempfile.TemporaryDirectory(prefix="howdah-broken-") as name:
            directory = Path(name)
            directory.chmod(0o755)  # the server's account must be able to enter
            verdict = perform(
                build.scenario(), Place(database, database), directory, 5, load,
                modify_schema=modify_schema, supervisor=supervisor,
            )  # fmt: skip
            return verdict, History(ledger.read(directory / ledger.FILE))

    return run


def break_functions(conn: psycopg.Connection[Any], schema: str, build: Build) -> None:
    """Replace text in SQL functions and run a script. Every replaced text must occur."""
    conn.execute(f"SET search_path = {schema}".encode())
    for function, edits in build.edits.items():
        row = conn.execute(
            "SELECT pg_get_functiondef(p.oid) FROM pg_proc AS p "
            "WHERE p.proname = %s AND p.pronamespace = %s::regnamespace",
            (function, schema.strip('"')),
        ).fetchone()
        assert row is not None, f"no function {function}"
        (text,) = row
        for old, new in edits.items():
            assert old in text, f"{function} does not contain {old!r}"
            text = text.replace(old, new)
        conn.execute(text.encode())
    if build.script:
        done = conn.execute(build.script.encode())
        assert done.rowcount != 0, "the script changed nothing"


def test_every_build_can_be_broken(database: str) -> None:
    """In seconds: a function whose text has changed would otherwise be found by a run of minutes."""
    for build in BUILDS:
        with psycopg.connect(database) as conn:
            break_functions(conn, "howdah", build)
            conn.rollback()


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.lacks)
def test_a_build_without_a_guard_is_reported(
    run_build: Callable[..., tuple[Verdict, History]], build: Build
) -> None:
    verdict, history = run_build(build)
    if build.worker or build.producer or build.bare:
        assert any(note["text"].startswith("broken: ") for note in history.notes)
    reported = {*verdict.broken(), *([SCENARIO] if verdict.notes else [])}
    assert build.promise in reported, (verdict.broken(), verdict.notes, verdict.hits)
    proofs = [finding for finding in verdict.findings if finding.promise == build.promise]
    assert all(finding.job for finding in proofs)


RUNS = {(build.scenario, build.load): build for build in reversed(BUILDS)}


@pytest.mark.parametrize("build", RUNS.values(), ids=lambda build: build.scenario.name)
def test_the_healthy_build_passes_the_same_run(
    run_build: Callable[..., tuple[Verdict, History]], build: Build
) -> None:
    verdict, _ = run_build(build, healthy=True)
    assert (verdict.findings, verdict.notes) == ([], [])
