"""`howdah jobs` and `howdah show`, and how every command treats ids, databases and odd text."""

from __future__ import annotations

import re
import socket
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from stage import EVIL, ids, invoke

from howdah.cli import main

if TYPE_CHECKING:
    from stage import Run, Shop

# ── the list ──────────────────────────────────────────────────────────────────────────────────────


def test_jobs_lists_the_newest_first_with_complete_ids(run_on_shop: Run, shop: Shop) -> None:
    result = run_on_shop("jobs", "--limit", 3)
    assert result.exit_code == 0
    assert ids(result.stdout) == [str(shop.misspelt), str(shop.evil), str(shop.scheduled)]
    assert result.stdout.splitlines()[0].split()[:3] == ["ID", "STATUS", "TYPE"]
    assert result.stderr == f"Next page: --before {shop.scheduled}\n"


def test_before_gives_the_next_page(run_on_shop: Run, shop: Shop) -> None:
    first = ids(run_on_shop("jobs", "--limit", 5).stdout)
    rest = ids(run_on_shop("jobs", "--before", first[-1], "--limit", 100).stdout)
    assert len(first) == 5
    assert first + rest == [str(each) for each in (
        shop.misspelt, shop.evil, shop.scheduled, shop.pending, shop.blocked, shop.running,
        shop.cancelled, shop.failed, shop.completed)]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--status", "failed"], ["failed"]),
        (["--status", "failed", "--status", "cancelled"], ["cancelled", "failed"]),
        (["--type", "resize", "--status", "pending"], ["scheduled", "pending"]),
        (["--queue", "mail"], ["blocked", "running"]),
        (["--where", "status=running,failed"], ["running", "failed"]),
        (["--where", "status!=pending,running,completed"], ["cancelled", "failed"]),
        (["--where", "type~RESI", "--where", "status=completed"], ["completed"]),
        (["--where", "priority>100"], ["pending"]),
        (["--where", "attempts=2"], ["failed"]),
        (["--where", "progress>=60", "--where", "progress<100"], ["running"]),
        (["--where", "worker=worker-1", "--where", "status=running"], ["running"]),
        (["--where", "request_id=request-9"], ["pending"]),
        (["--where", "ordering_key=alice"], ["blocked", "running"]),
        (["--where", "error=DECLINED 2"], ["failed"]),
        (["--where", "error~declined 9"], []),
        (["--where", "data.path=a.png"], ["completed"]),
        (["--where", "data.size.width=400"], ["completed"]),
        (["--where", "data.size.width>399"], ["completed"]),
        (["--where", "data.size.width>400"], []),
        (["--where", "data.path~PNG", "--where", "data.path!=a.png", "--where", "status=cancelled"],
         ["cancelled"]),
        (["--where", "data.order=null", "--where", "type=charge"], []),
        (["--where", "data.missing=null", "--where", "type=charge"], ["failed"]),
        (["--where", "data.note=it's; \"quoted\" -- here"], ["failed"]),
        (["--where", "older=1d"], []),
        (["--where", "age<1d", "--where", "type=charge"], ["failed"]),
        (["--where", "newer=1d", "--where", "type = charge"], ["failed"]),
    ],
)  # fmt: skip
def test_jobs_lists_jobs_that_meet_every_condition(
    run_on_shop: Run, shop: Shop, options: list[str], names: list[str]
) -> None:
    result = run_on_shop("jobs", *options)
    assert result.exit_code == 0
    assert ids(result.stdout) == [str(getattr(shop, name)) for name in names]
    assert (result.stderr == "No job matches.\n") == (not names)


def test_a_condition_on_the_id_finds_one_job(run_on_shop: Run, shop: Shop) -> None:
    assert ids(run_on_shop("jobs", "--where", f"id={shop.failed}").stdout) == [str(shop.failed)]


HOSTILE = [
    "'; DROP TABLE howdah.live_jobs; --",
    '" OR 1=1 --',
    "$1",
    "{}",
    "%s %(x)s",
    "\\",
    "a' || pg_sleep(10) || '",
    '{"a": 1}',
    "[1, 2",
    "NaN",
    "1e999",
    '"\\u0000"',
    '"\\ud800"',
]


@pytest.mark.parametrize("name", ["type", "error", "data.path", "ordering_key"])
@pytest.mark.parametrize(("operator", "found"), [("=", 0), ("!=", 9), ("~", 0)])
def test_sql_in_a_value_is_only_compared(
    run_on_shop: Run, name: str, operator: str, found: int
) -> None:
    conditions = [("--where", f"{name}{operator}{value}") for value in HOSTILE]
    result = run_on_shop(
        "jobs", "--json", *[word for condition in conditions for word in condition]
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(ids(result.stdout)) == found


def test_sql_in_a_name_is_not_executed(run_on_shop: Run) -> None:
    for name in ("data.a'b", 'data."a', "type)--", "data.{x}", "1=1 OR type"):
        assert run_on_shop("jobs", "--where", f"{name}=x").exit_code in (0, 2)
    assert len(ids(run_on_shop("jobs").stdout)) == 9


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--where", "stauts=failed"], 'unknown column "stauts"; did you mean "status"?'),
        (["--where", "zzz=1"], 'unknown column "zzz"; use id, status, type, queue, worker, '
         "request_id, ordering_key, priority, attempts, progress, error, age, older, newer or "
         "data.MEMBER."),
        (["--where", "status=faild"], 'unknown status "faild"; did you mean "failed"?'),
        (["--status", "runing"], 'unknown status "runing"; did you mean "running"?'),
        (["--where", "failed"], '"failed" is not a condition; write a name, an operator and a value, '
         "as in status=failed, data.path=a.png or age>2h."),
        (["--where", "age>yesterday"],
         '"yesterday" is not a duration; write it as 30s, 5m, 2h or 7d.'),
        (["--where", "age=5m"], '"age" cannot be compared with =; use < <= > >='),
        (["--where", "priority=high"], '"priority" is compared with a whole number, not "high".'),
        (["--where", "type>a"], '"type" cannot be compared with >; use = != ~'),
        (["--where", "data.=1"], '"data." does not name a member of the data; write it as in data.user.id=42.'),
        (["--where", "data.n>x"], '> compares numbers; "x" is not a number.'),
        (["--where", "id=7"], '"7" is not a complete job id.'),
        (["--before", "nonsense"],
         '"nonsense" is not a job id, nor the beginning or the end of one.'),
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence_and_code_2(
    run_on_shop: Run, options: list[str], sentence: str
) -> None:
    result = run_on_shop("jobs", *options)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {sentence}\n")


def test_text_that_is_not_valid_unicode_is_rejected(run_on_shop: Run) -> None:
    result = run_on_shop("jobs", "--type", "\udcff")
    assert (result.exit_code, result.stderr) == (2, "Error: '\\udcff' is not valid Unicode.\n")


def test_json_is_one_object_per_line_with_iso_times(
    run_on_shop: Run, shop: Shop, read_json: Any
) -> None:
    found = read_json(run_on_shop("jobs", "--json"))
    assert [each["id"] for each in found] == ids(run_on_shop("jobs").stdout)
    job = found[-1]
    assert (job["job_type"], job["status"], job["result"]) == ("resize", "completed", "a-400.png")
    for name in ("created_at", "claimed_at", "started_at", "completed_at", "run_at"):
        assert datetime.fromisoformat(job[name]).utcoffset() is not None
    assert "lease_id" not in job


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("color", [True, False])
def test_the_list_fits_a_terminal(terminal: Any, shop: Shop, width: int, color: bool) -> None:
    variables = {} if color else {"NO_COLOR": "1"}
    seen = terminal("jobs", "--database", shop.url, width=width, **variables)
    assert seen.wait() == 0
    lines = seen.text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(ids(seen.text)) == 9, "no id is cut or wrapped"
    assert [line.split()[1] for line in lines[1:]] == [
        "pending", "pending", "pending", "pending", "pending", "running", "cancelled", "failed",
        "completed"]  # fmt: skip
    assert ("\x1b[32mcompleted" in seen.raw) == color
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", seen.raw)) == color
    if width == 120:
        assert "CardError: declined 2 …" in seen.text
        assert "60 % writing" in seen.text


def test_piped_output_is_plain_and_not_cut(piped: Any, shop: Shop) -> None:
    done = piped("jobs", "--database", shop.url, COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert len(ids(done.stdout)) == 9
    assert "CardError: declined 2 …" in done.stdout


def test_output_to_an_ascii_pipe_is_ascii(piped: Any, shop: Shop) -> None:
    done = piped("top", "--database", shop.url, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_no_jobs_are_a_note_and_no_table(run: Run) -> None:
    result = run("jobs")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "There are no jobs.\n")
    assert run("jobs", "--json").stderr == ""


def test_control_characters_are_escaped(run_on_shop: Run, shop: Shop) -> None:
    assert EVIL.startswith("evil\x1b")
    for command in (["jobs"], ["show", shop.evil], ["explain", shop.evil], ["queues"],
                    ["tail", "--no-follow", "--lines", 100], ["doctor"]):  # fmt: skip
        result = run_on_shop(*command)
        assert "\x1b" not in result.output, command
        assert "\x07" not in result.output, command
    assert "evil\\x1b[31m" in run_on_shop("jobs").stdout


# ── one job ───────────────────────────────────────────────────────────────────────────────────────


def test_show_prints_the_timeline_data_and_result(run_on_shop: Run, shop: Shop) -> None:
    lines = run_on_shop("show", shop.completed).stdout.splitlines()
    assert lines[0] == "✓ completed  resize"
    assert lines[1] == str(shop.completed)
    text = "\n".join(lines)
    steps = re.findall(r"^  \d\d:\d\d:\d\d\.\d{3} +(?:\+\S+ \S+ +)?(\w+)", text, re.MULTILINE)
    assert steps == ["enqueued", "claimed", "event", "completed"]
    assert 'tile {"n": 1}' in text
    assert '    "width": 400' in text
    assert text.endswith('result\n  "a-400.png"')


def test_show_prints_the_error_of_every_attempt(run_on_shop: Run, shop: Shop) -> None:
    text = run_on_shop("show", shop.failed).stdout
    assert text.startswith("✗ failed  charge\n")
    assert "attempts  2 of 2" in text
    assert "error of attempt 1" in text
    assert "  CardError: declined 1\n  second line\n" in text
    assert "  CardError: declined 2\n  second line\n" in text


def test_show_as_json_has_the_events(run_on_shop: Run, shop: Shop, read_json: Any) -> None:
    [job] = read_json(run_on_shop("show", shop.failed, "--json"))
    assert job["status"] == "failed"
    assert [event["kind"] for event in job["events"]] == ["error", "error"]
    assert job["events"][0]["data"]["error"] == "CardError: declined 1\nsecond line"


@pytest.mark.parametrize("width", [60, 120])
def test_show_fits_a_terminal(terminal: Any, shop: Shop, width: int) -> None:
    seen = terminal("show", shop.failed, "--database", shop.url, width=width)
    assert seen.wait() == 0
    assert max(map(len, seen.text.splitlines())) <= width
    assert str(shop.failed) in seen.text.splitlines()


@pytest.mark.parametrize("command", ["show", "explain", "wait", "watch"])
def test_a_part_of_an_id_is_enough(run_on_shop: Run, shop: Shop, command: str) -> None:
    whole = str(shop.completed)
    for part in (whole, whole.upper(), whole[:30], whole[-10:], whole.replace("-", "")):
        result = run_on_shop(command, part)
        assert result.exit_code == 0, result.stderr


def test_an_ambiguous_id_names_the_candidates(run_on_shop: Run, shop: Shop) -> None:
    result = run_on_shop("show", str(shop.completed)[:6])
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        f"matches several jobs; type more of the id: {shop.misspelt} (exprot, pending),"
        in result.stderr
    )
    assert result.stderr.endswith(" and more.\n")


@pytest.mark.parametrize("command", ["show", "explain", "wait", "watch", "retry", "cancel", "rm"])
def test_an_invalid_id_is_one_sentence_and_code_2(run_on_shop: Run, command: str) -> None:
    for part in ("x'; DROP TABLE jobs", "é", ""):
        result = run_on_shop(command, part)
        assert (result.exit_code, result.stderr) == (
            2,
            f'Error: "{part}" is not a job id, nor the beginning or the end of one.\n',
        )
    result = run_on_shop(command, "12")
    assert (result.exit_code, result.stderr) == (
        2,
        'Error: "12" is too short for a job id; type at least 4 characters of its beginning or end.\n',
    )


@pytest.mark.parametrize("command", ["show", "explain", "wait", "watch", "retry", "cancel", "rm"])
def test_a_missing_job_is_code_3(run_on_shop: Run, command: str) -> None:
    whole = "01890000-0000-7000-8000-000000000000"
    result = run_on_shop(command, whole)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"Error: there is no job {whole}; it may have been cleared after its retention.\n"
    )
    result = run_on_shop(command, "ffffffffff")
    assert result.exit_code == 3
    assert result.stderr.startswith('Error: no job\'s id begins or ends with "ffffffffff"')


# ── databases ─────────────────────────────────────────────────────────────────────────────────────

COMMANDS: list[list[str]] = [
    ["jobs"], ["show", "01890000"], ["watch", "01890000"], ["wait", "01890000"], ["top", "--once"],
    ["tail", "--no-follow"], ["queues"], ["workers"], ["explain", "01890000"], ["doctor"],
    ["retry", "01890000"], ["cancel", "01890000"], ["rm", "01890000"], ["recover"],
    ["clear", "--older-than", "7d"], ["enqueue", "--type", "x"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_unreachable_database_is_code_4(command: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refused at once
        port = unused.getsockname()[1]
        result = invoke(*command, "--database", f"postgresql://ada:s3cret@127.0.0.1:{port}/shop")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith('Error: cannot reach database "shop" at 127.0.0.1:')
    assert "s3cret" not in result.stderr


def test_without_a_database_the_error_names_both_solutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HOWDAH_DATABASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for command in COMMANDS:
        result = invoke(*command)
        assert result.exit_code == 1
        assert "Set HOWDAH_DATABASE_URL" in result.stderr
        assert "howdah db start" in result.stderr


def test_a_database_without_the_schema_is_an_error_and_stays_empty(empty_database: str) -> None:
    for command in COMMANDS:
        if command[0] in ("enqueue", "doctor"):
            continue
        result = invoke(*command, "--database", empty_database)
        assert (result.exit_code, result.stdout, result.stderr) == (
            1,
            "",
            'Error: schema "howdah" has no Howdah tables in this database. Run `howdah migrate` to '
            "make them, or name the right database or schema with --database and --schema.\n",
        )
    doctor = invoke("doctor", "--database", empty_database)
    assert doctor.exit_code == 1
    assert "Run `howdah migrate`" in doctor.stdout
    with psycopg.connect(empty_database) as conn:
        assert conn.execute("SELECT to_regnamespace('howdah')").fetchone() == (None,)


def test_a_bad_schema_name_is_code_2(run_on_shop: Run) -> None:
    for command in COMMANDS:
        result = run_on_shop(*command, "--schema", "pg_mine")
        assert result.exit_code == 2
        assert result.stderr.startswith('Error: "pg_mine" cannot be a schema name')


def test_a_role_that_may_only_read_can_inspect_and_cannot_change(reader: str, shop: Shop) -> None:
    job = str(shop.completed)
    for command in (["jobs"], ["show", job], ["watch", job], ["wait", job], ["top"], ["queues"],
                    ["tail", "--no-follow"], ["workers"], ["explain", job]):  # fmt: skip
        result = invoke(*command, "--database", reader)
        assert (result.exit_code, result.stderr.count("Error")) == (0, 0), result.stderr
        assert result.stdout
    assert "schema" in invoke("doctor", "--database", reader).stdout
    for command in (["retry", job], ["cancel", str(shop.pending)], ["rm", job],
                    ["enqueue", "--type", "x"], ["clear", "--older-than", "0s"]):  # fmt: skip
        result = invoke(*command, "--database", reader)
        assert result.exit_code == 1, command
        who = "this role" if command[0] == "enqueue" else 'role "reader_role"'
        refusal = f"Error: the database does not let {who} do that: permission denied"
        assert result.stderr.startswith(refusal)
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command", [*COMMANDS, ["worker", "x"], ["dev", "x"]], ids=lambda command: command[0]
)
def test_every_command_has_help(command: list[str]) -> None:
    result = invoke(command[0], "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: main {command[0]} ")
    if command[0] not in ("worker", "dev"):
        assert "--json" in result.stdout
        assert "--database" in result.stdout


def test_shell_completion_is_available(piped: Any) -> None:
    done = piped(_HOWDAH_COMPLETE="bash_source")
    assert (done.returncode, done.stderr) == (0, "")
    assert "_HOWDAH_COMPLETE=bash_complete" in done.stdout


def test_the_reference_names_every_option_of_these_commands() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    shared = (
        page[: page.index("## Conditions")]
        + page[page.index("## Operate") : page.index("### retry")]
    )
    for command in [*COMMANDS, ["dev"]]:
        name = command[0]
        section = page.split(f"\n### {name}\n")[1].split("\n### ")[0]
        for parameter in main.commands[name].params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                if option.startswith("--"):
                    assert f"`{option}" in section + shared, f"{name} {option}"
