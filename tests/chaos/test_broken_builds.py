"""The checker is only worth what it catches: for each promise a build that does not keep it, by one guard
less in the database or a part less in a process, must be found out by a short run, and the healthy build must
pass the very same run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from server_faults import KillServer

from howdah.chaos import ledger
from howdah.chaos.history import History
from howdah.chaos.process_faults import Calm, FaultPoints, KillWorkers, PauseWorkers
from howdah.chaos.run import Load, Verdict
from howdah.chaos.run import perform as play
from howdah.chaos.scenario import Place, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    import psycopg

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LOAD = Load(seconds=7, rate=120, workers=3, lease=2, patience=25, backlog=400)


class KillAfterClaim(FaultPoints):
    """Workers die with jobs that they have claimed and not begun."""

    name = "kill after claim"
    first = 0.5
    every = 1.5
    least = 7.0

    def draw(self, random: Random) -> tuple[str, dict[str, Any]]:
        return "kill at fault point", {"points": ("after-claim",), "time": 1}


class KillOne(KillWorkers):
    """One worker dies, and others are left who could do something about it."""

    name = "kill one"
    every = 1000.0


class LongPauses(PauseWorkers):
    """Until another worker certainly has the jobs, and is at them."""

    name = "long pauses"
    every = 2.0


class CrashServer(KillServer):
    """The server crashes a few times."""

    name = "crash server"
    every = 2.0


@dataclass(frozen=True, slots=True)
class Build:
    """A build without a guard: how it is made, the run that shows it, and the promise that breaks."""

    lacks: str
    promise: str
    scenario: type[Scenario] = Calm
    edits: dict[str, dict[str, str]] = field(default_factory=dict)
    """Text to be replaced, by function."""
    script: str = ""
    worker: str = ""
    """How the worker is broken."""
    producer: bool = False
    bare: bool = False
    load: Load = LOAD


NO_FENCE = {
    "lock_leased": {
        "(j.id, j.lease_id) IN": "(j.id) IN",
        "SELECT a.id, a.lease_id FROM unnest": "SELECT a.id FROM unnest",
        "j.lease_id = a.lease_id": "true",
        "j.lease_id = u.lease_id": "true",
    }
}
# Between looking and taking there is time for another worker: what it takes is taken once more.
NO_LOCK = {
    "claim_job_batch": {"FOR UPDATE SKIP LOCKED))": ")) AND (SELECT pg_sleep(0.05) IS NOT NULL)"}
}
BUILDS = [
    Build("the fence of an acknowledgement", "P3", LongPauses, NO_FENCE),
    Build("the lock of a claim", "P3", edits=NO_LOCK),
    # A crash of the server excuses claims that it took back, and no others.
    Build("the lock of a claim, on a server that crashes", "P3", CrashServer, NO_LOCK),
    Build(
        "leases: rescue goes by age", "P3",
        edits={"lock_stale_jobs": {
            "j.lease_expires_at BETWEEN p_from AND p_until": "true",
            "p_timeout IS NULL OR j.claimed_at <= clock_timestamp() - p_timeout":
                "j.claimed_at <= clock_timestamp() - interval '0.2 s'",
        }},
        script="UPDATE maintenance SET period = '0.1 s' WHERE duty = 'recover'",
    ),
    Build("work: it is acknowledged first", "P6", worker="acknowledge first"),
    Build("work: a bare queue acknowledges first", "P6", bare=True),
    Build("one transaction for row and completion", "P6", worker="two transactions"),
    Build(
        "the cap on attempts", "P4",
        edits={
            "fail_jobs": {"AND j.attempts < j.max_attempts": "AND j.attempts < j.max_attempts + 2"},
            "claim_job_batch": {"AND p.attempts < p.max_attempts": ""},
        },
        script="ALTER TABLE live_jobs DROP CONSTRAINT consistent",
    ),
    Build(
        "the refund of an attempt that never began", "P8", KillAfterClaim,
        edits={"requeue_jobs": {
            "(j.started_at IS NULL AND j.claims - j.attempts < 10))::int": "false)::int",
        }},
    ),
    Build("the caller's transaction", "P5", producer=True),
    Build(
        "recovery", "P9", KillOne,
        script="UPDATE maintenance SET due_at = 'infinity' WHERE duty IN ('recover', 'sweep')",
        load=Load(seconds=7, rate=120, workers=3, lease=2, patience=20, backlog=400),
    ),
    Build(
        "claims that go on", "P9",
        edits={"claim_job_batch": {
            "\nBEGIN\n": "\nBEGIN\n    IF (SELECT count(*) > 200 FROM finished_jobs) THEN RETURN; END IF;\n",
        }},
        load=Load(seconds=7, rate=120, workers=3, lease=2, patience=4, backlog=400),
    ),
    Build(
        "the order of a lane", "P7",
        edits={"claim_job_batch": {"ORDER BY p.run_at, p.id": "ORDER BY p.run_at DESC, p.id"}},
        load=Load(seconds=7, rate=200, workers=1, lease=2, patience=25, backlog=400),
    ),
    Build(
        "the order of a key", "P7",
        edits={"enqueue_jobs": {"(i.ordering_key IS NOT NULL)::int": "0"}},
    ),
    Build(
        "jobs that were tried more than once", "P1",
        edits={"finish_jobs": {
            "WHERE p_status <> 'completed' OR r.keep": "WHERE r.attempts = 1 AND true OR r.keep",
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
        load=Load(seconds=5, rate=40, workers=2, lease=2, patience=8, backlog=400),
    ),
]  # fmt: skip


@pytest.fixture
def perform(database: str) -> Callable[..., tuple[Verdict, History]]:
    def run(build: Build, *, healthy: bool = False) -> tuple[Verdict, History]:
        crew: dict[str, Any] = {"environment": {"PYTHONPATH": str(HERE)}}
        if not healthy and build.worker:
            crew["app"] = "broken_app:app"
            crew["environment"]["HOWDAH_BROKEN"] = build.worker
        if not healthy and build.producer:
            crew["producer"] = "broken_producer"
        if not healthy and build.bare:
            crew["bare"] = "broken_bare"

        def sabotage(conn: psycopg.Connection[Any], schema: str) -> None:
            if not healthy:
                break_functions(conn, schema, build)

        # Those that never end what they began need not be waited for.
        load = replace(build.load, patience=120) if healthy else build.load
        with tempfile.TemporaryDirectory(prefix="howdah-broken-") as name:
            directory = Path(name)
            directory.chmod(0o755)  # the server's account must get in
            verdict = play(
                build.scenario(), Place(database, database), directory, 5, load,
                sabotage=sabotage, crew=crew,
            )  # fmt: skip
            return verdict, History(ledger.read(directory / ledger.FILE))

    return run


def break_functions(conn: psycopg.Connection[Any], schema: str, build: Build) -> None:
    """Edit the text of functions, all that there is of it."""
    conn.execute(f"SET search_path = {schema}".encode())
    for function, edits in build.edits.items():
        row = conn.execute(
            "SELECT pg_get_functiondef(p.oid) FROM pg_proc AS p "
            "WHERE p.proname = %s AND p.pronamespace = %s::regnamespace",
            (function, schema.strip('"')),
        ).fetchone()
        assert row is not None, f"there is no function {function}"
        (text,) = row
        for old, new in edits.items():
            assert old in text, f"{function} does not say {old!r}"
            text = text.replace(old, new)
        conn.execute(text.encode())
    if build.script:
        done = conn.execute(build.script.encode())
        assert done.rowcount != 0, "the script changed nothing"


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.lacks)
def test_a_build_that_lacks_a_guard_is_caught(
    perform: Callable[..., tuple[Verdict, History]], build: Build
) -> None:
    verdict, history = perform(build)
    if build.worker or build.producer or build.bare:
        assert any(note["text"].startswith("broken: ") for note in history.notes)
    assert build.promise in verdict.broken(), (verdict.broken(), verdict.notes, verdict.hits)
    proofs = [finding for finding in verdict.findings if finding.promise == build.promise]
    assert all(finding.job for finding in proofs)


RUNS = {(build.scenario, build.load): build for build in reversed(BUILDS)}


@pytest.mark.parametrize("build", RUNS.values(), ids=lambda build: build.scenario.name)
def test_the_healthy_build_passes_the_same_run(
    perform: Callable[..., tuple[Verdict, History]], build: Build
) -> None:
    verdict, _ = perform(build, healthy=True)
    assert (verdict.findings, verdict.notes) == ([], [])
