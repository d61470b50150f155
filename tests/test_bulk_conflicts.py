"""A bulk enqueue that an idempotency key refuses names the job by its index, on every way in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from blocking import BlockingAsyncJobQueue
from howdah import IdempotencyConflict, JobQueue, NewJob

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYED = NewJob(job_type="work", data={"n": 1}, idempotency_key="key")
OTHER = NewJob(job_type="work", data={"n": 2}, idempotency_key="key")
PLAIN = NewJob(job_type="work")
DELAYED = NewJob(job_type="work", delay=60)

# The jobs, and the index of the one that is refused. From 200 jobs on, plain jobs are sent with COPY.
BULKS: dict[str, tuple[list[NewJob], int]] = {
    "alone": ([OTHER], 0),
    "among a few": ([PLAIN, DELAYED, OTHER, PLAIN], 2),
    "the first of several": ([PLAIN, OTHER, OTHER], 1),
    "in a later chunk of JSON": ([DELAYED] * 450 + [OTHER] + [DELAYED] * 10, 450),
    "behind a COPY": ([PLAIN] * 400 + [OTHER, PLAIN], 400),
    "in the middle of the last chunk of a COPY": ([PLAIN] * 450 + [OTHER] + [PLAIN] * 50, 450),
    "behind two COPYs": ([PLAIN] * 20_400 + [OTHER], 20_400),
    "first, before jobs that could be copied": ([OTHER] + [PLAIN] * 450, 0),
}


@pytest.fixture(params=[JobQueue, BlockingAsyncJobQueue])
def any_queue(request: pytest.FixtureRequest, database: str) -> Iterator[Any]:
    queue = request.param(database)
    yield queue
    queue.close()


@pytest.mark.parametrize("bulk", BULKS)
def test_the_error_of_a_bulk_enqueue_names_the_refused_job_and_the_first(
    any_queue: Any, bulk: str
) -> None:
    first = any_queue.enqueue("work", KEYED.data, idempotency_key="key")
    jobs, index = BULKS[bulk]
    with pytest.raises(IdempotencyConflict) as caught:
        any_queue.enqueue_many(jobs)
    assert (caught.value.index, caught.value.id) == (index, first.id)
    assert caught.value.field == "idempotency_key"
    assert str(caught.value).startswith(f"job {index}: ")
    assert any_queue.pending() == 1  # all of the jobs or none


def test_a_key_twice_in_one_bulk_names_the_second_job(any_queue: Any) -> None:
    jobs = [PLAIN, KEYED, PLAIN, OTHER, OTHER]
    with pytest.raises(IdempotencyConflict) as caught:
        any_queue.enqueue_many(jobs)
    assert caught.value.index == 3
    assert any_queue.pending() == 0


def test_a_bulk_on_the_callers_connection_names_the_refused_job(database: str) -> None:
    queue = JobQueue(database)
    first = queue.enqueue("work", KEYED.data, idempotency_key="key")
    with psycopg.connect(database) as conn:
        with pytest.raises(IdempotencyConflict) as caught, conn.transaction():
            queue.enqueue_many([PLAIN] * 300 + [OTHER], conn=conn)
        assert (caught.value.index, caught.value.id) == (300, first.id)
        assert queue.enqueue_many([PLAIN], conn=conn)
    queue.close()
