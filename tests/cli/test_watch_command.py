"""`howdah watch`, `wait` and `enqueue --wait`."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from stage import ids, invoke

from children import until
from howdah import JobQueue, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from stage import Run, Shop


def work(database: str, *, fail: bool = False, watched: bool = True) -> Callable[[], None]:
    """A worker that claims one job, waits until it is watched, reports two steps and ends it."""

    def run() -> None:
        with (
            closing(JobQueue(database, worker_id="worker-7")) as queue,
            psycopg.connect(database, autocommit=True) as conn,
        ):
            job = until(lambda: queue.claim_one(queues=["default", "mail"]), "a job is enqueued")
            if watched:
                find = "SELECT FROM howdah.watchers WHERE job_id = %s"
                until(lambda: conn.execute(find, [job.id]).rowcount, "the job is watched")
            for step in (1, 2):
                queue.progress(job, 33 * step, f"step {step}")
                queue.event(job, "step", {"n": step})
            if fail:
                queue.fail(job, "ValueError: no such\x1b[31m file", retry=False)
            else:
                queue.complete(job, {"pages": 3})

    return run


# ── waiting ───────────────────────────────────────────────────────────────────────────────────────


def test_enqueue_and_wait_prints_the_result(
    run: Run, database: str, meanwhile: Any, read_json: Any
) -> None:
    with meanwhile(work(database)):
        result = run("enqueue", "--type", "t", "--wait")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == ['{"pages": 3}']
    assert result.stderr.startswith("Completed in ")
    with meanwhile(work(database)):
        first, last = read_json(run("enqueue", "--type", "t", "--wait", "--json"))
    assert first["id"] == last["id"]
    assert (last["status"], last["result"]) == ("completed", {"pages": 3})


def test_a_failed_job_is_code_5(run: Run, database: str, meanwhile: Any) -> None:
    with meanwhile(work(database, fail=True)):
        result = run("enqueue", "--type", "t", "--wait")
    assert result.exit_code == 5
    [job_id] = ids(result.stdout)
    sentence = (
        f"Error: job {job_id} (t) failed after 1 attempt: ValueError: no such\\x1b[31m file\n"
    )
    assert result.stderr == sentence
    for command in ("wait", "watch"):
        again = run(command, job_id)
        assert (again.exit_code, again.stderr) == (5, sentence)
        assert run(command, job_id, "--json").exit_code == 5


def test_a_cancelled_job_is_code_5(run_on_shop: Run, shop: Shop) -> None:
    result = run_on_shop("wait", shop.cancelled)
    assert (result.exit_code, result.stdout) == (5, "")
    assert result.stderr == f"Error: job {shop.cancelled} (resize) was cancelled.\n"


def test_waiting_too_long_is_code_1(run_on_shop: Run, shop: Shop) -> None:
    result = run_on_shop("wait", shop.pending, "--timeout", "200ms")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"Error: job {shop.pending} did not end within 0.2 seconds; it continues.\n"
    )


def test_a_job_that_is_not_kept_counts_as_completed(
    terminal: Any, database: str, queue: JobQueue, meanwhile: Any
) -> None:
    job = queue.enqueue("t", keep=0)
    seen = terminal("wait", job.id, "--database", database)
    seen.read(until="pending")
    with meanwhile(work(database)):
        assert seen.wait() == 0
    assert seen.text.endswith("The job completed and was not kept.\n")


# ── watching ──────────────────────────────────────────────────────────────────────────────────────


def test_piped_watch_prints_every_change(
    run: Run, database: str, queue: JobQueue, meanwhile: Any, read_json: Any
) -> None:
    job = queue.enqueue("t")
    with meanwhile(work(database)):
        lines = run("watch", job.id).stdout.splitlines()
    assert any(line.endswith('  step  {"n": 1}') for line in lines)
    assert "completed  100 %  step 2" in lines
    assert lines[-1] == '{"pages": 3}'
    job = queue.enqueue("t")
    with meanwhile(work(database)):
        changes = read_json(run("watch", job.id, "--json"))
    assert changes[-1]["status"] == "completed"
    assert [e["data"]["n"] for change in changes for e in change["events"]] == [1, 2]


@pytest.mark.parametrize("width", [60, 120])
def test_watch_shows_a_progress_bar_in_a_terminal(
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


def test_ctrl_c_does_not_cancel_the_job(
    terminal: Any, shop: Shop, queue: JobQueue, database: str
) -> None:
    job = queue.enqueue("t")
    seen = terminal("watch", job.id, "--database", database)
    seen.read(until="pending")
    seen.interrupt()
    assert seen.wait() == 130
    assert "The job was not cancelled." in seen.text
    assert "Traceback" not in seen.text
    assert queue.get(job).status is Status.PENDING


def test_a_role_that_may_only_read_can_wait(
    database: str, queue: JobQueue, connect: Any, meanwhile: Any
) -> None:
    conn = connect()
    conn.execute("CREATE ROLE onlooker LOGIN")
    try:
        conn.execute("GRANT USAGE ON SCHEMA howdah TO onlooker")
        conn.execute("GRANT SELECT ON ALL TABLES IN SCHEMA howdah TO onlooker")
        job = queue.enqueue("t")
        with meanwhile(work(database, watched=False)):
            result = invoke(
                "wait", job.id, "--database", database.replace("://howdah@", "://onlooker@")
            )
        assert (result.exit_code, result.stdout) == (0, '{"pages": 3}\n')
    finally:
        conn.execute("DROP OWNED BY onlooker")
        conn.execute("DROP ROLE onlooker")
