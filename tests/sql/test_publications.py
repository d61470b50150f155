"""Logical replication of the whole database (CREATE PUBLICATION … FOR ALL TABLES), as change data capture and upgrades
without downtime use it: PostgreSQL refuses to update or delete rows of a published table without a replica identity,
whatever wal_level is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from calls import call_everything, claim, complete, enqueue, fail, maintain, rows, value

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


@pytest.fixture
def conn(connect: Connect) -> Connection:
    """A connection in autocommit mode to a database that publishes all tables."""
    conn = connect()
    conn.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    return conn


def test_every_table_has_a_replica_identity(conn: Connection) -> None:
    maintain(conn, "partitions")
    without = rows(
        conn,
        "SELECT c.relname FROM pg_class AS c WHERE c.relnamespace = 'howdah'::regnamespace "
        "AND c.relkind IN ('r', 'p') AND c.relreplident <> 'f' "
        "AND NOT EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary)",
    )
    assert [row.relname for row in without] == []


def test_every_function_and_duty_works_on_published_tables(conn: Connection) -> None:
    call_everything(conn)


def test_recovery_removes_the_leases_of_ended_jobs_from_a_published_table(conn: Connection) -> None:
    enqueue(conn, WORK)
    (job,) = claim(conn, lease="1 microsecond")
    complete(conn, job)
    maintain(conn, "recover")
    assert value(conn, "SELECT count(*) FROM howdah.leases") == 0


def test_prune_removes_rows_of_every_published_table(conn: Connection) -> None:
    fill_what_prune_removes(conn)
    maintain(conn, "prune")
    assert left_for_prune(conn) == dict.fromkeys(PRUNED, 0)


@pytest.mark.parametrize("refused", ["freed_keys", "watchers", "throughput"])
def test_a_table_that_cannot_be_pruned_does_not_keep_the_others(
    conn: Connection, refused: str
) -> None:
    fill_what_prune_removes(conn)
    conn.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN RAISE ''not this one''; END'; CREATE TRIGGER refuse BEFORE DELETE "
        f"ON howdah.{refused} FOR EACH ROW EXECUTE FUNCTION refuse()".encode()
    )
    conn.execute("UPDATE howdah.maintenance SET due_at = CASE duty WHEN 'prune' "
                 "THEN clock_timestamp() ELSE 'infinity' END")  # fmt: skip
    (ran,) = rows(conn, "SELECT * FROM howdah.run_maintenance()")
    assert ran.error == f"{refused} could not be pruned: not this one"
    left = {name for name, count in left_for_prune(conn).items() if count}
    # A key and the row that frees it are removed together.
    assert left == ({refused, "idempotency_keys"} if refused == "freed_keys" else {refused})


PRUNED = (
    "idempotency_keys", "freed_keys", "workers", "watchers", "throughput", "finished_jobs_short",
)  # fmt: skip


def left_for_prune(conn: Connection) -> dict[str, int]:
    return {name: value(conn, f"SELECT count(*) FROM howdah.{name}") for name in PRUNED}


def fill_what_prune_removes(conn: Connection) -> None:
    """Write a row that is due for removal to each table that `prune` removes rows from."""
    enqueue(conn, WORK | {"idempotency_key": "a", "keep": 1, "max_attempts": 1})
    (job,) = claim(conn)
    fail(conn, job, retry=False)
    conn.execute("SELECT howdah.watch_jobs('me', %s)", ([job.id],))
    conn.execute("UPDATE howdah.watchers SET until = now() - interval '1 day'")
    conn.execute("SELECT howdah.register_worker('worker', 'host', 1, '{default}', '{work}')")
    conn.execute("UPDATE howdah.workers SET seen_at = now() - interval '2 days'")
    conn.execute("INSERT INTO howdah.throughput (bucket, worker_id, queue, job_type) "
                 "VALUES (now() - interval '2 days', 'worker', 'default', 'work')")  # fmt: skip
    conn.execute("UPDATE howdah.finished_jobs SET completed_at = now() - interval '1 hour'")
    # An earlier reading of the clock has confirmed the time.
    conn.execute("UPDATE howdah.maintenance SET reached = clock_timestamp(), observed = clock_timestamp() "
                 "WHERE duty = 'prune'")  # fmt: skip
    assert left_for_prune(conn) == dict.fromkeys(PRUNED, 1)
