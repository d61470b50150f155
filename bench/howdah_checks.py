"""What every round on Howdah's tables must prove while its worker still runs, ceilings included: the figures do not
come from broken promises. The history is complete, a stale fence is rejected, and enqueues and acknowledgements were
committed durably. The proof is stored with the figures of the round."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from howdah import JobQueue, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.peers import Peer
    from bench.services import Postgres
    from bench.workloads import Testbed

# Records the settings under which rows were committed, independent of the writer and of the function: a deferred
# trigger runs last before the commit, which reads the setting at that time.
PROBE = (
    "CREATE TABLE public.bench_probe (relation text, fsync text, synchronous_commit text)",
    """CREATE FUNCTION public.bench_probe() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.bench_probe
        VALUES (TG_ARGV[0], current_setting('fsync'), current_setting('synchronous_commit'));
        RETURN NULL;
    END $$""",
    """CREATE CONSTRAINT TRIGGER bench_probe AFTER INSERT ON howdah.live_jobs
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.bench_probe('enqueue')""",
    """CREATE CONSTRAINT TRIGGER bench_probe AFTER INSERT ON howdah.finished_jobs
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.bench_probe('acknowledgement')""",
)
PROBE_JOBS = 256  # enough that a bulk enqueue takes the path of a large one
HISTORY_TIMEOUT_SECONDS = 30.0


def prove(
    testbed: Testbed,
    peer: Peer,
    jobs: int,
    handler: str = "async",
    how: str = "bulk",
    work: Callable[[], object] = lambda: None,
    **options: Any,
) -> int:
    """Raise unless all of it holds, and store the proof. Returns the number of additional jobs that were run.

    `how` is the way in which this round enqueues; `work` is called if no worker is running."""
    postgres, database = testbed.postgres, f"bench_{peer.name}"
    _wait_for_history(postgres, database, jobs)
    for statement in PROBE:
        postgres.query(statement, database=database)
    request = {"handler": handler, "how": how, "first": jobs, "jobs": PROBE_JOBS, **options}
    with testbed.launch(peer, "enqueue", **request) as producer:
        producer.expect("ready")
        producer.go()
        producer.expect("done")
    work()
    _wait_for_history(postgres, database, jobs + PROBE_JOBS)
    testbed.checked = {
        "history_rows": jobs,
        **_commit_settings(postgres, database),
        "stale_acknowledgement": stale_acknowledgement(postgres, database),
    }
    return PROBE_JOBS


def _wait_for_history(postgres: Postgres, database: str, jobs: int) -> None:
    """Wait until exactly so many jobs are completed and no other job exists."""
    deadline = time.monotonic() + HISTORY_TIMEOUT_SECONDS
    while True:
        completed, others = postgres.query(
            "SELECT count(*) FILTER (WHERE status = 'completed'), "
            "count(*) FILTER (WHERE status <> 'completed') FROM howdah.jobs",
            database=database,
        )[0]
        if completed == jobs and others == 0:
            return
        if time.monotonic() > deadline:
            raise AssertionError(
                f"of {jobs:,} jobs {completed:,} are completed; {others:,} others exist"
            )
        time.sleep(0.05)


def _commit_settings(postgres: Postgres, database: str) -> dict[str, str | int]:
    """The settings under which the probes were enqueued and acknowledged."""
    rows = postgres.query(
        "SELECT relation, count(*), string_agg(DISTINCT fsync, ' and '), "
        "string_agg(DISTINCT synchronous_commit, ' and ') "
        "FROM public.bench_probe GROUP BY relation ORDER BY relation",
        database=database,
    )
    found = [tuple(row) for row in rows]
    if found != [(name, PROBE_JOBS, "on", "on") for name in ("acknowledgement", "enqueue")]:
        raise AssertionError(f"not durable, or not recorded: {found}")
    return {
        "fsync": rows[0][2],
        "synchronous_commit_of_acknowledgements": rows[0][3],
        "synchronous_commit_of_enqueues": rows[1][3],
        "witnessed_jobs": PROBE_JOBS,
    }


def stale_acknowledgement(postgres: Postgres, database: str) -> str:
    """Lose a lease, then try to complete the job. Returns how that was rejected."""
    with contextlib.closing(JobQueue(postgres.url(database))) as queue:
        queue.enqueue("stale")
        job = queue.claim_one("stale")
        if job is None or queue.recover_stale_jobs(timeout=0) < 1:
            raise AssertionError("no lease was recovered")
        try:
            queue.complete(job)
        except LeaseLost as error:
            return f"refused: {type(error).__name__}"
    raise AssertionError("a stale acknowledgement was accepted")
