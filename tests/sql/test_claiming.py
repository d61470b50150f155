"""What a claim takes, and in which order."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from calls import claim, complete, enqueue, enqueue_bulk, rows

from howdah import BACKFILL, DISCOVERED, EXPLICIT, JobQueue, Status

if TYPE_CHECKING:
    Connection = psycopg.Connection[Any]


def test_higher_priority_goes_first_then_the_older(queue: JobQueue) -> None:
    for name, priority in [("a", BACKFILL), ("b", DISCOVERED), ("c", EXPLICIT), ("d", DISCOVERED)]:
        queue.enqueue("work", {"name": name}, priority=priority)
    assert [job.data["name"] for job in queue.claim()] == ["c", "b", "d", "a"]


def test_a_claim_takes_only_the_types_it_asks_for(queue: JobQueue) -> None:
    queue.enqueue("one")
    queue.enqueue("two")
    assert [job.job_type for job in queue.claim(["two"])] == ["two"]


def test_a_job_that_is_due_later_is_not_claimed_now(queue: JobQueue) -> None:
    queue.enqueue("later", delay=3600)
    assert queue.claim() == []
    assert queue.pending() == 1


def test_claiming_one_counts_as_starting_it(queue: JobQueue) -> None:
    queue.enqueue("work")
    job = queue.claim_one()
    assert job is not None
    assert queue.get(job).status is Status.RUNNING


def test_a_claim_takes_only_from_the_queues_it_asks_for(conn: Connection) -> None:
    enqueue(conn, {"job_type": "work", "queue": "one"}, {"job_type": "work", "queue": "two"})
    taken = rows(conn, "SELECT * FROM howdah.claim_job_batch('w', p_queues => '{two,three}')")
    assert [job.queue for job in taken] == ["two"]


def test_a_claim_takes_no_more_than_it_asks_for_over_all_lanes(conn: Connection) -> None:
    enqueue(conn, *({"job_type": f"type {n}"} for n in range(8)))
    assert [len(claim(conn, 3)) for _ in range(4)] == [3, 3, 2, 0]


def test_among_types_of_equal_priority_the_one_with_the_oldest_job_goes_first(
    conn: Connection,
) -> None:
    for name in ("y", "x", "y", "x"):
        enqueue(conn, {"job_type": name})
    assert [job.job_type for job in claim(conn)] == ["y", "y", "x", "x"]
    for name in ("y", "x", "y", "x"):
        enqueue(conn, {"job_type": name})
    assert [claim(conn, 1)[0].job_type for _ in range(4)] == ["y", "x", "y", "x"]


def test_a_batch_keeps_its_order(conn: Connection) -> None:
    first = UUID("01900000-0000-7000-8000-000000000000").int
    ids = enqueue(conn, *({"id": str(UUID(int=first + n)), "job_type": "work"} for n in range(500)))
    assert [job.id for job in claim(conn, 500)] == ids


PRODUCER = """
import sys, time, types
import howdah.model
from howdah import JobQueue
offset = float(sys.argv[2]) * 1e9
howdah.model.time = types.SimpleNamespace(time_ns=lambda: time.time_ns() + int(offset))
queue = JobQueue(sys.argv[1])
for line in sys.stdin:
    print(queue.enqueue("work", ordering_key=line.strip() or None).id, flush=True)
"""


@pytest.mark.parametrize("key", ["", "a key"])
def test_jobs_are_claimed_in_enqueue_order_whatever_the_producers_clocks(
    database: str, conn: Connection, key: str
) -> None:
    enqueued: list[UUID] = []
    with ExitStack() as stack:
        producers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", PRODUCER, database, str(offset)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for offset in (3600, 0, -3600)
        ]
        for _ in range(3):
            for producer in producers:
                assert producer.stdin is not None
                assert producer.stdout is not None
                producer.stdin.write(f"{key}\n")
                producer.stdin.flush()
                enqueued.append(UUID(producer.stdout.readline().strip()))
        for producer in producers:
            producer.communicate(timeout=30)
    assert enqueued != sorted(enqueued), "the clocks do not differ"
    claimed: list[UUID] = []
    while jobs := claim(conn, 2):
        claimed += [job.id for job in jobs]
        complete(conn, *jobs)
    assert claimed == enqueued


def test_sixteen_claimers_take_each_of_50000_jobs_once(fresh_database: str) -> None:
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        for n in range(10):
            enqueue_bulk(conn, 5_000, f"type {n % 3}")

    def take(number: int) -> list[tuple[UUID, int, int]]:
        taken: list[tuple[UUID, int, int]] = []
        with psycopg.connect(fresh_database, autocommit=True) as conn:
            while batch := conn.execute(
                "SELECT id, claims, attempts FROM howdah.claim_job_batch(%s, NULL, 100)",
                (f"worker {number}",),
            ).fetchall():
                taken += batch
        return taken

    with ThreadPoolExecutor(16) as pool:
        takers = list(pool.map(take, range(16)))
    counts = Counter(id_ for taken in takers for id_, _, _ in taken)
    assert len(counts) == 50_000
    assert set(counts.values()) == {1}
    assert {(claims, attempts) for taken in takers for _, claims, attempts in taken} == {(1, 1)}
    assert sum(1 for taken in takers if taken) > 1
