"""The bare queue: every method, of the sync and of the async queue."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

import howdah
from blocking import BlockingAsyncJobQueue
from howdah import (
    BACKFILL,
    EXPLICIT,
    AsyncJobQueue,
    Handle,
    InvalidOption,
    Job,
    JobNotFound,
    JobQueue,
    LeaseLost,
    NewJob,
    NotClaimed,
    Status,
)
from howdah.protocol.new_jobs import CHUNK_JOBS
from howdah.queue import backend_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from howdah.model import NewJobLike


@pytest.fixture(params=[JobQueue, BlockingAsyncJobQueue], ids=["sync", "async"])
def queue_class(request: pytest.FixtureRequest) -> Any:
    """Each of the two queues. The async one blocks, so that both have the same methods."""
    return request.param


@pytest.fixture
def queue(queue_class: Any, database: str) -> Iterator[JobQueue]:
    queue = queue_class(database)
    yield queue
    queue.close()


SOON = timedelta(seconds=5)


def only(queue: JobQueue, **options: Any) -> Job:
    """The only job that a claim returns."""
    (job,) = queue.claim(**options)
    return job


# ── the twins ─────────────────────────────────────────────────────────────────────────────────────


def methods(cls: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_queues_have_the_same_methods_parameters_defaults_and_docstrings() -> None:
    sync, awaited = methods(JobQueue), methods(AsyncJobQueue)
    assert sync.keys() == awaited.keys()
    for name in sync:
        ours, theirs = inspect.signature(sync[name]), inspect.signature(awaited[name])
        assert ours.parameters == theirs.parameters, name
        assert ours.return_annotation == theirs.return_annotation, name
        assert inspect.getdoc(sync[name]) == inspect.getdoc(awaited[name]), name
        assert inspect.getdoc(sync[name]), name
        assert inspect.iscoroutinefunction(awaited[name]), name
        assert not inspect.iscoroutinefunction(sync[name]), name


def test_both_queues_are_made_with_the_same_parameters() -> None:
    ours = inspect.signature(JobQueue).parameters
    theirs = inspect.signature(AsyncJobQueue).parameters
    assert list(ours) == list(theirs)
    assert [each.default for each in ours.values()] == [each.default for each in theirs.values()]


# ── enqueueing ────────────────────────────────────────────────────────────────────────────────────


def test_a_job_has_the_values_it_was_enqueued_with(queue: JobQueue) -> None:
    at = datetime(2040, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
    handle = queue.enqueue(
        "send-email", {"to": ["é", 1, None]}, priority=EXPLICIT, queue="mail", run_at=at,
        max_attempts=7, idempotency_key="welcome-7", ordering_key="alice", request_id="r-1",
        traceparent="00-ab-cd-01", keep=timedelta(hours=3),
    )  # fmt: skip
    assert handle == Handle(handle.id, True)
    job = queue.get(handle)
    assert (job.job_type, job.data, job.priority) == ("send-email", {"to": ["é", 1, None]}, 150)
    assert (job.queue, job.run_at, job.max_attempts) == ("mail", at, 7)
    assert (job.idempotency_key, job.ordering_key) == ("welcome-7", "alice")
    assert (job.request_id, job.traceparent, job.keep) == ("r-1", "00-ab-cd-01", timedelta(hours=3))
    assert (job.status, job.attempts, job.progress, job.result) == ("pending", 0, 0, None)


def test_a_job_with_nothing_but_a_type_has_the_defaults(queue: JobQueue) -> None:
    job = queue.get(queue.enqueue("work"))
    assert (job.queue, job.priority, job.max_attempts, job.keep) == ("default", 100, 3, None)
    assert job.data == {}
    assert job.run_at <= datetime.now(UTC) + SOON


def test_a_delay_is_seconds_or_a_timedelta(queue: JobQueue) -> None:
    for delay in (90, 90.0, timedelta(minutes=1.5)):
        job = queue.get(queue.enqueue("later", delay=delay))
        assert abs(job.run_at - job.created_at - timedelta(seconds=90)) < timedelta(seconds=1)
    assert queue.claim() == []


def test_a_job_with_a_time_in_the_past_is_due_at_once(queue: JobQueue) -> None:
    queue.enqueue("old", run_at=datetime(1990, 1, 1, tzinfo=UTC))
    assert only(queue).job_type == "old"


def test_run_at_may_be_in_any_time_zone(queue: JobQueue) -> None:
    at = datetime(2040, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=5.5)))
    assert queue.get(queue.enqueue("later", run_at=at)).run_at == at


def test_a_retention_of_any_length_is_stored(queue: JobQueue) -> None:
    for keep in (0.000001, 0.5, 3_153_600_000, timedelta(days=1, microseconds=1)):
        expected = keep if isinstance(keep, timedelta) else timedelta(seconds=keep)
        assert queue.get(queue.enqueue("work", keep=keep)).keep == expected


def test_a_queue_has_a_retention_that_its_jobs_inherit(queue_class: Any, database: str) -> None:
    queue = queue_class(database, keep=timedelta(hours=1))
    inherits, has_its_own = queue.enqueue("a"), queue.enqueue("a", keep=0)
    assert queue.get(inherits).keep == timedelta(hours=1)
    queue.complete(queue.claim())
    assert queue.get(inherits).status == "completed"
    with pytest.raises(JobNotFound):
        queue.get(has_its_own)
    queue.close()


def test_an_unknown_option_is_refused_with_a_suggestion(queue: JobQueue) -> None:
    with pytest.raises(InvalidOption) as caught:
        queue.enqueue("work", {}, max_atempts=3)  # type: ignore[arg-type]
    assert str(caught.value) == 'unknown option "max_atempts"; did you mean "max_attempts"?'
    with pytest.raises(InvalidOption, match=r'^unknown option "zzz"$'):
        queue.enqueue("work", zzz=3)  # type: ignore[arg-type]


def test_a_type_checker_refuses_an_unknown_option(tmp_path: Any) -> None:
    code = tmp_path / "call.py"
    code.write_text(
        "from howdah import AsyncJobQueue, JobQueue\n"
        "JobQueue().enqueue('a', {}, priority=3)\n"
        "JobQueue().enqueue('a', {}, prioritty=3)\n"
        "async def call() -> None:\n"
        "    await AsyncJobQueue().enqueue('a', prioritty=3)\n"
        "JobQueue().find(stat='failed')\n"
    )
    source = os.path.dirname(os.path.dirname(howdah.__file__))
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports",
         "--follow-imports=silent", f"--cache-dir={tmp_path}", str(code)],
        env={**os.environ, "MYPYPATH": source}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line.split(":")[1] for line in found.stdout.splitlines() if "[arg-type]" in line]
    assert lines == ["3", "5", "6"], found.stdout


def test_handles_are_returned_in_the_order_of_the_jobs(queue: JobQueue) -> None:
    handles = queue.enqueue_many(
        [NewJob(job_type="a", data=1, priority=BACKFILL), {"job_type": "b", "data": 2}, ("c", 3)]
    )
    assert [queue.get(each).job_type for each in handles] == ["a", "b", "c"]
    assert [queue.get(each).data for each in handles] == [1, 2, 3]
    assert all(each.is_new for each in handles)
    assert [each.id for each in handles] == sorted(each.id for each in handles)


def test_enqueue_many_takes_an_empty_list_and_a_generator(queue: JobQueue) -> None:
    assert queue.enqueue_many([]) == []
    assert len(queue.enqueue_many(("a", n) for n in range(3))) == 3


def test_a_hundred_thousand_jobs_are_sent_in_at_most_thirty_statements(
    queue: JobQueue, connect: Callable[[], psycopg.Connection]
) -> None:
    conn = connect()
    conn.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    queue.pending()
    conn.execute("SELECT pg_stat_statements_reset()")
    handles = queue.enqueue_many(("bulk", n) for n in range(100_000))
    assert len({each.id for each in handles}) == 100_000
    calls = conn.execute(
        "SELECT sum(calls) FROM pg_stat_statements JOIN pg_database ON oid = dbid "
        "WHERE datname = current_database() AND query NOT LIKE '%pg_stat%'"
    ).fetchone()
    assert calls is not None
    assert calls[0] <= 30
    assert queue.pending() == 100_000
    assert [job.data for job in queue.claim(batch_size=3)] == [0, 1, 2]


AWKWARD = "a\tb\\c\nd\re\\N\\.\U0001f418 \x7f\u2028"
AWKWARD_JOBS = [
    NewJob(job_type=AWKWARD, data={AWKWARD: [AWKWARD, None, 1.5, {}]}, queue=AWKWARD, priority=-7),
    NewJob(job_type="\\.", data="\\.", max_attempts=9, request_id=AWKWARD, keep=90),
    NewJob(job_type="\\N", data=None, traceparent="00-\\N"),
]


def fields(job: howdah.Job) -> tuple[object, ...]:
    return (
        job.job_type, job.data, job.queue, job.priority, job.max_attempts, job.request_id,
        job.traceparent, job.keep, job.status, job.attempts, job.idempotency_key, job.result,
    )  # fmt: skip


def test_a_bulk_enqueue_stores_the_same_as_a_single_enqueue(
    queue: JobQueue, connect: Callable[[], psycopg.Connection]
) -> None:
    alone = [fields(queue.get(queue.enqueue_many([job])[0])) for job in AWKWARD_JOBS]
    fill = [("fill", n) for n in range(CHUNK_JOBS)]
    handles = queue.enqueue_many([*AWKWARD_JOBS, *fill])
    assert all(handle.is_new for handle in handles)
    assert [fields(queue.get(handle)) for handle in handles[:3]] == alone
    lanes = connect().execute("SELECT queue, job_type, priority FROM howdah.lanes").fetchall()
    assert {(AWKWARD, AWKWARD, -7), ("default", "\\N", 100), ("default", "fill", 100)} <= set(lanes)
    assert [job.data for job in queue.claim("fill", batch_size=3)] == [0, 1, 2]


@pytest.mark.parametrize("others", [1, CHUNK_JOBS])
def test_data_over_the_limit_of_the_database_are_refused_with_the_index_of_their_job(
    queue_class: Any, database: str, others: int
) -> None:
    queue = queue_class(database, payload_limit=2**20)
    jobs = [("fill", {"n": n}) for n in range(others)]
    try:
        with pytest.raises(howdah.PayloadTooLarge) as caught:
            queue.enqueue_many([*jobs, ("large", "x" * 70_000), *jobs])
        assert caught.value.index == others
        assert queue.pending() == 0
    finally:
        queue.close()


def test_jobs_that_copy_cannot_write_are_enqueued_in_bulk(queue: JobQueue) -> None:
    fill = [("fill", n) for n in range(CHUNK_JOBS)]
    late = NewJob(job_type="late", delay=3600)
    first = queue.enqueue_many([*fill, late, NewJob(job_type="once", idempotency_key="k")])
    second = queue.enqueue_many([*fill, late, NewJob(job_type="once", idempotency_key="k")])
    assert second[-1] == Handle(first[-1].id, False)
    assert queue.get(second[-2]).run_at > queue.get(second[-1]).run_at + timedelta(minutes=59)


def test_a_bulk_enqueue_stores_all_jobs_or_none(
    queue: JobQueue, connect: Callable[[], psycopg.Connection]
) -> None:
    conn = connect()
    conn.execute("ALTER TABLE howdah.live_jobs ADD CONSTRAINT no CHECK (data <> '6000'::jsonb)")
    try:
        with pytest.raises(howdah.InvalidJob) as caught:
            queue.enqueue_many(("bulk", n) for n in range(12_000))
    finally:
        conn.execute("ALTER TABLE howdah.live_jobs DROP CONSTRAINT no")
    assert caught.value.index == 6_000
    assert queue.pending() == 0


class Unreadable(dict[str, object]):
    """A lazy mapping that has lost its source."""

    def __contains__(self, key: object) -> bool:
        raise ConnectionResetError("gone")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (("bulk", {1, 2}), "data holds a set"),
        ({"job_type": "bulk", "prioritty": 3}, "prioritty"),
        (Unreadable(job_type="bulk"), "could not be read: ConnectionResetError: gone"),
    ],
)
def test_an_invalid_job_found_after_others_were_sent_rolls_them_back(
    queue: JobQueue, bad: NewJobLike, why: str
) -> None:
    jobs = [*[("bulk", n) for n in range(6_000)], bad, ("bulk", 6_001)]
    with pytest.raises(howdah.HowdahError, match=f"job 6000: .*{why}"):
        queue.enqueue_many(jobs)
    assert queue.pending() == 0
    queue.enqueue_many(jobs[:6_000])  # the connection is usable
    assert queue.pending() == 6_000


def test_jobs_in_bulk_are_encoded_while_others_are_sent() -> None:
    bulk = backend_of(JobQueue("postgresql://")).operations.enqueue_many(
        [("bulk", n) for n in range(10 * CHUNK_JOBS)], on_caller_connection=False
    )
    (copy, *_) = itertools.islice(bulk.statements(), 1)
    assert copy.copy is not None
    for sent, _ in enumerate(copy.copy.lines, 1):
        assert len(bulk.encoded) == sent * CHUNK_JOBS
    assert sent == 10


# ── request ids ───────────────────────────────────────────────────────────────────────────────────


def test_the_request_id_is_taken_from_the_context_unless_given(queue: JobQueue) -> None:
    def within_a_request() -> list[Handle]:
        howdah.request_id.set("req-42")
        return [
            queue.enqueue("a"),
            queue.enqueue("a", request_id="mine"),
            *queue.enqueue_many([("a", 1)]),
        ]

    inside = copy_context().run(within_a_request)
    assert [queue.get(each).request_id for each in inside] == ["req-42", "mine", "req-42"]
    assert queue.get(queue.enqueue("a")).request_id is None
    assert {job.id for job in queue.find(request_id="req-42")} == {inside[0].id, inside[2].id}


async def test_concurrent_requests_keep_their_own_ids(aqueue: AsyncJobQueue) -> None:
    async def request(name: str) -> str | None:
        howdah.request_id.set(name)
        return (await aqueue.get(await aqueue.enqueue("a"))).request_id

    names = [f"r{n}" for n in range(10)]
    assert await asyncio.gather(*map(request, names)) == names


def test_the_request_id_survives_retries_recovery_and_reopening(queue: JobQueue) -> None:
    queue.enqueue("a", request_id="keeps")
    job = only(queue)
    queue.fail(job, "once")
    job = only(queue)
    assert queue.recover_stale_jobs(0) == 1
    job = only(queue)
    queue.fail(job, "permanently", retry=False)
    assert queue.get(job).request_id == "keeps"
    queue.retry(job)
    assert only(queue).request_id == "keeps"


# ── idempotency ───────────────────────────────────────────────────────────────────────────────────


def test_a_second_enqueue_with_the_same_key_returns_the_first_jobs_handle(queue: JobQueue) -> None:
    first = queue.enqueue("a", {"n": 1}, idempotency_key="k")
    second = queue.enqueue("a", {"n": 1}, idempotency_key="k")
    assert (first.is_new, second.is_new, second.id) == (True, False, first.id)
    queue.complete(queue.claim())
    assert queue.enqueue("a", {"n": 1}, idempotency_key="k") == Handle(first.id, False)
    bulk = queue.enqueue_many(
        [{"job_type": "a", "data": {"n": 1}, "idempotency_key": key} for key in ("k", "new", "new")]
    )
    assert [each.is_new for each in bulk] == [False, True, False]
    assert bulk[1].id == bulk[2].id
    assert queue.get(first).data == {"n": 1}


def test_threads_that_enqueue_with_the_same_key_at_once_make_one_job(queue: JobQueue) -> None:
    together = threading.Barrier(8)

    def enqueue(n: int) -> Handle:
        together.wait()
        return queue.enqueue("a", idempotency_key="k")

    with ThreadPoolExecutor(8) as threads:
        handles = list(threads.map(enqueue, range(8)))
    assert len({each.id for each in handles}) == 1
    assert sum(each.is_new for each in handles) == 1
    assert queue.pending() == 1


async def test_tasks_that_enqueue_with_the_same_key_at_once_make_one_job(
    aqueue: AsyncJobQueue,
) -> None:
    handles = await asyncio.gather(*(aqueue.enqueue("a", idempotency_key="k") for _ in range(20)))
    assert len({each.id for each in handles}) == 1
    assert sum(each.is_new for each in handles) == 1
    assert await aqueue.pending() == 1


def test_a_key_is_not_remembered_after_its_ttl(queue_class: Any, database: str) -> None:
    forgetful = queue_class(database, idempotency_ttl=timedelta(0))
    first = forgetful.enqueue("a", idempotency_key="k")
    again = forgetful.enqueue("a", idempotency_key="k")
    assert first.is_new
    assert again.is_new
    assert first.id != again.id
    forgetful.close()


# ── claiming ──────────────────────────────────────────────────────────────────────────────────────


def test_claims_take_the_highest_priority_first_and_then_the_oldest(queue: JobQueue) -> None:
    for n, priority in enumerate([BACKFILL, 100, EXPLICIT, 100]):
        queue.enqueue("a", n, priority=priority)
    assert [job.data for job in queue.claim()] == [2, 1, 3, 0]


def test_a_claim_returns_only_its_types_and_queues_up_to_its_batch_size(queue: JobQueue) -> None:
    queue.enqueue_many(
        [NewJob(job_type=kind, queue=name) for name in ("default", "mail") for kind in "abc"]
    )
    assert [job.job_type for job in queue.claim("a")] == ["a"]
    assert {job.job_type for job in queue.claim(["b", "c"], queues="mail")} == {"b", "c"}
    assert len(queue.claim(batch_size=1, queues=["default", "mail"])) == 1
    assert len(queue.claim(queues=("default", "mail"))) == 2
    assert queue.claim([], queues=["default"]) == []


def test_a_claimed_job_has_its_worker_lease_and_attempt(queue_class: Any, database: str) -> None:
    queue = queue_class(database, worker_id="me", lease=timedelta(minutes=5))
    queue.enqueue("a")
    job = only(queue)
    assert (job.status, job.worker_id, job.attempts, job.claims) == ("claimed", "me", 1, 1)
    assert job.lease_id is not None
    assert job.lease_expires_at is not None
    assert job.claimed_at is not None
    assert job.lease_expires_at - job.claimed_at == timedelta(minutes=5)
    assert job.started_at is None
    queue.close()


def test_the_default_worker_id_ends_with_the_process_id(queue: JobQueue) -> None:
    queue.enqueue("a")
    assert (only(queue).worker_id or "").endswith(f":{os.getpid()}")


def test_claim_one_starts_its_job_and_returns_none_if_no_job_is_due(queue: JobQueue) -> None:
    assert queue.claim_one() is None
    queue.enqueue("a")
    job = queue.claim_one(["a"], lease=7.5)
    assert job is not None
    assert job.status is Status.RUNNING
    assert job.started_at is not None
    assert job.lease_expires_at is not None
    assert job.lease_expires_at - job.started_at == timedelta(seconds=7.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be between 1 and 10000."),
        ({"batch_size": True}, "batch_size must be a whole number, not bool."),
        ({"batch_size": 10**5000}, "batch_size is a int that cannot be shown; "
         "it must be between 1 and 10000."),
        ({"lease": 0}, "lease is 0; it must be at least 0.001 seconds and below a century."),
        ({"lease": timedelta(days=31)}, "lease is datetime.timedelta(days=31); "
         "it must be at most 30 days. Extend it instead."),
        ({"lease": "5m"}, "lease must be a timedelta or a number of seconds, not str."),
        ({"job_types": [""]}, "job_types is empty; give it a name."),
        ({"job_types": 5}, "job_types must be a string or a list of them, not 5."),
        ({"queues": "a\x00"}, "queues holds a NUL character, which PostgreSQL cannot store."),
    ],
)  # fmt: skip
def test_invalid_options_of_a_claim_are_refused(
    queue_class: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        queue_class("postgresql://").claim(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease": 0}, "lease is 0; it must be at least 0.001 seconds and below a century."),
        ({"keep": -1}, "keep is -1; it must be at least 0 seconds and below a century."),
        ({"worker_id": ""}, "worker_id is empty; give it a name."),
        ({"worker_id": "w" * 101}, "worker_id is 101 characters long; the limit is 100."),
        ({"timeout": 0}, "timeout is 0; it must be at least 0.001 seconds and below a century."),
        ({"idempotency_ttl": "1d"},
         "idempotency_ttl must be a timedelta or a number of seconds, not str."),
        ({"schema": ""}, "'' is not a schema name."),
    ],
)  # fmt: skip
def test_invalid_options_of_a_queue_are_refused(options: dict[str, Any], message: str) -> None:
    for kind in (JobQueue, AsyncJobQueue):
        with pytest.raises(InvalidOption) as caught:
            kind(**options)
        assert str(caught.value) == message


def test_a_database_that_is_neither_a_url_nor_a_pool_is_refused() -> None:
    with pytest.raises(InvalidOption) as caught:
        JobQueue(5)  # type: ignore[arg-type]
    assert str(caught.value) == "JobQueue takes a URL or a psycopg_pool.ConnectionPool, not int."
    with pytest.raises(InvalidOption) as caught:
        AsyncJobQueue(5)
    assert str(caught.value) == "AsyncJobQueue takes a URL or an asyncpg.Pool, not int."


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_claims_alone_recover_the_job_of_a_process_that_ended(database: str) -> None:
    child = os.fork()
    if child == 0:
        dying = JobQueue(database, lease=0.05)
        dying.enqueue("a", request_id="r")
        os._exit(0 if dying.claim_one() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    survivor = JobQueue(database)
    deadline = time.monotonic() + 120
    job = None
    while job is None and time.monotonic() < deadline:
        time.sleep(0.05)
        job = survivor.claim_one()
    assert job is not None
    assert (job.attempts, job.request_id) == (2, "r")
    assert (job.last_error or "").startswith("the lease expired")
    survivor.close()


# ── acknowledging ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def claimed(queue: JobQueue) -> list[Job]:
    queue.enqueue_many([("a", n) for n in range(4)])
    return queue.claim()


def test_one_job_is_completed_with_its_result(queue: JobQueue, claimed: list[Job]) -> None:
    queue.complete(claimed[0], {"made": [1.5, None]})
    job = queue.get(claimed[0])
    assert (job.status, job.result, job.progress) == ("completed", {"made": [1.5, None]}, 100)
    assert job.completed_at is not None


def test_several_jobs_are_completed_each_with_its_result(
    queue: JobQueue, claimed: list[Job]
) -> None:
    queue.complete(claimed[:2], ["one", None])
    queue.complete(each for each in claimed[2:])
    assert [queue.get(each).result for each in claimed] == ["one", None, None, None]
    assert queue.counts()["completed"] == 4
    queue.complete([])


def test_results_must_be_as_many_as_the_jobs(queue: JobQueue, claimed: list[Job]) -> None:
    with pytest.raises(InvalidOption, match="result must be a list of 2 values, one for each job"):
        queue.complete(claimed[:2], ["one"])
    with pytest.raises(InvalidOption, match="result must be a list of 2 values"):
        queue.complete(claimed[:2], "both")


def test_a_claimed_job_can_be_completed_by_its_handle_id_or_text(queue: JobQueue) -> None:
    handles = queue.enqueue_many([("a", n) for n in range(5)])
    queue.claim()
    queue.complete(handles[0])
    queue.complete(handles[1].id)
    queue.complete(str(handles[2].id))
    queue.complete([handles[3], queue.get(handles[4])])
    assert queue.counts()["completed"] == 5


def test_a_job_that_another_queue_claimed_cannot_be_acknowledged_by_its_id(
    queue: JobQueue, database: str
) -> None:
    other = JobQueue(database)
    queue.enqueue("a")
    theirs = only(other)
    for act in (queue.complete, queue.release, queue.extend):
        with pytest.raises(NotClaimed) as caught:
            act(theirs.id)
        assert caught.value.id == theirs.id
    assert str(caught.value) == (
        f"job {theirs.id} was not claimed by this queue, so there is no lease to act under. "
        "Pass the Job that claim() returned."
    )
    queue.complete(theirs)  # the job itself has its fence
    other.close()


def test_a_job_that_was_only_read_has_no_fence(queue: JobQueue, database: str) -> None:
    other = JobQueue(database)
    queue.enqueue("a")
    theirs = only(other)
    for read in (queue.get(theirs.id), *queue.find(status="claimed")):
        assert read.lease_id is None
        with pytest.raises(NotClaimed):
            queue.complete(read)
    other.complete(other.get(theirs.id))
    other.close()


def test_lease_lost_names_the_rejected_jobs_and_the_others_are_completed(
    queue: JobQueue, claimed: list[Job], database: str
) -> None:
    rescuer = JobQueue(database)
    queue.extend(claimed[2:])
    queue.release(claimed[:2])
    again = rescuer.claim()
    with pytest.raises(LeaseLost) as caught:
        queue.complete(claimed)
    assert set(caught.value.ids) == {claimed[0].id, claimed[1].id}
    assert "the lease on 2 jobs was lost and nothing was written about them" in str(caught.value)
    assert [queue.get(each).status for each in claimed] == [
        "claimed", "claimed", "completed", "completed",
    ]  # fmt: skip
    rescuer.complete(again)
    rescuer.close()


def test_a_write_with_a_stale_fence_changes_nothing(
    queue: JobQueue, claimed: list[Job], database: str
) -> None:
    rescuer = JobQueue(database)
    assert rescuer.recover_stale_jobs(0) == 4
    (mine, *_) = rescuer.claim()
    before = rescuer.get(mine)
    stale = next(each for each in claimed if each.id == mine.id)
    acts: list[Callable[[], Any]] = [
        lambda: queue.complete(stale, "late"),
        lambda: queue.fail(stale, "late"),
        lambda: queue.release(stale),
        lambda: queue.extend(stale),
        lambda: queue.progress(stale, 50, "late"),
        lambda: queue.event(stale, "late"),
    ]
    for act in acts:
        with pytest.raises(LeaseLost):
            act()
    assert rescuer.get(mine) == before
    rescuer.close()


def test_losing_an_old_lease_does_not_forget_the_new_one_of_the_same_queue(
    queue: JobQueue,
) -> None:
    queue.enqueue("a")
    old = only(queue)
    queue.recover_stale_jobs(0)
    new = only(queue)
    with pytest.raises(LeaseLost):
        queue.complete(old)
    queue.complete(new.id)
    assert queue.get(new).status == "completed"


def test_a_failed_job_is_retried_at_once_until_no_attempt_is_left(queue: JobQueue) -> None:
    handle = queue.enqueue("a", max_attempts=2)
    queue.fail(only(queue), ValueError("first"))
    job = queue.get(handle)
    assert (job.status, job.attempts, job.last_error) == ("pending", 1, "ValueError: first")
    assert job.worker_id is None
    queue.fail(only(queue), "second")
    job = queue.get(handle)
    assert (job.status, job.attempts, job.last_error) == ("failed", 2, "second")
    assert [event.data["error"] for event in queue.events(handle)] == [
        "ValueError: first",
        "second",
    ]


def test_a_failed_job_is_retried_at_its_time_or_not_at_all(
    queue: JobQueue, claimed: list[Job]
) -> None:
    at = datetime(2040, 5, 6, tzinfo=UTC)
    queue.fail(claimed[0], "later", run_at=at)
    queue.fail(claimed[1], "later", delay=timedelta(hours=1))
    queue.fail(claimed[2:], "never", retry=False)
    assert queue.get(claimed[0]).run_at == at
    assert queue.get(claimed[1]).run_at > datetime.now(UTC) + timedelta(minutes=59)
    assert [queue.get(each).status for each in claimed[2:]] == ["failed", "failed"]
    assert queue.claim() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_at": datetime(2040, 1, 1, tzinfo=UTC), "delay": 1},
         "run_at and delay exclude each other; give one of them."),
        ({"retry": False, "delay": 1}, "retry=False and a time to retry at exclude each other."),
        ({"run_at": datetime(2040, 1, 1)},  # noqa: DTZ001
         "run_at is a naive datetime; give it a time zone, as in datetime.now(UTC)."),
        ({"delay": -1}, "delay is -1; it must be at least 0 seconds and below a century."),
    ],
)  # fmt: skip
def test_invalid_options_of_fail_are_refused(
    queue_class: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        queue_class("postgresql://").fail(uuid4(), "no", **options)
    assert str(caught.value) == message


def test_a_released_job_returns_to_the_queue_without_using_an_attempt(
    queue: JobQueue, claimed: list[Job]
) -> None:
    queue.release(claimed[0])
    queue.release(claimed[1:], delay=60)
    assert [queue.get(each).attempts for each in claimed] == [0, 0, 0, 0]
    assert [job.id for job in queue.claim()] == [claimed[0].id]


def lease_seconds(queue: JobQueue, jobs: list[Job]) -> list[float]:
    """The seconds until the leases of claimed jobs expire."""
    ends = [queue.get(each).lease_expires_at for each in jobs]
    now = datetime.now(UTC)
    return [(end - now).total_seconds() for end in ends if end is not None]


def test_leases_are_extended_from_now(queue: JobQueue) -> None:
    queue.enqueue_many([("a", n) for n in range(4)])
    claimed = [queue.claim(batch_size=1)[0] for _ in range(4)]
    queue.extend(claimed[0], lease=timedelta(hours=1))
    queue.extend(claimed[1:], lease=120)
    left = lease_seconds(queue, claimed)
    assert len(left) == 4
    assert 59 * 60 < left[0] < 61 * 60
    assert all(100 < each < 140 for each in left[1:])


def test_an_extension_of_a_job_extends_those_that_were_claimed_with_it(
    queue: JobQueue, claimed: list[Job]
) -> None:
    queue.extend(claimed[0], lease=timedelta(hours=1))
    left = lease_seconds(queue, claimed)
    assert len(left) == 4
    assert all(59 * 60 < each < 61 * 60 for each in left)


def test_progress_of_one_or_several_jobs_never_decreases(
    queue: JobQueue, claimed: list[Job]
) -> None:
    queue.progress(claimed[0], 60, "tiles")
    queue.progress(claimed[0], 30)
    queue.progress(claimed[0], stage="s" * 300)
    job = queue.get(claimed[0])
    assert (job.progress, job.status) == (60, "running")
    assert job.current_stage == "s" * 99 + "…"
    queue.progress(claimed[1:], 250.7, "all")
    assert {queue.get(each).progress for each in claimed[1:]} == {100}
    queue.progress(claimed[0], -math.inf)
    queue.progress(claimed[0], math.nan)
    assert queue.get(claimed[0]).progress == 60
    with pytest.raises(InvalidOption, match=r"^percent must be a number, not str\.$"):
        queue.progress(claimed[0], "half")  # type: ignore[arg-type]


def test_events_of_one_or_several_jobs_are_kept_in_order(
    queue: JobQueue, claimed: list[Job]
) -> None:
    queue.event(claimed, "started")
    queue.event(claimed[0], "k" * 300, {"n": 1})
    first, second = queue.events(claimed[0])
    assert (first.kind, first.data, first.attempt, first.job_id) == (
        "started", {}, 1, claimed[0].id,
    )  # fmt: skip
    assert (len(second.kind), second.data) == (100, {"n": 1})
    assert queue.events(claimed[0], after=first.event_id) == [second]
    assert [len(queue.events(each)) for each in claimed] == [2, 1, 1, 1]
    assert queue.get(claimed[0]).events_count == 2
    queue.event(claimed[0], "")
    assert queue.events(claimed[0])[-1].kind == "event"
    with pytest.raises(InvalidOption, match=r"^after is -1; it must be between 0 and"):
        queue.events(claimed[0], after=-1)


@pytest.mark.parametrize("bad", ["not-an-id", 5, None, b"x", "\x00"])
def test_a_value_that_is_not_a_job_id_is_refused(queue_class: Any, bad: Any) -> None:
    for act in (queue_class("postgresql://").complete, queue_class("postgresql://").get):
        with pytest.raises(InvalidOption, match="is not a job id"):
            act(bad)


# ── operating and reading ─────────────────────────────────────────────────────────────────────────


def test_a_pending_job_is_cancelled_and_a_claimed_one_is_cancelling(
    queue: JobQueue, claimed: list[Job]
) -> None:
    waiting = queue.enqueue("b")
    gone = uuid4()
    assert queue.cancel([waiting, claimed[0], gone]) == {
        waiting.id: "cancelled",
        claimed[0].id: "cancelling",
    }
    assert queue.get(waiting).status == "cancelled"
    assert queue.get(claimed[0]).cancel_requested
    queue.fail(claimed[0], "stopped")
    assert queue.get(claimed[0]).status == "cancelled"
    assert queue.cancel(waiting) == {}


def test_a_finished_job_is_reopened_under_the_same_id(queue: JobQueue, claimed: list[Job]) -> None:
    queue.fail(claimed[0], "no", retry=False)
    assert queue.retry([claimed[0], claimed[1]]) == [claimed[0].id]
    job = only(queue)
    assert (job.id, job.attempts, job.data) == (claimed[0].id, 1, claimed[0].data)


def test_pending_jobs_are_counted_by_queue_and_type(queue: JobQueue) -> None:
    queue.enqueue_many([("a", 1), {"job_type": "a", "queue": "q"}, {"job_type": "b", "delay": 60}])
    assert [queue.pending(), queue.pending("q"), queue.pending(job_type="a")] == [3, 1, 2]
    assert queue.pending("q", "b") == 0
    with pytest.raises(InvalidOption, match="queue holds a NUL character"):
        queue.pending("\x00")


def test_counts_have_every_status(queue: JobQueue, claimed: list[Job]) -> None:
    queue.complete(claimed[0])
    queue.fail(claimed[1], "no", retry=False)
    queue.progress(claimed[2], 1)
    queue.cancel(queue.enqueue("b"))
    queue.enqueue("b")
    assert queue.counts() == dict.fromkeys(Status, 1)
    assert queue.counts(job_type="b") == dict.fromkeys(Status, 0) | {
        Status.PENDING: 1,
        Status.CANCELLED: 1,
    }


def test_a_job_that_does_not_exist_is_not_found(queue: JobQueue) -> None:
    missing = uuid4()
    with pytest.raises(JobNotFound) as caught:
        queue.get(missing)
    assert caught.value.id == missing
    assert (
        str(caught.value)
        == f"there is no job {missing}; it may have been cleared after its retention."
    )


def test_jobs_are_found_by_every_filter(queue_class: Any, database: str) -> None:
    queue = queue_class(database, worker_id="w1")
    a = queue.enqueue("a", {"user": {"id": 7, "tags": ["x"]}}, request_id="r", ordering_key="o")
    b = queue.enqueue("b", {"user": {"id": 8}}, queue="q")
    c = queue.enqueue("c", {"user": {"id": 7}})
    queue.complete(queue.claim("c"))
    queue.claim("a")

    def found(**filters: Any) -> list[UUID]:
        return [job.id for job in queue.find(**filters)]

    assert found() == [c.id, b.id, a.id]
    assert found(status="pending") == [b.id]
    assert found(status=["completed", Status.CLAIMED]) == [c.id, a.id]
    assert found(job_type=("a", "b")) == [b.id, a.id]
    assert found(queue="q") == [b.id]
    assert found(request_id="r") == found(ordering_key="o") == [a.id]
    assert found(worker_id="w1", status="claimed") == [a.id]
    assert found(data={"user": {"id": 7}}) == [c.id, a.id]
    assert found(data={"user": {"tags": ["x"]}}, job_type="a") == [a.id]
    assert found(data={"user": {"id": 9}}) == []
    queue.close()


def test_find_returns_pages_of_jobs_newest_first(queue: JobQueue) -> None:
    handles = queue.enqueue_many([("a", n) for n in range(25)])
    queue.complete(queue.claim(batch_size=13))
    seen: list[Any] = []
    page = queue.find(limit=10)
    while page:
        seen += page
        page = queue.find(limit=10, before=page[-1])
    assert [job.id for job in seen] == [each.id for each in reversed(handles)]


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"staus": "failed"}, 'unknown filter "staus"; did you mean "status"?'),
        ({"status": "complete"}, 'unknown status "complete"; did you mean "completed"?'),
        ({"limit": 0}, "limit is 0; it must be between 1 and 10000."),
        ({"limit": 2.5}, "limit must be a whole number, not float."),
        ({"before": "x"}, "'x' is not a job id."),
        ({"request_id": "\x00"},
         "request_id holds a NUL character, which PostgreSQL cannot store."),
        ({"data": {"x": math.nan}}, "data holds nan, which JSON does not have."),
        ({"data": {"x": {1}}}, "data holds a set, which JSON does not have. "
         "Convert it to a string, number, list or dict."),
    ],
)  # fmt: skip
def test_invalid_filters_are_refused(
    queue_class: Any, filters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        queue_class("postgresql://").find(**filters)
    assert str(caught.value) == message


def test_finished_jobs_are_cleared_by_age_and_status(queue: JobQueue, claimed: list[Job]) -> None:
    queue.complete(claimed[:2])
    queue.fail(claimed[2:], "no", retry=False)
    assert queue.clear(older_than=timedelta(hours=1)) == 0
    assert queue.clear(statuses="failed") == 2
    assert queue.clear(statuses=[Status.COMPLETED, "cancelled"]) == 2
    assert queue.counts() == dict.fromkeys(Status, 0)
    with pytest.raises(InvalidOption) as caught:
        queue.clear(statuses="running")
    assert str(caught.value) == 'unknown final status "running"'
    with pytest.raises(
        InvalidOption, match="older_than must be a timedelta or a number of seconds"
    ):
        queue.clear("7d")  # type: ignore[arg-type]


def test_stale_jobs_are_recovered_by_lease_or_by_age(queue: JobQueue) -> None:
    queue.enqueue_many([("a", n) for n in range(3)])
    queue.claim(lease=0.001)
    assert queue.recover_stale_jobs(timedelta(hours=1)) == 0
    assert queue.recover_stale_jobs(limit=1) == 1
    assert queue.recover_stale_jobs() == 2
    with pytest.raises(InvalidOption, match=r"^limit is 0; it must be between 1 and"):
        queue.recover_stale_jobs(limit=0)


def test_one_database_holds_several_queues(queue_class: Any, empty_database: str) -> None:
    one, two = (
        queue_class(empty_database),
        queue_class(empty_database, schema='my "other" queue 100%'),
    )
    one.enqueue("a")
    assert (one.pending(), two.pending()) == (1, 0)
    two.enqueue("b")
    assert only(two).job_type == "b"
    one.close()
    two.close()
