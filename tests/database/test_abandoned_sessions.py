"""A client that gives up leaves no session behind that waits for a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blocking import BlockingAsyncJobQueue
from howdah import DatabaseUnreachable, JobQueue
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connect = Callable[..., psycopg.Connection[Any]]


@pytest.mark.parametrize("queue_class", [JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"])
def test_behind_a_lock_on_a_table_no_sessions_are_left_waiting(
    queue: JobQueue, database: str, connect: Connect, queue_class: Any
) -> None:
    impatient = queue_class(database, timeout=1, command_timeout=1.5)
    impatient.pending()
    locker = connect(autocommit=False)
    locker.execute("LOCK TABLE howdah.live_jobs IN ACCESS EXCLUSIVE MODE")
    watcher = connect()

    def waiting() -> int:
        found = watcher.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
        assert found is not None
        return int(found[0])

    most = 0
    for _ in range(3):
        with pytest.raises(DatabaseUnreachable):
            impatient.pending()
        most = max(most, waiting())
    assert most > 0
    until(lambda: waiting() == 0, "the sessions notice that their clients are gone")
    locker.rollback()
    impatient.close()
