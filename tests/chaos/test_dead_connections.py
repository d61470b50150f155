"""Workers whose line goes dead, without a word, in the middle of everything."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from children import Children, until
from howdah.chaos import ledger
from howdah.chaos.checker import Checker
from howdah.chaos.history import History
from howdah.chaos.processes.supervisor import BARE, EFFECTS, Crew
from howdah.chaos.run import read_database
from howdah.chaos.scenario import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg
    from faulty_proxy import Wire

    from howdah import JobQueue

LATEST = "SELECT max(last_run_at) FROM howdah.maintenance WHERE duty IN ('recover', 'keys')"
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%run_maintenance()%' "
    "AND wait_event_type = 'Lock' AND datname = current_database()"
)


def test_a_worker_whose_line_went_dead_in_the_middle_of_its_duties_soon_does_them_again(
    wire: Wire, children: Children, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    conn, holder = connect(), connect(autocommit=False)
    worker = children.start().ready()
    until(lambda: conn.execute(LATEST).fetchone() != (None,), "it did its duties")
    holder.execute("LOCK TABLE howdah.maintenance")
    until(lambda: conn.execute(WAITING).fetchone() != (0,), "it waits for an answer")
    wire.black_hole(True)
    holder.commit()
    until(lambda: conn.execute(WAITING).fetchone() == (0,), "the answer was swallowed")
    wire.black_hole(False)
    before = conn.execute(LATEST).fetchone()
    # Half of the time that a statement of its duties may take.
    until(lambda: conn.execute(LATEST).fetchone() != before, "it did its duties again", 30)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_loop_on_a_bare_queue_whose_line_went_dead_says_so_and_finds_back(
    wire: Wire, queue: JobQueue, database: str, tmp_path: Path
) -> None:
    book = ledger.Ledger(tmp_path / ledger.FILE)

    def lines(kind: str) -> list[ledger.Line]:
        return [line for line in ledger.read(book.path) if line.kind == kind]

    crew = Crew(Place(wire.url, database, "howdah"), tmp_path, book, lease=2.0, worker_options=[])
    try:
        crew.man(0, 1)
        queue.enqueue(BARE, {"seconds": 0, "failures": 0})
        until(lambda: lines("ack-accepted"), "it works")
        wire.black_hole(True)
        until(lambda: lines("trouble"), "it gives up", 60)
        assert lines("trouble")[0]["function"] in ("claim_job_batch", "run_maintenance")
        assert lines("trouble")[0]["claimed"] > 0
        wire.black_hole(False)
        queue.enqueue(BARE, {"seconds": 0, "failures": 0})
        until(lambda: queue.counts()["completed"] == 2, "it finds back", 60)
    finally:
        crew.close()
        book.close()


def test_workers_whose_lines_all_went_dead_at_once_resume_in_time(
    wire: Wire, queue: JobQueue, database: str, tmp_path: Path,
    connect: Callable[..., psycopg.Connection[Any]],
) -> None:  # fmt: skip
    connect().execute(f"CREATE TABLE howdah.{EFFECTS} (job_id uuid, tag text)".encode())
    place = Place(wire.url, database, "howdah")
    book = ledger.Ledger(tmp_path / ledger.FILE)
    crew = Crew(place, tmp_path, book, lease=2.0, worker_options=["--concurrency", "4"])

    def accepted() -> set[int]:
        return {line.pid for line in ledger.read(book.path) if line.kind == "ack-accepted"}

    kinds = ["chaos.nap"] * 400 + [BARE] * 100
    queue.enqueue_many(
        (kind, {"tag": str(n), "seconds": 0.05, "failures": 0} if kind == BARE else {"tag": str(n)})
        for n, kind in enumerate(kinds)
    )
    try:
        crew.man(1, 1)
        until(lambda: len(accepted()) == 2, "both work")
        book.write("fault", fault=1, name="black hole", scope="connection", phase="begin")
        wire.black_hole(True)
        # It ends at once: only what was open is lost, and no statement has met it yet.
        wire.black_hole(False)
        book.write("fault", fault=1, name="black hole", scope="connection", phase="end")
        until(lambda: queue.counts()["completed"] == len(kinds), "all of it is done", 60)
        crew.dismiss("worker")
        crew.dismiss("bare")
    finally:
        crew.close()
        book.close()
    lines = ledger.read(book.path)
    (worker,) = [x["child"] for x in lines if x.kind == "ready" and x["role"] == "worker"]
    assert worker in {x.pid for x in lines if x.kind == "well"}, "its line did not go dead"
    assert Checker(History(lines), read_database(place), lease=2.0).check() == []
