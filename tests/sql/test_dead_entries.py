"""While a transaction elsewhere stays open, finished jobs and their leases leave index entries that vacuum cannot
remove. Claiming, completing, heartbeats and recovering must not pay for them."""

from __future__ import annotations

import contextlib
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, enqueue_bulk, expire, fences, rows, value
from plans import buffers
from psycopg import IsolationLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
EXTEND = (
    "SELECT * FROM howdah.extend_jobs(%s::uuid[], %s::uuid[], '1 hour', p_more_leases => %s::uuid[], "
    "p_ended_leases => %s::uuid[])"
)
MEASURED = (
    "claim", "extend", "complete", "end", "recover", "recover nothing", "late", "peek", "sweep",
)  # fmt: skip
# A heartbeat looks at few pages. The transaction keeps the versions of its own jobs, too.
KEPT_VERSIONS = {"extend": 3 * BATCH, "end": 3 * BATCH}
INDEXES = {
    "live_jobs_pending": "live_jobs WHERE status = 'pending' AND blockers = 0",
    "live_jobs_pkey": "live_jobs",
    "leases_pkey": "leases",
    "leases_expired": "leases",
}
RECOVER = "SELECT howdah.recover_expired()"
LATE = "SELECT howdah.recover_late()"
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
    live = value(conn, f"SELECT count(*) FROM howdah.{INDEXES[index]}")
    return int(entries) - int(live)


def end_leases(conn: Connection, count: int) -> None:
    """What so many claims of one job each leave behind: leases that were removed by their workers. They expired before the
    last run of recovery, or will expire after the next one."""
    conn.execute(
        "INSERT INTO howdah.leases (lease_id, worker_id, claimed_at, written_at, expires_at, job_ids) "
        "SELECT gen_random_uuid(), 'worker', clock_timestamp(), clock_timestamp(), "
        "clock_timestamp() + (mod(n, 2) * 2 - 1) * (1 + random()) * interval '30 minutes', "
        "ARRAY[gen_random_uuid()] FROM generate_series(1, %s) AS n",
        (count,),
    )
    conn.execute("SELECT howdah.remove_ended_leases(ARRAY (SELECT lease_id FROM howdah.leases))")


def settled(read: list[int]) -> int:
    """The less of the last two: what grows has grown in both, and a call after autovacuum has renewed the statistics reads
    the catalogue, too."""
    return min(read[-2:])


def costs(conn: Connection) -> dict[str, int]:
    """Pages touched by a claim, a heartbeat, a completion and a recovery of a batch, by a heartbeat that removes a lease, by
    a claim and recoveries of nothing, and by a sweep.

    The least of several: a relation whose statistics were just renewed costs a look at the catalogue."""
    taken: dict[str, list[int]] = {name: [] for name in MEASURED}
    # The head keeps a second behind: what was enqueued before that is not this claim's neighbourhood.
    conn.execute("SELECT pg_sleep(1.1)")
    enqueue_bulk(conn, 30 * BATCH)
    sweep(conn)
    for _ in range(5):
        taken["claim"].append(buffers(conn, CLAIM))
        mine = rows(conn, CLAIM)
        leases = [*{job.lease_id for job in mine}]
        taken["extend"].append(buffers(conn, EXTEND, *fences(mine), leases, []))
        taken["complete"].append(buffers(conn, COMPLETE, *fences(mine)))
        taken["end"].append(buffers(conn, EXTEND, [], [], [], leases))
    rows(conn, RECOVER)
    rows(conn, LATE)
    for _ in range(3):
        expire(conn, *rows(conn, CLAIM))
        taken["recover"].append(buffers(conn, RECOVER))
        # Recovered jobs are first in line: done with, so that the next batch has no old versions.
        complete(conn, *rows(conn, CLAIM))
    conn.execute("SELECT howdah.recover_stale_jobs(interval '0')")
    while value(conn, CLAIM_AND_COMPLETE, "1 hour"):
        pass
    conn.execute("SELECT pg_sleep(1.1)")
    for _ in range(3):  # each starts a quarter of a second before the one before it
        taken["recover nothing"].append(buffers(conn, RECOVER))
        taken["late"].append(buffers(conn, LATE))
        conn.execute("SELECT pg_sleep(0.3)")
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
                end_leases(conn, 10_000)
                conn.execute("SELECT howdah.run_maintenance()")
            dead = {name: dead_entries(conn, name) for name in INDEXES}
            # What autovacuum does sooner or later: statistics of a table with pages and no rows.
            conn.execute("ANALYZE howdah.live_jobs, howdah.leases")
            yield fresh, costs(conn), dead
        admin.execute("DROP DATABASE dead_entries WITH (FORCE)")


def test_the_dead_entries_are_there(measured: Any) -> None:
    _, _, dead = measured
    assert {name: count >= DEAD for name, count in dead.items()} == dict.fromkeys(dead, True)


@pytest.mark.parametrize("what", MEASURED)
def test_200000_dead_entries_at_most_double_the_pages_of(measured: Any, what: str) -> None:
    fresh, burdened, _ = measured
    assert burdened[what] <= 2 * fresh[what] + KEPT_VERSIONS.get(what, 0), (fresh, burdened)


NOTHING = ("'{}', '{}'", "'{%(id)s}', '{%(id)s}'")
CALLS = {
    "complete_jobs": "complete_jobs({})",
    "complete_runs": "complete_runs({})",
    "fail_jobs": "fail_jobs({}, '{{no}}')",
    "release_jobs": "release_jobs({})",
    "stop_jobs": "stop_jobs({})",
    "start_jobs": "start_jobs({})",
    "extend_jobs": "extend_jobs({})",
    "extend_jobs of leases": "extend_jobs({0}, p_more_leases => {1}, p_ended_leases => {1})",
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
                end_leases(conn, 5000)
            while value(conn, CLAIM_AND_COMPLETE, "1 millisecond"):
                pass
            enqueue_bulk(conn, 30)
            claim(conn, 30, lease="1 hour")
            conn.execute("VACUUM ANALYZE howdah.live_jobs, howdah.leases")
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
    ids %= {"id": "00000000-0000-7000-8000-000000000000"}
    call = CALLS[name].format(ids, ids.split(", ")[0])
    read = [buffers(drained, f"SELECT * FROM howdah.{call}") for _ in range(8)]
    assert max(read[1:]) < 200, read


# ── claims of one job ─────────────────────────────────────────────────────────────────────────────

ONE = "SELECT id, lease_id FROM howdah.claim_job_batch('worker', NULL, 1, '1 hour', p_suspects_alone => false)"
ONE_BY_ONE = """
DO $$
DECLARE
    v_job record;
BEGIN
    FOR n IN 1..%(count)s LOOP
        PERFORM howdah.enqueue_job(%(job)s);
        COMMIT;
        SELECT id, lease_id INTO v_job
        FROM howdah.claim_job_batch('worker', NULL, 1, '1 hour', p_suspects_alone => false);
        PERFORM howdah.complete_jobs(ARRAY[v_job.id], ARRAY[v_job.lease_id]);
        COMMIT;
    END LOOP;
END $$
"""


def run_one_by_one(conn: Connection, count: int, job: str) -> None:
    """Enqueue, claim and complete so many jobs, one at a time."""
    conn.execute((ONE_BY_ONE % {"count": count, "job": job}).encode())


@pytest.fixture
def held(fresh_database: str) -> Iterator[Connection]:
    """A database with a transaction that stays open."""
    with (
        psycopg.connect(fresh_database, autocommit=True) as conn,
        psycopg.connect(fresh_database) as elsewhere,
    ):
        conn.execute("SET synchronous_commit = off")
        elsewhere.isolation_level = IsolationLevel.REPEATABLE_READ
        elsewhere.execute("SELECT count(*) FROM howdah.migrations")
        yield conn


@pytest.fixture
def connect_fresh(fresh_database: str) -> Iterator[Callable[[], Connection]]:
    """Opens further connections to the database of `held`."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(psycopg.connect(fresh_database))


def test_claims_of_one_job_do_not_read_more_the_longer_a_transaction_stays_open(
    held: Connection,
) -> None:
    """Eight lanes, one job at a time, and a sweep now and then, as in production: the pages of a claim are those of
    the last seconds, and the sweep reads no more than what was written since the sweep before the last."""
    claims, sweeps = [], []
    rates = []  # a claim reads the entries of a quarter of a second, a sweep those since the sweep before the last
    for _ in range(9):
        began = time.monotonic()
        run_one_by_one(held, 1500, "'type ' || n % 8")
        rates.append(1500 / (time.monotonic() - began))
        sweeps.append(buffers(held, SWEEP))
        held.execute("SELECT howdah.enqueue_job('type 0')")
        claims.append(buffers(held, ONE))
        held.execute("SELECT howdah.cancel_jobs(ARRAY (SELECT id FROM howdah.live_jobs))")
    # The first round fills the time that heads and sweeps look back. Medians: heads move by chance.
    per_rate = [pages / rate for pages, rate in zip(claims, rates, strict=True)]
    assert median(per_rate[5:]) <= 1.5 * median(per_rate[1:5]), (claims, rates)
    assert median(sweeps[5:]) <= 1.5 * median(sweeps[1:5]), (claims, sweeps)


def test_a_sweep_does_not_read_more_while_there_is_always_an_open_producer(
    held: Connection, connect_fresh: Callable[[], Connection]
) -> None:
    """Each producer spans some sweeps and the beginning of the next one, so there is no sweep that none spans."""
    producers = [connect_fresh(), connect_fresh()]
    read = []
    for n in range(24):
        producers[n % 2].execute("SELECT howdah.enqueue_job('late', p_ordering_key => 'late')")
        rows(held, SWEEP)
        producers[1 - n % 2].commit()
        run_one_by_one(held, 100, f"'type ' || n % 4, p_ordering_key => '{n} ' || n % 50")
        read.append(buffers(held, SWEEP))
    assert max(read[12:]) <= 1.5 * max(read[4:12]), read


def test_a_claim_for_a_late_notification_reads_from_its_due_time_on(held: Connection) -> None:
    """On a loaded machine many notifications arrive later than the margin of a head."""
    read = []
    for _ in range(4):
        run_one_by_one(held, 1500, "'type ' || n % 8")
        rows(held, SWEEP)
        held.execute("SELECT howdah.enqueue_job('type 0')")
        due = value(held, "SELECT min(run_at) FROM howdah.live_jobs")
        held.execute("SELECT pg_sleep(0.6)")
        rows(held, SWEEP)
        late = ONE.replace("p_suspects", f"p_due_from => '{due.isoformat()}', p_suspects")
        read.append(buffers(held, late))
        held.execute("SELECT howdah.takeover_jobs(ARRAY (SELECT id FROM howdah.live_jobs))")
        held.execute("SELECT howdah.cancel_jobs(ARRAY (SELECT id FROM howdah.live_jobs))")
    assert settled(read) <= read[0] + 40, read


@pytest.mark.parametrize("keys", [1, 40, 1000])
def test_a_sweep_reads_no_jobs_of_ordering_keys_that_have_ended(
    held: Connection, connect_fresh: Callable[[], Connection], keys: int
) -> None:
    """Each session plans by the statistics of its first sweep."""
    read = []
    for _ in range(4):
        run_one_by_one(held, 1000, f"'work', p_ordering_key => 'key ' || n % {keys}")
        held.execute("ANALYZE howdah.live_jobs")
        session = connect_fresh()
        session.autocommit = True
        for _ in range(3):
            rows(session, SWEEP)
        read.append(buffers(session, SWEEP))
    assert settled(read) <= read[0] + 40, read


@pytest.mark.parametrize("analyzed", [False, True])
def test_heartbeats_and_recovery_do_not_read_leases_that_have_ended(
    held: Connection, analyzed: bool
) -> None:
    """Jobs come one by one, and a few run for long: their leases are extended, and one of them expires."""
    read: dict[str, list[int]] = {"extend": [], "recover": [], "late": [], "expired": []}
    for _ in range(5):
        run_one_by_one(held, 500, "'work'")
        end_leases(held, 3000)
        if analyzed:
            held.execute("ANALYZE howdah.leases")
        held.execute("SELECT pg_sleep(0.3)")
        rows(held, RECOVER)
        rows(held, LATE)
        held.execute("SELECT pg_sleep(0.3)")
        enqueue_bulk(held, 3)
        jobs = [claim(held, 1)[0] for _ in range(3)]
        leases = [job.lease_id for job in jobs]
        read["extend"].append(buffers(held, EXTEND, *fences(jobs), leases, []))
        read["late"].append(buffers(held, LATE))
        expire(held, jobs[0])
        read["expired"].append(buffers(held, RECOVER))
        held.execute("SELECT pg_sleep(0.3)")
        rows(held, RECOVER)
        read["recover"].append(buffers(held, RECOVER))
        held.execute("SELECT howdah.takeover_jobs(ARRAY (SELECT id FROM howdah.live_jobs))")
        held.execute("SELECT howdah.cancel_jobs(ARRAY (SELECT id FROM howdah.live_jobs))")
    assert {name: max(numbers[1:]) <= numbers[0] + 40 for name, numbers in read.items()} == (
        dict.fromkeys(read, True)
    ), read


# ── what else a transaction that stays open keeps ─────────────────────────────────────────────────

WATCHED = """
DO $$
BEGIN
    FOR n IN 1..%s LOOP
        PERFORM howdah.watch_jobs('watcher', ARRAY[gen_random_uuid()]);
        COMMIT;
        DELETE FROM howdah.watchers;
        COMMIT;
    END LOOP;
END $$
"""
CANCELLED_EARLY = """
DO $$
BEGIN
    FOR n IN 1..%s LOOP
        PERFORM howdah.cancel_jobs(ARRAY[howdah.enqueue_job('work', p_run_at => now() + interval '1 minute')]);
        COMMIT;
    END LOOP;
END $$
"""


def test_a_job_of_a_key_does_not_read_those_that_have_ended(held: Connection) -> None:
    """The key has no holder whenever a job is enqueued, so its holder is searched for."""
    enqueued, assigned = [], []
    for _ in range(5):
        run_one_by_one(held, 400, "'work', p_ordering_key => 'key'")
        for _ in range(2):
            rows(held, SWEEP)
        enqueued.append(buffers(held, "SELECT howdah.enqueue_job('work', p_ordering_key => 'key')"))
        held.execute("INSERT INTO howdah.unassigned_keys (ordering_key) VALUES ('key')")
        assigned.append(buffers(held, "SELECT howdah.assign_keys()"))
        held.execute("SELECT howdah.cancel_jobs(ARRAY (SELECT id FROM howdah.live_jobs))")
    assert settled(enqueued) <= enqueued[0] + 20, (enqueued, assigned)
    assert settled(assigned) <= assigned[0] + 20, (enqueued, assigned)


def test_a_completion_does_not_read_watchers_that_have_gone(held: Connection) -> None:
    read = []
    for _ in range(3):
        held.execute((WATCHED % 2000).encode())
        held.execute("SELECT howdah.enqueue_job('work')")
        (job,) = claim(held, 1)
        read.append(buffers(held, COMPLETE, *fences([job])))
    assert settled(read) <= read[0] + 20, read


@pytest.mark.parametrize("call", ["SELECT * FROM howdah.next_wake('worker')", SWEEP])
def test_jobs_that_were_cancelled_before_they_were_due_are_not_read(
    held: Connection, call: str
) -> None:
    read = []
    for _ in range(3):
        held.execute((CANCELLED_EARLY % 2000).encode())
        read.append(buffers(held, call))
    assert settled(read) <= read[0] + 20, read


def test_pruning_does_not_read_what_was_pruned(held: Connection) -> None:
    key = "p_idempotency_key => gen_random_uuid()::text"
    read = []
    for _ in range(6):
        run_one_by_one(held, 300, f"'work', p_keep => interval '1 second', {key}")
        held.execute("UPDATE howdah.idempotency_keys SET expires_at = clock_timestamp()")
        held.execute((WATCHED % 300).encode())
        held.execute(
            f"SELECT howdah.cancel_jobs(ARRAY[howdah.enqueue_job('work', {key})])".encode()
        )
        # Until the jobs have expired, and nothing that expired before the last run is left.
        held.execute("SELECT pg_sleep(1.1)")
        held.execute(
            "UPDATE howdah.maintenance SET observed = clock_timestamp(), reached = now() WHERE duty = 'prune'"
        )
        read.append(buffers(held, "SELECT * FROM howdah.prune()"))
        assert rows(held, "SELECT FROM howdah.finished_jobs_short") == []
        assert rows(held, "SELECT FROM howdah.idempotency_keys") == []
        assert rows(held, "SELECT FROM howdah.freed_keys") == []
    assert max(read[3:]) <= 1.2 * read[1], read
