"""The SQL contract, called as a client in any language would call it: plain statements, plain rows."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg.rows import namedtuple_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from uuid import UUID

    import psycopg

DEADLINE = 120.0


class Fences(NamedTuple):
    """Ids and lease ids in the same order: the first two parameters of every acknowledgement."""

    ids: list[UUID]
    lease_ids: list[UUID]


def rows(conn: psycopg.Connection[Any], text: str, *parameters: Any) -> list[Any]:
    """The rows of a statement, with names."""
    with conn.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(text.encode(), parameters).fetchall()


def value(conn: psycopg.Connection[Any], text: str, *parameters: Any) -> Any:
    """The one value that a statement answers."""
    row = conn.execute(text.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def enqueue(conn: psycopg.Connection[Any], *jobs: dict[str, Any]) -> list[UUID]:
    """Enqueue jobs in one statement; the ids come in the order given."""
    return [row.id for row in rows(conn, "SELECT * FROM howdah.enqueue_jobs(%s)", json.dumps(jobs))]


def enqueue_bulk(conn: psycopg.Connection[Any], count: int, job_type: str = "work") -> None:
    """Enqueue many equal jobs without sending them over the wire."""
    conn.execute(
        "SELECT count(*) FROM howdah.enqueue_jobs((SELECT jsonb_agg(jsonb_build_object("
        "'job_type', %s::text)) FROM generate_series(1, %s)))",
        (job_type, count),
    )


def claim(
    conn: psycopg.Connection[Any],
    size: int = 10,
    *,
    types: Sequence[str] | None = None,
    lease: str = "30 seconds",
    worker: str = "worker",
    started: bool = False,
    due_from: str | None = None,
    suspects_alone: bool = True,
) -> list[Any]:
    """Claim jobs, best first."""
    return rows(
        conn,
        "SELECT * FROM howdah.claim_job_batch(p_worker_id => %s, p_job_types => %s::text[], "
        "p_batch_size => %s, p_lease => %s, p_started => %s, p_due_from => %s, "
        "p_suspects_alone => %s)",
        worker,
        types,
        size,
        lease,
        started,
        due_from,
        suspects_alone,
    )


def fences(jobs: Iterable[Any]) -> Fences:
    """The fences of claimed jobs."""
    jobs = list(jobs)
    return Fences([job.id for job in jobs], [job.lease_id for job in jobs])


def complete_runs(conn: psycopg.Connection[Any], *jobs: Any) -> None:
    """Complete jobs as a worker does, which leaves their leases to its next heartbeat."""
    conn.execute("SELECT howdah.complete_runs(%s, %s)", fences(jobs))


def complete(conn: psycopg.Connection[Any], *jobs: Any) -> list[UUID]:
    """Complete claimed jobs; the accepted ids."""
    return [
        row[0]
        for row in conn.execute(
            "SELECT * FROM howdah.complete_jobs(%s, %s)", fences(jobs)
        ).fetchall()
    ]


def fail(conn: psycopg.Connection[Any], *jobs: Any, retry: bool = True) -> list[UUID]:
    """Fail claimed jobs, to be tried again at once or never; the accepted ids."""
    again = None if retry else [None] * len(jobs)
    found = conn.execute(
        "SELECT * FROM howdah.fail_jobs(%s, %s, %s::text[], %s::timestamptz[])",
        (*fences(jobs), ["it broke"] * len(jobs), again),
    )
    return [row[0] for row in found.fetchall()]


def expire(conn: psycopg.Connection[Any], *jobs: Any) -> None:
    """Let the leases of claimed jobs run out, as if their worker had died long ago, with the jobs that share them."""

    def ran_out() -> bool:
        # A lease that recovery has locked just now is skipped, not lost: try again.
        answers = rows(
            conn, "SELECT * FROM howdah.extend_jobs(%s, %s, '1 microsecond')", *fences(jobs)
        )
        return all(answer.extended or not answer.mine for answer in answers)

    wait_until(ran_out, "the leases run out")


def expire_leases(conn: psycopg.Connection[Any], *job_ids: UUID) -> None:
    """Let the leases of these jobs run out (all leases if none is named): without a heartbeat, which ends an excuse."""
    conn.execute(
        "UPDATE howdah.leases SET expires_at = clock_timestamp() - interval '1 ms', "
        "written_at = least(written_at, clock_timestamp() - interval '1 ms') "
        "WHERE %(ids)s::uuid[] = '{}' OR job_ids && %(ids)s::uuid[]",
        {"ids": list(job_ids)},
    )


def get(conn: psycopg.Connection[Any], job_id: UUID) -> Any:
    """One job as the view shows it, or None."""
    found = rows(conn, "SELECT * FROM howdah.jobs WHERE id = %s", job_id)
    return found[0] if found else None


def status(conn: psycopg.Connection[Any], job_id: UUID) -> str | None:
    """A job's status, or None if there is no such job."""
    job = get(conn, job_id)
    return None if job is None else job.status


def maintain(conn: psycopg.Connection[Any], *duties: str) -> None:
    """Run duties as if their time had come (all of them if none is named); none may fail."""
    conn.execute(
        "UPDATE howdah.maintenance SET due_at = CASE WHEN %s = '{}' OR duty = ANY (%s) "
        "THEN clock_timestamp() ELSE 'infinity' END",
        (list(duties), list(duties)),
    )
    ran = rows(conn, "SELECT * FROM howdah.run_maintenance()")
    assert [row for row in ran if row.error is not None] == []
    assert set(duties) <= {row.duty for row in ran}


def call_everything(conn: psycopg.Connection[Any]) -> None:
    """Call every function so that each of its statements runs."""
    work = {"job_type": "work"}
    conn.execute(
        "SELECT howdah.register_worker('worker', 'host', 1, '{default}', '{work}'),"
        ' howdah.beat_worker(\'worker\', \'{}\', \'[{"queue": "default", "job_type": "work", "completed": 1,'
        ' "failed": 0, "retried": 0, "cancelled": 0, "wait_seconds": 0, "run_seconds": 0}]\'),'
        " howdah.touch_worker('worker', true)"
    )
    keyed = work | {"ordering_key": "key"}
    ids = enqueue(
        conn, *([work] * 20), keyed, keyed, work | {"idempotency_key": "a"}, work | {"delay": 3600}
    )
    value(conn, "SELECT howdah.enqueue_job('work')")
    conn.execute("INSERT INTO howdah.jobs (job_type) VALUES ('work')")
    value(
        conn, "SELECT count(*) FROM howdah.enqueue_and_claim('{\"job_type\": \"work\"}', 'worker')"
    )
    conn.execute("SELECT howdah.watch_jobs('me', %s)", (ids[:2],))
    conn.execute('SELECT howdah.announce_jobs(\'[["default", "work", 100]]\')')
    jobs = claim(conn, 22)
    assert len(jobs) == 22
    conn.execute("SELECT howdah.next_due_at()")
    conn.execute("SELECT howdah.start_jobs(%s, %s)", fences(jobs[:2]))
    conn.execute("SELECT howdah.extend_jobs(%s, %s)", fences(jobs[:2]))
    conn.execute(
        "SELECT howdah.extend_jobs(%s, %s, p_elapsed => '{1,2}', p_more_leases => %s, p_ended_leases => %s)",
        (*fences(jobs[2:4]), [jobs[4].lease_id], [jobs[4].lease_id]),
    )
    conn.execute("SELECT howdah.report_progress(%s, %s, '{1,2}')", fences(jobs[:2]))
    conn.execute("SELECT howdah.add_events(%s, %s, '{a,b}', NULL)", fences(jobs[:2]))
    complete(conn, *jobs[:3])
    conn.execute("SELECT howdah.add_late_events(%s, %s, '{a,b}', NULL)", fences(jobs[:2]))
    conn.execute("SELECT * FROM howdah.complete_jobs(%s, %s, p_again => true)", fences(jobs[:2]))
    fail(conn, jobs[3], retry=False)
    fail(conn, jobs[4])
    conn.execute("SELECT howdah.cancel_jobs(%s)", ([job.id for job in jobs[5:8]],))
    fail(conn, jobs[5])
    conn.execute("SELECT howdah.release_jobs(%s, %s)", fences(jobs[6:7]))
    conn.execute("SELECT howdah.stop_jobs(%s, %s)", fences(jobs[8:9]))
    conn.execute("SELECT howdah.release_jobs(%s, %s)", fences(jobs[9:10]))
    conn.execute("SELECT howdah.takeover_jobs(%s)", ([jobs[10].id],))
    conn.execute(
        "UPDATE howdah.live_jobs SET attempts = 3, claims = 3, started_at = now() WHERE id = ANY (%s)",
        ([job.id for job in jobs[12:14]],),
    )
    expire(conn, *jobs[11:])
    conn.execute("SELECT howdah.recover_stale_jobs()")
    conn.execute("SELECT howdah.cancel_jobs(%s)", (ids,))
    conn.execute("SELECT howdah.retry_jobs(%s)", (ids[:2],))
    conn.execute("SELECT howdah.pending_count()")
    conn.execute("SELECT howdah.remove_jobs(%s)", (ids[3:5],))
    conn.execute("SELECT howdah.clear_finished()")
    for _ in range(2):
        conn.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
        assert {row.error for row in rows(conn, "SELECT * FROM howdah.run_maintenance()")} == {None}
        conn.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp()")
        while ran := rows(conn, "SELECT * FROM howdah.run_due_duty()"):
            assert ran[0].error is None
    conn.execute("SELECT howdah.unwatch_jobs('me', %s)", (ids,))
    conn.execute("SELECT howdah.remove_worker('worker')")


class Waits:
    """Counts how often a connection's statements wait for somebody's lock: the server says so itself."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.count = 0
        conn.add_notice_handler(self._hear)
        conn.execute("SET log_lock_waits = on")
        conn.execute("SET deadlock_timeout = '1ms'")  # after that long it is told
        conn.execute("SET client_min_messages = log")

    def _hear(self, notice: psycopg.errors.Diagnostic) -> None:
        self.count += " still waiting for " in (notice.message_primary or "")


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Ask again and again until the answer is true, and fail with a sentence if it never is."""
    give_up = time.monotonic() + DEADLINE
    while not (answer := condition()):
        assert time.monotonic() < give_up, f"never happened: {what}"
        time.sleep(0.005)
    return answer
