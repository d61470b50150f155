"""`howdah worker`: its options, its logs and its errors."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from children import HERE, Child, Children, all_ended, is_alive, offspring, until
from howdah.cli import main
from howdah.worker import garbage_collector

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from howdah import JobQueue
    from howdah.embedded import EmbeddedServer


@pytest.fixture
def conn(connect: Callable[..., psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    return connect()


def free_port(count: int = 1) -> int:
    """The first of `count` free ports in a row, outside the range of ephemeral ports."""
    for port in random.sample(range(10_000, 30_000), 100):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for n in range(count):
                probes.enter_context(socket.create_server(("127.0.0.1", port + n)))
            return port
    raise AssertionError("no port is free")


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """The status and body of a health page; 0 if the connection is refused."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
    except OSError:
        return 0, {}


# ── running ───────────────────────────────────────────────────────────────────────────────────────


def test_concurrency_and_queues_limit_what_runs(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    for name in ("mail", "reports", "other"):
        queue.enqueue_many(
            [{"job_type": "nap", "data": {"seconds": 0.3}, "queue": name}]
            * (6 if name == "mail" else 2)
        )
    worker = children.start("--concurrency", "3", "--queues", "mail, reports")

    def is_done() -> bool:
        left = conn.execute("SELECT DISTINCT queue FROM howdah.live_jobs").fetchall()
        return left == [("other",)]

    until(is_done, "the jobs of its queues ended")
    steps = (1 if e["kind"] == "start" else -1 for e in children.ledger("start", "effect"))
    assert max(accumulate(steps)) == 3
    (started,) = worker.said("worker started")
    assert started["queues"] == ["mail", "reports"]
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    messages = [entry["message"] for entry in worker.entries()]
    assert messages[0] == "worker started"
    assert messages[-2:] == ["worker stopping", "worker stopped"]


@pytest.mark.parametrize(
    ("options", "is_tuned"),
    [((), True), (("--processes", "2"), True), (("--gc", "default"), False),
     (("--gc", "default", "--processes", "2"), False)],
)  # fmt: skip
def test_the_garbage_collector_is_tuned_unless_it_is_switched_off(
    children: Children, queue: JobQueue, options: tuple[str, ...], is_tuned: bool
) -> None:
    children.start(*options)
    handle = queue.enqueue("collector")
    until(lambda: queue.get(handle.id).status == "completed", "the job ended")
    *thresholds, frozen = queue.get(handle.id).result
    assert (tuple(thresholds) == garbage_collector.THRESHOLDS) is is_tuned
    assert (frozen > 10_000) is is_tuned


def test_several_processes_are_restarted_and_stopped_together(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    port = free_port(2)
    supervisor = children.start("--processes", "2", "--health-port", str(port)).ready(2)
    first = offspring(supervisor.pid)
    assert len(first) == 2
    for each in (port, port + 1):
        until(lambda p=each: ask(p, "/ready")[0] == 200, "it is ready")
    os.kill(first[0], signal.SIGKILL)
    supervisor.ready(3)
    (death,) = supervisor.said("worker process ended; restarting")
    assert (death["pid"], death["status"]) == (first[0], -signal.SIGKILL)
    processes = offspring(supervisor.pid)
    assert len(processes) == 2
    assert first[1] in processes

    def both_work() -> bool:
        queue.enqueue_many([{"job_type": "nap", "data": {"seconds": 0.2}}] * 50)
        return {e["pid"] for e in children.ledger("start")} == {*processes}

    until(both_work, "both processes run jobs")
    supervisor.send(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert not any(map(is_alive, processes))
    assert len(children.ledger("start")) == len(children.ledger("effect"))
    assert conn.execute("SELECT DISTINCT status FROM howdah.live_jobs").fetchall() in (
        [],
        [("pending",)],
    )


def test_the_processes_of_a_killed_supervisor_stop(
    children: Children,
) -> None:
    supervisor = children.start("--processes", "2").ready(2)
    processes = offspring(supervisor.pid)
    supervisor.send(signal.SIGKILL)
    supervisor.wait()
    until(lambda: not any(map(is_alive, processes)), "no orphan is left")
    assert len(supervisor.said("worker stopped")) == 2


APP = """
from howdah import App
app = App()

@app.task
async def greet() -> str:
    return {answer!r}
"""


def test_it_restarts_when_a_source_file_changes(
    children: Children, queue: JobQueue, tmp_path: Path
) -> None:
    module = tmp_path / "greetings.py"
    module.write_text(APP.format(answer="hello"))
    worker = children.start("--reload", app="greetings:app", cwd=tmp_path).ready()

    def answer() -> object:
        handle = queue.enqueue("greet")
        return until(lambda: queue.get(handle.id).result, "the job returned")

    assert answer() == "hello"
    module.write_text("import nothing_of_that_name\n")
    message = "worker ended; restarting when a source file changes"
    until(lambda: message in worker.log.read_text(), "it waits for a change")
    assert "No module named 'nothing_of_that_name'" in worker.log.read_text()
    module.write_text(APP.format(answer="good morning"))
    until(lambda: worker.log.read_text().count("worker started") == 2, "it restarted")
    assert answer() == "good morning"
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


# ── health ────────────────────────────────────────────────────────────────────────────────────────


def test_health_reports_live_and_ready(
    children: Children, queue: JobQueue, server: EmbeddedServer, conn: psycopg.Connection[Any]
) -> None:
    port = free_port()
    worker = children.start(
        "--health-port", str(port), "--grace", "60", FAULT_APP_LEASE="1"
    ).ready()
    status, body = until(lambda: _if_ok(ask(port, "/ready")), "it is ready")
    assert status == 200
    assert body["ready"] is True
    assert ask(port, "/live")[0] == 200
    assert ask(port, "/elsewhere")[0] == 404
    # The database is unreachable: not ready, but still live.
    name = conn.info.dbname
    with psycopg.connect(server.url, autocommit=True) as outside:
        outside.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
        outside.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )
        until(lambda: ask(port, "/ready")[0] == 503, "it is not ready")
        assert ask(port, "/live")[0] == 200
        outside.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())
    until(lambda: ask(port, "/ready")[0] == 200, "it is ready again")
    # Stopping: not ready, but live until the end.
    handle = queue.enqueue("nap", {"seconds": 3600})
    until(lambda: children.ledger("start"), "a job runs")
    worker.send(signal.SIGTERM)
    until(lambda: ask(port, "/ready")[0] == 503, "it is stopping")
    assert ask(port, "/live")[0] == 200
    queue.cancel(handle)
    assert worker.wait() == 0


def _if_ok(answer: tuple[int, dict[str, Any]]) -> tuple[int, dict[str, Any]] | None:
    return answer if answer[0] == 200 else None


# ── logs ──────────────────────────────────────────────────────────────────────────────────────────


def test_logs_in_a_terminal_have_color_without_no_color(children: Children) -> None:
    assert "\x1b[" in run_in_terminal(children)
    plain = run_in_terminal(children, NO_COLOR="1")
    assert "\x1b[" not in plain
    assert "worker started" in plain


def run_in_terminal(children: Children, **environment: str) -> str:
    """The output of a worker in a pseudo-terminal, until it stops."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "howdah", "worker", "fault_app:app"]
    process = subprocess.Popen(
        command, cwd=HERE, env=children.environment(**environment), stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text, stopping = b"", False
    try:
        with contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(ours, 65536):
                text += data
                if not stopping and b"worker started" in text:
                    stopping = True
                    process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    return text.decode()


def test_json_logs_are_one_object_per_line(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    worker = children.start("--log-level", "debug").ready()
    handle = queue.enqueue("flaky", {"key": "a", "n": 0}, max_attempts=2)
    until(lambda: all_ended(conn), "it ended")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    (failure,) = worker.said("job failed")  # every line was read as JSON
    assert failure["job_id"] == str(handle.id)
    assert failure["state"] == "retrying"
    assert failure["error"] == "OSError: not yet"
    assert failure["level"] == "info"
    assert failure["logger"] == "howdah.worker.completer"
    assert failure["time"].endswith("Z")


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`howdah worker …` in this process, for errors before the worker starts."""
    monkeypatch.setattr("howdah.cli.commands.worker.set_up_logging", lambda *_, **__: None)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(*arguments: str, cwd: Path = HERE) -> Result:
        monkeypatch.chdir(cwd)
        for name in ("broken", "empty"):
            sys.modules.pop(name, None)
        return CliRunner().invoke(main, ["worker", *arguments])

    return run


@pytest.mark.parametrize("more", [(), ("--processes", "2")])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("shop", '"shop" does not name an app; write it as module:attribute, as in shop:app.'),
        ("shop:app", 'there is no module "shop" in {here} or on the Python path.'),
        ("json:app", 'module "json" has no app named "app".'),
        ("fault_app:ap", 'module "fault_app" has no app named "ap"; did you mean "app"?'),
        ("fault_app:write", '"fault_app:write" is not an App; its type is function.'),
    ],
)
def test_a_wrong_name_is_one_sentence(
    command: Callable[..., Result], name: str, sentence: str, more: tuple[str, ...]
) -> None:
    result = command(name, *more)
    assert result.output == f"Error: {sentence.format(here=HERE)}\n"
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def", "SyntaxError: invalid syntax ({here}/broken.py:1)."),
        ("1 / 0", "ZeroDivisionError: division by zero ({here}/broken.py:1)."),
        ("raise SystemExit(3)", "SystemExit: 3 ({here}/broken.py:1)."),
        ("import brok", "No module named 'brok'."),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_sentence(
    command: Callable[..., Result], tmp_path: Path, text: str, sentence: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    result = command("broken:app", cwd=tmp_path)
    assert result.output == (
        f'Error: importing "broken" failed: {sentence.format(here=tmp_path)}\n'
    )
    assert result.exit_code == 1


def test_an_app_without_tasks_is_one_sentence(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "empty.py").write_text("from howdah import App\napp = App()\n")
    result = command("empty:app", cwd=tmp_path)
    assert result.output == (
        "Error: the app has no tasks; import the modules that define them first.\n"
    )
    assert result.exit_code == 1


@pytest.mark.parametrize(
    "options", [("--concurrency", "0"), ("--queues", " ,"), ("--grace", "-1"), ("--inter",)]
)
def test_wrong_options_are_code_2(command: Callable[..., Result], options: tuple[str, ...]) -> None:
    result = command("fault_app:app", *options)
    assert result.exit_code == 2
    assert result.output.startswith("Usage: ")


def run(children: Children, *arguments: str) -> Child:
    """`howdah worker …` as a process that ends by itself."""
    child = children.start(*arguments[1:], app=arguments[0], log_json=False)
    child.wait()
    return child


def test_an_error_prints_only_its_sentence(children: Children) -> None:
    child = run(children, "fault_app:ap")
    assert child.wait() == 1
    assert child.log.read_text() == (
        'Error: module "fault_app" has no app named "ap"; did you mean "app"?\n'
    )


def test_a_health_port_in_use_is_one_sentence(children: Children) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = run(children, "fault_app:app", "--health-port", str(port))
    assert child.wait() == 1
    assert child.log.read_text().startswith(f"Error: health cannot be served at 127.0.0.1:{port}: ")
    assert "Traceback" not in child.log.read_text()


def test_a_missing_database_is_one_sentence(children: Children) -> None:
    children.database = children.database.replace("/test_", "/nowhere_")
    child = run(children, "fault_app:app")  # waiting would never end
    assert child.wait() == 4
    assert child.log.read_text().startswith('Error: cannot reach database "nowhere_')
    assert "does not exist" in child.log.read_text()
    assert child.log.read_text().count("\n") == 1
