"""Every hot statement looks at the rows it is about and no others: whatever the statistics say, and
whether its plan was made for these parameters or for any."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import Fences, fences, rows
from plans import explained

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plans import Node

    from howdah.embedded import EmbeddedServer

    Connection = psycopg.Connection[Any]

BATCH = 40
LANES = 6
PENDING = 24_000
CALLED = 7  # times: the sixth call of a statement is the first that may get a generic plan
# A batch, its lanes, and the entries that the calls before have left behind: they stay for as long as anybody has an
# older snapshot, as autovacuum may.
ENOUGH = (CALLED + 1) * BATCH + 2 * LANES

FILL = f"""
SELECT count(*) FROM howdah.enqueue_jobs((
    SELECT jsonb_agg(jsonb_build_object(
        'job_type', 'type ' || n % {LANES},
        'ordering_key', CASE WHEN n % 4 = 0 THEN 'key ' || n % 2000 END))
    FROM generate_series(1, {PENDING}) AS n));
SELECT count(*) FROM howdah.enqueue_jobs((
    SELECT jsonb_agg(jsonb_build_object('job_type', 'type ' || n % {LANES}, 'delay', 3600))
    FROM generate_series(1, 2000) AS n));
SELECT count(*) FROM howdah.claim_job_batch('somebody else', NULL, 4000, '1 hour');
DO $$
DECLARE
    v_ids uuid[];
    v_leases uuid[];
BEGIN
    SELECT array_agg(c.id), array_agg(c.lease_id) INTO v_ids, v_leases
    FROM howdah.claim_job_batch('somebody else', NULL, 3000) AS c;
    PERFORM howdah.complete_jobs(v_ids, v_leases);
END $$;
"""

DRAINED = """
DO $$
DECLARE
    v_ids uuid[];
    v_leases uuid[];
BEGIN
    PERFORM howdah.enqueue_jobs((
        SELECT jsonb_agg(jsonb_build_object('job_type', 'type ' || n % 6))
        FROM generate_series(1, 5000) AS n));
    SELECT array_agg(c.id), array_agg(c.lease_id) INTO v_ids, v_leases
    FROM howdah.claim_job_batch('somebody else', NULL, 5000) AS c;
    PERFORM howdah.complete_jobs(v_ids, v_leases);
END $$
"""


@pytest.fixture(scope="module", params=["fresh", "stale", "absent", "drained"])
def filled(request: pytest.FixtureRequest, server: EmbeddedServer, template: str) -> Iterator[str]:
    """A database with a backlog, history and jobs in flight, and statistics of the given kind."""
    kind = request.param
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE plans_{kind} TEMPLATE {template}".encode())
        url = server.url.replace("/howdah?", f"/plans_{kind}?")
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute(
                "DO $$ DECLARE t regclass; BEGIN FOR t IN SELECT oid FROM pg_class WHERE relkind = 'r'"
                " AND relnamespace = 'howdah'::regnamespace LOOP EXECUTE format("
                "'ALTER TABLE %s SET (autovacuum_enabled = off)', t); END LOOP; END $$"
            )
            if kind == "stale":
                conn.execute("ANALYZE")
            if kind == "drained":
                # As autovacuum finds a queue whose jobs are done: many pages, and not one row.
                conn.execute(DRAINED.encode())
                conn.execute("ANALYZE")
            for statement in FILL.split(";\nSELECT"):
                prefix = "" if statement is FILL or statement.startswith("\nSELECT") else "SELECT"
                conn.execute(f"{prefix}{statement}".encode())
            if kind == "fresh":
                conn.execute("ANALYZE")
            known = conn.execute(
                "SELECT reltuples, relpages FROM pg_class WHERE oid = 'howdah.live_jobs'::regclass"
            ).fetchone()
            assert known is not None
            tuples, pages = known
            assert {
                "fresh": tuples > 10_000,
                "stale": (tuples, pages) == (0, 0),
                "absent": tuples == -1,
                "drained": tuples == 0 and pages > 100,
            }[kind]
        yield url
        admin.execute(f"DROP DATABASE plans_{kind} WITH (FORCE)".encode())


@pytest.fixture
def conn(filled: str) -> Iterator[Connection]:
    with psycopg.connect(filled, autocommit=True) as conn:
        yield conn


CALLS = {
    "complete_jobs": ("complete_jobs(%s, %s)", ()),
    "complete_runs": ("complete_runs(%s, %s)", ()),
    "fail_jobs": ("fail_jobs(%s, %s, %s)", (["no"] * BATCH,)),
    "fail_jobs for good": (
        "fail_jobs(%s, %s, %s, %s::timestamptz[])",
        (["no"] * BATCH, [None] * BATCH),
    ),
    "release_jobs": ("release_jobs(%s, %s)", ()),
    "extend_jobs": ("extend_jobs(%s, %s, '1 hour')", ()),
    "extend_jobs of started jobs": ("extend_jobs(%s, %s, '1 hour', %s)", ([1.5] * BATCH,)),
    "start_jobs": ("start_jobs(%s, %s)", ()),
    "report_progress": ("report_progress(%s, %s, %s)", ([50] * BATCH,)),
    "add_events": ("add_events(%s, %s, %s, NULL)", (["note"] * BATCH,)),
}
OTHERS = {
    "claim_job_batch": f"claim_job_batch('worker', NULL, {BATCH})",
    "claim_runs": f"claim_runs('worker', NULL, {BATCH}, '30 s', '{{default}}')",
    "claim_job_batch by type": f"claim_job_batch('worker', '{{type 1,type 5}}', {BATCH})",
    "recover_stale_jobs": f"recover_stale_jobs(NULL, {BATCH})",
    "recover_expired": f"recover_expired({BATCH})",
    "recover_late": f"recover_late({BATCH})",
    "assign_keys": f"assign_keys({BATCH})",
    "next_due_at": "next_due_at()",
    "next_wake": "next_wake('worker')",
    "next_wake of a poll": "next_wake('worker', NULL, '{default}', true)",
    "pass_wake": "pass_wake('worker')",
    "enqueue_jobs of one": """enqueue_jobs('[{"job_type": "type 1", "ordering_key": "key 4"}]')""",
    "enqueue_jobs": "enqueue_jobs('"
    + json.dumps(
        [
            {
                "job_type": f"type {n % LANES}",
                "ordering_key": f"key {n % 1000 * 4}" if n % 2 else None,
                "idempotency_key": None if n % 4 else f"key {n}",
            }
            for n in range(BATCH)
        ]
    )
    + "')",
}


def claimed(conn: Connection) -> Fences:
    jobs = rows(
        conn,
        f"SELECT * FROM howdah.claim_job_batch('worker', NULL, {BATCH}, '1 hour', "
        "p_suspects_alone => false)",
    )
    assert len(jobs) == BATCH
    return fences(jobs)


def prepare(conn: Connection, name: str) -> None:
    """What the statement is to find."""
    if name.startswith("recover"):
        conn.execute("SELECT howdah.extend_jobs(%s, %s, '1 microsecond')", claimed(conn))
    if name == "pass_wake":
        conn.execute("SELECT howdah.register_worker('idle', 'host', 1, '{default}', '{type 1}')")
    if name == "assign_keys":
        conn.execute(
            "INSERT INTO howdah.unassigned_keys (ordering_key) "
            "SELECT 'key ' || n * 4 FROM generate_series(1, %s) AS n",
            (BATCH,),
        )


def offences(nodes: list[Node]) -> list[str]:
    """What no plan of a hot statement may contain."""
    tables = ("live_jobs", "finished_jobs", "leases")
    return [
        str(node)
        for node in nodes
        if (node.relation.startswith(tables) and node.kind == "Seq Scan")
        or node.rows > ENOUGH * (LANES if node.kind in ("Result", "Append") else 1)
    ]


@pytest.mark.parametrize("name", [*CALLS, *OTHERS])
@pytest.mark.parametrize("plans", ["auto", "force_generic_plan"])
def test_a_hot_statement_touches_no_more_than_its_batch(
    conn: Connection, name: str, plans: str
) -> None:
    conn.execute(f"SET plan_cache_mode = {plans}".encode())
    for _ in range(CALLED if plans == "auto" else 2):
        if name in CALLS:
            text, more = CALLS[name]
            parameters: tuple[Any, ...] = (*claimed(conn), *more)
        else:
            prepare(conn, name)
            text, parameters = OTHERS[name], ()
        with explained(conn) as nodes:
            conn.execute(f"SELECT * FROM howdah.{text}".encode(), parameters or None)
        assert offences(nodes) == []
        assert [node for node in nodes if node.relation == "live_jobs"], "nothing was explained"


def test_the_guard_sees_a_plan_that_reads_the_whole_table(conn: Connection) -> None:
    with explained(conn) as nodes:
        conn.execute("SELECT howdah.pending_count()")
        conn.execute("SELECT id FROM howdah.live_jobs ORDER BY data LIMIT 1")
    found = offences(nodes)
    assert any("Scan on live_jobs" in each for each in found)
    assert any(each.startswith("Sort") for each in found)
