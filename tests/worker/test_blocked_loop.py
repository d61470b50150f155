"""A handler that blocks the event loop keeps its own lease, but not the jobs that wait for the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from howdah import Status
from howdah.hooks import Hooks
from howdah.worker.slots import Slots
from waiting import DEADLINE_SECONDS, ended, eventually, until

if TYPE_CHECKING:
    import psycopg

    from children import Children
    from conftest import RunWorker
    from howdah import App, JobQueue


def test_another_worker_runs_the_jobs_that_wait_for_a_blocked_event_loop(
    children: Children, queue: JobQueue, conn: psycopg.Connection[Any]
) -> None:
    queue.enqueue_many(
        [
            {"job_type": "block", "data": {"seconds": 3600}, "priority": 200},
            *[{"job_type": "thread_nap", "data": {"seconds": 0}, "priority": 100}] * 8,
        ]
    )
    # The leases are longer than this test waits.
    blocked = children.start(FAULT_APP_LEASE="600", FAULT_APP_PROCESSES="32").ready()
    until(lambda: children.ledger("start"), "the first job blocks the loop")
    other = children.start().ready()
    until(lambda: len(children.ledger("effect")) == 8, "the other jobs ran")
    assert {entry["pid"] for entry in children.ledger("effect")} == {other.pid}
    assert set(children.counted("start").values()) == {1}
    until(
        lambda: (
            conn.execute(
                "SELECT job_type, status, attempts, count(*) FROM howdah.jobs GROUP BY 1, 2, 3 ORDER BY 1"
            ).fetchall()
            == [("block", "claimed", 1, 1), ("thread_nap", "completed", 1, 8)]
        ),
        "the jobs are completed, and the blocking one keeps its lease",
    )
    message = "a handler blocks the event loop; releasing jobs that have not started"
    assert [entry["jobs"] for entry in blocked.logged(message)] == [8]


async def test_a_worker_runs_jobs_again_when_its_event_loop_is_no_longer_blocked(
    app: App, running_worker: RunWorker
) -> None:
    ran: list[int] = []
    released = threading.Event()

    @app.task(priority=200)
    async def blocks() -> bool:
        return released.wait(DEADLINE_SECONDS)  # blocks the loop on purpose

    @app.task(priority=100)
    def follows(n: int) -> None:
        ran.append(n)

    first = await blocks.aenqueue()
    others = [await follows.aenqueue(n) for n in range(8)]

    def wait_for_release(worker: Any) -> None:
        until(lambda: worker._heartbeat.runs(), "jobs were claimed")
        until(lambda: len(worker._heartbeat.runs()) == 1, "the jobs were released")
        states.append(worker.health()["ready"])
        released.set()

    states: list[object] = []
    async with running_worker(app, lease=600) as worker:
        watching = asyncio.create_task(asyncio.to_thread(wait_for_release, worker))
        jobs = [await ended(each) for each in (first, *others)]
        await watching

        async def ready() -> bool:
            return bool(worker.health()["ready"])

        await eventually(ready, "ready again")
    assert [(job.status, job.attempts) for job in jobs] == [(Status.COMPLETED, 1)] * 9
    assert sorted(ran) == list(range(8))
    assert states == [False]


def test_a_job_is_either_taken_from_the_buffer_or_started() -> None:
    """The event loop may run again at the moment at which the heartbeat's thread takes its jobs."""

    class Buffered:
        def __init__(self) -> None:
            self.buffer = deque(range(100_000))

    executor = Buffered()
    slots = Slots.__new__(Slots)
    slots._all = [executor]  # type: ignore[list-item]
    slots._clock = type("Blocked", (), {"blocked_seconds": lambda self: 60.0})()
    slots._hooks = Hooks([])
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.extend(slots.take_unstarted()))
    started = []
    thread.start()
    while executor.buffer:
        try:
            started.append(executor.buffer.popleft())
        except IndexError:
            break
        time.sleep(0)
    thread.join()
    assert sorted(started + taken) == list(range(100_000))
