"""Passwords appear nowhere: not in the output of commands, not in logs, errors, tracebacks and tables, not in the
list of processes. On a server that requires them, with the correct password and with wrong ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from secured import ENCODED, PIECES, ROLES, Secured, run

from children import Children, offspring, until
from howdah import App, AsyncJobQueue, DatabaseUnreachable, HowdahError, JobQueue
from howdah.chaos.ledger import FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent


def leaks(text: str) -> list[str]:
    """The lines that contain a part of the password."""
    return [line for line in text.splitlines() if any(piece in line for piece in PIECES)]


@pytest.fixture
def children(tmp_path: Path, secured: Secured) -> Iterator[Children]:
    children = Children(tmp_path, secured.as_kind("worker"))
    yield children
    children.close()


def command_lines(pid: int) -> str:
    """The command lines of a process and its descendants, as in a list of processes."""
    family = [pid, *offspring(pid)]
    family += [inner for each in family[1:] for inner in offspring(each)]
    lines = []
    for each in family:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just exited
            lines += [Path(f"/proc/{each}/{file}").read_text() for file in ("cmdline", "comm")]
    return "\n".join(lines).replace("\0", " ")


def everything_stored(secured: Secured) -> str:
    with secured.connect() as conn:
        tables = [row[0] for row in conn.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'howdah'::regnamespace "
            "AND relkind IN ('r', 'p', 'v')")]  # fmt: skip
        rows = [
            str(row)
            for table in tables
            for row in conn.execute(f"SELECT t::text FROM howdah.{table} AS t".encode())
        ]
        rows += map(str, conn.execute("SELECT application_name, query FROM pg_stat_activity"))
    return "\n".join(rows)


def test_a_worker_runs_jobs_end_to_end_without_revealing_its_password(
    secured: Secured, children: Children
) -> None:
    options = ("--processes", "2", "--concurrency", "4", "--log-level", "debug")
    worker = children.start(*options, app="shop_app:app", cwd=HERE).ready(2)
    # Any role may send forged notifications; they must do no harm.
    with secured.connect("producer") as conn:
        for channel in ("wake", "cancel", "job"):
            for payload in ("", "[", "{}", '["x"]', "\\", "null", "1e999"):
                conn.execute("SELECT pg_notify(%s, %s)", (f"howdah:{channel}", payload))
    producer = JobQueue(secured.as_kind("producer"))
    wanted = [
        producer.enqueue("add", {"x": 1, "y": 2}),
        producer.enqueue("steps", {"n": 3}),
        producer.enqueue("pid"),
        producer.enqueue("fail"),
        producer.enqueue("chain", {"n": 3}),
        producer.enqueue("connect"),
    ]
    producer.close()
    observer = JobQueue(secured.as_kind("observer"))
    until(lambda: all(observer.get(job).status.is_final for job in wanted), "all jobs ended")
    ended = {job.job_type: job for job in observer.find()}
    observer.close()
    assert ended["chain"].result == 4
    assert ended["pid"].result not in (None, worker.pid)
    assert [event.kind for event in _events(secured, ended["steps"])] == ["step"] * 3
    assert (ended["fail"].status, ended["fail"].attempts) == ("failed", 3)
    # The worker role covers heartbeats and maintenance too.
    with secured.connect() as conn:
        seen = "SELECT count(*) FROM howdah.workers WHERE info ? 'running'"
        late = "SELECT duty, last_error FROM howdah.maintenance WHERE last_run_at IS NULL OR last_error IS NOT NULL"
        until(lambda: conn.execute(seen).fetchone() == (2,), "both workers sent a heartbeat")
        until(lambda: conn.execute(late).fetchall() == [], "every duty ran")
    titles = command_lines(worker.pid)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert "shop_app:app" in titles
    assert leaks(titles) == []
    assert "no luck" in worker.log.read_text() + everything_stored(secured)
    assert leaks(worker.log.read_text()) == []
    assert leaks(everything_stored(secured)) == []


def _events(secured: Secured, job: Any) -> list[Any]:
    queue = JobQueue(secured.as_kind("observer"))
    try:
        return queue.events(job)
    finally:
        queue.close()


COMMANDS = [
    ("jobs",), ("jobs", "--where", "data.x=1"), ("queues",), ("workers",), ("top", "--once"),
    ("tail", "--no-follow"), ("doctor",), ("migrate",), ("migrate", "--check"), ("migrate", "--grants"),
    ("show", "0190"), ("explain", "0190"), ("wait", "0190"), ("cancel", "0190"), ("recover",),
    ("clear", "--older-than", "1d"), ("retry", "--where", "status=failed", "--yes"),
]  # fmt: skip


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_no_command_shows_the_password(secured: Secured, options: tuple[str, ...]) -> None:
    url = secured.as_kind("administrator")
    places = {
        "right": url,
        "wrong password": url.replace(ENCODED, ENCODED + "x"),
        "no such database": url.replace("/test_", "/missing_"),
        "no such server": url.replace("host=/", "host=/nowhere/"),
        "no such host": f"postgresql://ops:{ENCODED}@no-such-host.invalid/db",
        "no server listens": f"postgresql://ops:{ENCODED}@127.0.0.1:1/db",
        "in an option": f"postgresql://127.0.0.1:1/db?user=ops&password={ENCODED}",
        "unreadable": url.replace("%25@", "%2@"),
    }
    for what, place in places.items():
        for command in COMMANDS if what in ("right", "wrong password") else COMMANDS[:10:3]:
            result = run(*command, *options, "--database", place)
            assert leaks(result.output) == [], (what, command)
            assert what == "right" or result.exit_code != 0, (what, command)


@pytest.mark.parametrize("command", ["chaos", "bench"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_chaos_and_bench_do_not_show_the_password(
    secured: Secured, tmp_path: Path, command: str, options: tuple[str, ...]
) -> None:
    url = secured.as_kind("administrator")
    with secured.connect() as conn:
        name = conn.info.dbname
        conn.execute(f"GRANT CREATE ON DATABASE {name} TO {ROLES['administrator']}".encode())
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOWDAH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "howdah", command, "--seconds", "3", *options],
        env=environment | {"TMPDIR": str(tmp_path), "HOWDAH_DATABASE_URL": url},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    # The ledger and the logs of its workers are deleted when it ends.
    files: dict[Path, str] = {}
    titles = ""
    try:
        while process.poll() is None:
            titles += command_lines(process.pid)
            for file in tmp_path.rglob("*"):
                with contextlib.suppress(OSError):
                    files[file] = file.read_text(errors="replace")
            time.sleep(0.2)
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"howdah {command}" in titles
    assert command == "bench" or any(file.name == FILE and text for file, text in files.items())
    assert leaks("\n".join([output, titles, *files.values()])) == []


@pytest.mark.parametrize("command", ["chaos", "bench"])
def test_chaos_and_bench_with_a_wrong_password_do_not_show_it(
    secured: Secured, command: str
) -> None:
    url = secured.as_kind("administrator").replace(ENCODED, ENCODED + "x")
    result = run(command, "--seconds", 3, "--database", url)
    assert result.exit_code == 4
    assert "password authentication failed" in result.output
    assert leaks(result.output) == []


@pytest.mark.parametrize("special", "?/#@%:[],; &=\\'\"é{}$")
def test_a_password_that_is_not_url_encoded_is_not_shown(special: str) -> None:
    url = f"postgresql://u:Zqx7{special}Wvk9@127.0.0.1:1/db"
    seen = run("jobs", "--database", url).output
    queue = JobQueue(url, timeout=0.1)
    with pytest.raises(HowdahError) as sync:
        queue.enqueue("x")

    async def enqueue() -> None:
        await AsyncJobQueue(url, timeout=0.1).enqueue("x")

    with pytest.raises(HowdahError) as awaited:
        asyncio.run(enqueue())
    seen += "".join(
        traceback.format_exception(sync.value) + traceback.format_exception(awaited.value)
    )
    assert "Zqx7" not in seen
    assert "Wvk9" not in seen


def test_no_exception_traceback_or_attribute_shows_the_password(secured: Secured) -> None:
    url = secured.as_kind("producer")
    texts: list[str] = []
    for wrong in (url.replace(ENCODED, ENCODED + "x"), url.replace("%25@", "%2@")):
        for queue in (JobQueue(wrong, timeout=0.5), App(wrong).queue):
            with pytest.raises(HowdahError) as refused:
                queue.enqueue("mail")
            texts += [repr(queue), repr(vars(refused.value))]
            texts += traceback.format_exception(refused.value)
    assert leaks("\n".join(texts)) == []
    assert any("password authentication failed" in text for text in texts)


def test_a_worker_with_a_wrong_password_reports_it_without_the_password(
    secured: Secured, children: Children
) -> None:
    children.database = secured.as_kind("worker").replace(ENCODED, ENCODED + "x")
    worker = children.start("--log-level", "debug", app="shop_app:app", cwd=HERE, log_json=False)
    assert worker.wait() == 4
    text = worker.log.read_text()
    assert "password authentication failed" in text
    assert leaks(text) == []


@pytest.mark.parametrize("kind", ["producer", "observer"])
def test_a_worker_without_the_worker_role_reports_it_and_exits(
    secured: Secured, children: Children, kind: str
) -> None:
    children.database = secured.as_kind(kind)
    worker = children.start(app="shop_app:app", cwd=HERE, log_json=False)
    assert worker.wait() == 1
    text = worker.log.read_text()
    assert "permission denied for function register_worker" in text
    assert "Traceback" not in text


def test_a_password_from_the_environment_is_used_and_not_shown(secured: Secured) -> None:
    bare = secured.url.replace("://howdah@", "://grafana@")
    environment = os.environ | {"HOWDAH_DATABASE_URL": bare, "PGPASSWORD": "hunter2-§ecret/@:%"}
    result = subprocess.run(
        [sys.executable, "-m", "howdah", "doctor", "--json"],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert {json.loads(line)["check"] for line in result.stdout.splitlines()} >= {
        "schema",
        "access",
    }
    assert leaks(result.stdout + result.stderr) == []


def test_an_unreachable_database_is_named_without_user_and_password() -> None:
    queue = JobQueue(f"postgresql://ops:{ENCODED}@127.0.0.1:1/shop", timeout=0.1)
    with pytest.raises(DatabaseUnreachable) as refused:
        queue.pending()
    assert (refused.value.host, refused.value.database) == ("127.0.0.1:1", "shop")
