"""What wakes a worker, how many jobs it claims, and how it acknowledges them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from children import Children, all_ended
from howdah import Context, NewJob
from howdah.protocol.worker_statements import WorkerStatements
from howdah.worker import fetcher
from howdah.worker.slots import Slots
from waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import RunWorker
    from howdah import App, JobQueue


def add_nap(app: App) -> None:
    @app.task(max_attempts=5)
    async def nap(seconds: float = 0.0) -> None:
        await asyncio.sleep(seconds)


def add_gated(app: App) -> asyncio.Event:
    """A task that ends when the event is set."""
    gate = asyncio.Event()

    @app.task
    async def gated() -> None:
        await gate.wait()

    return gate


async def completed(conn: psycopg.Connection[Any], count: int) -> None:
    def are() -> bool:
        ended = conn.execute("SELECT count(*) FROM howdah.finished_jobs WHERE status = 'completed'")
        return ended.fetchone() == (count,)

    await eventually(are, f"{count} jobs were completed")


async def is_idle(conn: psycopg.Connection[Any]) -> None:
    def are() -> bool:
        return conn.execute("SELECT bool_and(idle) FROM howdah.workers").fetchone() == (True,)

    await eventually(are)


def by_worker(conn: psycopg.Connection[Any], job_type: str = "nap") -> Counter[str]:
    return Counter(
        dict(
            conn.execute(
                "SELECT worker_id, count(*) FROM howdah.finished_jobs WHERE job_type = %s GROUP BY 1",
                [job_type],
            ).fetchall()
        )
    )


class Calls:
    """Records the sizes of the statements of one kind that workers send."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.sizes: list[int] = []
        original = getattr(WorkerStatements, name)

        def count(statements: WorkerStatements, first: Any, *rest: Any, **named: Any) -> Any:
            self.sizes.append(len(first))
            return original(statements, first, *rest, **named)

        monkeypatch.setattr(WorkerStatements, name, count)


class Waits:
    """Counts how often a fetcher has begun to wait: for a notification, or for the demand of its slots."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.for_notification = self.for_demand = 0
        poll_seconds, wait_for_demand = fetcher.Fetcher._poll_seconds, Slots.wait_for_demand

        def count_notification(waiting: fetcher.Fetcher) -> float:
            self.for_notification += 1
            return poll_seconds(waiting)

        async def count_demand(slots: Slots) -> None:
            self.for_demand += 1
            await wait_for_demand(slots)

        monkeypatch.setattr(fetcher.Fetcher, "_poll_seconds", count_notification)
        monkeypatch.setattr(Slots, "wait_for_demand", count_demand)


# ── what wakes a worker ───────────────────────────────────────────────────────────────────────────


class Disturbance:
    """Measures how late the machine itself is, by short sleeps and claims that find nothing."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []  # begin, end, seconds late

    async def measure(self, database: str) -> None:
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as conn:
            while True:
                began = time.time()
                await asyncio.sleep(0.01)
                await conn.execute("SELECT * FROM howdah.claim_job_batch('nobody', '{nothing}')")
                ended = time.time()
                self._samples.append((began, ended, ended - began - 0.01))

    def late(self, since: float, until: float) -> float:
        """How late the machine was at most within this time."""
        return max((late for a, b, late in self._samples if a <= until and b >= since), default=0.0)


@pytest.mark.usefixtures("hourly")
async def test_due_times_wake_an_idle_worker(
    app: App, running_worker: RunWorker, conn: psycopg.Connection[Any], database: str
) -> None:
    """No job starts early, and a quarter of the jobs start within 50 ms plus the lateness of the machine."""
    add_nap(app)
    machine = Disturbance()
    async with running_worker(app), asyncio.TaskGroup() as group:
        measuring = group.create_task(machine.measure(database))
        jobs = [NewJob(job_type="nap", delay=0.5 + 0.15 * n) for n in range(12)]
        await app.aqueue.enqueue_many(jobs)
        await completed(conn, 12)
        measuring.cancel()
    times = conn.execute(
        "SELECT extract(epoch FROM run_at)::float8, extract(epoch FROM started_at)::float8 "
        "FROM howdah.jobs"
    ).fetchall()
    assert all(started >= due for due, started in times)
    # A busy machine delays some jobs; a worker that wakes up late would delay all of them. Between timer and
    # handler a job waits for a processor several times, the measurement once or twice.
    late = sorted(started - due - 3 * machine.late(due, started) for due, started in times)
    assert late[len(late) // 4] < 0.05, str(late)


@pytest.mark.usefixtures("hourly")
async def test_a_notification_wakes_an_idle_worker(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = Waits(monkeypatch)
    add_nap(app)
    async with running_worker(app):
        for n in range(3):
            await eventually(lambda n=n: waits.for_notification > n)
            await app.aqueue.enqueue("nap")
            await completed(conn, n + 1)


async def test_without_notifications_polling_finds_the_jobs(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("howdah.database.listener.Listener.start", lambda listener: None)
    monkeypatch.setattr(fetcher, "POLL_SECONDS", 0.2)
    waits = Waits(monkeypatch)
    add_nap(app)
    async with running_worker(app):
        for n in range(3):
            before = waits.for_notification
            await eventually(lambda before=before: waits.for_notification > before)
            await app.aqueue.enqueue("nap")
            await completed(conn, n + 1)


@pytest.mark.usefixtures("hourly")
async def test_a_notification_makes_a_worker_find_a_job_below_its_lanes_head(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    connect: Callable[..., psycopg.Connection[Any]],
    queue: JobQueue,
) -> None:
    add_nap(app)
    # The sweep would find the job too; it does not run during this test.
    conn.execute("UPDATE howdah.maintenance SET due_at = 'infinity' WHERE duty = 'sweep'")
    slow = connect(autocommit=False)
    async with running_worker(app):
        await is_idle(conn)
        queue.enqueue("nap", conn=slow)
        (due,) = slow.execute("SELECT run_at FROM howdah.live_jobs").fetchone()  # type: ignore[misc]
        query = "SELECT clock_timestamp() > %s + interval '1.3 s'"  # the margin is 1 s
        await eventually(lambda: conn.execute(query, [due]).fetchone() == (True,))
        conn.execute("UPDATE howdah.sweeps SET raised = array_fill(clock_timestamp(), ARRAY[256])")
        slow.commit()
        await completed(conn, 1)  # nothing else would find it within the hour


# ── how much it claims ────────────────────────────────────────────────────────────────────────────


async def test_two_workers_share_long_jobs(
    app: App, running_worker: RunWorker, conn: psycopg.Connection[Any]
) -> None:
    gate = add_gated(app)
    async with (
        running_worker(app, concurrency=10) as one,
        running_worker(app, concurrency=10) as other,
    ):
        await app.aqueue.enqueue_many([NewJob(job_type="gated")] * 20)
        for worker in (one, other):
            await eventually(lambda worker=worker: worker.health()["running"] == 10)
        gate.set()
        await completed(conn, 20)
    assert sorted(by_worker(conn, "gated").values()) == [10, 10]


async def test_thousands_of_short_jobs_take_few_claims(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims, completions = Calls(monkeypatch, "claim"), Calls(monkeypatch, "complete_runs")
    add_nap(app)

    @app.task  # its duration is never measured, as for most tasks of an app at first
    async def another() -> None:
        pass

    await app.aqueue.enqueue_many([NewJob(job_type="nap")] * 5000)
    async with running_worker(app, concurrency=16):
        await completed(conn, 5000)
        assert len(claims.sizes) < 150
        # The outcomes that arrive while a statement runs form the next batch.
        assert sum(completions.sizes) == 5000
        assert len(completions.sizes) < 500


async def test_prefetched_jobs_that_prove_to_be_long_are_released_to_another_worker(
    app: App, running_worker: RunWorker, conn: psycopg.Connection[Any]
) -> None:
    ended = asyncio.Event()

    @app.task
    async def nap(long: bool) -> None:
        if long:
            await ended.wait()

    short, long = ({"job_type": "nap", "data": {"long": is_long}} for is_long in (False, True))
    await app.aqueue.enqueue_many([short] * 2000 + [long] * 12)
    async with running_worker(app, concurrency=6) as first:
        await completed(conn, 2000)
        async with running_worker(app, concurrency=6) as second:
            # If the first worker kept its prefetched jobs, the second would have none to run.
            await eventually(lambda: second.health()["running"] == 6)
            assert first.health()["running"] == 6
            ended.set()
            await completed(conn, 2012)
    rows = conn.execute(
        "SELECT worker_id, count(*) FROM howdah.jobs WHERE data @> '{\"long\": true}' GROUP BY 1"
    ).fetchall()
    assert dict(rows) == {first.worker_id: 6, second.worker_id: 6}
    assert conn.execute("SELECT max(attempts) FROM howdah.jobs").fetchone() == (1,)


async def test_a_worker_whose_slots_have_long_jobs_claims_no_others_and_at_most_once_per_wait(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims, releases = Calls(monkeypatch, "claim"), Calls(monkeypatch, "release_jobs")
    waits = Waits(monkeypatch)
    gate = add_gated(app)

    @app.task
    async def quick() -> None:
        pass

    jobs = [NewJob(job_type="quick")] * 1000 + [NewJob(job_type="gated")] * 30
    await app.aqueue.enqueue_many(jobs)
    async with running_worker(app, concurrency=4) as worker:
        await eventually(lambda: by_worker(conn, "quick").total() == 1000)
        await eventually(lambda: worker.health()["running"] == 4)
        claimed_before, waited_before = len(claims.sizes), waits.for_demand
        await eventually(lambda: waits.for_demand >= waited_before + 3)
        assert len(claims.sizes) - claimed_before <= waits.for_demand - waited_before
        held = conn.execute("SELECT count(*) FROM howdah.live_jobs WHERE status = 'claimed'")
        assert held.fetchone() == (4,)
        assert releases.sizes == []
        gate.set()


# ── acknowledging ─────────────────────────────────────────────────────────────────────────────────

REFUSE_ONE = """
CREATE FUNCTION public.refuse_one() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.status = 'completed' AND NEW.data @> '{"seconds": 0.001}' THEN
        RAISE EXCEPTION 'not this one';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse_one BEFORE INSERT ON howdah.finished_jobs
    FOR EACH ROW EXECUTE FUNCTION public.refuse_one();
"""


async def test_an_outcome_that_the_database_rejects_fails_its_job_and_no_other(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completions = Calls(monkeypatch, "complete_runs")
    conn.execute(REFUSE_ONE)
    add_nap(app)
    good, bad = NewJob(job_type="nap"), NewJob(job_type="nap", data={"seconds": 0.001})
    await app.aqueue.enqueue_many([*[good] * 100, bad, *[good] * 100])
    async with running_worker(app, concurrency=32):
        await completed(conn, 200)
        await eventually(lambda: all_ended(conn))
    failed = conn.execute(
        "SELECT attempts, last_error FROM howdah.jobs WHERE status = 'failed'"
    ).fetchall()
    assert len(failed) == 1
    assert failed[0][0] == 1
    assert "not this one" in failed[0][1]
    others = conn.execute("SELECT DISTINCT attempts FROM howdah.jobs WHERE status = 'completed'")
    assert others.fetchall() == [(1,)]
    assert 1 in completions.sizes  # the batch was split until the bad outcome was alone


REFUSE_FOR_NOW = """
CREATE TABLE public.trouble ();
CREATE FUNCTION public.refuse_for_now() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_regclass('public.trouble') IS NOT NULL THEN
        RAISE EXCEPTION 'no room left' USING ERRCODE = 'disk_full';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse_for_now BEFORE INSERT ON howdah.finished_jobs
    FOR EACH ROW EXECUTE FUNCTION public.refuse_for_now();
"""


async def test_outcomes_are_retried_until_the_database_accepts_them(
    app: App,
    running_worker: RunWorker,
    conn: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    conn.execute(REFUSE_FOR_NOW)
    add_nap(app)
    await app.aqueue.enqueue_many([NewJob(job_type="nap")] * 20)
    async with running_worker(app, lease=2):
        await eventually(lambda: "outcomes could not be written; retrying" in caplog.text)
        conn.execute("DROP TABLE public.trouble")
        await completed(conn, 20)
    attempts = conn.execute("SELECT DISTINCT attempts, claims FROM howdah.jobs").fetchall()
    assert attempts == [(1, 1)]


# ── durability ────────────────────────────────────────────────────────────────────────────


async def test_claims_do_not_wait_for_a_durable_commit_and_acknowledgements_do(
    app: App, running_worker: RunWorker, conn: psycopg.Connection[Any]
) -> None:
    ran = asyncio.Event()

    @app.task
    async def nap() -> None:
        ran.set()

    def acknowledging() -> bool:
        rows = conn.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE wait_event = 'SyncRep' AND query LIKE '%complete_runs%'"
        )
        return rows.fetchone() == (1,)

    conn.execute("SET synchronous_commit = local")
    async with running_worker(app):
        await is_idle(conn)
        await app.aqueue.enqueue("nap", delay=2)
        # A standby that does not exist: every durable commit waits for it.
        conn.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        try:
            conn.execute("SELECT pg_reload_conf()")
            await asyncio.wait_for(ran.wait(), 120)
            await eventually(acknowledging, "the acknowledgement waits")
        finally:
            conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
            conn.execute("SELECT pg_reload_conf()")
        await completed(conn, 1)


# ── a part that fails ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("point", ["after-claim", "before-acknowledge", "after-run"])
async def test_a_worker_stops_with_the_error_of_the_part_that_failed(
    app: App, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    from howdah import Worker
    from howdah.execution import fault_points

    def fail() -> None:
        raise fault_points.InjectedFault(point)

    monkeypatch.setitem(fault_points.hooks, point, fail)
    add_nap(app)
    await app.aqueue.enqueue("nap")
    worker = Worker(app, concurrency=2, grace=1)
    with pytest.raises(fault_points.InjectedFault, match=point):
        await asyncio.wait_for(worker.run(), 120)
    assert conn.execute("SELECT count(*) FROM howdah.workers").fetchone() == (0,)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("howdah-slot")]


async def test_a_worker_whose_caller_is_cancelled_releases_its_jobs(
    app: App, conn: psycopg.Connection[Any]
) -> None:
    from howdah import Worker

    begun = asyncio.Event()

    @app.task
    async def endless(ctx: Context) -> None:
        begun.set()
        await asyncio.sleep(3600)

    await app.aqueue.enqueue_many([NewJob(job_type="endless")] * 3)
    running = asyncio.create_task(Worker(app, concurrency=2).run())
    await asyncio.wait_for(begun.wait(), 120)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 120)
    jobs = conn.execute("SELECT DISTINCT status, attempts FROM howdah.jobs").fetchall()
    assert jobs == [("pending", 0)]


# ── ordering keys ─────────────────────────────────────────────────────────────────────────────────


def test_jobs_of_an_ordering_key_run_one_at_a_time_and_in_order_on_two_workers_with_retries(
    tmp_path: Path, database: str, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    keys, length = ["a", "b", "c", "d"], 0
    children = Children(tmp_path, database)
    try:
        workers = [children.start("--concurrency", "8").ready() for _ in range(2)]
        # One worker may be fast enough for all of them: more jobs until both have run some.
        while length < 12 or len({entry["pid"] for entry in children.ledger("start")}) < 2:
            assert length < 1200
            for n in range(length, length + 12):
                queue.enqueue_many(
                    [
                        NewJob(
                            job_type="flaky",
                            data={"key": key, "n": n},
                            ordering_key=key,
                            max_attempts=5,
                        )
                        for key in keys
                    ]
                )
            length += 12
            until(lambda: all_ended(conn), "every job ended")
        for worker in workers:
            worker.send(signal.SIGTERM)
        assert [worker.wait() for worker in workers] == [0, 0]
        entries = children.ledger("start", "end")
    finally:
        children.close()
    expected = [
        (kind, n, attempt)
        for n in range(length)
        for attempt in ([1, 2] if n % 3 == 0 else [1])
        for kind in ("start", "end")
    ]
    for key in keys:
        ran = [(e["kind"], e["n"], e["attempt"]) for e in entries if e["key"] == key]
        assert ran == expected
    assert conn.execute("SELECT DISTINCT status FROM howdah.jobs").fetchall() == [("completed",)]
