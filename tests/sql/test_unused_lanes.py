"""Lanes that are no longer used are removed, and no job is left without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from calls import claim, complete, enqueue, fences, maintain, rows, value

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}
SWEEPS = 4  # found empty, closed, and two more until it is removed


def lanes(conn: Connection) -> int:
    return int(value(conn, "SELECT count(*) FROM howdah.lanes"))


def sweep(conn: Connection, times: int = 1, *, later: bool = True) -> None:
    """Sweep, each time as if eleven minutes had passed."""
    for _ in range(times):
        if later:
            conn.execute(
                "UPDATE howdah.sweeps SET used = ARRAY (SELECT at - interval '11 minutes' "
                "FROM unnest(used) WITH ORDINALITY AS u (at, n) ORDER BY n)"
            )
        maintain(conn, "sweep")


@pytest.fixture
def used(conn: Connection) -> None:
    """A lane whose jobs are done."""
    enqueue(conn, WORK)
    complete(conn, *claim(conn))


def limit_search(conn: Connection, limit: str) -> None:
    """A lane whose search takes longer stays. The machine's load must not decide that."""
    definition = value(conn, "SELECT pg_get_functiondef('howdah.close_lane'::regproc)")
    assert "'5 milliseconds'" in definition
    conn.execute(definition.replace("'5 milliseconds'", f"'{limit}'").encode())


@pytest.mark.usefixtures("used")
def test_an_unused_lane_is_removed(conn: Connection) -> None:
    limit_search(conn, "1 hour")
    sweep(conn, SWEEPS - 1)
    assert lanes(conn) == 1
    sweep(conn)
    assert lanes(conn) == 0


@pytest.mark.usefixtures("used")
def test_a_lane_whose_search_is_slow_stays_for_another_ten_minutes(conn: Connection) -> None:
    limit_search(conn, "0")
    sweep(conn, SWEEPS)
    assert rows(conn, "SELECT closing FROM howdah.lanes") == [(0,)]
    assert value(conn, "SELECT used[1] > now() - interval '1 minute' FROM howdah.sweeps")


@pytest.mark.usefixtures("used")
def test_a_lane_stays_for_ten_minutes(conn: Connection) -> None:
    sweep(conn, 2 * SWEEPS, later=False)
    assert lanes(conn) == 1


@pytest.mark.parametrize(
    "job", [WORK, WORK | {"delay": 3600}], ids=["a pending job", "a scheduled job"]
)
def test_a_lane_stays_while_it_has(conn: Connection, job: dict[str, Any]) -> None:
    enqueue(conn, job)
    sweep(conn, 2 * SWEEPS)
    assert lanes(conn) == 1


def test_a_lane_stays_while_its_job_is_being_run(conn: Connection) -> None:
    enqueue(conn, WORK)
    (job,) = claim(conn, lease="1 hour")
    sweep(conn, 2 * SWEEPS)
    conn.execute("SELECT howdah.release_jobs(%s, %s)", fences([job]))
    assert [again.id for again in claim(conn)] == [job.id]


@pytest.mark.usefixtures("used")
def test_a_lane_in_which_a_sweep_found_a_job_stays_although_it_is_empty_later(
    conn: Connection,
) -> None:
    """Its dead entries would be read from the start if it were removed and added again."""
    limit_search(conn, "1 hour")
    for _ in range(3):
        enqueue(conn, WORK)
        sweep(conn)
        complete(conn, *claim(conn))
        sweep(conn, 2 * SWEEPS, later=False)
        assert lanes(conn) == 1


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("sweeps", range(2 * SWEEPS))
@pytest.mark.parametrize("sweeps_before", range(SWEEPS + 1))
def test_a_job_is_found_at_once_whenever_its_transaction_began_and_committed(
    connect: Connect, conn: Connection, sweeps_before: int, sweeps: int
) -> None:
    sweep(conn, sweeps_before)
    producer = connect(autocommit=False)
    ids = enqueue(producer, WORK)
    sweep(conn, sweeps)
    producer.commit()
    assert [job.id for job in claim(conn)] == ids


@pytest.mark.usefixtures("used")
def test_an_enqueue_does_not_wait_for_a_lane_that_is_being_removed(
    connect: Connect, conn: Connection
) -> None:
    limit_search(conn, "1 hour")
    sweep(conn, SWEEPS - 1)
    remover = connect(autocommit=False)
    remover.execute("SELECT howdah.sweep_lanes()")
    conn.execute("SET lock_timeout = '1ms'")
    ids = enqueue(conn, WORK)
    remover.commit()
    assert [job.id for job in claim(conn)] == ids
    assert rows(conn, "SELECT twin, closing FROM howdah.lanes") == [(True, 0)]


@pytest.mark.usefixtures("used")
def test_transactions_that_add_a_closing_lane_again_do_not_wait_for_each_other(
    connect: Connect, conn: Connection
) -> None:
    sweep(conn, SWEEPS - 1)
    one, two = connect(autocommit=False), connect(autocommit=False)
    two.execute("SET lock_timeout = '1ms'")
    ids = enqueue(one, WORK) + enqueue(two, WORK)
    conn.execute("SET lock_timeout = '1ms'")
    maintain(conn, "sweep")
    two.commit()
    maintain(conn, "sweep")  # as for any lane that an open transaction is adding
    assert [job.id for job in claim(conn)] == ids[1:]
    one.rollback()
    sweep(conn, SWEEPS)
    assert enqueue(conn, WORK) == [job.id for job in claim(conn)]


@pytest.mark.usefixtures("used")
def test_a_reopened_job_has_its_lane_again(conn: Connection) -> None:
    sweep(conn, SWEEPS)
    (job,) = rows(conn, "SELECT id FROM howdah.finished_jobs")
    conn.execute("SELECT howdah.retry_jobs(%s)", ([job.id],))
    assert [again.id for again in claim(conn)] == [job.id]


def test_a_job_that_gets_its_key_has_its_lane_again(conn: Connection) -> None:
    first, second = enqueue(
        conn,
        {"job_type": "first", "ordering_key": "key"},
        {"job_type": "second", "ordering_key": "key"},
    )
    (job,) = claim(conn, lease="1 hour")
    assert job.id == first
    sweep(conn, SWEEPS)
    assert value(conn, "SELECT count(*) FROM howdah.lanes WHERE job_type = 'second'") == 0
    complete(conn, job)
    assert [job.id for job in claim(conn)] == [second]


def test_many_lanes_are_removed_together(conn: Connection) -> None:
    conn.execute(
        "INSERT INTO howdah.lanes (queue, job_type, priority) "
        "SELECT 'default', 'type ' || n, 100 FROM generate_series(1, 5000) AS n"
    )
    sweep(conn, 3 * SWEEPS)  # a lane whose scan took long stays for another ten minutes
    assert lanes(conn) == 0
