"""One idempotency key, one job, however many ask for it at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from calls import claim, complete, enqueue, maintain, rows, value, wait_until
from processes import at_once

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

ENQUEUE = "SELECT * FROM howdah.enqueue_jobs(%s, false, %s)"


def with_key(conn: Connection, *keys: str, ttl: str = "7 days") -> list[tuple[UUID, bool]]:
    jobs = [{"job_type": "work", "idempotency_key": key} for key in keys]
    return [(row.id, row.is_new) for row in rows(conn, ENQUEUE, json.dumps(jobs), ttl)]


def test_ten_processes_with_one_key_make_one_job(database: str, conn: Connection) -> None:
    code = """
from howdah import JobQueue
queue = JobQueue(sys.argv[1])
queue.pending()
start()
handle = queue.enqueue("work", idempotency_key="the key")
print(handle.id, handle.is_new)
"""
    answers = [answer.split() for answer in at_once(10, code, database)]
    assert len({id_ for id_, _ in answers}) == 1
    assert sorted(is_new for _, is_new in answers) == ["False"] * 9 + ["True"]
    assert len(claim(conn)) == 1


def test_many_connections_with_the_same_keys_make_one_job_of_each(connect: Connect) -> None:
    conns = [connect() for _ in range(8)]
    keys = [f"key {n}" for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda c: with_key(c, *keys), conns))
    for place in range(20):
        of_one_key = [answer[place] for answer in answers]
        assert len({id_ for id_, _ in of_one_key}) == 1
        assert sum(is_new for _, is_new in of_one_key) == 1
    assert len(claim(conns[0], 100)) == 20


def test_a_key_twice_in_one_batch_makes_one_job(conn: Connection) -> None:
    (first, is_new), (second, is_new_too) = with_key(conn, "key", "key")
    assert (first == second, is_new, is_new_too) == (True, True, False)
    assert len(claim(conn)) == 1


def test_a_key_is_remembered_when_its_job_is_finished(conn: Connection) -> None:
    ((first, _),) = with_key(conn, "key")
    complete(conn, *claim(conn))
    assert with_key(conn, "key") == [(first, False)]


@pytest.mark.parametrize("pruned", [True, False])
def test_an_expired_key_makes_a_new_job(conn: Connection, pruned: bool) -> None:
    ((first, _),) = with_key(conn, "key", ttl="0")
    if pruned:
        maintain(conn, "prune")
        assert value(conn, "SELECT count(*) FROM howdah.idempotency_keys") == 0
    ((second, is_new),) = with_key(conn, "key")
    assert is_new
    assert second != first
    assert with_key(conn, "key") == [(second, False)]


def test_pruning_leaves_keys_that_are_still_good(conn: Connection) -> None:
    ((first, _),) = with_key(conn, "key")
    maintain(conn, "prune")
    assert with_key(conn, "key") == [(first, False)]


@pytest.mark.parametrize("commits", [True, False])
def test_an_enqueue_waits_for_the_fate_of_its_key(
    connect: Connect, conn: Connection, commits: bool
) -> None:
    rival, other = connect(autocommit=False), connect()
    ((first, _),) = with_key(rival, "key")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(with_key, other, "key")
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: value(conn, waits, other.info.backend_pid), "the second waits")
        if commits:
            rival.commit()
            assert answer.result() == [(first, False)]
        else:
            rival.rollback()
            ((second, is_new),) = answer.result()
            assert is_new
            assert second != first
    assert len(claim(conn)) == 1


def test_other_keys_do_not_wait(connect: Connect, conn: Connection) -> None:
    with_key(connect(autocommit=False), "one key")
    conn.execute("SET lock_timeout = '200ms'")
    assert len(with_key(conn, "another key")) == 1


def test_jobs_without_a_key_may_share_a_batch_with_those_that_have_one(conn: Connection) -> None:
    ids = enqueue(
        conn, {"job_type": "a"}, {"job_type": "b", "idempotency_key": "key"}, {"job_type": "c"}
    )
    again = enqueue(
        conn, {"job_type": "a"}, {"job_type": "b", "idempotency_key": "key"}, {"job_type": "c"}
    )
    assert [one == other for one, other in zip(ids, again, strict=True)] == [False, True, False]
    assert len(claim(conn)) == 5
