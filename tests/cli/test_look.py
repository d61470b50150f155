"""`howdah queues`, `workers`, `explain` and `doctor`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from howdah.insight.explain import describe

if TYPE_CHECKING:
    from stage import Run, Shop

    from howdah import JobQueue


@pytest.fixture
def database(wiped: str) -> str:
    return wiped


def test_queues_shows_what_waits_and_runs(look: Run, read_json: Any) -> None:
    lines = [line.split() for line in look("queues").stdout.splitlines()]
    assert lines[0][:5] == ["TYPE", "QUEUE", "DUE", "SCHEDULED", "BLOCKED"]
    found = {
        (each["queue"], each["job_type"]): each for each in read_json(look("queues", "--json"))
    }
    resize = found["default", "resize"]
    assert (resize["due"], resize["scheduled"], resize["running"]) == (1, 1, 0)
    assert resize["mean_wait"] == pytest.approx(0.1)
    export = found["mail", "export"]
    assert (export["due"], export["blocked"], export["running"]) == (0, 1, 1)


def test_workers_are_listed(look: Run, act: Run, read_json: Any) -> None:
    heading, line = look("workers").stdout.splitlines()
    assert heading.split() == ["WORKER", "STATE", "RUNNING", "SEEN", "UP", "QUEUES", "TYPES"]
    assert line.startswith("worker-1  busy")
    assert "1/8" in line
    [worker] = read_json(look("workers", "--json"))
    assert (worker["worker_id"], worker["host"], worker["alive"]) == (
        "worker-1",
        "db.example.com",
        True,
    )
    nobody = act("workers")
    assert (nobody.exit_code, nobody.stdout) == (0, "")
    assert nobody.stderr == "No worker is running. Start one with `howdah worker MODULE:APP`.\n"


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("completed", "completed", "it completed at "),
        ("failed", "failed", ": CardError: declined 2"),
        ("cancelled", "cancelled", "it was cancelled at "),
        ("running", "running", "it runs on worker-1"),
        ("blocked", "key-held", 'the key "alice" is held by job '),
        ("pending", "next", "it is next in line"),
        ("scheduled", "due-later", "it was scheduled: due in "),
        ("misspelt", "unknown-type", 'no live worker has a task named "exprot"; did you mean "export"?'),
    ],
)  # fmt: skip
def test_explain_says_why(
    look: Run, shop: Shop, read_json: Any, name: str, code: str, text: str
) -> None:
    job_id = getattr(shop, name)
    result = look("explain", job_id)
    assert result.exit_code == 0
    assert text in result.stdout
    [answer] = read_json(look("explain", job_id, "--json"))
    assert answer["id"] == str(job_id)
    assert [reason["code"] for reason in answer["reasons"]] == [code]


def test_explain_names_the_holder_of_the_key_and_the_place_in_line(
    look: Run, shop: Shop, read_json: Any
) -> None:
    assert str(shop.running) in look("explain", shop.blocked).stdout
    [answer] = read_json(look("explain", shop.misspelt, "--json"))
    assert answer["ahead"] == 2
    [answer] = read_json(look("explain", shop.pending, "--json"))
    assert answer["starts_at"] is not None


def test_explain_without_workers(act: Run, queue: JobQueue) -> None:
    job = queue.enqueue("work")
    assert "no worker is running; start one with `howdah worker`" in act("explain", job.id).stdout


@pytest.mark.parametrize("command", ["explain", "doctor"])
def test_what_it_says_fits_a_terminal(terminal: Any, shop: Shop, command: str) -> None:
    which = [shop.misspelt] if command == "explain" else []
    seen = terminal(command, *which, "--database", shop.url, width=60)
    seen.wait()
    assert "did you mean" in " ".join(seen.text.split())
    assert max(map(len, seen.text.splitlines())) <= 60


def test_doctor_names_problems_and_what_to_do(look: Run, read_json: Any) -> None:
    result = look("doctor")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("✓ server         PostgreSQL ")
    found = {each["check"]: each for each in read_json(look("doctor", "--json"))}
    assert found["schema"]["level"] == "ok"
    # fsync is off on the server of the tests, to make them quick
    assert found["durability"]["level"] == "problem"
    types = found["job types"]
    assert types["level"] == "problem"
    assert '"exprot"; did you mean "export"?' in types["text"]
    assert types["advice"] in result.stdout
    assert found["notifications"]["level"] == "ok"
    assert lines[-1].endswith((" warning.", " warnings."))


def test_doctor_sees_expired_leases(
    act: Run, queue: JobQueue, connect: Any, read_json: Any
) -> None:
    queue.enqueue("work")
    queue.claim_one()
    connect().execute("UPDATE howdah.live_jobs SET lease_expires_at = now() - interval '1 min'")
    found = {each["check"]: each for each in read_json(act("doctor", "--json"))}
    assert found["leases"]["level"] == "problem"
    assert "howdah recover" in found["leases"]["advice"]


def test_doctor_copes_with_an_odd_schema_name(empty_database: str, read_json: Any) -> None:
    from stage import invoke

    schema = 'odd "name" ' + "x" * 30
    assert invoke("migrate", "--database", empty_database, "--schema", schema).exit_code == 0
    found = read_json(invoke("doctor", "--database", empty_database, "--schema", schema, "--json"))
    assert [each["check"] for each in found if each["level"] == "unknown"] == []
    for command in (["queues"], ["tail", "--no-follow"], ["top"], ["jobs", "--where", "data.a=1"]):
        result = invoke(*command, "--database", empty_database, "--schema", schema)
        assert result.exit_code == 0, result.stderr


def test_doctor_reports_what_it_may_not_see(reader: str, read_json: Any) -> None:
    from stage import invoke

    with psycopg.connect(reader) as conn:
        assert conn.info.user == "looker"
    found = read_json(invoke("doctor", "--database", reader, "--json"))
    assert len(found) == 16


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0 ms"), (0.25, "250 ms"), (0.9999, "1.0 s"), (3.21, "3.2 s"), (42.4, "42 s"),
        (59.99, "1 min"), (150, "2 min"), (3600, "1 h"), (7500, "2 h 5 min"), (3 * 86400, "3 days"),
        (-5, "0 ms"),
    ],
)  # fmt: skip
def test_durations_are_described_as_people_do(seconds: float, text: str) -> None:
    assert describe(timedelta(seconds=seconds)) == text
