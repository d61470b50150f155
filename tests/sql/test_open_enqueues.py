"""An enqueue's transaction that stays open, or has very many keys, harms nobody else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from calls import claim, complete, enqueue, maintain, value

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

MANY = 20_000
ORDERED = {"job_type": "work", "ordering_key": "key"}


@pytest.fixture(autouse=True)
def _lane(conn: Connection) -> None:
    conn.execute("SELECT howdah.add_lane('default', 'work', 100)")


IMMEDIATE = "SET CONSTRAINTS ALL IMMEDIATE"
ORDERS = {
    "before the enqueue": [IMMEDIATE, "enqueue"],
    "after the enqueue": ["enqueue", IMMEDIATE],
    "before and after": [IMMEDIATE, "enqueue", IMMEDIATE],
    "back to deferred": ["enqueue", IMMEDIATE, "SET CONSTRAINTS ALL DEFERRED"],
    "in a block": [
        "DO $$ BEGIN PERFORM howdah.enqueue_job('work', p_ordering_key => 'key'); "
        "SET CONSTRAINTS ALL IMMEDIATE; END $$"
    ],
    "in one message": [
        "SET CONSTRAINTS ALL IMMEDIATE; SELECT howdah.enqueue_job('work', p_ordering_key => 'key')"
    ],
    "in a savepoint": ["SAVEPOINT s", "enqueue", IMMEDIATE, "RELEASE SAVEPOINT s"],
}


def run(producer: Connection, commands: list[str]) -> None:
    for command in commands:
        if command == "enqueue":
            enqueue(producer, ORDERED)
        else:
            producer.execute(command.encode())


@pytest.mark.parametrize("order", ORDERS)
def test_an_open_enqueue_with_immediate_constraints_does_not_keep_the_key_holder_from_its_end(
    connect: Connect, conn: Connection, order: str
) -> None:
    enqueue(conn, ORDERED)
    (holder,) = claim(conn)
    producer = connect(autocommit=False)
    run(producer, ORDERS[order])
    conn.execute("SET lock_timeout = '100ms'")
    assert complete(conn, holder) == [holder.id]
    producer.commit()
    maintain(conn, "keys")
    assert len(claim(conn)) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_an_open_enqueue_with_immediate_constraints_does_not_hold_back_jobs_of_its_key(
    connect: Connect, conn: Connection, order: str
) -> None:
    producer = connect(autocommit=False)
    run(producer, ORDERS[order])
    enqueue(conn, ORDERED)
    (job,) = claim(conn)
    complete(conn, job)
    producer.commit()
    maintain(conn, "keys")
    assert len(claim(conn)) == 1


COMMITS = [
    "COMMIT",
    "commit;",
    "END",
    "Commit Work",
    "COMMIT AND CHAIN",
    "  commit  ",
    "COMMIT -- x",
]


@pytest.mark.parametrize("commit", COMMITS)
def test_a_key_is_assigned_when_its_transaction_commits(
    connect: Connect, conn: Connection, commit: str
) -> None:
    producer = connect()
    producer.execute("BEGIN")
    enqueue(producer, ORDERED)
    producer.execute(commit.encode())
    if "--" in commit:  # not recognized: the duty assigns it
        maintain(conn, "keys")
    assert len(claim(conn)) == 1


def test_a_key_is_assigned_by_a_statement_that_is_its_own_transaction(conn: Connection) -> None:
    enqueue(conn, ORDERED)
    conn.execute("SELECT howdah.enqueue_job('work', p_ordering_key => 'by a simple query')")
    conn.execute("INSERT INTO howdah.jobs (job_type, ordering_key) VALUES ('work', 'by INSERT')")
    conn.execute(
        "DO $$ BEGIN PERFORM howdah.enqueue_job('work', p_ordering_key => 'in a block'); END $$"
    )
    assert len(claim(conn)) == 4


def test_any_number_of_ordering_keys_is_enqueued_in_one_call(conn: Connection) -> None:
    jobs = json.dumps([{"job_type": "work", "ordering_key": f"key {n}"} for n in range(MANY)])
    conn.execute("SELECT count(*) FROM howdah.enqueue_jobs(%s)", (jobs,))
    for _ in range(MANY // 1000 + 1):
        maintain(conn, "keys")
    assert value(conn, "SELECT count(*) FROM howdah.unassigned_keys") == 0
    assert value(conn, "SELECT count(*) FROM howdah.live_jobs WHERE holds_key") == MANY


def test_any_number_of_ordering_keys_is_enqueued_in_one_transaction(
    connect: Connect, conn: Connection
) -> None:
    producer = connect(autocommit=False)
    producer.execute(
        "SELECT howdah.enqueue_job('work', p_ordering_key => 'key ' || n) "
        "FROM generate_series(1, %s) AS n",
        (MANY,),
    )
    assert locks(producer) < 100
    producer.commit()
    assert value(conn, "SELECT count(*) FROM howdah.live_jobs") == MANY


def test_any_number_of_lanes_is_enqueued_in_one_call(connect: Connect, conn: Connection) -> None:
    producer = connect(autocommit=False)
    jobs = json.dumps([{"job_type": f"type {n}"} for n in range(MANY)])
    producer.execute("SELECT count(*) FROM howdah.enqueue_jobs(%s)", (jobs,))
    assert locks(producer) < 100
    producer.commit()
    assert value(conn, "SELECT count(*) FROM howdah.lanes") == MANY + 1
    assert len(claim(conn, 1000)) == 1000


def test_a_lane_that_shares_its_lock_with_an_open_enqueue_is_added_by_the_sweep(
    connect: Connect, conn: Connection
) -> None:
    stranger = connect(autocommit=False)
    enqueue(stranger, *({"job_type": f"type {n}"} for n in range(500)))  # takes every lock
    (mine,) = enqueue(conn, {"job_type": "mine"})
    maintain(conn, "sweep")
    assert [job.id for job in claim(conn)] == [mine]


def locks(conn: Connection) -> int:
    """The advisory locks of this session."""
    return int(
        value(
            conn,
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
        )
    )
