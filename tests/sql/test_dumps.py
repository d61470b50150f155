"""A queue survives pg_dump and pg_restore, in every form in which people use them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from calls import claim, complete, enqueue, fail, maintain, status, value

from howdah import JobQueue
from howdah.embedded.binaries import find_binaries

if TYPE_CHECKING:
    from collections.abc import Callable

    Connection = psycopg.Connection[Any]
    MakeDatabase = Callable[[str | None], str]

TABLES = (
    "jobs", "job_events", "idempotency_keys", "lanes", "maintenance", "migrations", "grants", "throughput",
)  # fmt: skip


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a program of the PostgreSQL under test, and fails with its messages."""
    directory = request.config.getoption("--pg-bin")

    def run(name: str, *arguments: str) -> None:
        path = str(Path(directory) / name) if directory else find_binaries().program(name)
        done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "ERROR" not in done.stderr

    return run


@pytest.fixture
def database(fresh_database: str) -> str:
    return fresh_database


@pytest.fixture
def filled(conn: Connection) -> list[Any]:
    """Jobs of every status, with events, keys and partitions; the ids of those that can be claimed, in order."""
    enqueue(
        conn,
        *({"job_type": "work", "idempotency_key": f"key {n}"} for n in range(4)),
        {"job_type": "work", "keep": "0:01:00"},
        {"job_type": "work", "keep": "90 days"},
    )
    jobs = claim(conn, 6)
    fail(conn, jobs[0])
    fail(conn, jobs[1], retry=False)
    complete(conn, *jobs[2:6])
    conn.execute(
        "SELECT howdah.register_worker('worker', 'host', 1, '{default}', '{work}');"
        'SELECT howdah.beat_worker(\'worker\', \'{}\', \'[{"queue": "default", "job_type": "work", '
        '"completed": 1, "failed": 0, "retried": 0, "cancelled": 0, "wait_seconds": 0, "run_seconds": 0}]\')'
    )
    ordered = enqueue(conn, *({"job_type": "ordered", "ordering_key": "k"} for _ in range(5)))
    enqueue(conn, {"job_type": "later", "delay": 3600})
    return [jobs[0].id, ordered]


def contents(conn: Connection) -> dict[str, set[str]]:
    return {
        table: {
            row[0]
            for row in conn.execute(f"SELECT to_jsonb(t)::text FROM howdah.{table} AS t".encode())
        }
        for table in TABLES
    }


def assert_works(url: str, filled: list[Any]) -> None:
    """Jobs continue where they were: in order, with their attempts; maintenance runs, and new jobs are new."""
    retried, ordered = filled
    with psycopg.connect(url, autocommit=True) as conn:
        (first,) = claim(conn, types=["work"])
        assert (first.id, first.attempts) == (retried, 2)
        complete(conn, first)
        for expected in ordered:
            (job,) = claim(conn, types=["ordered"])
            assert job.id == expected
            complete(conn, job)
        maintain(conn)
        before = value(conn, "SELECT max(event_id) FROM howdah.job_events")
        (new,) = enqueue(conn, {"job_type": "new"})
        fail(conn, *claim(conn, types=["new"]), retry=False)
        assert status(conn, new) == "failed"
        assert value(conn, "SELECT max(event_id) FROM howdah.job_events") > before
        assert value(conn, "SELECT max(seq) FROM howdah.jobs") == value(
            conn, f"SELECT seq FROM howdah.jobs WHERE id = '{new}'"
        )
    queue = JobQueue(url, create=False)
    queue.pending()
    queue.close()


@pytest.mark.parametrize("form", ["plain", "custom", "directory"])
def test_a_full_dump_restores_the_queue(
    program: Callable[..., None], database: str, conn: Connection, filled: list[Any],
    make_database: MakeDatabase, tmp_path: Path, form: str,
) -> None:  # fmt: skip
    target, dump = make_database(None), str(tmp_path / "dump")
    program("pg_dump", "--format", form, "--file", dump, database)
    if form == "plain":
        program("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-f", dump, target)
    else:
        program("pg_restore", "--exit-on-error", "--dbname", target, dump)
    with psycopg.connect(target, autocommit=True) as restored:
        assert contents(restored) == contents(conn)
    assert_works(target, filled)


@pytest.mark.parametrize("options", [(), ("--load-via-partition-root",), ("--inserts",)])
@pytest.mark.parametrize("into", ["dumped schema", "migrated schema", "used schema"])
def test_data_alone_restores_into_a_schema_that_exists(
    program: Callable[..., None], database: str, conn: Connection, filled: list[Any],
    make_database: MakeDatabase, template: str, tmp_path: Path, into: str, options: tuple[str, ...],
) -> None:  # fmt: skip
    maintain(conn, "partitions")
    dump = str(tmp_path / "data.sql")
    target = make_database(None if into == "dumped schema" else template)
    program("pg_dump", "--data-only", *options, "--file", dump, database)
    if into == "dumped schema":
        schema = str(tmp_path / "schema.sql")
        program("pg_dump", "--schema-only", "--file", schema, database)
        program(
            "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-f", schema, target
        )
    elif "--load-via-partition-root" not in options:
        # Partitions of days that only the source has.
        with psycopg.connect(target, autocommit=True) as empty:
            empty.execute("SELECT howdah.maintain_partitions(140)")
    if into == "used schema":  # a worker has registered here
        with psycopg.connect(target, autocommit=True) as used:
            used.execute("SELECT howdah.register_worker('other', 'host', 1, '{default}', '{work}')")
            used.execute("INSERT INTO howdah.grants VALUES ('worker', 'somebody')")
        conn.execute(
            "INSERT INTO howdah.grants VALUES ('worker', 'somebody'), ('worker', 'another')"
        )
        program("pg_dump", "--data-only", *options, "--file", dump, database)
    # Rows that are committed one by one are assigned their ordering keys one by one.
    once = ("--single-transaction",) if "--inserts" in options else ()
    program(
        "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", *once, "-f", dump, target
    )
    with psycopg.connect(target, autocommit=True) as restored:
        expected, found = contents(conn), contents(restored)
        for table in TABLES:
            if into == "dumped schema" or table not in ("maintenance", "migrations", "lanes"):
                assert found[table] == expected[table], table
        assert len(found["maintenance"]) == len(expected["maintenance"])
        assert len(found["migrations"]) == 1
    assert_works(target, filled)
