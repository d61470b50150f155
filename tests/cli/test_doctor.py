"""`howdah doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import psycopg.sql
from stage import invoke

if TYPE_CHECKING:
    from stage import Run, Shop

    from howdah import JobQueue


def test_doctor_names_problems_with_advice(run_on_shop: Run, read_json: Any) -> None:
    result = run_on_shop("doctor")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("✓ server         PostgreSQL ")
    found = {each["check"]: each for each in read_json(run_on_shop("doctor", "--json"))}
    assert found["schema"]["level"] == "ok"
    # fsync is off on the test server, for speed
    assert found["durability"]["level"] == "problem"
    types = found["job types"]
    assert types["level"] == "problem"
    assert '"exprot"; did you mean "export"?' in types["text"]
    assert types["advice"] in result.stdout
    assert found["notifications"]["level"] == "ok"
    assert lines[-1].endswith((" warning.", " warnings."))


def test_doctor_accepts_read_uncommitted_which_postgresql_treats_as_read_committed(
    run: Run, connect: Any, read_json: Any
) -> None:
    name = psycopg.sql.Identifier(connect().info.dbname)
    connect().execute(
        psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = {}").format(
            name, "read uncommitted"
        )
    )
    found = {each["check"]: each for each in read_json(run("doctor", "--json"))}
    assert found["server"]["level"] == "ok"


def test_doctor_names_the_limit_that_the_connections_approach(
    run: Run, connect: Any, read_json: Any
) -> None:
    conn = connect()
    name = psycopg.sql.Identifier(conn.info.dbname)
    conn.execute(psycopg.sql.SQL("ALTER DATABASE {} CONNECTION LIMIT 1").format(name))
    found = {each["check"]: each for each in read_json(run("doctor", "--json"))}
    assert found["connections"]["level"] == "warning"
    assert found["connections"]["text"].endswith(
        " of 1 in use (the CONNECTION LIMIT of this database)"
    )


def test_doctor_reports_expired_leases(
    run: Run, queue: JobQueue, connect: Any, read_json: Any
) -> None:
    queue.enqueue("work")
    queue.claim_one()
    connect().execute("UPDATE howdah.leases SET expires_at = now() - interval '1 min'")
    found = {each["check"]: each for each in read_json(run("doctor", "--json"))}
    assert found["leases"]["level"] == "problem"
    assert "howdah recover" in found["leases"]["advice"]


def test_an_expired_lease_whose_jobs_have_ended_is_no_problem(
    run: Run, queue: JobQueue, connect: Any, read_json: Any
) -> None:
    queue.enqueue("work")
    job = queue.claim_one()
    assert job is not None
    connect().execute("SELECT howdah.complete_runs(%s, %s)", ([job.id], [job.lease_id]))
    done = connect().execute("UPDATE howdah.leases SET expires_at = now() - interval '1 min'")
    assert done.rowcount == 1
    found = {each["check"]: each for each in read_json(run("doctor", "--json"))}
    assert found["leases"]["level"] == "ok"


def test_the_lease_of_a_locked_job_with_heartbeats_has_not_expired(
    run: Run, queue: JobQueue, connect: Any, read_json: Any
) -> None:
    queue.enqueue("work")
    job = queue.claim_one()
    assert job is not None
    conn, operator = connect(), connect(autocommit=False)
    conn.execute("UPDATE howdah.leases SET expires_at = now() - interval '1 min'")
    operator.execute("SELECT FROM howdah.live_jobs FOR UPDATE")
    conn.execute("SELECT howdah.extend_jobs(%s, %s)", ([job.id], [job.lease_id]))
    found = {each["check"]: each for each in read_json(run("doctor", "--json"))}
    assert found["leases"]["level"] == "ok"


def test_a_heartbeat_that_a_clock_wrote_ahead_of_time_is_no_sign_of_life(
    run: Run, connect: Any, read_json: Any
) -> None:
    conn = connect()
    for name in ("living", "ghost"):
        conn.execute(
            "SELECT howdah.register_worker(%s, 'host', 1, '{default}', '{work}', '{100}', '{}')",
            (name,),
        )
        conn.execute("SELECT howdah.touch_worker(%s, true)", (name,))
    ahead = (
        "UPDATE howdah.workers SET seen_at = now() + interval '7 days' WHERE worker_id = 'ghost'"
    )
    conn.execute(ahead)
    found = {each["check"]: each for each in read_json(run("doctor", "--json"))}
    assert found["workers"]["text"] == "1 alive, 1 lost"
    listed = read_json(run("workers", "--json"))
    assert [(each["worker_id"], each["alive"]) for each in listed] == [
        ("living", True),
        ("ghost", False),
    ]
    idle = conn.execute("SELECT howdah.idle_workers('default', 'work', 5)").fetchall()
    assert idle == [("living",)]
    conn.execute("SELECT howdah.prune()")
    assert conn.execute("SELECT worker_id FROM howdah.workers").fetchall() == [("living",)]


def test_doctor_and_other_commands_accept_an_odd_schema_name(
    empty_database: str, read_json: Any
) -> None:
    schema = 'odd "name" ' + "x" * 30
    assert invoke("migrate", "--database", empty_database, "--schema", schema).exit_code == 0
    found = read_json(invoke("doctor", "--database", empty_database, "--schema", schema, "--json"))
    assert [each["check"] for each in found if each["level"] == "unknown"] == []
    for command in (["queues"], ["tail", "--no-follow"], ["top"], ["jobs", "--where", "data.a=1"]):
        result = invoke(*command, "--database", empty_database, "--schema", schema)
        assert result.exit_code == 0, result.stderr


def test_doctor_runs_every_check_for_a_role_that_may_only_read(reader: str, read_json: Any) -> None:
    with psycopg.connect(reader) as conn:
        assert conn.info.user == "reader_role"
    found = read_json(invoke("doctor", "--database", reader, "--json"))
    assert len(found) == 17


def test_doctor_fits_a_narrow_terminal(terminal: Any, shop: Shop) -> None:
    seen = terminal("doctor", "--database", shop.url, width=60)
    seen.wait()
    assert "did you mean" in " ".join(seen.text.split())
    assert max(map(len, seen.text.splitlines())) <= 60
