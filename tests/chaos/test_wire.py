"""A worker whose line goes dead, without a word, in the middle of everything."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from children import Children, until

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg
    from wire import Wire

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
