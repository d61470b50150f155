"""What every round over Howdah's tables must prove while its worker still runs, ceilings included: that the
figures were not bought with promises. History is complete, fences hold, and both ends of a job's life were
committed durably. What was found is kept with the figures of the round."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from howdah import JobQueue, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.peers import Peer
    from bench.services import Postgres
    from bench.workloads import Stage

# Says under which settings rows really were committed, whoever wrote them and through whatever function: it runs
# as the last thing before the commit, which reads the setting then.
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
PROBES = 256  # so many that a bulk enqueue goes the way of a large one
PATIENCE = 30.0


def prove(
    stage: Stage,
    peer: Peer,
    jobs: int,
    handler: str = "async",
    how: str = "bulk",
    work: Callable[[], object] = lambda: None,
    **options: Any,
) -> int:
    """Raise unless all of it holds, and keep what was found. Gives how many more jobs were run for it.

    `how` is the way in which this round enqueues; `work` is called where no worker runs by itself."""
    postgres, database = stage.postgres, f"bench_{peer.name}"
    _wait_for_history(postgres, database, jobs)
    for statement in PROBE:
        postgres.query(statement, database=database)
    request = {"handler": handler, "how": how, "first": jobs, "jobs": PROBES, **options}
    with stage.launch(peer, "enqueue", **request) as producer:
        producer.expect("ready")
        producer.go()
        producer.expect("done")
    work()
    _wait_for_history(postgres, database, jobs + PROBES)
    stage.checked = {
        "history_rows": jobs,
        **_witnessed(postgres, database),
        "stale_acknowledgement": be_refused(postgres, database),
    }
    return PROBES


def _wait_for_history(postgres: Postgres, database: str, jobs: int) -> None:
    """Exactly so many rows of history, and nothing else."""
    end = time.monotonic() + PATIENCE
    while True:
        completed, others = postgres.query(
            "SELECT count(*) FILTER (WHERE status = 'completed'), "
            "count(*) FILTER (WHERE status <> 'completed') FROM howdah.jobs",
            database=database,
        )[0]
        if completed == jobs and others == 0:
            return
        if time.monotonic() > end:
            raise AssertionError(
                f"of {jobs:,} jobs {completed:,} are in history; {others:,} others"
            )
        time.sleep(0.05)


def _witnessed(postgres: Postgres, database: str) -> dict[str, str | int]:
    """The settings under which the probes were enqueued and acknowledged, by whoever did it."""
    rows = postgres.query(
        "SELECT relation, count(*), string_agg(DISTINCT fsync, ' and '), "
        "string_agg(DISTINCT synchronous_commit, ' and ') "
        "FROM public.bench_probe GROUP BY relation ORDER BY relation",
        database=database,
    )
    found = [tuple(row) for row in rows]
    if found != [(name, PROBES, "on", "on") for name in ("acknowledgement", "enqueue")]:
        raise AssertionError(f"not durable, or not witnessed: {found}")
    return {
        "fsync": rows[0][2],
        "synchronous_commit_of_acknowledgements": rows[0][3],
        "synchronous_commit_of_enqueues": rows[1][3],
        "witnessed_jobs": PROBES,
    }


def be_refused(postgres: Postgres, database: str) -> str:
    """Lose a lease, then try to complete the job all the same. Gives how that was refused."""
    with contextlib.closing(JobQueue(postgres.url(database))) as queue:
        queue.enqueue("stale")
        job = queue.claim_one("stale")
        if job is None or queue.recover_stale_jobs(timeout=0) < 1:
            raise AssertionError("there was no lease to lose")
        try:
            queue.complete(job)
        except LeaseLost as refusal:
            return f"refused: {type(refusal).__name__}"
    raise AssertionError("a stale acknowledgement was accepted")
