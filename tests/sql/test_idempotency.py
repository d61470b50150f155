"""One idempotency key, one job, however many ask for it at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, enqueue, fail, get, maintain, rows, value, wait_until
from processes import at_once

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

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
        maintain(conn, "prune")  # one reading of the clock removes nothing
        conn.execute("UPDATE howdah.maintenance SET observed = now() - interval '31 seconds'")
        conn.execute(
            "UPDATE howdah.idempotency_keys SET expires_at = expires_at - interval '1 minute'"
        )
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


def charge(conn: Connection, key: str = "key", job_type: str = "charge", **more: Any) -> UUID:
    (job_id,) = enqueue(conn, {"job_type": job_type, "idempotency_key": key, **more})
    return job_id


def test_a_key_belongs_to_its_job_type(conn: Connection) -> None:
    assert charge(conn) != charge(conn, job_type="refund")
    assert charge(conn) == charge(conn)


@pytest.mark.parametrize("ended", [None, "completed", "removed with keep = 0"])
def test_a_key_with_other_data_is_an_error_that_names_the_first_job(
    conn: Connection, ended: str | None
) -> None:
    first = charge(conn, data={"cents": 1}, keep=None if ended != "removed with keep = 0" else "0")
    if ended is not None:
        complete(conn, *claim(conn))
    with pytest.raises(psycopg.errors.UniqueViolation, match=f"belongs to job {first}") as caught:
        charge(conn, data={"cents": 2})
    assert caught.value.diag.constraint_name == "idempotency_keys_pkey"
    assert caught.value.diag.message_hint == (
        "Enqueue the same data again, or use another key for other data."
    )
    assert charge(conn, data={"cents": 1.0}) == first  # equal as JSON


def test_a_key_twice_in_one_batch_with_other_data_is_refused(conn: Connection) -> None:
    jobs = [{"job_type": "a", "data": {"n": n}, "idempotency_key": "key"} for n in range(2)]
    with pytest.raises(psycopg.errors.UniqueViolation, match="which has other data"):
        enqueue(conn, *jobs)
    assert claim(conn) == []


def end(conn: Connection, job_id: UUID, how: str) -> None:
    if how == "cancelled while it waits":
        conn.execute("SELECT howdah.cancel_jobs(%s)", ([job_id],))
        return
    (job,) = claim(conn)
    if how == "failed":
        fail(conn, job, retry=False)
    elif how == "stopped":
        conn.execute("SELECT howdah.stop_jobs(%s, %s)", ([job.id], [job.lease_id]))
    elif how == "recovered without attempts":
        conn.execute("SELECT howdah.start_jobs(%s, %s)", ([job.id], [job.lease_id]))
        conn.execute("SELECT howdah.recover_stale_jobs('0')")
    else:
        complete(conn, job)
        if how == "removed":
            conn.execute("SELECT howdah.remove_jobs(%s)", ([job_id],))
        else:
            conn.execute("SELECT howdah.clear_finished()")


@pytest.mark.parametrize(
    "how",
    ["failed", "stopped", "cancelled while it waits", "recovered without attempts", "removed", "cleared"],
)  # fmt: skip
def test_a_job_that_failed_was_cancelled_or_removed_frees_its_key(
    conn: Connection, how: str
) -> None:
    first = charge(conn, data={"cents": -1}, max_attempts=1)
    end(conn, first, how)
    second = charge(conn, data={"cents": 1})
    assert second != first
    assert charge(conn, data={"cents": 1}) == second


def test_a_job_that_waits_for_its_retry_keeps_its_idempotency_key(conn: Connection) -> None:
    first = charge(conn)
    fail(conn, *claim(conn))
    assert charge(conn) == first


def test_the_end_of_a_job_does_not_wait_for_a_transaction_that_read_its_key(
    connect: Connect, conn: Connection
) -> None:
    first = charge(conn)
    reader = connect(autocommit=False)
    assert charge(reader) == first
    conn.execute("SET lock_timeout = '200ms'")
    fail(conn, *claim(conn), retry=False)
    second = charge(conn)
    assert second != first
    reader.commit()
    assert charge(conn) == second


def test_an_enqueue_does_not_wait_for_a_transaction_that_frees_its_key(
    connect: Connect, conn: Connection
) -> None:
    first = charge(conn)
    operator = connect(autocommit=False)
    operator.execute("SELECT howdah.cancel_jobs(%s)", ([first],))
    conn.execute("SET lock_timeout = '200ms'")
    assert charge(conn) == first
    operator.commit()
    assert charge(conn) != first


def test_a_retried_job_takes_its_key_again(conn: Connection) -> None:
    first = charge(conn)
    fail(conn, *claim(conn), retry=False)
    conn.execute("SELECT howdah.retry_jobs(%s)", ([first],))
    assert charge(conn) == first


def test_a_job_whose_key_another_job_took_meanwhile_is_not_retried(conn: Connection) -> None:
    first = charge(conn)
    fail(conn, *claim(conn), retry=False)
    second = charge(conn)
    assert rows(conn, "SELECT howdah.retry_jobs(%s)", [first]) == []
    assert get(conn, first).status == "failed"
    fail(conn, *claim(conn), retry=False)
    # Both have failed, and of the two the last may run again.
    assert rows(conn, "SELECT howdah.retry_jobs(%s)", [first, second]) == [(second,)]


def test_a_clock_that_jumped_weeks_ahead_frees_no_key(conn: Connection) -> None:
    """To the server it looks as if the key had expired, and the last confirmed reading of the clock was weeks ago."""
    first = charge(conn)
    complete(conn, *claim(conn))
    conn.execute("UPDATE howdah.idempotency_keys SET expires_at = now() - interval '4 weeks'")
    conn.execute(
        "UPDATE howdah.maintenance SET reached = now() - interval '5 weeks' WHERE duty = 'prune'"
    )
    assert charge(conn) == first
    assert with_key(conn, "a new key")[0][1]
    # A reading in which the clock was right: the key has really expired.
    conn.execute("UPDATE howdah.maintenance SET reached = now() WHERE duty = 'prune'")
    assert charge(conn) != first


def test_a_key_has_a_lifetime_of_its_own(conn: Connection) -> None:
    forgotten = charge(conn, idempotency_ttl="0 seconds")
    assert charge(conn, data={"n": 1}, idempotency_ttl="1 year") != forgotten
    left = value(conn, "SELECT max(expires_at) - now() > '360 days' FROM howdah.idempotency_keys")
    assert left
    by_parameter = (
        "SELECT howdah.enqueue_job('b', p_idempotency_key => 'k', p_idempotency_ttl => '0')"
    )
    assert value(conn, by_parameter) != value(conn, by_parameter)


def test_many_keys_are_taken_in_one_call(conn: Connection) -> None:
    keys = [f"key {n}" for n in range(5000)]
    first = with_key(conn, *keys)
    assert with_key(conn, *reversed(keys)) == [(id_, False) for id_, _ in reversed(first)]


BAD_LIFETIMES = ["-1 second", "-1 day", "-infinity", "infinity", "1001 years", None]


@pytest.mark.parametrize("ttl", BAD_LIFETIMES)
@pytest.mark.parametrize("way", ["enqueue_job", "enqueue_jobs", "the member of a job", "claimed"])
def test_a_lifetime_that_is_negative_infinite_or_null_is_refused_in_words(
    conn: Connection, way: str, ttl: str | None
) -> None:
    if conn.info.server_version < 170000 and ttl in ("infinity", "-infinity"):
        pytest.skip("this PostgreSQL has no infinite intervals")
    job = json.dumps({"job_type": "work", "idempotency_key": "key"})
    conn.execute("SET statement_timeout = '10s'")
    if way == "the member of a job" and ttl is None:
        pytest.skip("NULL means the default of the call")
    calls = {
        "enqueue_job": "SELECT howdah.enqueue_job('work', p_idempotency_key => 'key', "
        "p_idempotency_ttl => %(ttl)s)",
        "enqueue_jobs": "SELECT howdah.enqueue_jobs(jsonb_build_array(%(job)s::jsonb), "
        "p_idempotency_ttl => %(ttl)s)",
        "the member of a job": "SELECT howdah.enqueue_jobs(jsonb_build_array("
        "%(job)s::jsonb || jsonb_build_object('idempotency_ttl', %(ttl)s::text)))",
        "claimed": "SELECT howdah.enqueue_and_claim(%(job)s, 'w', p_idempotency_ttl => %(ttl)s)",
    }
    with pytest.raises(psycopg.errors.CheckViolation, match="must be from 0 to 1000 years"):
        conn.execute(calls[way].encode(), {"ttl": ttl, "job": job})


@pytest.mark.parametrize("ttl", ["0", "1 mon -30 days"])
def test_the_shortest_lifetimes_end_at_once_and_take_no_time(conn: Connection, ttl: str) -> None:
    conn.execute("SET statement_timeout = '10s'")
    first, second = (with_key(conn, "key", "key", ttl=ttl) for _ in range(2))
    assert [is_new for _, is_new in first + second] == [True, False, True, False]


OPERATIONS = ["failed", "stopped", "cancelled", "recovered", "removed", "cleared"]


@pytest.mark.parametrize("how", OPERATIONS)
@pytest.mark.parametrize("commits", [True, False])
def test_an_enqueue_does_not_wait_for_a_transaction_that_frees_an_expired_key(
    connect: Connect, conn: Connection, how: str, commits: bool
) -> None:
    """The key expires before or while the other transaction is open: nobody else may see that."""
    first = charge(conn, max_attempts=1)
    operator = connect(autocommit=False)
    if how in ("removed", "cleared"):
        complete(conn, *claim(conn))
    if how == "removed":
        operator.execute("SELECT howdah.remove_jobs(%s)", ([first],))
    elif how == "cleared":
        operator.execute("SELECT howdah.clear_finished()")
    else:
        names = {"cancelled": "cancelled while it waits", "recovered": "recovered without attempts"}
        end(operator, first, names.get(how, how))
    conn.execute("SET lock_timeout = '200ms'")
    assert charge(conn) == first  # still taken, until that transaction commits
    conn.execute("UPDATE howdah.idempotency_keys SET expires_at = expires_at - interval '8 days'")
    second = charge(conn)
    assert second != first
    (operator.commit if commits else operator.rollback)()
    assert charge(conn) == second
    maintain(conn, "prune")
    assert charge(conn) == second


def test_freed_keys_are_pruned(conn: Connection) -> None:
    jobs = [charge(conn, key=str(n)) for n in range(3)]
    conn.execute("SELECT howdah.cancel_jobs(%s)", (jobs[:2],))
    again = charge(conn, key="0")
    maintain(conn, "prune")
    keys = rows(conn, "SELECT key, job_id FROM howdah.idempotency_keys ORDER BY key")
    assert [tuple(row) for row in keys] == [("0", again), ("2", jobs[2])]
    assert value(conn, "SELECT count(*) FROM howdah.freed_keys") == 0


def test_a_retried_job_keeps_its_key_when_the_freed_ones_are_pruned(conn: Connection) -> None:
    first = charge(conn)
    for _ in range(2):
        conn.execute("SELECT howdah.cancel_jobs(%s)", ([first],))
        conn.execute("SELECT howdah.retry_jobs(%s)", ([first],))
        maintain(conn, "prune")
        assert charge(conn) == first
