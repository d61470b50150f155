"""A transaction that called any function of the contract and stays open: nobody else waits for it.

Other sessions enqueue, claim, acknowledge, extend, recover and run the duties meanwhile, with other jobs of the same job
types, ordering keys, queues and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from calls import Waits, claim, complete, enqueue, expire, fail, fences, rows, value

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Connection = psycopg.Connection[Any]
    Connect = Callable[..., Connection]

WORK = {"job_type": "work"}
KEYED = WORK | {"ordering_key": "key"}
CLAIMED = "%(ids)s, %(lease_ids)s"  # two claimed jobs of the caller, one of which holds the key
FINISHED = "%(finished)s"

CALLS = {
    "enqueue_job": "enqueue_job('work', p_ordering_key => 'key', p_idempotency_key => 'theirs')",
    "enqueue_jobs": """enqueue_jobs('[{"job_type": "work", "ordering_key": "key"}, {"job_type": "new"}]')""",
    "announce_jobs": """announce_jobs('[["default", "new", 100]]')""",
    "claim_job_batch": "claim_job_batch('caller', NULL, 1)",
    "claim_runs": "claim_runs('caller', NULL, 1, '30 s', '{default}')",
    "complete_jobs": f"complete_jobs({CLAIMED})",
    "complete_runs": f"complete_runs({CLAIMED})",
    "fail_jobs": f"fail_jobs({CLAIMED}, '{{no,no}}')",
    "release_jobs": f"release_jobs({CLAIMED})",
    "start_jobs": f"start_jobs({CLAIMED})",
    "stop_jobs": f"stop_jobs({CLAIMED})",
    "extend_jobs": f"extend_jobs({CLAIMED})",
    "report_progress": f"report_progress({CLAIMED}, '{{1,2}}')",
    "add_events": f"add_events({CLAIMED}, '{{note,note}}', NULL)",
    "add_late_events": f"add_late_events({CLAIMED}, '{{note,note}}', NULL)",
    "cancel_jobs": "cancel_jobs(%(ids)s || %(pending)s)",
    "retry_jobs": f"retry_jobs({FINISHED})",
    "takeover_jobs": "takeover_jobs(%(ids)s)",
    "recover_stale_jobs": "recover_stale_jobs(interval '0', 1)",
    "clear_finished": "clear_finished()",
    "remove_jobs": f"remove_jobs({FINISHED})",
    "run_maintenance": "run_maintenance()",
    "run_due_duty": "run_due_duty()",
    "next_due_at": "next_due_at()",
    "next_wake": "next_wake('worker', NULL, '{default}', true)",
    "enqueue_and_claim": """enqueue_and_claim('{"job_type": "work"}', 'caller')""",
    "register_worker": "register_worker('caller', 'host', 1, '{default}', '{work,new}')",
    "touch_worker": "touch_worker('worker', true)",
    "beat_worker": "beat_worker('worker', '{}')",
    "remove_worker": "remove_worker('worker')",
    "pass_wake": "pass_wake('worker')",
    "watch_jobs": "watch_jobs('caller', %(ids)s)",
    "unwatch_jobs": "unwatch_jobs('watcher', %(ids)s)",
}
# An enqueue waits for a transaction that takes or removes the same idempotency key. A retry takes the key of its job
# again, and the duty `prune` removes keys that have expired.
TAKES_THE_KEY = {"retry_jobs", "run_maintenance"}
READS = {"held_jobs", "pending_count", "get_jobs", "get_events", "wake_channel"}


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


def test_every_function_of_the_contract_is_called(conn: Connection) -> None:
    contract = rows(
        conn,
        "SELECT DISTINCT proname::text FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace "
        "AND prosecdef AND prorettype <> 'trigger'::regtype",
    )
    assert {row.proname for row in contract} | {"wake_channel"} == CALLS.keys() | READS


@pytest.mark.parametrize("name", CALLS)
def test_nobody_waits_for_an_open_transaction_that_called(
    conn: Connection, connect: Connect, name: str
) -> None:
    enqueue(conn, WORK | {"idempotency_key": "expired"})
    finished = complete(conn, *claim(conn))
    conn.execute("SELECT howdah.register_worker('worker', 'host', 1, '{default}', '{work}')")
    enqueue(conn, KEYED, WORK)
    theirs = claim(conn, 2)
    enqueue(conn, *[WORK] * 3)
    mine = claim(conn, 3)
    pending = enqueue(conn, KEYED, WORK, WORK)[:1]
    conn.execute("SELECT howdah.watch_jobs('watcher', %s)", (fences(mine + theirs).ids,))
    conn.execute("UPDATE howdah.idempotency_keys SET expires_at = now() - interval '1 day'")
    conn.execute(
        "UPDATE howdah.maintenance SET due_at = clock_timestamp() - interval '1 minute', "
        "observed = observed - interval '1 hour', reached = least(reached, now() - interval '1 minute')"
    )
    conn.execute("UPDATE howdah.maintenance SET reached = observed WHERE duty = 'prune'")
    ids, lease_ids = fences(theirs)
    caller = connect(autocommit=False)
    caller.execute(
        f"SELECT * FROM howdah.{CALLS[name]}".encode(),
        {"ids": ids, "lease_ids": lease_ids, "finished": finished, "pending": pending},
    )

    waits = Waits(conn)
    conn.execute("SET lock_timeout = '3s'")
    enqueue(conn, WORK, KEYED, {"job_type": "new"}, WORK | {"idempotency_key": "mine"})
    assert claim(conn, 1, types=["work"])
    answers = rows(conn, "SELECT * FROM howdah.extend_jobs(%s, %s)", *fences(mine))
    assert all(answer.extended for answer in answers)
    expire(conn, mine[2])
    assert complete(conn, mine[0]) == [mine[0].id]
    assert fail(conn, mine[1], retry=False) == [mine[1].id]
    conn.execute("SELECT howdah.recover_stale_jobs()")
    conn.execute("SELECT howdah.touch_worker('other', true)")
    for _ in range(12):
        conn.execute("SELECT howdah.run_due_duty()")
    assert value(conn, "SELECT count(*) FROM howdah.maintenance WHERE last_error IS NOT NULL") == 0
    assert waits.count == 0
    if name not in TAKES_THE_KEY:
        enqueue(conn, WORK | {"idempotency_key": "expired"})
        assert waits.count == 0


@pytest.mark.parametrize(
    "name", ["complete_jobs", "fail_jobs", "release_jobs", "start_jobs", "stop_jobs", "add_events"]
)
def test_without_p_wait_a_locked_job_is_rejected_at_once_and_its_neighbour_accepted(
    conn: Connection, connect: Connect, name: str
) -> None:
    enqueue(conn, *[WORK] * 2)
    locked, neighbour = claim(conn, 2)
    ids, lease_ids = fences([locked, neighbour])
    caller = connect(autocommit=False)
    caller.execute("SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (locked.id,))
    waits = Waits(conn)
    call = CALLS[name].removesuffix(")") + ", p_wait => false)"
    accepted = conn.execute(
        f"SELECT * FROM howdah.{call}".encode(), {"ids": ids, "lease_ids": lease_ids}
    )
    assert accepted.fetchall() == [(neighbour.id,)]
    assert waits.count == 0
