"""Workers whose line goes dead, without a word, in the middle of everything."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from children import Children, until
from howdah.chaos import ledger
from howdah.chaos.crew import BARE, Crew
from howdah.chaos.scenario import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg
    from wire import Wire

    from howdah import JobQueue

LATEST = "SELECT max(last_run_at) FROM howdah.maintenance WHERE duty IN ('recover', 'settle')"
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
