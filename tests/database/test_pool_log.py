"""What a program without logging shows on its standard error."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg_pool
import pytest

if TYPE_CHECKING:
    from proxy import Proxy

PROGRAM = """
import psycopg, sys
from howdah import DatabaseUnreachable, JobQueue
queue = JobQueue(sys.argv[1], timeout=3)
queue.enqueue("a")
with psycopg.connect(sys.argv[2], autocommit=True) as conn:
    for _ in range(3):
        conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                     "WHERE datname = current_database() AND pid <> pg_backend_pid()")
        queue.enqueue("a")
    conn.execute(f"ALTER DATABASE {conn.info.dbname} SET default_transaction_read_only = on")
    conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                 "WHERE datname = current_database() AND pid <> pg_backend_pid()")
try:
    queue.enqueue("a")
except DatabaseUnreachable:
    print("raised")
queue.close()
"""


def test_a_program_without_logging_shows_nothing_of_the_pool(
    proxy: Proxy, fresh_database: str
) -> None:
    url = proxy.url(fresh_database.partition("?")[0].rpartition("/")[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, fresh_database], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("raised\n", "")


def test_lines_about_the_pools_of_a_program_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pool that the program made itself, which cannot connect."""
    caplog.set_level(logging.WARNING)
    pool = psycopg_pool.ConnectionPool(
        "postgresql://nobody@127.0.0.1:1/none", min_size=1, open=False, name="mine"
    )
    with pytest.raises(psycopg_pool.PoolTimeout):
        pool.open(wait=True, timeout=0.5)
    assert "error connecting in 'mine'" in caplog.text
