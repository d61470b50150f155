"""What each of the four roles can do and cannot do, on a real server that requires passwords."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import psycopg
import pytest
from secured import ROLES, Secured, run, succeed

from howdah import App, AsyncJobQueue, JobQueue, NewJob, NotPermitted
from howdah.encoding.copy_format import COLUMNS
from howdah.protocol.new_jobs import CHUNK_JOBS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENQUEUEING = {"enqueue_job", "enqueue_jobs", "announce_jobs", "refuse_replica_role"}
READING = {"pending_count", "next_due_at", "get_jobs", "get_events"}
WORKING = {
    "claim_job_batch", "claim_runs", "enqueue_and_claim", "start_jobs", "extend_jobs", "report_progress", "add_events",
    "add_late_events", "complete_jobs", "complete_runs", "fail_jobs", "release_jobs", "stop_jobs", "held_jobs", "watch_jobs",
    "unwatch_jobs", "register_worker", "touch_worker", "beat_worker", "remove_worker",
    "wake_channel", "next_wake", "pass_wake", "recover_stale_jobs", "run_maintenance",
    "run_due_duty",
}  # fmt: skip
OPERATING = {"cancel_jobs", "retry_jobs", "takeover_jobs", "clear_finished", "remove_jobs"}
FUNCTIONS = {
    "producer": ENQUEUEING,
    "worker": ENQUEUEING | READING | WORKING,
    "observer": READING,
}
TABLES = {
    "producer": {"migrations": {"SELECT"}, "jobs": {"INSERT"}, "live_jobs": {"INSERT"}},
    "worker": {
        "migrations": {"SELECT"}, "jobs": {"INSERT", "SELECT"}, "job_events": {"SELECT"},
        "live_jobs": {"INSERT"},
    },
    "observer": {
        table: {"SELECT"}
        for table in (
            "migrations", "jobs", "job_events", "live_jobs", "leases", "finished_jobs",
            "finished_jobs_default", "job_events_default", "lanes", "idempotency_keys", "freed_keys", "unassigned_keys", "workers", "watchers", "maintenance", "throughput",
            "grants",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_role_may_execute_its_functions_and_no_others(secured: Secured, kind: str) -> None:
    with secured.connect() as conn:
        callable_ = conn.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace "
            "AND has_function_privilege(%s, oid, 'EXECUTE')",
            (ROLES[kind],),
        ).fetchall()
    assert {name for (name,) in callable_} == FUNCTIONS[kind]


@pytest.mark.parametrize("kind", ["producer", "worker"])
def test_a_role_may_insert_exactly_the_columns_of_a_bulk_enqueue(
    secured: Secured, kind: str
) -> None:
    with secured.connect() as conn:
        found = conn.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'howdah.live_jobs'::regclass "
            "AND attnum > 0 AND has_column_privilege(%s, attrelid, attnum, 'INSERT')",
            (ROLES[kind],),
        ).fetchall()
    assert {name for (name,) in found} == set(COLUMNS)


@pytest.mark.parametrize("kind", TABLES)
def test_a_role_has_its_privileges_on_relations_and_no_others(secured: Secured, kind: str) -> None:
    privileges = ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"]
    with secured.connect() as conn:
        found = conn.execute(
            "SELECT relname, array_agg(p) FROM pg_class, unnest(%s::text[]) AS p "
            "WHERE relnamespace = 'howdah'::regnamespace AND relkind IN ('r', 'p', 'v', 'S') "
            "AND (has_table_privilege(%s, oid, p) "
            "     OR (p IN ('SELECT', 'INSERT', 'UPDATE') AND has_any_column_privilege(%s, oid, p))) "
            "GROUP BY relname",
            (privileges, ROLES[kind], ROLES[kind]),
        ).fetchall()
        (creates,) = conn.execute(
            "SELECT has_schema_privilege(%s, 'howdah', 'CREATE')", (ROLES[kind],)
        ).fetchone() or (None,)
    assert {name: set(given) for name, given in found} == TABLES[kind]
    assert creates is False


def test_other_roles_have_no_privileges(secured: Secured) -> None:
    with secured.connect() as conn:
        conn.execute("CREATE ROLE stranger")
        try:
            found = conn.execute(
                "SELECT proname FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace "
                "AND has_function_privilege('stranger', oid, 'EXECUTE') UNION ALL "
                "SELECT relname FROM pg_class WHERE relnamespace = 'howdah'::regnamespace "
                "AND relkind IN ('r', 'p', 'v') AND has_any_column_privilege('stranger', oid, 'SELECT')"
            ).fetchall()
        finally:
            conn.execute("DROP ROLE stranger")
    assert found == []


# ── the producer ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def producer(secured: Secured) -> Iterator[JobQueue]:
    queue = JobQueue(secured.as_kind("producer"))
    yield queue
    queue.close()


def jobs(secured: Secured) -> list[Any]:
    with secured.connect() as conn:
        return conn.execute(
            "SELECT job_type, queue, data, ordering_key, holds_key FROM howdah.jobs ORDER BY seq"
        ).fetchall()


def test_a_producer_cannot_put_a_new_job_in_front_of_a_finished_one(secured: Secured) -> None:
    finished = "01900000-0000-7000-8000-000000000001"
    with secured.connect() as conn:
        conn.execute("SELECT howdah.enqueue_job('charge', p_id => %s)", (finished,))
        conn.execute("SELECT * FROM howdah.cancel_jobs(ARRAY[%s]::uuid[])", (finished,))
    row = "INSERT INTO howdah.live_jobs (id, job_type) VALUES (%s, 'nobody')"
    with psycopg.connect(secured.as_kind("producer"), autocommit=True) as conn:
        with pytest.raises(psycopg.errors.UniqueViolation, match="exists and is finished"):
            conn.execute(row, (finished,))
        conn.execute(row, (uuid4(),))
        new = [{"id": finished, "job_type": "nobody"}]
        for batch in (new, [*new, {"job_type": "other"}]):
            answer = conn.execute(
                "SELECT is_new FROM howdah.enqueue_jobs(%s, p_fresh_ids => true)",
                (json.dumps(batch),),
            ).fetchall()
            assert answer[0] == (False,)
    with secured.connect() as conn:
        found = conn.execute(
            "SELECT job_type, status FROM howdah.jobs WHERE id = %s", (finished,)
        ).fetchall()
    assert found == [("charge", "cancelled")]


def test_a_producer_enqueues_single_jobs_bulk_jobs_and_with_an_idempotency_key(
    secured: Secured, producer: JobQueue
) -> None:
    producer.enqueue("mail", {"n": 1}, queue="a-new-queue", priority=7, delay=60)
    first = producer.enqueue("mail", {"n": 2}, idempotency_key="once")
    again = producer.enqueue("mail", {"n": 2}, idempotency_key="once")
    producer.enqueue_many([NewJob(job_type="mail", data={"n": n}) for n in range(4, 7)])
    assert first.is_new
    assert (again.id, again.is_new) == (first.id, False)
    assert [job[2]["n"] for job in jobs(secured)] == [1, 2, 4, 5, 6]
    handles = producer.enqueue_many(NewJob(job_type="bulk", queue="b") for _ in range(CHUNK_JOBS))
    assert len(jobs(secured)) == 5 + len(handles)
    with secured.connect() as conn:
        lanes = conn.execute("SELECT count(*) FROM howdah.lanes WHERE job_type = 'bulk'")
        assert lanes.fetchone() == (1,)


async def test_a_producer_enqueues_from_async_code(secured: Secured) -> None:
    queue = AsyncJobQueue(secured.as_kind("producer"))
    await queue.enqueue("mail", {"n": 1})
    conn = await asyncpg.connect(secured.as_kind("producer"))
    async with conn.transaction():
        await queue.enqueue("mail", {"n": 2}, conn=conn, ordering_key="k")
    await conn.close()
    await queue.close()
    assert [job[2]["n"] for job in jobs(secured)] == [1, 2]


def test_a_producer_enqueues_in_its_own_transaction(secured: Secured, producer: JobQueue) -> None:
    with secured.connect("producer", autocommit=False) as conn:
        producer.enqueue("mail", {"n": 1}, conn=conn)
        conn.commit()
        producer.enqueue("mail", {"n": 2}, conn=conn)
        conn.rollback()
    assert [job[2]["n"] for job in jobs(secured)] == [1]


def test_a_producer_enqueues_by_insert_and_by_function(secured: Secured) -> None:
    with secured.connect("producer") as conn:
        conn.execute("INSERT INTO howdah.jobs (job_type, data) VALUES ('mail', '{\"n\": 1}')")
        conn.execute("SELECT howdah.enqueue_job('mail', '{\"n\": 2}')")
    assert [job[2]["n"] for job in jobs(secured)] == [1, 2]


@pytest.mark.parametrize("way", ["commit", "immediate constraints", "another role commits"])
def test_the_ordering_keys_of_a_producer_are_assigned_when_it_commits(
    secured: Secured, way: str
) -> None:
    # Before PostgreSQL 18 the trigger that does it runs as the role that commits.
    with secured.connect() as conn:
        conn.execute(f"GRANT {ROLES['producer']} TO {ROLES['observer']}".encode())
    kind = "observer" if way == "another role commits" else "producer"
    with secured.connect(kind, autocommit=False) as conn:
        if kind == "observer":
            conn.execute(f"SET ROLE {ROLES['producer']}".encode())
        for n in (1, 2):
            conn.execute(
                "SELECT howdah.enqueue_job('mail', %s, p_ordering_key => 'key')",
                (json.dumps({"n": n}),),
            )
        if way == "immediate constraints":
            conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        if kind == "observer":
            conn.execute("RESET ROLE")
        conn.commit()
    with secured.connect() as conn:
        conn.execute(f"REVOKE {ROLES['producer']} FROM {ROLES['observer']}".encode())
        if way == "immediate constraints":
            # The keys would be decided before the commit: they are left to maintenance (decision 0034).
            conn.execute("SELECT howdah.run_maintenance()")
    assert [job[4] for job in jobs(secured)] == [True, False]


def test_a_producer_notifies_an_idle_worker(secured: Secured, producer: JobQueue) -> None:
    with secured.connect("worker") as worker:
        row = worker.execute("SELECT howdah.wake_channel('w')").fetchone()
        assert row is not None
        worker.execute(f'LISTEN "{row[0]}"'.encode())
        worker.execute("SELECT howdah.register_worker('w', 'h', 1, '{default}', '{mail}')")
        producer.enqueue("mail")
        notifications = list(worker.notifies(timeout=120, stop_after=1))
    assert [json.loads(each.payload)[0][:2] for each in notifications] == [["default", "mail"]]


def test_a_producer_can_only_enqueue(secured: Secured, producer: JobQueue) -> None:
    handle = producer.enqueue("mail", {"card": "4111"})
    before = jobs(secured)
    refused = [
        lambda: producer.get(handle),
        lambda: producer.find(),
        lambda: producer.counts(),
        lambda: producer.pending(),
        lambda: producer.claim(),
        lambda: producer.cancel(handle),
        lambda: producer.retry(handle),
        lambda: producer.clear(),
        lambda: producer.events(handle),
        lambda: producer.recover_stale_jobs(),
    ]
    for attempt in refused:
        with pytest.raises(
            NotPermitted, match=r"does not let this role do that: permission denied"
        ):
            attempt()
    assert jobs(secured) == before


HOSTILE = [
    "SELECT data FROM howdah.jobs",
    "SELECT id FROM howdah.live_jobs",
    "SELECT key FROM howdah.idempotency_keys",
    "INSERT INTO howdah.live_jobs (id, job_type, status, lease_id) "
    "VALUES (gen_random_uuid(), 'x', 'claimed', gen_random_uuid())",
    "INSERT INTO howdah.live_jobs (id, job_type, run_at) VALUES (gen_random_uuid(), 'x', '2000-01-01')",
    "INSERT INTO howdah.live_jobs (id, job_type) VALUES (gen_random_uuid(), 'x') RETURNING id",
    "INSERT INTO howdah.jobs (job_type) VALUES ('x') RETURNING data",
    "UPDATE howdah.jobs SET priority = 1",
    "DELETE FROM howdah.jobs",
    "DELETE FROM howdah.finished_jobs_default",
    "TRUNCATE howdah.live_jobs",
    "UPDATE howdah.maintenance SET due_at = 'infinity'",
    "INSERT INTO howdah.grants VALUES ('worker', current_user)",
    "SELECT howdah.complete_jobs('{}', '{}')",
    "SELECT howdah.finish_jobs('{}', 'completed')",
    "SELECT howdah.maintain_partitions()",
    "SELECT howdah.assign_key('key')",
    "SELECT howdah.run_maintenance()",
    "CREATE TABLE howdah.mine (x int)",
    "CREATE FUNCTION howdah.add_lane(text, text, int, text) RETURNS void LANGUAGE sql AS ''",
    "ALTER FUNCTION howdah.enqueue_job RESET ALL",
    "CREATE TRIGGER t BEFORE INSERT ON howdah.live_jobs EXECUTE FUNCTION howdah.assign_key_at_commit()",
    "DROP SCHEMA howdah CASCADE",
    "LOCK TABLE howdah.live_jobs",
    "SET ROLE ops",
]


@pytest.mark.parametrize("kind", ["producer", "observer"])
def test_hostile_statements_are_refused(secured: Secured, kind: str) -> None:
    with secured.connect(kind, autocommit=False) as conn:
        for statement in HOSTILE:
            if kind == "observer" and re.match(r"SELECT .* FROM ", statement):
                continue  # an observer may read
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(statement.encode())
            conn.rollback()


def test_temporary_objects_of_a_producer_do_not_replace_those_of_howdah(secured: Secured) -> None:
    with secured.connect("producer") as conn:
        conn.execute("SET search_path = pg_temp, howdah")
        conn.execute("CREATE TEMP TABLE live_jobs (LIKE pg_class)")
        conn.execute(
            "CREATE TEMP TABLE lanes (queue text, job_type text, priority int, twin boolean)"
        )
        conn.execute("CREATE TEMP TABLE workers (idle boolean, seen_at timestamptz)")
        conn.execute(
            "CREATE FUNCTION pg_temp.lower(text) RETURNS text LANGUAGE sql AS $$ SELECT 'planted' $$"
        )
        conn.execute(
            "CREATE FUNCTION pg_temp.add_lane(text, text, int) RETURNS void LANGUAGE plpgsql "
            "AS $$ BEGIN RAISE EXCEPTION 'run by %', current_user; END $$"
        )
        conn.execute("SELECT howdah.enqueue_job('mail', p_ordering_key => 'k', p_queue => 'new')")
    with secured.connect() as conn:
        assert conn.execute("SELECT queue FROM howdah.lanes").fetchall() == [("new",)]
    assert len(jobs(secured)) == 1


# ── the observer ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def filled(secured: Secured) -> Secured:
    queue = JobQueue(secured.as_kind("worker"), worker_id="w-1")
    queue.enqueue("charge", {"order": 7}, max_attempts=1)
    job = queue.claim_one()
    assert job is not None
    queue.event(job, "note", {"n": 1})
    queue.fail(job, "CardError: declined")
    queue.enqueue("charge", {"order": 8}, ordering_key="k")
    queue.close()
    return secured


def test_an_observer_can_run_every_reading_command(filled: Secured) -> None:
    there = ("--database", filled.as_kind("observer"))
    with filled.connect() as conn:
        before = _all_rows(conn)
        ids = [str(row[0]) for row in conn.execute("SELECT id FROM howdah.jobs ORDER BY seq")]
    assert "charge" in succeed("jobs", *there)
    assert "charge" in succeed("jobs", "--where", "data.order=8", *there)
    assert "declined" in succeed("show", ids[0], *there)
    assert "no worker" in succeed("explain", ids[1], *there)
    assert "charge" in succeed("queues", *there)
    assert "charge" in succeed("tail", "--no-follow", *there)
    assert "charge" in succeed("top", "--once", *there)
    assert "worker" in succeed("workers", *there)
    assert "declined" in run("wait", ids[0], *there).output
    assert "declined" in run("watch", ids[0], *there).output
    doctor = run("doctor", *there).output
    assert "permission denied" not in doctor
    assert "this role sees only its own transactions" in doctor
    with filled.connect() as conn:
        assert _all_rows(conn) == before


def _all_rows(conn: psycopg.Connection[Any]) -> list[Any]:
    tables = [*TABLES["observer"]]
    return [
        conn.execute(f"SELECT t::text FROM howdah.{t} AS t ORDER BY 1".encode()).fetchall()
        for t in tables
    ]


def test_an_observer_gets_an_error_from_every_writing_command(filled: Secured) -> None:
    with filled.connect() as conn:
        before = _all_rows(conn)
        failed, live = (str(r[0]) for r in conn.execute("SELECT id FROM howdah.jobs ORDER BY seq"))
    for command in (
        ("retry", failed), ("rm", failed), ("cancel", live), ("recover",), ("clear", "--older-than", "0s"),
        ("migrate", "--grants", "producer=grafana"),
    ):  # fmt: skip
        result = run(*command, "--database", filled.as_kind("observer"))
        assert result.exit_code == 1, command
        assert 'role "grafana"' in result.stderr
        assert re.search(r"permission denied|must be", result.stderr), result.stderr
    with filled.connect() as conn:
        assert _all_rows(conn) == before


def test_a_role_that_is_producer_and_observer_can_wait_for_a_result(
    secured: Secured, new_role: Callable[..., str]
) -> None:
    shop = new_role("shop", "LOGIN IN ROLE app_web, grafana")
    app = App(secured.as_role(shop))

    @app.task
    def double(x: int) -> int:
        return 2 * x

    handle = double.enqueue(21)
    worker = JobQueue(secured.as_kind("worker"))
    job = worker.claim_one()
    assert job is not None
    worker.complete(job, 42)
    worker.close()
    assert handle.result(timeout=120) == 42
    app.close()


# ── the administrator ─────────────────────────────────────────────────────────────────────────────


def test_an_administrator_can_do_everything(filled: Secured) -> None:
    there = ("--database", filled.as_kind("administrator"))
    with filled.connect() as conn:
        failed, live = (str(r[0]) for r in conn.execute("SELECT id FROM howdah.jobs ORDER BY seq"))
    assert "up to date" in succeed("migrate", *there)
    succeed("retry", failed, *there)
    succeed("cancel", live, *there)
    succeed("cancel", failed, *there)
    succeed("rm", live, *there)
    succeed("recover", *there)
    succeed("clear", "--older-than", "0s", *there)
    queue = JobQueue(filled.as_kind("administrator"))
    queue.enqueue("mail")
    assert [job.job_type for job in queue.claim()] == ["mail"]
    queue.close()


def test_a_privilege_granted_by_hand_survives_granting_again(
    secured: Secured, producer: JobQueue
) -> None:
    with secured.connect("administrator") as conn:
        conn.execute("GRANT EXECUTE ON FUNCTION howdah.cancel_jobs TO app_web")
    succeed("migrate", "--grants", "--database", secured.as_kind("administrator"))
    handle = producer.enqueue("mail")
    producer.cancel(handle)
    assert producer.enqueue("mail", idempotency_key=str(uuid4())).is_new
