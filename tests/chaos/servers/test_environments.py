"""Tests of the test environments: the chaos tests prove something only if these work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import disturbances
import fake_clock
import pooler
import psycopg
import pytest
import small_disk
import strict_scenarios
from builds import newer_build, pointing_to
from commit_proxy import CommitProxy
from embedded_servers import running_server, wait_until_up, workspace
from replicas import replicas

from children import until
from howdah import JobQueue, sql
from next_release import EDITS, STEP, VERSION

if TYPE_CHECKING:
    from howdah.embedded import EmbeddedServer

pytestmark = pytest.mark.slow


# ── a primary and a standby ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["one proxy", "both hosts"])
async def test_a_promoted_synchronous_standby_has_what_was_committed(how: str) -> None:
    with workspace("pair") as directory, replicas(directory, synchronous=True) as pair:
        url = pair.url if how == "one proxy" else pair.urls
        conn = await asyncpg.connect(url)
        await conn.execute("CREATE TABLE written (n int)")
        await conn.execute("INSERT INTO written VALUES (1)")
        await conn.close()
        pair.fail_over()
        with psycopg.connect(url, autocommit=True) as after:
            assert after.execute("SELECT n FROM written").fetchall() == [(1,)]
            after.execute("INSERT INTO written VALUES (2)")
            assert after.info.backend_pid
        conn = await asyncpg.connect(url)
        assert await conn.fetchval("SELECT count(*) FROM written") == 2
        await conn.close()


def test_a_standby_that_was_behind_lacks_what_was_committed_in_the_meantime() -> None:
    with workspace("pair") as directory, replicas(directory, synchronous=False) as pair:
        with psycopg.connect(pair.url, autocommit=True) as conn:
            conn.execute("CREATE TABLE written (n int)")
            conn.execute("INSERT INTO written VALUES (1)")
            pair.wait_until_caught_up()
            pair.pause_replication()
            conn.execute("INSERT INTO written VALUES (2)")
        pair.fail_over()
        with psycopg.connect(pair.url, autocommit=True) as conn:
            assert conn.execute("SELECT n FROM written").fetchall() == [(1,)]


# ── a full disk ───────────────────────────────────────────────────────────────────────────────────

WRITE = "INSERT INTO written SELECT n, repeat('x', 2000) FROM generate_series(1, 5000) AS n"


def _write_until_error(conn: psycopg.Connection[Any]) -> None:
    while True:
        conn.execute(WRITE)


@pytest.mark.skipif(
    bool(small_disk.unavailable_because()), reason=str(small_disk.unavailable_because())
)
def test_a_full_data_disk_fails_the_statement_until_there_is_space() -> None:
    with (
        workspace("disk") as directory,
        small_disk.server_on_small_disk(directory, "data") as (server, disk),
        psycopg.connect(server.url, autocommit=True) as conn,
    ):
        conn.execute("CREATE TABLE written (n int, filler text)")
        assert disk.fill() > 0
        with pytest.raises(psycopg.errors.DiskFull):
            conn.execute(WRITE)
        disk.free()
        conn.execute(WRITE)
        assert conn.execute("SELECT count(*) FROM written").fetchone() == (5000,)


@pytest.mark.skipif(
    bool(small_disk.unavailable_because()), reason=str(small_disk.unavailable_because())
)
def test_a_full_wal_disk_crashes_the_server_which_restarts_when_there_is_space() -> None:
    with (
        workspace("disk") as directory,
        small_disk.server_on_small_disk(directory, "wal") as (server, disk),
    ):
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("CREATE TABLE written (n int, filler text)")
            conn.execute("INSERT INTO written VALUES (0)")
            disk.fill()
            with pytest.raises(psycopg.OperationalError):
                _write_until_error(conn)
        disk.free()
        wait_until_up(server)
        with psycopg.connect(server.url, autocommit=True) as conn:
            assert conn.execute("SELECT count(*) FROM written WHERE n = 0").fetchone() == (1,)


# ── poolers, clocks and other sessions ────────────────────────────────────────────────────────────


@pytest.mark.skipif(pooler.PROGRAM is None, reason=pooler.MISSING)
def test_a_pooler_keeps_its_port_when_it_is_killed_and_started_again(
    database: str,
) -> None:
    with workspace("pooler") as directory, pooler.pooler(directory, database) as bouncer:
        for end in (bouncer.stop, bouncer.kill):
            with psycopg.connect(bouncer.url, autocommit=True, prepare_threshold=None) as conn:
                conn.execute("SELECT 1")
                end()
                with pytest.raises(psycopg.OperationalError):
                    conn.execute("SELECT 1")
            bouncer.start()
        with psycopg.connect(bouncer.url, autocommit=True, prepare_threshold=None) as conn:
            conn.execute("SELECT 1")


@pytest.mark.skipif(fake_clock.library() is None, reason=fake_clock.MISSING)
@pytest.mark.parametrize("seconds", [fake_clock.HOUR, -fake_clock.HOUR])
def test_a_fake_clock_is_wrong_by_its_offset_and_the_monotonic_clock_is_right(
    seconds: int,
) -> None:
    program = "import time; time.sleep(0.01); print(time.time(), time.monotonic())"
    before = time.time(), time.monotonic()
    output = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | fake_clock.off_by(seconds),
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split()
    after = time.time(), time.monotonic()
    assert before[0] + seconds - 1 <= float(output[0]) <= after[0] + seconds + 1
    assert before[1] <= float(output[1]) <= after[1]


def test_a_ddl_lock_blocks_a_reader_until_it_is_released(database: str) -> None:
    with disturbances.ddl_lock(database) as pid:
        asking = subprocess.Popen(
            [sys.executable, "-c", f"import howdah; howdah.JobQueue({database!r}).counts()"]
        )
        until(lambda: disturbances.waiting_for(database, pid), "the reader waits")
    assert asking.wait(60) == 0


def test_a_held_transaction_is_idle_in_a_transaction_with_a_snapshot(database: str) -> None:
    with (
        disturbances.held_transaction(database) as pid,
        psycopg.connect(database, autocommit=True) as conn,
    ):
        (row,) = conn.execute(
            "SELECT state, backend_xid IS NOT NULL FROM pg_stat_activity WHERE pid = %s", [pid]
        )
        assert row == ("idle in transaction", True)


def test_a_server_without_a_free_connection_slot_refuses_connections_until_one_is_free() -> None:
    with (
        workspace("limit") as directory,
        running_server(directory / "pg", max_connections="20") as server,
    ):
        with disturbances.no_connection_left(server.url) as taken:
            assert taken > 15
            with pytest.raises(psycopg.OperationalError, match="too many clients"):
                psycopg.connect(server.url)
        wait_until_up(server)


def test_a_process_that_reconnects_without_a_pause_is_named() -> None:
    with (
        workspace("connections") as directory,
        running_server(directory / "pg", log_connections="on") as server,
    ):
        before = strict_scenarios.connections(server)
        for name, count in {"0001-worker": 3, "0002-producer": 20}.items():
            for _ in range(count):
                psycopg.connect(server.url, application_name=name).close()
        opened = strict_scenarios.connections(server) - before
        assert opened == {"0001-worker": 3, "0002-producer": 20}
        assert strict_scenarios.too_many(opened, 1.0) == [
            "0002-producer opened 20 connections to a read-only server in 1 s"
        ]


@pytest.mark.parametrize("concurrently", [False, True])
def test_indexes_are_valid_after_a_reindex(database: str, concurrently: bool) -> None:
    JobQueue(database).enqueue("work")
    disturbances.reindex(database, concurrently=concurrently)
    assert disturbances.indexes_are_valid(database)


def test_a_process_runs_the_build_that_it_is_pointed_to(tmp_path: Path) -> None:
    home = newer_build(tmp_path / "next", STEP, edits=EDITS, oldest_code=1)
    program = "import howdah.sql; print(howdah.sql.latest_version(), howdah.sql.__file__)"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | pointing_to(home),
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split()
    assert answer == [str(VERSION), str(home / "howdah" / "sql" / "__init__.py")]
    assert sql.latest_version() == VERSION - 1


def test_a_proxy_cuts_connections_and_can_be_redirected(
    server: EmbeddedServer, database: str
) -> None:
    proxy = CommitProxy(server.socket_directory / ".s.PGSQL.5432")
    try:
        with psycopg.connect(proxy.url("howdah"), autocommit=True) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
            assert proxy.cut() == 1
            with pytest.raises(psycopg.OperationalError):
                conn.execute("SELECT 1")
        proxy.redirect(Path("/nowhere"))
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(proxy.url("howdah"))
    finally:
        proxy.close()
