"""`howdah enqueue`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from stage import invoke

if TYPE_CHECKING:
    from pathlib import Path

    from stage import Run

    from howdah import JobQueue

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
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of tasks in the current directory."""
    (tmp_path / "cli_shop.py").write_text(textwrap.dedent(TASKS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "cli_shop", raising=False)


@pytest.mark.usefixtures("tasks")
def test_a_call_of_a_task_is_enqueued_with_its_options(run: Run, queue: JobQueue) -> None:
    result = run("enqueue", "cli_shop:resize", "path=42", 'size={"width": 400}', "factor=2",
                 'tags=["a","b"]', "--delay", "1h", "--ordering-key", "k")  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    job = queue.get(result.stdout.strip())
    # "42" stays a string, because the signature says so
    assert job.data == {"path": "42", "size": {"width": 400}, "factor": 2, "tags": ["a", "b"]}
    assert (job.job_type, job.ordering_key) == ("resize", "k")
    assert (job.run_at - job.created_at).total_seconds() == pytest.approx(3600, abs=30)


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize("name", ["cli_shop:send", "cli_shop:mail.send", "cli_shop:app:mail.send"])
def test_a_task_is_named_by_its_function_or_its_registered_name(
    run: Run, queue: JobQueue, name: str
) -> None:
    job = queue.get(run("enqueue", name, "to=a=b").stdout.strip())
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
        (["cli_shop:send", "to=a", "--timeout", "5s"], "--timeout needs --wait."),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_sentence_and_code_2(run: Run, words: list[str], sentence: str) -> None:
    result = run("enqueue", *words)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {sentence}\n")


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["path=a"], "missing a required argument: 'size'."),
        (["path=a", 'size={"width": "wide"}'],
         "argument 'size': Expected `int`, got `str` - at `$.width`."),
        (["path=a", 'size={"width": 1}', "color=red"],
         "got an unexpected keyword argument 'color'."),
    ],
)  # fmt: skip
def test_arguments_are_checked_against_the_signature_and_nothing_is_enqueued(
    run: Run, queue: JobQueue, words: list[str], problem: str
) -> None:
    result = run("enqueue", "cli_shop:resize", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: resize")
    assert result.stderr.endswith(f": {problem}\n")
    assert len(result.stderr.splitlines()) == 1
    assert queue.pending() == 0


def test_a_bare_job_needs_no_app(run: Run, queue: JobQueue, read_json: Any) -> None:
    result = run("enqueue", "--type", "send-email", "to=alice", "n=3", "--queue", "mail",
                 "--priority", 30, "--key", "welcome", "--json")  # fmt: skip
    [answer] = read_json(result)
    job = queue.get(answer["id"])
    assert answer["is_new"] is True
    assert (job.job_type, job.queue, job.priority) == ("send-email", "mail", 30)
    assert job.data == {"to": "alice", "n": 3}
    again = run("enqueue", "--type", "send-email", "to=alice", "n=3", "--key", "welcome")
    assert again.stdout == f"{job.id}\n"
    assert again.stderr == "A job with this key was enqueued before; this is its id.\n"
    other = run("enqueue", "--type", "send-email", "to=bob", "--key", "welcome")
    assert (other.exit_code, other.stdout) == (2, "")
    assert str(job.id) in other.stderr


def test_data_is_json_to_which_arguments_are_added(run: Run, queue: JobQueue) -> None:
    one = run("enqueue", "--type", "t", "--data", '{"a": {"b": [1]}}', "c=true").stdout.strip()
    assert queue.get(one).data == {"a": {"b": [1]}, "c": True}
    refused = run("enqueue", "--type", "t", "--data", "[1]", "c=true")
    assert (refused.exit_code, refused.stderr) == (
        2,
        "Error: --data must be a JSON object if KEY=VALUE arguments are given too.\n",
    )


@pytest.mark.parametrize(
    ("options", "beginning"),
    [
        (["--type", "x" * 300], "job_type is 300 characters long"),
        (["--type", ""], "job_type is empty"),
        (["--type", "t", "--data", '"' + "x" * 70000 + '"'], "data is 70,002 bytes of JSON"),
        (["--type", "t", "--priority", "5000"], "Invalid value for '--priority': 5000 is not in the range"),
        (["--type", "t", "--delay", "soon"], '"soon" is not a duration; write it as 30s, 5m, 2h or 7d.'),
    ],
)  # fmt: skip
def test_an_invalid_job_is_one_sentence_and_code_2(
    run: Run, options: list[str], beginning: str
) -> None:
    result = run("enqueue", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"Error: {beginning}")


@pytest.mark.usefixtures("tasks")
def test_the_first_enqueue_creates_the_schema(empty_database: str) -> None:
    result = invoke("enqueue", "cli_shop:elsewhere", "--database", empty_database)
    assert result.exit_code == 0
    shown = invoke("show", result.stdout.strip(), "--database", empty_database, "--schema", "other")
    assert shown.exit_code == 0
