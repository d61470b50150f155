"""What a claim takes, and in which order."""

from __future__ import annotations

from howdah import BACKFILL, DISCOVERED, EXPLICIT, JobQueue, Status


def test_higher_priority_goes_first_then_the_older(queue: JobQueue) -> None:
    for name, priority in [("a", BACKFILL), ("b", DISCOVERED), ("c", EXPLICIT), ("d", DISCOVERED)]:
        queue.enqueue("work", {"name": name}, priority=priority)
    assert [job.data["name"] for job in queue.claim()] == ["c", "b", "d", "a"]


def test_a_claim_takes_only_the_types_it_asks_for(queue: JobQueue) -> None:
    queue.enqueue("one")
    queue.enqueue("two")
    assert [job.job_type for job in queue.claim(["two"])] == ["two"]


def test_a_job_that_is_due_later_is_not_claimed_now(queue: JobQueue) -> None:
    queue.enqueue("later", delay=3600)
    assert queue.claim() == []
    assert queue.pending() == 1


def test_claiming_one_counts_as_starting_it(queue: JobQueue) -> None:
    queue.enqueue("work")
    job = queue.claim_one()
    assert job is not None
    assert queue.get(job).status is Status.RUNNING
