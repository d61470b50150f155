"""PostgreSQL does not prepare a transaction that has called a function of the contract that writes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, enqueue, rows, status

from howdah import JobQueue
from howdah.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def two_phase(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a database on a server that allows prepared transactions."""
    directory = Path(tempfile.mkdtemp(prefix="howdah-two-phase-"))
    directory.chmod(0o755)
    programs = request.config.getoption("--pg-bin")
    server = EmbeddedServer(
        directory / "pg",
        settings={"fsync": "off", "max_prepared_transactions": "5"},
        bin_directory=Path(programs) if programs else None,
    )
    server.start()
    try:
        queue = JobQueue(server.url)
        queue.pending()
        queue.close()
        yield server.url
    finally:
        server.stop("immediate")
        server.remove()
        shutil.rmtree(directory, ignore_errors=True)


# The parameters of the second group are those of a claimed job, or of nothing: a call that changes no row is
# refused, too.
CALLS = {
    "enqueue_job": "'work'",
    "enqueue_job with an ordering key": "'work', p_ordering_key => 'key'",
    "enqueue_jobs": """'[{"job_type": "a"}, {"job_type": "b"}]'""",
    "announce_jobs": """'[["default", "work", 100]]'""",
    "enqueue_and_claim": """'{"job_type": "work"}', 'worker'""",
    "enqueue_and_claim of a job that exists": """jsonb_build_object(
        'job_type', 'work', 'id', (%(ids)s::uuid[])[1]), 'worker'""",
    "claim_job_batch": "'worker'",
    "claim_job_batch of nothing": "'worker', '{no such type}'",
    "claim_runs": "'worker', NULL, 1, '30 s', '{default}'",
    "recover_stale_jobs": "",
    "run_maintenance": "",
    "run_due_duty": "",
    "register_worker": "'worker', 'host', 1, '{default}', '{work}'",
    "touch_worker": "'worker'",
    "beat_worker": "'worker', '{}'",
    "remove_worker": "'worker'",
    "pass_wake": "'worker'",
    "clear_finished": "",
    "watch_jobs": "'watcher', %(ids)s",
    "unwatch_jobs": "'watcher', %(ids)s",
    "cancel_jobs": "%(ids)s",
    "retry_jobs": "%(ids)s",
    "takeover_jobs": "%(ids)s",
    "remove_jobs": "%(ids)s",
    "start_jobs": "%(ids)s, %(lease_ids)s",
    "extend_jobs": "%(ids)s, %(lease_ids)s",
    "report_progress": "%(ids)s, %(lease_ids)s, '{50}'",
    "add_events": "%(ids)s, %(lease_ids)s, '{note}', NULL",
    "add_late_events": "%(ids)s, %(lease_ids)s, '{note}', NULL",
    "complete_jobs": "%(ids)s, %(lease_ids)s",
    "complete_runs": "%(ids)s, %(lease_ids)s",
    "fail_jobs": "%(ids)s, %(lease_ids)s, '{broke}'",
    "release_jobs": "%(ids)s, %(lease_ids)s",
    "stop_jobs": "%(ids)s, %(lease_ids)s",
}
READERS = {"pending_count", "next_due_at", "next_wake", "get_jobs", "get_events", "held_jobs"}
STATEMENTS = {call: f"SELECT * FROM howdah.{call.split()[0]}({CALLS[call]})" for call in CALLS} | {
    "INSERT INTO jobs": "INSERT INTO howdah.jobs (job_type) VALUES ('work')"
}


def set_idle_workers(conn: psycopg.Connection[Any], count: int) -> None:
    """With an idle worker some calls notify, which PostgreSQL refuses to prepare by itself."""
    conn.execute("DELETE FROM howdah.workers")
    if count:
        conn.execute(
            "INSERT INTO howdah.workers (worker_id, host, pid, queues, job_types, idle) "
            "VALUES ('w', 'h', 1, '{default}', '{work}', true)"
        )


def refuses(conn: psycopg.Connection[Any], call: str, parameters: dict[str, Any]) -> None:
    conn.execute("BEGIN")
    conn.execute(STATEMENTS[call].encode(), parameters if "%" in STATEMENTS[call] else None)
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="cannot PREPARE"):
        conn.execute("PREPARE TRANSACTION 'one'")
    conn.execute("ROLLBACK")
    assert rows(conn, "SELECT * FROM pg_prepared_xacts") == []


@pytest.mark.parametrize("idle_workers", [1, 0])
@pytest.mark.parametrize("call", STATEMENTS)
def test_two_phase_commit_is_refused_always(two_phase: str, call: str, idle_workers: int) -> None:
    with psycopg.connect(two_phase, autocommit=True) as conn:
        set_idle_workers(conn, idle_workers)
        (job_id,) = enqueue(conn, {"job_type": "work", "priority": 1000})
        (job,) = claim(conn, 1)
        assert job.id == job_id
        refuses(conn, call, {"ids": [job.id], "lease_ids": [job.lease_id]})
        if "%" in STATEMENTS[call] and "and_claim" not in call:
            refuses(conn, call, {"ids": [], "lease_ids": []})
        conn.execute("SELECT howdah.complete_jobs(%s, %s)", ([job.id], [job.lease_id]))


def test_every_function_of_the_contract_that_writes_refuses_two_phase_commit(
    two_phase: str,
) -> None:
    """A new function is added to the calls above, or to the readers."""
    with psycopg.connect(two_phase) as conn:
        contract = rows(
            conn,
            "SELECT proname FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace "
            "AND prosecdef AND prorettype <> 'trigger'::regtype",
        )
    assert {row.proname for row in contract} == {call.split()[0] for call in CALLS} | READERS


def test_a_reading_transaction_can_be_prepared(two_phase: str) -> None:
    with psycopg.connect(two_phase, autocommit=True) as conn:
        (job,) = enqueue(conn, {"job_type": "work"})
        conn.execute("BEGIN")
        conn.execute("SELECT * FROM howdah.get_jobs(%s)", ([job],))
        conn.execute("SELECT * FROM howdah.get_events(%s)", (job,))
        conn.execute("SELECT howdah.pending_count(), howdah.next_due_at()")
        conn.execute("SELECT * FROM howdah.next_wake('worker')")
        conn.execute("SELECT * FROM howdah.jobs")
        conn.execute("PREPARE TRANSACTION 'reader'")
        conn.execute("COMMIT PREPARED 'reader'")


def test_a_session_on_a_server_with_two_phase_commit_enqueues_and_listens_as_elsewhere(
    two_phase: str,
) -> None:
    with psycopg.connect(two_phase, autocommit=True) as conn:
        conn.execute("LISTEN mine")
        ids = [enqueue(conn, {"job_type": "work"})[0] for _ in range(3)]
        assert rows(conn, "SELECT pg_listening_channels()") == [("mine",)]
        assert status(conn, ids[0]) == "pending"
