"""Workers whose connections go dead without being closed."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from children import Children, until
from howdah.chaos import ledger
from howdah.chaos.checker import Checker
from howdah.chaos.history import History
from howdah.chaos.processes.environment import BARE, EFFECTS
from howdah.chaos.processes.supervisor import Supervisor
from howdah.chaos.run import read_database
from howdah.chaos.scenario import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg
    from faulty_proxy import FaultyProxy

    from howdah import JobQueue

LATEST = "SELECT max(last_run_at) FROM howdah.maintenance WHERE duty IN ('recover', 'keys')"
WAITING_STATEMENTS = (
    "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%run_due_duty(%' "
    "AND wait_event_type = 'Lock' AND datname = current_database()"
)


def test_a_worker_whose_connection_died_during_maintenance_runs_maintenance_again_within_30_s(
    faulty_proxy: FaultyProxy, children: Children, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    conn, holder = connect(), connect(autocommit=False)
    worker = children.start().ready()
    until(lambda: conn.execute(LATEST).fetchone() != (None,), "the worker ran maintenance")
    holder.execute("LOCK TABLE howdah.maintenance")
    until(
        lambda: conn.execute(WAITING_STATEMENTS).fetchone() != (0,), "the worker waits for a reply"
    )
    faulty_proxy.black_hole(True)
    holder.commit()
    until(lambda: conn.execute(WAITING_STATEMENTS).fetchone() == (0,), "the reply was dropped")
    faulty_proxy.black_hole(False)
    before = conn.execute(LATEST).fetchone()
    # Half of the timeout of a maintenance statement.
    until(lambda: conn.execute(LATEST).fetchone() != before, "the worker ran maintenance again", 30)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_bare_queue_worker_whose_connection_died_records_it_and_reconnects(
    faulty_proxy: FaultyProxy, queue: JobQueue, database: str, tmp_path: Path
) -> None:
    recorded = ledger.Ledger(tmp_path / ledger.FILE)

    def lines(kind: str) -> list[ledger.Line]:
        return [line for line in ledger.read(recorded.path) if line.kind == kind]

    supervisor = Supervisor(
        Place(faulty_proxy.url, database, "howdah"),
        tmp_path,
        recorded,
        lease=2.0,
        worker_options=[],
    )
    try:
        supervisor.run_workers(0, 1)
        queue.enqueue(BARE, {"seconds": 0, "failures": 0})
        until(lambda: lines("ack-accepted"), "the worker completed a job")
        faulty_proxy.black_hole(True)
        until(lambda: lines("trouble"), "a statement timed out", 60)
        assert lines("trouble")[0]["function"] in ("claim_job_batch", "run_due_duty")
        assert lines("trouble")[0]["claimed"] > 0
        faulty_proxy.black_hole(False)
        queue.enqueue(BARE, {"seconds": 0, "failures": 0})
        until(lambda: queue.counts()["completed"] == 2, "the worker reconnected", 60)
    finally:
        supervisor.close()
        recorded.close()


def test_workers_whose_connections_all_died_at_once_resume_in_time(
    faulty_proxy: FaultyProxy, queue: JobQueue, database: str, tmp_path: Path,
    connect: Callable[..., psycopg.Connection[Any]],
) -> None:  # fmt: skip
    connect().execute(f"CREATE TABLE howdah.{EFFECTS} (job_id uuid, tag text)".encode())
    place = Place(faulty_proxy.url, database, "howdah")
    recorded = ledger.Ledger(tmp_path / ledger.FILE)
    supervisor = Supervisor(
        place, tmp_path, recorded, lease=2.0, worker_options=["--concurrency", "4"]
    )

    def accepted() -> set[int]:
        return {line.pid for line in ledger.read(recorded.path) if line.kind == "ack-accepted"}

    kinds = ["chaos.nap"] * 400 + [BARE] * 100
    queue.enqueue_many(
        (kind, {"tag": str(n), "seconds": 0.05, "failures": 0} if kind == BARE else {"tag": str(n)})
        for n, kind in enumerate(kinds)
    )
    try:
        supervisor.run_workers(1, 1)
        until(lambda: len(accepted()) == 2, "both workers completed a job")
        recorded.write("fault", fault=1, name="black hole", scope="connection", phase="begin")
        faulty_proxy.black_hole(True)
        # It ends at once: only the open connections are dead, and no statement has used them yet.
        faulty_proxy.black_hole(False)
        recorded.write("fault", fault=1, name="black hole", scope="connection", phase="end")
        until(lambda: queue.counts()["completed"] == len(kinds), "all jobs are completed", 60)
        supervisor.stop("worker")
        supervisor.stop("bare")
    finally:
        supervisor.close()
        recorded.close()
    lines = ledger.read(recorded.path)
    (worker,) = [x["child"] for x in lines if x.kind == "ready" and x["role"] == "worker"]
    assert worker in {x.pid for x in lines if x.kind == "well"}, "its connection did not go dead"
    assert Checker(History(lines), read_database(place), lease=2.0).check() == []
