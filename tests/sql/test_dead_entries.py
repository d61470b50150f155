"""While a transaction elsewhere stays open, finished jobs leave index entries that vacuum cannot remove.
Claiming, completing and recovering must not pay for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, enqueue_bulk, expire, fences, rows, value
from plans import buffers
from psycopg import IsolationLevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.embedded import EmbeddedServer

    Connection = psycopg.Connection[Any]

DEAD = 200_000
BATCH = 100
# An hour: no lease of the measurement itself runs out while it goes on.
CLAIM = (
    f"SELECT id, lease_id FROM howdah.claim_job_batch('worker', NULL, {BATCH}, '1 hour', "
    "p_suspects_alone => false)"
)
COMPLETE = "SELECT * FROM howdah.complete_jobs(%s, %s)"
CLAIM_AND_COMPLETE = (
    "SELECT count(*) FROM (SELECT array_agg(id), array_agg(lease_id) "
    "FROM howdah.claim_job_batch('worker', NULL, 5000, %s, p_suspects_alone => false)) AS c (ids, lease_ids), "
    "LATERAL howdah.complete_jobs(c.ids, c.lease_ids)"
)
RECOVER = "SELECT howdah.recover_expired()"
SWEEP = "SELECT howdah.sweep_lanes()"


def dead_entries(conn: Connection, index: str) -> int:
    """The entries of an index that no live row stands behind, counted page by page."""
    entries = value(
        conn,
        # A posting list is several entries; the first item of a page with a right neighbour is none.
        "SELECT sum(coalesce(cardinality(i.tids), 1)) FROM generate_series(1, "
        "pg_relation_size(%s) / current_setting('block_size')::int - 1) AS page, "
        "bt_page_stats(%s, page::int) AS s, bt_page_items(%s, page::int) AS i "
        "WHERE s.type = 'l' AND NOT i.dead AND (i.itemoffset > 1 OR s.btpo_next = 0)",
        *[f"howdah.{index}"] * 3,
    )
    conditions = {
        "live_jobs_pending": "status = 'pending' AND blockers = 0",
        "live_jobs_claimed": "status = 'claimed'",
        "live_jobs_pkey": "true",
    }
    live = value(conn, f"SELECT count(*) FROM howdah.live_jobs WHERE {conditions[index]}")
    return int(entries) - int(live)


def costs(conn: Connection) -> dict[str, int]:
    """Pages touched by a claim, a completion and a recovery of a batch, by a claim of nothing, and by a sweep.

    The least of several: a relation whose statistics were just renewed costs a look at the catalogue."""
    taken: dict[str, list[int]] = {
        "claim": [],
        "complete": [],
        "recover": [],
        "peek": [],
        "sweep": [],
    }
    # The head keeps a second behind: what was enqueued before that is not this claim's neighbourhood.
    conn.execute("SELECT pg_sleep(1.1)")
    enqueue_bulk(conn, 30 * BATCH)
    sweep(conn)
    for _ in range(5):
        taken["claim"].append(buffers(conn, CLAIM))
        mine = rows(conn, CLAIM)
        taken["complete"].append(buffers(conn, COMPLETE, *fences(mine)))
    rows(conn, RECOVER)
    for _ in range(3):
        expire(conn, *rows(conn, CLAIM))
        taken["recover"].append(buffers(conn, RECOVER))
        # Recovered jobs are first in line: done with, so that the next batch has no old versions.
        complete(conn, *rows(conn, CLAIM))
    conn.execute("SELECT howdah.recover_stale_jobs(interval '0')")
    while value(conn, CLAIM_AND_COMPLETE, "1 hour"):
        pass
    conn.execute("SELECT pg_sleep(1.1)")
    sweep(conn)
    for _ in range(3):
        taken["peek"].append(buffers(conn, CLAIM))
    sweep(conn)  # each reads what was written since the one before the last
    for _ in range(3):
        taken["sweep"].append(buffers(conn, SWEEP))
    return {name: min(numbers) for name, numbers in taken.items()}


def sweep(conn: Connection) -> None:
    """Let the sweep's next tick come now; the other duties keep to their times."""
    conn.execute("UPDATE howdah.maintenance SET due_at = clock_timestamp() WHERE duty = 'sweep'")
    conn.execute("SELECT howdah.run_maintenance()")


@pytest.fixture(scope="module")
def measured(
    server: EmbeddedServer, template: str
) -> Iterator[tuple[dict[str, int], dict[str, int], dict[str, int]]]:
    """The costs on a fresh table, those at 200k dead entries, and how many there are."""
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE dead_entries TEMPLATE {template}".encode())
        url = server.url.replace("/howdah?", "/dead_entries?")
        with (
            psycopg.connect(url, autocommit=True) as conn,
            psycopg.connect(url) as elsewhere,
        ):
            conn.execute("CREATE EXTENSION pageinspect")
            enqueue_bulk(conn, BATCH)
            complete(conn, *claim(conn, BATCH, lease="1 hour"))
            fresh = costs(conn)
            elsewhere.isolation_level = IsolationLevel.REPEATABLE_READ
            elsewhere.execute("SELECT count(*) FROM howdah.migrations")
            made = 0
            while made < DEAD:
                enqueue_bulk(conn, 10_000)
                # Entries of leases on both sides of the moment at which recovery looks.
                for lease in ("1 millisecond", "1 hour"):
                    made += value(conn, CLAIM_AND_COMPLETE, lease)
                conn.execute("SELECT howdah.run_maintenance()")
            dead = {
                name: dead_entries(conn, name)
                for name in ("live_jobs_pending", "live_jobs_claimed", "live_jobs_pkey")
            }
            # What autovacuum does sooner or later: statistics of a table with pages and no rows.
            conn.execute("ANALYZE howdah.live_jobs")
            yield fresh, costs(conn), dead
        admin.execute("DROP DATABASE dead_entries WITH (FORCE)")


def test_the_dead_entries_are_there(measured: Any) -> None:
    _, _, dead = measured
    assert {name: count >= DEAD for name, count in dead.items()} == dict.fromkeys(dead, True)


@pytest.mark.parametrize("what", ["claim", "complete", "recover", "peek", "sweep"])
def test_200000_dead_entries_at_most_double_the_pages_of(measured: Any, what: str) -> None:
    fresh, burdened, _ = measured
    assert burdened[what] <= 2 * fresh[what], (fresh, burdened)


NOTHING = ("'{}', '{}'", "'{%(id)s}', '{%(id)s}'")
CALLS = {
    "complete_jobs": "complete_jobs({})",
    "fail_jobs": "fail_jobs({}, '{{no}}')",
    "release_jobs": "release_jobs({})",
    "stop_jobs": "stop_jobs({})",
    "start_jobs": "start_jobs({})",
    "extend_jobs": "extend_jobs({})",
    "report_progress": "report_progress({}, '{{1}}')",
    "add_events": "add_events({}, '{{note}}', NULL)",
    "held_jobs": "held_jobs({})",
    "cancel_jobs": "cancel_jobs({0:.0}'{{}}')",
    "takeover_jobs": "takeover_jobs({0:.0}'{{}}')",
    "recover": "recover_expired()",
    "late": "recover_late()",
}


@pytest.fixture(scope="module")
def drained(server: EmbeddedServer, template: str) -> Iterator[Connection]:
    """A queue with some jobs in flight, and dead entries in each of its indexes."""
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE drained TEMPLATE {template}".encode())
        url = server.url.replace("/howdah?", "/drained?")
        with psycopg.connect(url, autocommit=True) as conn, psycopg.connect(url) as elsewhere:
            elsewhere.isolation_level = IsolationLevel.REPEATABLE_READ
            elsewhere.execute("SELECT count(*) FROM howdah.migrations")
            conn.execute(
                "SELECT count(*) FROM howdah.enqueue_jobs((SELECT jsonb_agg(jsonb_build_object("
                "'job_type', 'work', 'ordering_key', n::text)) FROM generate_series(1, 5000) AS n))"
            )
            for _ in range(4):
                enqueue_bulk(conn, 5000)
                conn.execute(CLAIM_AND_COMPLETE.encode(), ("1 millisecond",))
            while value(conn, CLAIM_AND_COMPLETE, "1 millisecond"):
                pass
            enqueue_bulk(conn, 30)
            claim(conn, 30, lease="1 hour")
            conn.execute("VACUUM ANALYZE howdah.live_jobs")
            conn.execute("SELECT howdah.run_maintenance()")
            conn.execute("SELECT pg_sleep(2.2)")  # a run starts a second before the one before it
            conn.execute("SELECT howdah.recover_expired(), howdah.recover_late()")
            yield conn
        admin.execute("DROP DATABASE drained WITH (FORCE)")


@pytest.mark.parametrize("ids", NOTHING, ids=["no job", "a job that is gone"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_finds_nothing_reads_no_dead_entries(
    drained: Connection, name: str, ids: str
) -> None:
    """With a plan for an empty array, the planner may choose any partial index: a condition that is never true
    implies the condition of each. It then reads all of it."""
    call = CALLS[name].format(ids % {"id": "00000000-0000-7000-8000-000000000000"})
    read = [buffers(drained, f"SELECT * FROM howdah.{call}") for _ in range(8)]
    assert max(read[1:]) < 200, read


# ── claims of one job ─────────────────────────────────────────────────────────────────────────────

ONE = "SELECT id, lease_id FROM howdah.claim_job_batch('worker', NULL, 1, '1 hour', p_suspects_alone => false)"
SINGLE = """
DO $$
DECLARE
    v_job record;
BEGIN
    FOR n IN 1..%s LOOP
        PERFORM howdah.enqueue_job('type ' || n %% 8);
        COMMIT;
        SELECT id, lease_id INTO v_job
        FROM howdah.claim_job_batch('worker', NULL, 1, '1 hour', p_suspects_alone => false);
        PERFORM howdah.complete_jobs(ARRAY[v_job.id], ARRAY[v_job.lease_id]);
        COMMIT;
    END LOOP;
END $$
"""


def test_claims_of_one_job_do_not_read_more_the_longer_a_transaction_stays_open(
    fresh_database: str,
) -> None:
    """Eight lanes, one job at a time, and a sweep now and then, as in production: the pages of a claim are those of
    the last seconds, and the sweep reads no more than what was written since the sweep before the last."""
    with (
        psycopg.connect(fresh_database, autocommit=True) as conn,
        psycopg.connect(fresh_database) as elsewhere,
    ):
        conn.execute("SET synchronous_commit = off")
        elsewhere.isolation_level = IsolationLevel.REPEATABLE_READ
        elsewhere.execute("SELECT count(*) FROM howdah.migrations")
        claims, sweeps = [], []
        for _ in range(6):
            conn.execute((SINGLE % 1500).encode())
            sweeps.append(buffers(conn, SWEEP))
            conn.execute("SELECT howdah.enqueue_job('type 0')")
            claims.append(buffers(conn, ONE))
            conn.execute("SELECT howdah.cancel_jobs(ARRAY (SELECT id FROM howdah.live_jobs))")
        # The first rounds fill the time that heads and sweeps look back.
        assert max(claims[3:]) <= 2 * max(claims[:2]), (claims, sweeps)
        assert max(sweeps[3:]) <= 2 * max(sweeps[:3]), (claims, sweeps)
