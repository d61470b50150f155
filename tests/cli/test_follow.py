"""`howdah enqueue`, `watch` and `wait`."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest
from stage import ids, invoke

from howdah import JobQueue, Status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stage import Run, Shop

TASKS = """
from dataclasses import dataclass
from howdah import App
app = App()
other = App("postgresql://elsewhere/none", schema="other")

@dataclass
class Size:
    width: int

@app.task
def resize(path: str, size: Size, factor: float = 1.0, tags: list[str] | None = None) -> str: ...

@app.task(name="mail.send", queue="mail", priority=150)
def send(to: str) -> None: ...

@other.task
def elsewhere() -> None: ...
"""


@pytest.fixture
def database(wiped: str) -> str:
    return wiped


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of tasks in the current directory."""
    (tmp_path / "cli_shop.py").write_text(textwrap.dedent(TASKS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "cli_shop", raising=False)


def work(database: str, *, fail: bool = False, steps: int = 2) -> Callable[[], None]:
    """A worker that waits for one job, takes its time, and ends it."""

    def run() -> None:
        queue = JobQueue(database, worker_id="worker-7")
        deadline = time.monotonic() + 120
        while (job := queue.claim_one(queues=["default", "mail"])) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for step in range(1, steps + 1):
            queue.progress(job, 100 * step // (steps + 1), f"step {step}")
            queue.event(job, "step", {"n": step})
            time.sleep(0.1)
        if fail:
            queue.fail(job, "ValueError: no such\x1b[31m file", retry=False)
        else:
            queue.complete(job, {"pages": 3})
        queue.close()

    return run


# ── enqueue ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("tasks")
def test_a_call_of_a_task_is_enqueued_with_its_options(act: Run, queue: JobQueue) -> None:
    result = act("enqueue", "cli_shop:resize", "path=42", 'size={"width": 400}', "factor=2",
                 'tags=["a","b"]', "--delay", "1h", "--ordering-key", "k")  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    job = queue.get(result.stdout.strip())
    # "42" stays a text, for the signature says so
    assert job.data == {"path": "42", "size": {"width": 400}, "factor": 2, "tags": ["a", "b"]}
    assert (job.job_type, job.ordering_key) == ("resize", "k")
    assert (job.run_at - job.created_at).total_seconds() == pytest.approx(3600, abs=30)


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize("name", ["cli_shop:send", "cli_shop:mail.send", "cli_shop:app:mail.send"])
def test_a_task_goes_by_its_function_or_its_name(act: Run, queue: JobQueue, name: str) -> None:
    job = queue.get(act("enqueue", name, "to=a=b").stdout.strip())
    assert (job.job_type, job.queue, job.priority, job.data) == (
        "mail.send", "mail", 150, {"to": "a=b"})  # fmt: skip


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cli_shop:resiz"], 'module "cli_shop" has no task named "resiz"; did you mean "resize"?'),
        (["cli_shop:app:snd"], 'cli_shop:app has no task named "snd".'),
        (["cli_shop:app"], '"cli_shop:app" is an app; name one of its tasks: cli_shop:resize, '
         "cli_shop:mail.send."),
        (["cli_shop"], '"cli_shop" does not name an app; write it as module:attribute, as in shop:app.'),
        ([], "name a task as MODULE:TASK, or a bare job type with --type."),
        (["to=x"], "name a task as MODULE:TASK, or a bare job type with --type."),
        (["cli_shop:send", "x"], '"x" is not an argument; write it as key=value.'),
        (["cli_shop:send", "to=a", "to=b"], '"to" was given twice.'),
        (["cli_shop:send", "--data", "{"], "--data is not JSON: Expecting property name enclosed in "
         "double quotes: line 1 column 2 (char 1)."),
        (["cli_shop:send", "--data", "[1]"], "--data must be a JSON object of the task's arguments."),
        (["cli_shop:send", "to=a", "--timeout", "5s"], "--timeout goes with --wait."),
    ],
)  # fmt: skip
def test_wrong_calls_are_one_sentence(act: Run, words: list[str], sentence: str) -> None:
    result = act("enqueue", *words)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {sentence}\n")


@pytest.mark.usefixtures("tasks")
def test_arguments_are_checked_against_the_signature(act: Run, queue: JobQueue) -> None:
    for words in (["path=a"], ["path=a", 'size={"width": "wide"}'], ["path=a", "colour=red"]):
        result = act("enqueue", "cli_shop:resize", *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("Error: resize")
        assert len(result.stderr.splitlines()) == 1
    assert queue.pending() == 0


def test_a_bare_job_needs_no_app(act: Run, queue: JobQueue, read_json: Any) -> None:
    result = act("enqueue", "--type", "send-email", "to=alice", "n=3", "--queue", "mail",
                 "--priority", 30, "--key", "welcome", "--json")  # fmt: skip
    [answer] = read_json(result)
    job = queue.get(answer["id"])
    assert answer["is_new"] is True
    assert (job.job_type, job.queue, job.priority) == ("send-email", "mail", 30)
    assert job.data == {"to": "alice", "n": 3}
    again = act("enqueue", "--type", "send-email", "--key", "welcome")
    assert again.stdout == f"{job.id}\n"
    assert again.stderr == "A job was enqueued under this key before: this is its id.\n"


def test_data_may_be_any_json(act: Run, queue: JobQueue) -> None:
    one = act("enqueue", "--type", "t", "--data", '{"a": {"b": [1]}}', "c=true").stdout.strip()
    assert queue.get(one).data == {"a": {"b": [1]}, "c": True}
    refused = act("enqueue", "--type", "t", "--data", "[1]", "c=true")
    assert refused.exit_code == 2


def test_a_bad_job_is_refused_in_one_sentence(act: Run) -> None:
    for words in (["--type", "x" * 300], ["--type", ""], ["--type", "t", "--data", '"' + "x" * 70000 + '"'],
                  ["--type", "t", "--priority", "5000"], ["--type", "t", "--delay", "soon"]):  # fmt: skip
        result = act("enqueue", *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Error: " in result.stderr


@pytest.mark.usefixtures("tasks")
def test_the_first_enqueue_creates_the_schema(empty_database: str) -> None:
    result = invoke("enqueue", "cli_shop:elsewhere", "--database", empty_database)
    assert result.exit_code == 0
    shown = invoke("show", result.stdout.strip(), "--database", empty_database, "--schema", "other")
    assert shown.exit_code == 0


# ── waiting ───────────────────────────────────────────────────────────────────────────────────────


def test_enqueue_and_wait_prints_the_result(
    act: Run, database: str, meanwhile: Any, read_json: Any
) -> None:
    with meanwhile(work(database)):
        result = act("enqueue", "--type", "t", "--wait")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == ['{"pages": 3}']
    assert result.stderr.startswith("Completed in ")
    with meanwhile(work(database)):
        first, last = read_json(act("enqueue", "--type", "t", "--wait", "--json"))
    assert first["id"] == last["id"]
    assert (last["status"], last["result"]) == ("completed", {"pages": 3})


def test_a_job_that_fails_is_code_5(act: Run, database: str, meanwhile: Any) -> None:
    with meanwhile(work(database, fail=True)):
        result = act("enqueue", "--type", "t", "--wait")
    assert result.exit_code == 5
    [job_id] = ids(result.stdout)
    sentence = (
        f"Error: job {job_id} (t) failed after 1 attempt: ValueError: no such\\x1b[31m file\n"
    )
    assert result.stderr == sentence
    for command in ("wait", "watch"):
        again = act(command, job_id)
        assert (again.exit_code, again.stderr) == (5, sentence)
        assert act(command, job_id, "--json").exit_code == 5


def test_a_cancelled_job_is_code_5(look: Run, shop: Shop) -> None:
    result = look("wait", shop.cancelled)
    assert (result.exit_code, result.stdout) == (5, "")
    assert result.stderr == f"Error: job {shop.cancelled} (resize) was cancelled.\n"


def test_waiting_too_long_is_code_1(look: Run, shop: Shop) -> None:
    result = look("wait", shop.pending, "--timeout", "200ms")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"Error: job {shop.pending} did not end within 0.2 seconds; it continues.\n"
    )


def test_a_job_that_is_not_kept_completes_all_the_same(
    act: Run, database: str, queue: JobQueue, meanwhile: Any
) -> None:
    job = queue.enqueue("t", keep=0)
    with meanwhile(work(database, steps=10)):
        result = act("wait", job.id)
    assert (result.exit_code, result.stderr) == (0, "It completed, and was not kept.\n")


# ── watching ──────────────────────────────────────────────────────────────────────────────────────


def test_watch_tells_every_step_when_piped(
    act: Run, database: str, queue: JobQueue, meanwhile: Any, read_json: Any
) -> None:
    job = queue.enqueue("t")
    with meanwhile(work(database)):
        lines = act("watch", job.id).stdout.splitlines()
    assert any(line.endswith('  step  {"n": 1}') for line in lines)
    assert "completed  100 %  step 2" in lines
    assert lines[-1] == '{"pages": 3}'
    job = queue.enqueue("t")
    with meanwhile(work(database)):
        changes = read_json(act("watch", job.id, "--json"))
    assert changes[-1]["status"] == "completed"
    assert [e["data"]["n"] for change in changes for e in change["events"]] == [1, 2]


@pytest.mark.parametrize("width", [60, 120])
def test_watch_is_a_live_bar_in_a_terminal(
    terminal: Any, database: str, queue: JobQueue, meanwhile: Any, width: int
) -> None:
    job = queue.enqueue("t")
    seen = terminal("watch", job.id, "--database", database, width=width)
    seen.read(until="pending")
    with meanwhile(work(database)):
        assert seen.wait() == 0
    assert '{"n": 1}' in seen.text
    assert "step 2" in seen.text
    assert "✓ completed" in seen.text
    assert seen.text.rstrip().endswith('{"pages": 3}')
    assert max(map(len, seen.text.splitlines())) <= width


def test_ctrl_c_leaves_the_job_alone(
    terminal: Any, shop: Shop, queue: JobQueue, database: str
) -> None:
    job = queue.enqueue("t")
    seen = terminal("watch", job.id, "--database", database)
    seen.read(until="pending")
    seen.interrupt()
    assert seen.wait() == 130
    assert "The job goes on." in seen.text
    assert "Traceback" not in seen.text
    assert queue.get(job).status is Status.PENDING


def test_a_role_that_may_only_look_watches_all_the_same(
    database: str, queue: JobQueue, connect: Any, meanwhile: Any
) -> None:
    conn = connect()
    conn.execute("CREATE ROLE onlooker LOGIN")
    try:
        conn.execute("GRANT USAGE ON SCHEMA howdah TO onlooker")
        conn.execute("GRANT SELECT ON ALL TABLES IN SCHEMA howdah TO onlooker")
        job = queue.enqueue("t")
        with meanwhile(work(database)):
            result = invoke(
                "wait", job.id, "--database", database.replace("://howdah@", "://onlooker@")
            )
        assert (result.exit_code, result.stdout) == (0, '{"pages": 3}\n')
    finally:
        conn.execute("DROP OWNED BY onlooker")
        conn.execute("DROP ROLE onlooker")
