"""Jobs of one ordering key run one at a time, in enqueue order, and none is ever left behind."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, enqueue, expire, fail, get, maintain, rows, status, value
from psycopg import IsolationLevel

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    Connect = Callable[..., psycopg.Connection[Any]]
    Connection = psycopg.Connection[Any]


def keyed(name: str, key: str = "key", **more: Any) -> dict[str, Any]:
    return {"job_type": "work", "data": {"name": name}, "ordering_key": key, **more}


@pytest.fixture(autouse=True)
def _lane(conn: Connection) -> None:
    """The lane is there before the test, as a worker would have made it."""
    conn.execute("SELECT howdah.add_lane('default', 'work', 100)")


def drain(conn: Connection) -> list[str]:
    """Claim and complete until nothing is left, with maintenance; the names in order."""
    names: list[str] = []
    while True:
        jobs = claim(conn)
        if not jobs:
            maintain(conn, "keys")
            jobs = claim(conn)
        if not jobs:
            return names
        names += [job.data["name"] for job in jobs]
        complete(conn, *jobs)


def test_one_job_of_a_key_is_claimed_at_a_time_in_order(conn: Connection) -> None:
    enqueue(conn, keyed("a"), keyed("b"), keyed("c"))
    (first,) = claim(conn)
    assert first.data["name"] == "a"
    assert claim(conn) == []
    complete(conn, first)
    assert drain(conn) == ["b", "c"]


def test_a_job_that_waits_for_its_retry_keeps_its_key(conn: Connection) -> None:
    enqueue(conn, keyed("a"), keyed("b"))
    fail(conn, *claim(conn))
    assert [job.data["name"] for job in claim(conn)] == ["a"]


def test_a_finally_failed_job_frees_its_key(conn: Connection) -> None:
    enqueue(conn, keyed("a"), keyed("b"))
    fail(conn, *claim(conn), retry=False)
    assert drain(conn) == ["b"]


def test_a_cancelled_holder_frees_its_key(conn: Connection) -> None:
    first, _ = enqueue(conn, keyed("a"), keyed("b"))
    conn.execute("SELECT howdah.cancel_jobs(%s)", ([first],))
    assert drain(conn) == ["b"]


def test_a_cancelled_waiting_job_is_passed_over(conn: Connection) -> None:
    _, second, _ = enqueue(conn, keyed("a"), keyed("b"), keyed("c"))
    conn.execute("SELECT howdah.cancel_jobs(%s)", ([second],))
    assert drain(conn) == ["a", "c"]


def test_a_reopened_job_goes_behind_the_jobs_of_its_key(conn: Connection) -> None:
    first, *_ = enqueue(conn, keyed("a"), keyed("b"), keyed("c"))
    fail(conn, *claim(conn), retry=False)
    conn.execute("SELECT howdah.retry_jobs(%s)", ([first],))
    assert drain(conn) == ["b", "c", "a"]


def test_late_committers_go_behind_the_holder_in_their_own_order(
    connect: Connect, conn: Connection
) -> None:
    late = connect(autocommit=False)
    # Ids that sort the other way round: order comes from enqueueing, not from ids.
    ids = [f"01900000-0000-7000-8000-00000000000{n}" for n in (3, 2, 1)]
    enqueue(late, *(keyed(name, id=id_) for name, id_ in zip("bcd", ids, strict=True)))
    enqueue(conn, keyed("a"))
    (holder,) = claim(conn)
    late.commit()
    complete(conn, holder)
    assert drain(conn) == ["b", "c", "d"]


def test_the_jobs_of_a_transaction_keep_their_order_if_a_rival_enqueues_between_them(
    connect: Connect, conn: Connection
) -> None:
    slow = connect(autocommit=False)
    enqueue(slow, keyed("a"))
    enqueue(conn, keyed("rival"), keyed("second rival"))
    enqueue(slow, keyed("b"), keyed("c"))
    enqueue(conn, keyed("third rival"))
    slow.commit()
    order = drain(conn)
    assert [name for name in order if "rival" not in name] == ["a", "b", "c"]
    assert [name for name in order if "rival" in name] == ["rival", "second rival", "third rival"]


def test_a_sweep_raises_a_sequence_that_is_behind_its_jobs(conn: Connection) -> None:
    """As after logical replication, which does not replicate sequences."""
    enqueue(conn, *map(keyed, "abcd"))
    maintain(conn, "sweep")
    conn.execute("SELECT setval('howdah.live_jobs_seq_seq', 1)")
    maintain(conn, "sweep")
    enqueue(conn, keyed("e"))
    assert drain(conn) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("ahead", [3, 2**31 - 5])
def test_a_row_with_an_xid_of_the_future_is_not_an_own_write(conn: Connection, ahead: int) -> None:
    """A frozen row keeps the xid of two billion transactions ago, which looks like one that is to come."""
    is_own = "SELECT howdah.is_own_write(((pg_current_xact_id()::text::bigint + %s) & 4294967295)::text::xid)"
    assert value(conn, is_own, ahead) is False


def test_a_completion_in_a_repeatable_read_transaction_frees_the_key(
    connect: Connect, conn: Connection
) -> None:
    enqueue(conn, keyed("a"))
    (holder,) = claim(conn)
    handler = connect(autocommit=False)
    handler.isolation_level = IsolationLevel.REPEATABLE_READ
    handler.execute("SELECT 1 FROM howdah.jobs LIMIT 1")
    enqueue(conn, keyed("b"))  # the handler's snapshot does not show it
    complete(handler, holder)
    handler.commit()
    assert drain(conn) == ["b"]


def test_a_job_enqueued_in_a_repeatable_read_transaction_gets_its_turn(
    connect: Connect, conn: Connection
) -> None:
    producer = connect(autocommit=False)
    producer.isolation_level = IsolationLevel.REPEATABLE_READ
    enqueue(producer, keyed("a"), keyed("b"))
    producer.commit()
    assert drain(conn) == ["a", "b"]


def test_a_waiting_job_is_not_forgotten_when_its_cancelling_is_rolled_back(
    connect: Connect, conn: Connection
) -> None:
    late, handler, operator = (connect(autocommit=False) for _ in range(3))
    (waiting,) = enqueue(late, keyed("b"))
    enqueue(conn, keyed("a"))
    (holder,) = claim(conn)
    complete(handler, holder)
    late.commit()  # while the holder is being finished: the key stays unassigned
    handler.rollback()
    operator.execute("SELECT howdah.cancel_jobs(%s)", ([waiting],))
    maintain(conn, "keys")  # while the waiting job is locked
    operator.rollback()
    complete(conn, holder)
    assert drain(conn) == ["b"]


def test_a_finisher_that_finds_the_next_job_locked_leaves_the_key_to_maintenance(
    connect: Connect, conn: Connection
) -> None:
    _, second = enqueue(conn, keyed("a"), keyed("b"))
    (holder,) = claim(conn)
    operator = connect(autocommit=False)
    operator.execute("SELECT howdah.cancel_jobs(%s)", ([second],))
    assert complete(conn, holder) == [holder.id]
    operator.rollback()
    assert drain(conn) == ["b"]


def test_a_rolled_back_job_never_holds_the_key(connect: Connect, conn: Connection) -> None:
    producer = connect(autocommit=False)
    enqueue(producer, keyed("a"))
    enqueue(conn, keyed("b"))
    producer.rollback()
    assert drain(conn) == ["b"]


def test_keys_that_were_settled_leave_nothing_behind(conn: Connection) -> None:
    enqueue(conn, *(keyed(str(n), f"key {n % 3}") for n in range(9)))
    assert len(drain(conn)) == 9
    assert value(conn, "SELECT count(*) FROM howdah.unassigned_keys") == 0


class Stress:
    """Producers, one for each key, workers that do everything a worker may do, and maintenance."""

    KEYS = 6
    JOBS = 50
    WORKERS = 4

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.changed = threading.Condition()
        self.running: dict[str, int] = {}
        self.runs: dict[str, list[int]] = defaultdict(list)
        self.overlaps: list[tuple[str, int, int]] = []
        self.committed: dict[str, list[tuple[int, UUID]]] = defaultdict(list)
        self.steps = 0
        self.produced = threading.Event()
        self.finished = threading.Event()
        self.give_up = time.monotonic() + 200

    def produce(self, key: str) -> None:
        conn, lot = self.connect(autocommit=False), random.Random(key)
        for n in range(self.JOBS):
            (job_id,) = enqueue(conn, keyed("", key, data={"n": n}, max_attempts=50))
            draw = lot.random()
            if draw < 0.3:
                self.wait_for_steps(lot.randint(1, 5))  # commit late: others go on meanwhile
            if draw > 0.85:
                conn.rollback()
                continue
            conn.commit()
            self.committed[key].append((n, job_id))
            if lot.random() < 0.15:
                victim = lot.choice(self.committed[key])[1]
                conn.execute("SELECT howdah.cancel_jobs(%s)", ([victim],))
                conn.rollback() if lot.random() < 0.5 else conn.commit()

    def wait_for_steps(self, count: int) -> None:
        with self.changed:
            target = self.steps + count
            self.changed.wait_for(lambda: self.steps >= target, timeout=0.05)

    def work(self, number: int) -> None:
        conn, lot = self.connect(), random.Random(number)
        while not self.finished.is_set():
            jobs = claim(conn, lot.randint(1, 4), worker=f"worker {number}")
            if not jobs:
                self.wait_for_steps(1)
            for job in jobs:
                self.run(conn, lot, job)

    def run(self, conn: Connection, lot: random.Random, job: Any) -> None:
        key, n = job.ordering_key, job.data["n"]
        with self.changed:
            if key in self.running:
                self.overlaps.append((key, self.running[key], n))
            self.running[key] = n
            self.runs[key].append(n)
            self.steps += 1
            self.changed.notify_all()
        self.wait_for_steps(1)
        with self.changed:
            del self.running[key]
        draw = lot.random()
        if draw < 0.6:
            complete(conn, job)
        elif draw < 0.75:
            fail(conn, job)
        elif draw < 0.8:
            fail(conn, job, retry=False)
        elif draw < 0.9:
            conn.execute("SELECT howdah.release_jobs(%s, %s)", ([job.id], [job.lease_id]))
        else:
            expire(conn, job)  # the worker dies; maintenance recovers the job

    def maintain(self) -> None:
        conn = self.connect()
        while not self.finished.is_set():
            maintain(conn, "recover", "keys", "sweep")
            left = value(conn, "SELECT count(*) FROM howdah.live_jobs")
            if (self.produced.is_set() and left == 0) or time.monotonic() > self.give_up:
                self.finished.set()
            self.wait_for_steps(1)

    def go(self) -> None:
        with ThreadPoolExecutor(self.KEYS + self.WORKERS + 1) as pool:
            producers = [pool.submit(self.produce, f"key {n}") for n in range(self.KEYS)]
            others = [pool.submit(self.work, n) for n in range(self.WORKERS)]
            others.append(pool.submit(self.maintain))
            try:
                for future in producers:
                    future.result()
                self.produced.set()
                for future in others:
                    future.result()
            finally:
                self.finished.set()


def test_under_stress_no_job_is_stuck_overlaps_another_or_leaves_the_order(
    connect: Connect, conn: Connection
) -> None:
    stress = Stress(connect)
    stress.go()
    stuck = rows(
        conn,
        "SELECT ordering_key, seq, status, holds_key, blockers, run_at FROM howdah.live_jobs",
    )
    assert stuck == []
    assert stress.overlaps == []
    for key, runs in stress.runs.items():
        assert runs == sorted(runs), key
        committed = {n for n, _ in stress.committed[key]}
        assert set(runs) <= committed, "a rolled-back job ran"
    ended = [get(conn, job_id) for jobs in stress.committed.values() for _, job_id in jobs]
    assert {job.status for job in ended} <= {"completed", "failed", "cancelled"}
    assert all(job.attempts <= job.max_attempts for job in ended)
    assert sum(len(runs) for runs in stress.runs.values()) > 100


def test_a_scheduled_holder_keeps_the_jobs_behind_it_waiting(conn: Connection) -> None:
    _, second = enqueue(conn, keyed("a", delay=3600), keyed("b"))
    assert claim(conn) == []
    assert status(conn, second) == "pending"


@pytest.mark.parametrize("way", ["retried", "in savepoints", "in a block"])
def test_a_key_is_left_to_the_duty_once_however_many_of_its_jobs_one_transaction_adds(
    conn: Connection, connect: Connect, way: str
) -> None:
    """Savepoints and blocks with exceptions write under transaction ids of their own."""
    work = {"job_type": "work", "ordering_key": "key"}
    ids = enqueue(conn, *[work] * 3)
    conn.execute("SELECT howdah.cancel_jobs(%s)", (ids,))
    enqueue(conn, work)
    conn.execute("DELETE FROM howdah.unassigned_keys")
    operator = connect(autocommit=False)
    operator.execute("SELECT FROM howdah.live_jobs FOR UPDATE")
    producer = connect(autocommit=False)
    if way == "retried":
        producer.execute("SELECT howdah.retry_jobs(%s)", (ids,))
    elif way == "in savepoints":
        producer.execute("SELECT 1")
        for _ in range(3):
            with producer.transaction():
                enqueue(producer, work)
    else:
        producer.execute(
            "DO $$ BEGIN FOR n IN 1..3 LOOP BEGIN "
            "PERFORM howdah.enqueue_job('work', p_ordering_key => 'key'); "
            "EXCEPTION WHEN division_by_zero THEN NULL; END; END LOOP; END $$"
        )
    producer.commit()
    assert rows(conn, "SELECT ordering_key FROM howdah.unassigned_keys") == [("key",)]
    operator.rollback()
    maintain(conn, "keys")
    done = []
    while jobs := claim(conn):
        done += complete(conn, *jobs)
    assert len(done) == 4


@pytest.mark.parametrize("why", ["the holder is locked", "its snapshot is old"])
def test_a_job_that_committed_late_is_not_overtaken(
    connect: Connect, conn: Connection, why: str
) -> None:
    """Its transaction could not put it behind the holder, and the holder ends before the duty `keys` runs."""
    late = connect(autocommit=False)
    if why == "its snapshot is old":
        late.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    enqueue(late, keyed("late"))
    enqueue(conn, keyed("holder"))
    (holder,) = claim(conn)
    locker = connect(autocommit=False)
    if why == "the holder is locked":
        locker.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (holder.id,))
    late.commit()
    locker.rollback()
    enqueue(conn, keyed("after"))
    complete(conn, holder)
    assert drain(conn) == ["late", "after"]


@pytest.mark.parametrize("swept", [False, True])
def test_keys_are_assigned_although_the_sequence_was_set_back(
    conn: Connection, swept: bool
) -> None:
    """By TRUNCATE ... RESTART IDENTITY, or on a server that got the rows and not the sequence."""
    for n in range(40):
        enqueue(conn, keyed(str(n), key=str(n % 8)))
    drain(conn)
    maintain(conn, "sweep")
    maintain(conn, "sweep")
    assert value(conn, "SELECT min(f) FROM howdah.sweeps, unnest(key_floors) AS f") > 20
    conn.execute("TRUNCATE howdah.live_jobs RESTART IDENTITY")
    enqueue(conn, *(keyed(str(n), key=str(n % 8)) for n in range(16)))
    if swept:
        conn.execute("UPDATE howdah.live_jobs SET holds_key = false, blockers = 1")
        maintain(conn, "sweep")
    assert sorted(drain(conn), key=int) == [str(n) for n in range(16)]
