"""Security rules checked everywhere: in every SQL function, in every source file, and in the messages between
processes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from secured import Secured, run, succeed

from howdah import JobQueue
from howdah.worker import processes

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SOURCE = sorted((ROOT / "src").rglob("*.py"))
HOSTILE = [
    'a"b',
    "Upper Case",
    "x; DROP SCHEMA howdah",
    "it's",
    "$$ $1 %s {s} {}",
    "back\\slash",
    "ünï",
]

# ── the database ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def functions(secured: Secured) -> list[Any]:
    with secured.connect() as conn:
        return conn.execute(
            "SELECT proname, prosecdef, proconfig, prosqlbody IS NOT NULL, proacl::text, "
            "proowner::regrole::text, prorettype = 'trigger'::regtype, prosrc "
            "FROM pg_proc WHERE pronamespace = 'howdah'::regnamespace"
        ).fetchall()


def test_every_function_pins_its_search_path(functions: list[Any]) -> None:
    for name, _, settings, is_bound, *_ in functions:
        # A body that was parsed when the function was created resolves no name at run time.
        pinned = "search_path=howdah, pg_temp" in (settings or [])
        assert pinned or is_bound, f"{name} resolves names in its caller's search_path"


def documented() -> set[str]:
    page = (ROOT / "docs/reference/sql.md").read_text()
    page = page[page.index("\n## Functions") : page.index("\n## Internal functions")]
    return set(re.findall(r"^### (\w+)$", page, flags=re.MULTILINE))


def test_documented_functions_are_security_definer_and_internal_ones_are_not(
    functions: list[Any],
) -> None:
    definers = {name for name, is_definer, *_ in functions if is_definer}
    # Those `at_commit` run at the commit, as the role that commits. wake_channel reads no table.
    assert definers == (documented() - {"wake_channel"}) | {
        "assign_key_at_commit",
        "jobs_view_insert",
        "maintain_partitions_at_commit",
        "refuse_finished_id",
    }


def test_no_function_is_for_public(functions: list[Any]) -> None:
    public = {row[0] for row in functions if row[4] is None or re.search(r"[{,]=X", row[4])}
    assert public == set()


def test_dynamic_sql_quotes_its_arguments(functions: list[Any]) -> None:
    """`format` with %I and %L; only names from quote_ident are concatenated with ||."""
    for name, *_, body in functions:
        for statement in re.findall(r"EXECUTE\s+([^;]+);", body):
            assert re.match(r"format\(|'DROP TABLE ' \|\| array_to_string\(v_empty\b", statement), (
                name
            )
            if "%s" in statement:
                assert "v_partition" in statement, name


# ── the source ────────────────────────────────────────────────────────────────────────────────────

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "jsonpickle",
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                yield function.id, node
            elif isinstance(function, ast.Attribute):
                yield f".{function.attr}", node


def test_no_source_file_evaluates_unpickles_or_uses_a_shell() -> None:
    assert len(SOURCE) > 50
    for path in SOURCE:
        check_source(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "text", ["eval('1')", "exec(x)", "import pickle", "from marshal import loads", "os.system('ls')",
             "subprocess.run('ls', shell=True)", "import dill.session"]
)  # fmt: skip
def test_the_scan_detects_forbidden_code(text: str) -> None:
    with pytest.raises(AssertionError):
        check_source(ast.parse(text))


def check_source(tree: ast.AST) -> None:
    used = {name for name, _ in calls(tree)}
    assert used & FORBIDDEN_CALLS == set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {name.partition(".")[0] for name in names} & FORBIDDEN_MODULES
    for name, call in calls(tree):
        if name in {".Popen", ".run", ".call", ".check_output", ".system", ".popen"}:
            shell = [k for k in call.keywords if k.arg == "shell"]
            assert not shell, "no command goes through a shell"
    assert not used & {".system", ".popen"}


def test_messages_to_and_from_task_processes_contain_only_plain_data(secured: Secured) -> None:
    """Names, ids and JSON text in requests, and the fields of an outcome in replies, as MessagePack: nothing is
    unpickled, and no payload can name a class."""
    from uuid import uuid4

    from howdah.outcome import Cancelled, Completed, Failed, Lost, Released
    from howdah.protocol.worker_statements import Claimed
    from howdah.worker.process_messages import (
        RECEIVED_BYTES,
        Messages,
        make_outcome,
        outcome_values,
    )  # fmt: skip

    data = {
        "__reduce__": ["os.system", "id"],
        "py/object": "os.system",
        "n": [1, 2.5, None, True, "x"],
    }
    job = Claimed(
        id=uuid4(), lease_id=uuid4(), job_type="t", queue="q", data=json.dumps(data), attempts=1,
        max_attempts=3, claims=1, request_id=None, traceparent=None, idempotency_key=None, waited=0.0,
    )  # fmt: skip
    outcomes = [
        Completed('{"x": 1}'), Completed('"' + 200_000 * "x" + '"'), Failed("ValueError: no", "Traceback …", 1.0),
        Released(2.0), Cancelled("no"), Lost(),
    ]  # fmt: skip
    messages = [["run", "module", "task", processes.plain_values(job)]]
    messages += [["ended", 1, *outcome_values(each)] for each in outcomes]
    sender, receiver = Messages(), Messages()
    for message in messages:
        _, datagrams = sender.encode(*message)
        assert all(len(each) <= RECEIVED_BYTES for each in datagrams)
        *parts, received = [receiver.decode(each) for each in datagrams]
        assert parts == [None] * len(parts)
        assert received == message
        if message[0] == "ended":
            assert make_outcome(*received[2:]) == outcomes.pop(0)


# ── names ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schema", HOSTILE)
def test_every_command_works_on_a_schema_with_any_name(empty_database: str, schema: str) -> None:
    """Every command and the client, on schemas whose names would inject SQL if they were not quoted."""
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute("CREATE SCHEMA howdah")  # what an injected statement would drop
    there = ("--database", empty_database, "--schema", schema)
    queue = JobQueue(empty_database, schema=schema)
    done = queue.enqueue("mail", {"n": 1}, ordering_key="k")
    waiting = queue.enqueue("mail", {"n": 2}, ordering_key="k")
    job = queue.claim_one()
    assert job is not None
    assert job.id == done.id
    queue.progress(job, 10, "stage")
    queue.event(job, "kind", {"x": 1})
    queue.complete(job)
    assert [each.id for each in queue.find(data={"n": 2})] == [waiting.id]
    for command in (
        ("jobs",), ("jobs", "--where", "data.n=2"), ("show", done.id), ("explain", waiting.id),
        ("queues",), ("workers",), ("top", "--once"), ("tail", "--no-follow"), ("wait", done.id),
        ("recover",), ("migrate",), ("migrate", "--check"), ("cancel", waiting.id), ("retry", waiting.id),
        ("cancel", waiting.id), ("rm", waiting.id), ("clear", "--older-than", "0s"),
    ):  # fmt: skip
        succeed(*command, *there)
    assert "the check failed" not in run("doctor", *there).output
    queue.close()
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(
            sql.SQL("UPDATE {}.maintenance SET due_at = now()").format(sql.Identifier(schema))
        )
        done_now = conn.execute(
            sql.SQL("SELECT error FROM {}.run_maintenance()").format(sql.Identifier(schema))
        ).fetchall()
        assert set(done_now) == {(None,)}
        assert conn.execute("SELECT to_regnamespace('howdah') IS NOT NULL").fetchone() == (True,)
        script = succeed("migrate", "--sql", "--grants", "none", "--schema", schema + "2")
        conn.execute("SET standard_conforming_strings = off")
        conn.execute(script.encode())


def test_task_names_are_looked_up_among_registered_tasks_only() -> None:
    """A job type cannot name arbitrary code."""
    from howdah import App
    from howdah.errors import UnknownTask

    app = App()
    for name in ("os.system", "builtins.eval", "__import__('os')", "shop_app:app", "../x"):
        with pytest.raises(UnknownTask):
            app.get_task(name)
