"""`howdah tail`."""

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


def test_tail_prints_recent_occurrences_in_order(
    run_on_shop: Run, shop: Shop, read_json: Any
) -> None:
    found = read_json(run_on_shop("tail", "--no-follow", "--lines", 100, "--json"))
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


def test_tail_prints_the_last_lines_with_complete_ids_and_filters_them(
    run_on_shop: Run, shop: Shop
) -> None:
    text = run_on_shop("tail", "--no-follow", "--lines", 2).stdout
    assert ids(text) == [str(shop.evil), str(shop.misspelt)]
    only = run_on_shop("tail", "--no-follow", "--type", "charge").stdout
    assert set(ids(only)) == {str(shop.failed)}
    assert "attempt 1: CardError: declined 1 …" in only
    assert set(ids(run_on_shop("tail", "--no-follow", "--queue", "mail").stdout)) == {
        str(shop.running), str(shop.blocked)}  # fmt: skip


def test_tail_of_an_empty_queue_says_so(run: Run) -> None:
    result = run("tail", "--no-follow")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "Nothing happened in the last 1 h.\n"


def test_tail_ignores_partitions_that_howdah_has_not_made(
    run: Run, queue: JobQueue, connect: Any
) -> None:
    queue.enqueue("work")
    job = queue.claim_one(["work"])
    assert job is not None
    queue.complete(job)
    conn = connect()
    conn.execute(
        "CREATE TABLE howdah.archive PARTITION OF howdah.finished_jobs "
        "FOR VALUES FROM ('2001-01-01') TO ('2001-01-02')"
    )
    conn.execute("UPDATE howdah.finished_jobs SET drop_on = '2001-01-01'")
    result = run("tail", "--no-follow")
    assert result.exit_code == 0, result.output
    assert ids(result.stdout) == [str(job.id)]  # its enqueue


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


def test_tail_follows_a_job_that_was_enqueued_before_its_window(
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
    # It may be claimed and completed between two polls: then only the last page of its partition has it.
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


def test_tail_continues_after_a_lost_connection(
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
