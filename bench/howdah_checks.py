"""What every round of Howdah must prove while its worker still runs: that the figures were not bought with
promises. History is complete, fences hold, and both ends of a job's life were committed durably."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from howdah import JobQueue, LeaseLost

if TYPE_CHECKING:
    from bench.services import Postgres

# Says under which settings rows really were written, whoever wrote them and through whatever function.
PROBE = (
    "CREATE TABLE public.bench_probe (relation text, fsync text, synchronous_commit text)",
    """CREATE FUNCTION public.bench_probe() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.bench_probe
        VALUES (TG_ARGV[0], current_setting('fsync'), current_setting('synchronous_commit'));
        RETURN NULL;
    END $$""",
    """CREATE TRIGGER bench_probe AFTER INSERT ON howdah.live_jobs
    FOR EACH ROW EXECUTE FUNCTION public.bench_probe('enqueue')""",
    """CREATE TRIGGER bench_probe AFTER INSERT ON howdah.finished_jobs
    FOR EACH ROW EXECUTE FUNCTION public.bench_probe('acknowledgement')""",
)
PROBES = 8
PATIENCE = 30.0


def check_howdah(postgres: Postgres, database: str, job_type: str, jobs: int) -> int:
    """Raise unless all of it holds. Gives how many more jobs the worker ran for it."""
    _wait_for_history(postgres, database, jobs)
    _probe_durability(postgres, database, job_type, jobs)
    _be_refused(postgres, database)
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


def _probe_durability(postgres: Postgres, database: str, job_type: str, first: int) -> None:
    """Run a few more jobs through the same worker, with witnesses on both tables."""
    for statement in PROBE:
        postgres.query(statement, database=database)
    with contextlib.closing(JobQueue(postgres.url(database))) as queue:
        queue.enqueue_many(
            [
                {"job_type": job_type, "data": {"number": first + n, "pad": ""}}
                for n in range(PROBES)
            ]
        )
    _wait_for_history(postgres, database, first + PROBES)
    rows = postgres.query(
        "SELECT relation, count(*), bool_and(fsync = 'on' AND synchronous_commit = 'on') "
        "FROM public.bench_probe GROUP BY relation",
        database=database,
    )
    witnessed = {row[0]: (row[1], row[2]) for row in rows}
    if witnessed != {"enqueue": (PROBES, True), "acknowledgement": (PROBES, True)}:
        raise AssertionError(f"not durable, or not witnessed: {witnessed}")


def _be_refused(postgres: Postgres, database: str) -> None:
    """Lose a lease, then try to complete the job all the same."""
    with contextlib.closing(JobQueue(postgres.url(database))) as queue:
        queue.enqueue("stale")
        job = queue.claim_one("stale")
        if job is None or queue.recover_stale_jobs(timeout=0) < 1:
            raise AssertionError("there was no lease to lose")
        try:
            queue.complete(job)
        except LeaseLost:
            return
    raise AssertionError("a stale acknowledgement was accepted")
