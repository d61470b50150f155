"""A job that kills the process of a bare loop uses up its own attempts and no other job's (decision 0029)."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from calls import claim, complete, enqueue, fail, fences, get, rows, status

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]

# Every job of the batch runs in the order of the claim. "kill" ends the process as a segmentation fault would.
PYTHON_LOOP = """
import os, signal, sys
from howdah import JobQueue
queue = JobQueue(sys.argv[1])
while jobs := queue.claim(["work"], batch_size=10):
    for job in jobs:
        if job.data["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        queue.complete(job)
"""
SQL_LOOP = """
import os, signal, sys
import psycopg
conn = psycopg.connect(sys.argv[1], autocommit=True)
claim = "SELECT id, lease_id, data FROM howdah.claim_job_batch('loop', '{work}', 10)"
while jobs := conn.execute(claim).fetchall():
    for job_id, lease_id, data in jobs:
        if data["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        conn.execute("SELECT howdah.complete_jobs(%s, %s)", ([job_id], [lease_id]))
"""


def lose(conn: Connection) -> None:
    """Recover the claims of a process that died, as if their leases had expired."""
    conn.execute("SELECT howdah.recover_stale_jobs(interval '0')")


def deaths_until_nothing_is_left(conn: Connection, loop: str, url: str) -> int:
    deaths = 0
    while True:
        ended = subprocess.run([sys.executable, "-c", loop, url], check=False, timeout=60)
        lose(conn)
        if ended.returncode == 0:
            return deaths
        deaths += 1
        assert deaths < 20


@pytest.mark.parametrize("loop", [PYTHON_LOOP, SQL_LOOP], ids=["python", "sql"])
@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_killer_in_a_bare_loop_fails_after_four_deaths_and_its_neighbours_complete(
    conn: Connection, database: str, loop: str, place: int
) -> None:
    ids = enqueue(conn, *[{"job_type": "work", "data": {"kill": n == place}} for n in range(10)])
    killer = ids.pop(place)
    assert deaths_until_nothing_is_left(conn, loop, database) <= 4
    assert (get(conn, killer).status, get(conn, killer).attempts) == ("failed", 3)
    assert [(get(conn, i).status, get(conn, i).attempts) for i in ids] == [("completed", 1)] * 9


def test_two_killers_and_a_new_one_do_not_charge_each_others_neighbours(
    conn: Connection, database: str
) -> None:
    kills = [True, False, False, True, False]
    ids = enqueue(conn, *[{"job_type": "work", "data": {"kill": kill}} for kill in kills])
    subprocess.run([sys.executable, "-c", SQL_LOOP, database], check=False, timeout=60)
    lose(conn)
    more = enqueue(conn, *[{"job_type": "work", "data": {"kill": n == 2}} for n in range(5)])
    deaths_until_nothing_is_left(conn, SQL_LOOP, database)
    ended = [get(conn, i) for i in ids + more]
    assert [job.status == "failed" for job in ended] == [*kills, False, False, True, False, False]
    assert {job.attempts for job in ended if job.status == "completed"} == {1}
    assert {job.claims for job in ended if job.status == "failed"} == {4}


def test_a_suspect_is_claimed_alone_and_as_started(conn: Connection) -> None:
    enqueue(conn, *[{"job_type": "work"}] * 3)
    assert [job.status for job in claim(conn)] == ["claimed"] * 3
    lose(conn)
    (alone,) = claim(conn)
    assert (alone.status, alone.attempts, alone.claims) == ("running", 1, 2)
    assert alone.started_at is not None
    assert status(conn, alone.id) == "running"


def test_new_jobs_are_still_claimed_together_while_another_transaction_claims_a_suspect(
    conn: Connection, connect: Callable[..., Connection]
) -> None:
    enqueue(conn, {"job_type": "work"})
    claim(conn)
    lose(conn)
    enqueue(conn, *[{"job_type": "work"}] * 5)
    other = connect(autocommit=False)
    (suspect,) = claim(other)
    assert suspect.claims == 2
    assert [job.claims for job in claim(conn)] == [1] * 5
    other.rollback()
    assert [job.id for job in claim(conn)] == [suspect.id]


def test_a_suspect_is_not_starved_by_a_higher_lane_that_always_has_a_job(conn: Connection) -> None:
    (low,) = enqueue(conn, {"job_type": "work", "priority": 10})
    claim(conn)
    lose(conn)
    claimed: list[Any] = []
    for _ in range(1000):
        enqueue(conn, {"job_type": "work", "priority": 150})
        claimed = claim(conn)
        complete(conn, *claimed)
        if claimed[0].id == low:
            break
    assert [job.id for job in claimed] == [low]


def test_suspects_below_do_not_hold_up_the_new_jobs_of_their_lane(conn: Connection) -> None:
    enqueue(conn, *[{"job_type": "slow", "priority": 10}] * 3)
    claim(conn)
    lose(conn)
    enqueue(conn, {"job_type": "slow", "priority": 10}, {"job_type": "work", "priority": 150})
    batches = [[job.claims for job in claim(conn)] for _ in range(5)]
    # One claim in sixteen takes a suspect first.
    assert sorted(claims for batch in batches for claims in batch) == [1, 1, 2, 2, 2]
    assert [batch for batch in batches if 2 in batch] == [[2]] * 3


def test_a_suspect_that_fails_is_retried_alone(conn: Connection) -> None:
    enqueue(conn, *[{"job_type": "work"}] * 2)
    claim(conn)
    lose(conn)
    (first,) = claim(conn)
    fail(conn, first)
    (second,) = claim(conn)
    (again,) = claim(conn)
    assert second.id != first.id == again.id
    assert again.attempts == 2


def test_a_worker_claims_suspects_with_the_other_jobs(conn: Connection) -> None:
    enqueue(conn, *[{"job_type": "work"}] * 3)
    claim(conn)
    lose(conn)
    text = "SELECT * FROM howdah.claim_job_batch('w', NULL, 10, p_suspects_alone => false)"
    jobs = rows(conn, text)
    assert [(job.status, job.claims) for job in jobs] == [("claimed", 2)] * 3
    assert len(fences(jobs).ids) == 3
