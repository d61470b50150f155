"""`howdah retry`, `cancel`, `rm`, `recover` and `clear`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from howdah import JobNotFound, JobQueue, Status

if TYPE_CHECKING:
    from uuid import UUID

    from stage import Run


@pytest.fixture
def database(wiped: str) -> str:
    return wiped


def fail_one(queue: JobQueue, **options: Any) -> UUID:
    """A job that has failed for good."""
    job_id = queue.enqueue("charge", **options).id
    job = queue.claim_one("charge")
    assert job is not None
    assert job.id == job_id
    queue.fail(job, "declined", retry=False)
    return job_id


def test_retry_reopens_a_failed_job(act: Run, queue: JobQueue) -> None:
    job_id = fail_one(queue)
    result = act("retry", str(job_id)[-12:])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{job_id}  retried\n", "")
    assert queue.get(job_id).status is Status.PENDING
    again = act("retry", job_id)
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == (f"Error: job {job_id} cannot be retried: it has not ended (pending).\n")


def test_cancel_ends_a_waiting_job_and_asks_a_running_one(
    act: Run, queue: JobQueue, read_json: Any
) -> None:
    running = queue.enqueue("work").id
    queue.claim_one()
    waiting = queue.enqueue("work").id
    assert act("cancel", running, waiting).stdout == (
        f"{running}  cancelling\n{waiting}  cancelled\n"
    )
    assert queue.get(waiting).status is Status.CANCELLED
    assert queue.get(running).cancel_requested
    [answer] = read_json(act("cancel", waiting, "--json"))
    assert answer == {"id": str(waiting), "outcome": "refused", "status": "cancelled"}


def test_rm_deletes_finished_jobs_and_their_events_only(
    act: Run, queue: JobQueue, connect: Any
) -> None:
    failed = fail_one(queue)
    running = queue.enqueue("work").id
    queue.claim_one()
    result = act("rm", failed, running)
    assert (result.exit_code, result.stdout) == (1, f"{failed}  removed\n")
    assert result.stderr == (
        f"Error: job {running} cannot be removed: it has not ended; cancel it first (running).\n"
    )
    with pytest.raises(JobNotFound):
        queue.get(failed)
    assert queue.get(running).status is Status.RUNNING
    assert connect().execute("SELECT count(*) FROM howdah.job_events").fetchone() == (0,)


def test_by_conditions_it_says_how_many_and_asks(act: Run, queue: JobQueue) -> None:
    for n in range(3):
        fail_one(queue, data={"n": n})
    refused = act("retry", "--where", "type=charge", input="n\n")
    assert refused.exit_code == 1
    assert refused.stderr == "Retry 3 jobs? [y/N]: n\nError: nothing was changed.\n"
    assert queue.counts()[Status.FAILED] == 3
    agreed = act("retry", "--where", "type=charge", "--where", "data.n>0", input="y\n")
    assert (agreed.exit_code, agreed.stdout) == (0, "2 jobs retried.\n")
    assert queue.counts()[Status.FAILED] == 1


def test_without_an_answer_nothing_is_done(act: Run, queue: JobQueue) -> None:
    fail_one(queue)
    result = act("rm", "--where", "type=charge", input="")
    assert result.exit_code == 1
    assert queue.counts()[Status.FAILED] == 1


def test_a_dry_run_changes_nothing(act: Run, queue: JobQueue, read_json: Any) -> None:
    failed = fail_one(queue)
    waiting = queue.enqueue("charge").id
    before = [queue.get(failed), queue.get(waiting)]
    for command, job_id in (("retry", failed), ("rm", failed), ("cancel", waiting)):
        result = act(command, job_id, "--dry-run")
        assert result.exit_code == 0
        assert f"{job_id}  would be " in result.stdout
        result = act(command, "--where", "type=charge", "--dry-run")
        assert result.exit_code == 0
        assert result.stdout.startswith("1 job would be ")
        assert str(job_id) in result.stdout
        [answer] = read_json(act(command, "--where", "type=charge", "--dry-run", "--json"))
        assert (answer["matched"], answer["dry_run"]) == (1, True)
    assert [queue.get(failed), queue.get(waiting)] == before


def test_retry_by_conditions_leaves_completed_jobs_alone_unless_they_are_named(
    act: Run, queue: JobQueue
) -> None:
    queue.enqueue("charge")
    job = queue.claim_one()
    assert job is not None
    queue.complete(job)
    result = act("retry", "--where", "type=charge", "--yes")
    assert result.stdout == "No job that could be retried matches.\n"
    result = act("retry", "--where", "status=completed", "--yes")
    assert result.stdout == "1 job retried.\n"


def test_thousands_go_in_batches_and_none_is_done_twice(
    act: Run, queue: JobQueue, read_json: Any
) -> None:
    queue.enqueue_many([("bulk", {"n": n}) for n in range(1200)])
    [answer] = read_json(act("cancel", "--where", "type=bulk", "--yes", "--json"))
    assert answer == {"matched": 1200, "cancelled": 1200, "dry_run": False}
    [answer] = read_json(act("rm", "--where", "type=bulk", "--yes", "--json"))
    assert answer == {"matched": 1200, "removed": 1200, "dry_run": False}
    assert sum(queue.counts().values()) == 0


def test_long_work_shows_progress_in_a_terminal(
    terminal: Any, database: str, queue: JobQueue
) -> None:
    queue.enqueue_many([("bulk", {}) for _ in range(1200)])
    seen = terminal("cancel", "--where", "type=bulk", "--database", database, width=60)
    seen.read(until="Cancel 1,200 jobs? [y/N]:")
    seen.type("y\n")
    assert seen.wait() == 0
    assert "/1200" in seen.text
    assert "1,200 jobs cancelled." in seen.text


@pytest.mark.parametrize("command", ["retry", "cancel", "rm"])
def test_ids_or_conditions_are_needed_and_not_both(act: Run, command: str) -> None:
    for arguments in ([], ["01890000", "--where", "type=x"]):
        result = act(command, *arguments)
        assert (result.exit_code, result.stderr) == (
            2,
            "Error: name jobs by their ids, or by --where; one of the two.\n",
        )
    result = act(command, "01890000", "--dry-run", "--yes")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: --dry-run and --yes exclude each other.\n",
    )


def test_hostile_conditions_do_no_harm(act: Run, queue: JobQueue) -> None:
    fail_one(queue)
    for hostile in ("'; DELETE FROM howdah.jobs; --", "' OR '1'='1", "x) OR (true"):
        for name in ("type", "error", "data.a"):
            result = act("rm", "--where", f"{name}={hostile}", "--yes")
            assert result.stdout == "No job that could be removed matches.\n"
    assert queue.counts()[Status.FAILED] == 1


def test_recover_returns_what_ran_out_and_with_a_timeout_what_is_old(
    act: Run, queue: JobQueue, connect: Any, read_json: Any
) -> None:
    queue.enqueue("work")
    queue.claim_one()
    assert act("recover").stdout == "0 jobs recovered.\n"
    assert act("recover", "--timeout", "1h").stdout == "0 jobs recovered.\n"
    assert act("recover", "--timeout", "0s").stdout == "1 job recovered.\n"
    queue.claim_one()
    connect().execute(
        "UPDATE howdah.live_jobs SET lease_expires_at = clock_timestamp() - interval '1 s'"
    )
    assert read_json(act("recover", "--json")) == [{"recovered": 1}]


def test_clear_deletes_what_is_old_enough(act: Run, queue: JobQueue, read_json: Any) -> None:
    fail_one(queue)
    queue.cancel(queue.enqueue("work"))
    assert act("clear", "--older-than", "7d").stdout == (
        "0 finished jobs older than 7 days cleared.\n"
    )
    assert act("clear", "--older-than", "0s", "--status", "failed").exit_code == 0
    assert queue.counts()[Status.FAILED] == 0
    assert read_json(act("clear", "--older-than", "0s", "--json")) == [{"cleared": 1}]


def test_clear_wants_a_duration_and_final_statuses(act: Run) -> None:
    assert act("clear").exit_code == 2
    result = act("clear", "--older-than", "a week")
    assert (result.exit_code, result.stderr) == (
        2,
        'Error: "a week" is not a duration; write it as 30s, 5m, 2h or 7d.\n',
    )
    result = act("clear", "--older-than", "7d", "--status", "running")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: a running job has not ended; there are completed, failed, cancelled.\n",
    )
