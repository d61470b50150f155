"""`howdah bench`: its output, its advice, and that it removes its schema."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from stage import invoke

from howdah.bench import Figures, Latency, Rate, Server, advice

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = re.compile(r"howdah_bench_[0-9a-f]{8}_[0-9a-f]{6}")


@pytest.fixture
def database(fresh_database: str) -> str:
    """A new copy: the tests wait until nothing else is connected."""
    return fresh_database


def schemas(url: str) -> list[str]:
    with psycopg.connect(url) as conn:
        rows = conn.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'howdah_bench%'")
        return [name for (name,) in rows]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def is_alone(url: str) -> bool:
    """Whether this is the only connection."""
    with psycopg.connect(url) as conn:
        row = conn.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        ).fetchone()
        return row == (0,)


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


# ── output ────────────────────────────────────────────────────────────────────────────────────────


def test_bench_prints_the_figures_as_json(database: str, read_json: Any) -> None:
    [found] = read_json(invoke("bench", "--seconds", 1, "--json", "--database", database))
    for name in ("one_caller", "many_callers", "bulk", "worker"):
        rate = found[name]
        assert rate["jobs"] > 0
        assert rate["per_second"] == pytest.approx(rate["jobs"] / rate["seconds"])
    assert found["bulk"]["jobs"] % 1000 == 0
    assert found["many_callers"]["jobs"] >= 64
    enqueued = sum(found[name]["jobs"] for name in ("one_caller", "many_callers", "bulk"))
    assert found["worker"]["jobs"] <= enqueued
    assert found["pick_up"]["samples"] >= 10
    assert 0 < found["pick_up"]["p50"] <= found["pick_up"]["p99"]
    assert found["server"]["fsync"] == "off"
    assert "fsync is off" in found["advice"][-1]
    assert schemas(database) == []


@pytest.mark.parametrize(("width", "color"), [(60, False), (120, True)])
def test_it_shows_progress_and_fits_the_terminal(
    terminal: Any, database: str, width: int, color: bool
) -> None:
    variables = {} if color else {"NO_COLOR": "1"}
    seen = terminal("bench", "--seconds", "1", "--database", database, width=width, **variables)
    assert seen.wait() == 0
    assert "Traceback" not in seen.text
    assert max(map(len, seen.text.splitlines())) <= width
    assert ("\x1b[32m" in seen.raw) == color
    # Progress, step by step,
    assert re.search(r"▶ pick-up +━*─+  p50 [\d.]+ ms", seen.text)
    assert re.search(r"✓ pick-up +p50 [\d.]+ ms, p99 [\d.]+ ms\n▶ one caller +[━─]{20}", seen.text)
    assert re.search(r"○ one worker", seen.text)
    # and the figures at the end, which are not erased.
    end = seen.raw[seen.raw.rindex("PostgreSQL ") :]
    assert "\x1b[2K" not in end
    for name in (
        "enqueue, one caller",
        "enqueue, 64 callers",
        "enqueue in bulk",
        "one worker process",
    ):
        assert re.search(rf"{name} +[\d,]+ jobs/s  ━+\n", seen.text)
    assert "The temporary schema was removed." in seen.text
    assert schemas(database) == []


def test_piped_output_is_plain_and_without_progress(piped: Any, database: str) -> None:
    done = piped("bench", "--seconds", 1, "--database", database)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert done.stdout.startswith("PostgreSQL ")
    assert "Measuring" not in done.stdout
    assert re.search(r"^one worker process +[\d,]+ jobs/s$", done.stdout, re.MULTILINE)
    assert re.fullmatch(r"Took [\d.]+ s\. The temporary schema was removed\.\n", done.stderr)


# ── cleanup ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", ["pick-up", "in bulk", "one worker"])
def test_ctrl_c_removes_the_schema_and_closes_every_connection(
    terminal: Any, database: str, step: str
) -> None:
    seen = terminal("bench", "--seconds", "8", "--database", database)
    seen.read(until=f"▶ {step}")
    assert len(schemas(database)) == 1
    seen.interrupt()
    seen.interrupt()
    assert seen.wait() == 128 + signal.SIGINT
    assert "Traceback" not in seen.text
    assert "Stopped. The temporary schema was removed." in seen.text
    assert seen.raw.count("\x1b[?25l") == seen.raw.count("\x1b[?25h"), "the cursor is visible"
    assert schemas(database) == []
    wait_for(lambda: is_alone(database), "another process is still connected")


def test_a_killed_worker_is_reported(terminal: Any, database: str) -> None:
    seen = terminal("bench", "--seconds", "8", "--database", database)
    seen.read(until="▶ pick-up")
    [worker] = children(seen.process.pid)
    os.kill(worker, signal.SIGKILL)
    assert seen.wait() == 1
    assert "Error: the worker ended with status -9" in seen.text
    assert "Traceback" not in seen.text
    assert schemas(database) == []


def test_a_later_run_removes_old_schemas_of_killed_runs_only(terminal: Any, database: str) -> None:
    seen = terminal("bench", "--seconds", "8", "--database", database)
    seen.read(until="▶ pick-up")
    [worker] = children(seen.process.pid)
    seen.process.kill()
    seen.process.wait()

    def is_gone() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, 0)
            return False
        return True

    wait_for(is_gone, "the worker outlives the command that started it")
    [left] = schemas(database)
    old = f"howdah_bench_{int(time.time()) - 2 * 3600:08x}_abcdef"
    try:
        with psycopg.connect(database) as conn:
            conn.execute(f"CREATE SCHEMA {old}".encode())
            conn.execute("CREATE SCHEMA howdah_bench_of_mine")
        assert invoke("bench", "--seconds", 1, "--database", database).exit_code == 0
        # A recent schema may belong to a measurement that is still running.
        assert sorted(schemas(database)) == sorted([left, "howdah_bench_of_mine"])
    finally:
        with psycopg.connect(database) as conn:
            conn.execute(f"DROP SCHEMA {left} CASCADE".encode())
            conn.execute("DROP SCHEMA IF EXISTS howdah_bench_of_mine")


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


def test_a_role_that_may_not_create_a_schema_is_an_error(reader: str) -> None:
    result = invoke("bench", "--seconds", 1, "--database", reader)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Error: the database refused to make a schema to measure in: permission denied" in (
        result.stderr
    )
    assert "GRANT CREATE ON DATABASE" in result.stderr


def test_an_unreachable_database_is_code_4() -> None:
    result = invoke("bench", "--database", "postgresql://howdah@127.0.0.1:1/howdah")
    assert result.exit_code == 4
    assert result.stderr.startswith('Error: cannot reach database "howdah" at 127.0.0.1:')


@pytest.mark.parametrize("seconds", ["0", "121", "soon"])
def test_a_wrong_duration_is_code_2(database: str, seconds: str) -> None:
    assert invoke("bench", "--seconds", seconds, "--database", database).exit_code == 2


# ── advice ────────────────────────────────────────────────────────────────────────────────────────


def figures(*, round_trip: float = 0.0001, commit: float = 0.0001, one: float = 1000,
            cpu: float = 0.3, worker_cpu: float = 0.5, fsync: str = "on") -> Figures:  # fmt: skip
    def rate(per_second: float, cpu: float = cpu) -> Rate:
        return Rate(jobs=int(per_second * 2), seconds=2, cpu=cpu)

    return Figures(
        server=Server(version="18.0", fsync=fsync, full_page_writes="on", synchronous_commit="on",
                      round_trip=round_trip, commit=commit),
        pick_up=Latency(samples=100, p50=0.001, p99=0.002),
        one_caller=rate(one), many_callers=rate(20 * one), bulk=rate(35 * one),
        worker=rate(20_000, worker_cpu),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "number", "words"),
    [
        (figures(round_trip=0.02, one=45), 0, "The round trip of 20.0 ms is most of an enqueue"),
        (figures(round_trip=0.02, one=45), 1, "a worker nearer to the database"),
        (figures(commit=0.004, one=200), 0, "The durable commit of 4.00 ms is most of an enqueue"),
        (figures(cpu=0.95), 0, "mostly the producer's own CPU time"),
        (figures(), 0, "20 times as many from 64 concurrent callers, 35 times with enqueue_many"),
        (figures(worker_cpu=0.97), 1, "used 97% of a core, so it sets the pace itself"),
        (figures(worker_cpu=0.97), 1, "`howdah worker --processes 2`"),
        (figures(worker_cpu=0.4), 1, "used 40% of a core and waited for the server"),
        (figures(fsync="off"), 2, "fsync is off: a crash of the server may lose jobs"),
    ],
)
def test_advice_follows_from_the_figures(found: Figures, number: int, words: str) -> None:
    assert words in advice(found)[number]


def test_a_durable_server_gets_no_warning() -> None:
    assert len(advice(figures())) == 2
