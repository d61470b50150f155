"""`howdah top` and `howdah tail`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from stage import HOWDAH, ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stage import Run, Shop

    from howdah import JobQueue


# ── top ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_pipe_gets_one_frame(look: Run) -> None:
    result = look("top")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0][8:].startswith('  database "shop" at ')
    assert "3 due" in lines[1]
    assert "1 running" in lines[1]
    assert "1 scheduled  1 blocked" in lines[1]
    assert lines[2].startswith("completed ")
    assert "600 in 5 min" in lines[2]
    assert any(line.startswith("worker-1 ") for line in lines)
    assert look("top", "--once").stdout.splitlines()[1] == lines[1]


def test_a_frame_for_programs(look: Run, read_json: Any) -> None:
    [frame] = read_json(look("top", "--json"))
    assert (frame["due"], frame["running"], frame["scheduled"], frame["blocked"]) == (3, 1, 1, 1)
    assert sum(frame["completed"]) == 600
    resize = next(lane for lane in frame["lanes"] if lane["job_type"] == "resize")
    assert sum(resize["ended"]) == 630
    assert [worker["worker_id"] for worker in frame["workers"]] == ["worker-1"]


@pytest.mark.parametrize(("width", "colour"), [(60, False), (120, True)])
def test_top_is_live_until_q(terminal: Any, shop: Shop, width: int, colour: bool) -> None:
    variables = {} if colour else {"NO_COLOR": "1"}
    seen = terminal("top", "--interval", "100ms", "--database", shop.url, width=width, height=20,
                    **variables)  # fmt: skip
    seen.read(until="worker-1", times=3)
    seen.type("q")
    assert seen.wait() == 0
    assert "Traceback" not in seen.text
    frame = seen.text[: seen.text.index("worker-1")]
    assert max(map(len, frame.splitlines())) <= width
    assert ("\x1b[32m" in seen.raw) == colour
    assert seen.raw.endswith("\x1b[?25h\x1b[?1049l"), "cursor and screen are as they were"


def test_ctrl_c_leaves_top_in_peace(terminal: Any, shop: Shop) -> None:
    seen = terminal("top", "--database", shop.url)
    seen.read(until="worker-1")
    seen.interrupt()
    assert seen.wait() == 0
    assert "Traceback" not in seen.text


def test_top_shows_no_more_than_fits(terminal: Any, database: str, queue: JobQueue) -> None:
    queue.enqueue_many([(f"type-{n:03}", {}) for n in range(100)])
    seen = terminal("top", "--database", database, height=15)
    seen.read(until="more")
    seen.type("q")
    assert seen.wait() == 0
    assert "type-000" in seen.text
    assert "type-050" not in seen.text


# ── tail ──────────────────────────────────────────────────────────────────────────────────────────


def test_tail_says_what_happened_lately(look: Run, shop: Shop, read_json: Any) -> None:
    found = read_json(look("tail", "--no-follow", "--lines", 100, "--json"))
    happened = [(each["what"], each["job_id"]) for each in found]
    completed, failed = str(shop.completed), str(shop.failed)
    assert happened[:3] == [("enqueued", completed), ("event", completed), ("completed", completed)]
    assert [what for what, job in happened if job == failed] == [
        "enqueued",
        "error",
        "error",
        "failed",
    ]
    assert ("claimed", str(shop.running)) in happened
    assert ("cancelled", str(shop.cancelled)) in happened
    assert [each["at"] for each in found] == sorted(each["at"] for each in found)


def test_tail_shows_the_last_lines_and_whole_ids(look: Run, shop: Shop) -> None:
    text = look("tail", "--no-follow", "--lines", 2).stdout
    assert ids(text) == [str(shop.evil), str(shop.misspelt)]
    only = look("tail", "--no-follow", "--type", "charge").stdout
    assert set(ids(only)) == {str(shop.failed)}
    assert "attempt 1: CardError: declined 1 …" in only
    assert set(ids(look("tail", "--no-follow", "--queue", "mail").stdout)) == {
        str(shop.running), str(shop.blocked)}  # fmt: skip


def test_tail_of_nothing(act: Run) -> None:
    result = act("tail", "--no-follow")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "Nothing happened in the last 1 h.\n"


@pytest.mark.parametrize("width", [60, 120])
def test_tail_fits_a_terminal(terminal: Any, shop: Shop, width: int) -> None:
    seen = terminal("tail", "--no-follow", "--lines", 50, "--database", shop.url, width=width)
    assert seen.wait() == 0
    lines = seen.text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(ids(seen.text)) == len(lines)


@pytest.fixture
def following(database: str) -> Iterator[subprocess.Popen[str]]:
    """`howdah tail --json` as a process, with a pipe to read from."""
    with subprocess.Popen(
        [*HOWDAH, "tail", "--json", "--database", database], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=dict(os.environ),
    ) as process:  # fmt: skip
        yield process
        if process.poll() is None:
            process.kill()


def test_tail_follows_jobs_that_were_enqueued_long_ago(
    following: subprocess.Popen[str], queue: JobQueue, connect: Any
) -> None:
    old = queue.enqueue("old").id
    conn = connect()
    conn.execute("UPDATE howdah.live_jobs SET created_at = created_at - interval '1 day'")
    queue.enqueue("first")
    assert following.stdout is not None

    def read() -> dict[str, Any]:
        assert following.stdout is not None
        return dict(json.loads(following.stdout.readline()))

    assert (read()["job_type"]) == "first"
    # Between two looks it is claimed and completed: only the last page of the finished has it.
    job = queue.claim_one("old")
    assert job is not None
    queue.event(job, "note", {"text": "hello"})
    queue.complete(job)
    seen = {}
    while "completed" not in seen:
        each = read()
        if each["job_id"] == str(old):
            seen[each["what"]] = each
    assert seen["event"]["data"] == {"text": "hello"}
    assert seen["completed"]["job_type"] == "old"
    following.send_signal(signal.SIGINT)
    assert following.wait(120) == 0
    assert following.stderr is not None
    assert following.stderr.read() == ""


def test_tail_goes_on_after_a_lost_connection(
    following: subprocess.Popen[str], queue: JobQueue, connect: Any
) -> None:
    queue.enqueue("before")
    assert following.stdout is not None
    assert '"before"' in following.stdout.readline()
    connect().execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    queue.enqueue("after")
    assert '"after"' in following.stdout.readline()
