"""`howdah retry`, `cancel`, `rm`, `recover` and `clear`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from howdah import JobNotFound, JobQueue, Status

if TYPE_CHECKING:
    from uuid import UUID

    from stage import Run


def fail_one(queue: JobQueue, **options: Any) -> UUID:
    """A job that failed permanently."""
    job_id = queue.enqueue("charge", **options).id
    job = queue.claim_one("charge")
    assert job is not None
    assert job.id == job_id
    queue.fail(job, "declined", retry=False)
    return job_id


def test_retry_reopens_a_failed_job(run: Run, queue: JobQueue) -> None:
    job_id = fail_one(queue)
    result = run("retry", str(job_id)[-12:])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{job_id}  retried\n", "")
    assert queue.get(job_id).status is Status.PENDING
    again = run("retry", job_id)
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == (
        f"Error: job {job_id} cannot be retried: it is not finished (pending).\n"
    )


def test_cancel_ends_a_waiting_job_and_requests_the_end_of_a_running_one(
    run: Run, queue: JobQueue, read_json: Any
) -> None:
    running = queue.enqueue("work").id
    queue.claim_one()
    waiting = queue.enqueue("work").id
    assert run("cancel", running, waiting).stdout == (
        f"{running}  cancelling\n{waiting}  cancelled\n"
    )
    assert queue.get(waiting).status is Status.CANCELLED
    assert queue.get(running).cancel_requested
    [answer] = read_json(run("cancel", waiting, "--json"))
    assert answer == {"id": str(waiting), "outcome": "refused", "status": "cancelled"}


def test_rm_deletes_finished_jobs_and_their_events_only(
    run: Run, queue: JobQueue, connect: Any
) -> None:
    failed = fail_one(queue)
    running = queue.enqueue("work").id
    queue.claim_one()
    result = run("rm", failed, running)
    assert (result.exit_code, result.stdout) == (1, f"{failed}  removed\n")
    assert result.stderr == (
        f"Error: job {running} cannot be removed: it is not finished; cancel it first (running).\n"
    )
    with pytest.raises(JobNotFound):
        queue.get(failed)
    assert queue.get(running).status is Status.RUNNING
    assert connect().execute("SELECT count(*) FROM howdah.job_events").fetchone() == (0,)


def test_with_conditions_it_prints_the_count_and_asks(run: Run, queue: JobQueue) -> None:
    for n in range(3):
        fail_one(queue, data={"n": n})
    refused = run("retry", "--where", "type=charge", input="n\n")
    assert refused.exit_code == 1
    assert refused.stderr == "Retry 3 jobs? [y/N]: n\nError: no job was changed.\n"
    assert queue.counts()[Status.FAILED] == 3
    agreed = run("retry", "--where", "type=charge", "--where", "data.n>0", input="y\n")
    assert (agreed.exit_code, agreed.stdout) == (0, "2 jobs retried.\n")
    assert queue.counts()[Status.FAILED] == 1


def test_without_an_answer_nothing_is_changed(run: Run, queue: JobQueue) -> None:
    fail_one(queue)
    result = run("rm", "--where", "type=charge", input="")
    assert (result.exit_code, result.stderr) == (1, "Remove 1 job? [y/N]: Aborted!\n")
    assert queue.counts()[Status.FAILED] == 1


def test_a_dry_run_changes_nothing(run: Run, queue: JobQueue, read_json: Any) -> None:
    failed = fail_one(queue)
    waiting = queue.enqueue("charge").id
    before = [queue.get(failed), queue.get(waiting)]
    for command, job_id in (("retry", failed), ("rm", failed), ("cancel", waiting)):
        result = run(command, job_id, "--dry-run")
        assert result.exit_code == 0
        assert f"{job_id}  would be " in result.stdout
        result = run(command, "--where", "type=charge", "--dry-run")
        assert result.exit_code == 0
        assert result.stdout.startswith("1 job would be ")
        assert str(job_id) in result.stdout
        [answer] = read_json(run(command, "--where", "type=charge", "--dry-run", "--json"))
        assert (answer["matched"], answer["dry_run"]) == (1, True)
    assert [queue.get(failed), queue.get(waiting)] == before


def test_retry_with_conditions_skips_completed_jobs_unless_the_status_is_named(
    run: Run, queue: JobQueue
) -> None:
    queue.enqueue("charge")
    job = queue.claim_one()
    assert job is not None
    queue.complete(job)
    result = run("retry", "--where", "type=charge", "--yes")
    assert result.stdout == "No job that could be retried matches.\n"
    result = run("retry", "--where", "status=completed", "--yes")
    assert result.stdout == "1 job retried.\n"


def test_more_jobs_than_a_batch_are_changed_once_each(
    run: Run, queue: JobQueue, read_json: Any
) -> None:
    queue.enqueue_many([("bulk", {"n": n}) for n in range(1200)])
    [answer] = read_json(run("cancel", "--where", "type=bulk", "--yes", "--json"))
    assert answer == {"matched": 1200, "cancelled": 1200, "dry_run": False}
    [answer] = read_json(run("rm", "--where", "type=bulk", "--yes", "--json"))
    assert answer == {"matched": 1200, "removed": 1200, "dry_run": False}
    assert sum(queue.counts().values()) == 0


@pytest.mark.parametrize("batch", [1, 2, 500])
def test_locked_jobs_are_named_and_the_others_are_cancelled(
    run: Run, queue: JobQueue, connect: Any, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr("howdah.cli.commands.operate.BATCH_JOBS", batch)
    handles = [queue.enqueue("work") for _ in range(3)]
    with connect().transaction() as transaction:
        transaction.connection.execute(
            "SELECT FROM howdah.live_jobs WHERE id = %s FOR UPDATE", (handles[1].id,)
        )
        answer = run("cancel", "--where", "type=work", "--yes")
    assert (answer.exit_code, answer.stdout) == (1, "2 jobs cancelled.\n")
    assert (
        f"1 job was not cancelled, because another transaction has locked it: {handles[1].id}"
        in (answer.stderr)
    )
    assert [queue.get(each).status for each in handles] == ["cancelled", "pending", "cancelled"]


def test_many_jobs_show_a_progress_bar_in_a_terminal(
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
def test_either_ids_or_conditions_are_required(run: Run, command: str) -> None:
    for arguments in ([], ["01890000", "--where", "type=x"]):
        result = run(command, *arguments)
        assert (result.exit_code, result.stderr) == (
            2,
            "Error: name jobs either by their ids or with --where.\n",
        )
    result = run(command, "01890000", "--dry-run", "--yes")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: --dry-run and --yes cannot be used together.\n",
    )


def test_sql_in_a_condition_is_not_executed(run: Run, queue: JobQueue) -> None:
    fail_one(queue)
    for hostile in ("'; DELETE FROM howdah.jobs; --", "' OR '1'='1", "x) OR (true"):
        for name in ("type", "error", "data.a"):
            result = run("rm", "--where", f"{name}={hostile}", "--yes")
            assert result.stdout == "No job that could be removed matches.\n"
    assert queue.counts()[Status.FAILED] == 1


def test_recover_takes_expired_leases_and_with_a_timeout_old_claims(
    run: Run, queue: JobQueue, connect: Any, read_json: Any
) -> None:
    queue.enqueue("work")
    queue.claim_one()
    assert run("recover").stdout == "0 jobs recovered.\n"
    assert run("recover", "--timeout", "1h").stdout == "0 jobs recovered.\n"
    assert run("recover", "--timeout", "0s").stdout == "1 job recovered.\n"
    queue.claim_one()
    connect().execute("UPDATE howdah.leases SET expires_at = clock_timestamp() - interval '1 s'")
    assert read_json(run("recover", "--json")) == [{"recovered": 1}]


def test_clear_deletes_jobs_that_are_old_enough(run: Run, queue: JobQueue, read_json: Any) -> None:
    fail_one(queue)
    queue.cancel(queue.enqueue("work"))
    assert run("clear", "--older-than", "7d").stdout == (
        "0 finished jobs older than 7 days cleared.\n"
    )
    assert run("clear", "--older-than", "0s", "--status", "failed").exit_code == 0
    assert queue.counts()[Status.FAILED] == 0
    assert read_json(run("clear", "--older-than", "0s", "--json")) == [{"cleared": 1}]


def test_clear_requires_a_duration_and_final_statuses(run: Run) -> None:
    assert run("clear").exit_code == 2
    result = run("clear", "--older-than", "a week")
    assert (result.exit_code, result.stderr) == (
        2,
        'Error: "a week" is not a duration; write it as 30s, 5m, 2h or 7d.\n',
    )
    result = run("clear", "--older-than", "7d", "--status", "running")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: a running job is not finished; use completed, failed, cancelled.\n",
    )
