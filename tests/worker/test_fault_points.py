"""Workers that are killed, paused, or killed by a job: no job is lost, none is accepted twice, and a job that kills its
worker fails without costing other jobs an attempt."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from children import Children, all_ended, is_alive, offspring
from howdah import JobQueue, NewJob
from howdah.execution.fault_points import POINTS
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from uuid import UUID

    from howdah.embedded import EmbeddedServer

JOBS = 40
# The pass at which the worker is killed. The first pass of these points comes before there are any jobs.
KILL_AT_PASS = {
    "before-claim": 2,
    "after-claim": 2,
    "before-start": 5,
    "after-run": 3,
    "before-acknowledge": 2,
    "after-acknowledge": 2,
}


@pytest.fixture
def children(tmp_path_factory: pytest.TempPathFactory, database: str) -> Iterator[Children]:
    children = Children(tmp_path_factory.mktemp("workers"), database)
    yield children
    children.close()


# ── kill -9 at every fault point ──────────────────────────────────────────────────────────────────


class KilledWorkers:
    """One worker for each fault point, all running at the same time and killed there, and one that survives."""

    def __init__(self, children: Children, conn: psycopg.Connection[Any]) -> None:
        self.children, self.conn = children, conn
        self.ids: dict[str, list[UUID]] = {point: [] for point in POINTS}
        self._signalled = False
        survivor = children.start("--queues", ",".join(POINTS), FAULT_APP_LEASE="2").ready()
        self.victims = {
            point: children.start(
                "--queues", point, "--concurrency", "4",
                FAULT_APP_LEASE="2", HOWDAH_FAULT=f"{point}:kill:{KILL_AT_PASS.get(point, 1)}",
            )
            for point in POINTS
        }  # fmt: skip
        with contextlib.closing(JobQueue(children.database)) as queue:
            for point in POINTS:
                self._enqueue(queue, point)  # some workers are killed before the first feeding
            until(lambda: self._feed(queue), "every victim was killed")
        self.codes = {point: victim.wait() for point, victim in self.victims.items()}
        until(lambda: all_ended(conn), "every job ended")
        survivor.send(signal.SIGTERM)
        self.survivor_code = survivor.wait()

    def _feed(self, queue: JobQueue) -> bool:
        """Enqueue more jobs for the running victims: the survivor may have run the others."""
        living = [point for point, v in self.victims.items() if v.process.poll() is None]
        for point in living:
            if not self.victims[point].logged("worker started"):
                continue
            waiting = self.conn.execute("SELECT howdah.pending_count(%s)", [point]).fetchone()
            if waiting == (0,):
                self._enqueue(queue, point)
        victim = self.victims["during-shutdown"]
        if not self._signalled and any(
            e["pid"] == victim.pid for e in self.children.ledger("start")
        ):
            self._signalled = True
            victim.send(signal.SIGTERM)
        return not living

    def _enqueue(self, queue: JobQueue, point: str) -> None:
        """Half of the jobs are suspects: as if two workers had been killed with them before."""
        job = NewJob(job_type="nap", data={"seconds": 0.05}, queue=point, max_attempts=5)
        with self.conn.transaction():
            ids = [handle.id for handle in queue.enqueue_many([job] * JOBS, conn=self.conn)]
            self.conn.execute(
                "UPDATE howdah.live_jobs SET claims = 2 WHERE id = ANY (%s)", [ids[::2]]
            )
        self.ids[point] += ids


@pytest.fixture(scope="module")
def killed(
    server: EmbeddedServer, template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KilledWorkers]:
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE killed TEMPLATE {template}".encode())
        url = server.url.replace("/howdah?", "/killed?")
        children = Children(tmp_path_factory.mktemp("killed"), url)
        try:
            with psycopg.connect(url, autocommit=True) as conn:
                conn.execute(
                    "UPDATE howdah.maintenance SET period = '0.5 s' WHERE duty = 'recover'"
                )
                yield KilledWorkers(children, conn)
        finally:
            children.close()
            admin.execute("DROP DATABASE killed WITH (FORCE)")


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_is_killed_at_any_point_loses_no_job(
    killed: KilledWorkers, point: str
) -> None:
    assert killed.codes[point] == -signal.SIGKILL  # it reached the point
    jobs = killed.conn.execute(
        "SELECT id::text, status, attempts, max_attempts FROM howdah.jobs WHERE id = ANY (%s)",
        [killed.ids[point]],
    ).fetchall()
    assert Counter(job[0] for job in jobs) == {str(job_id): 1 for job_id in killed.ids[point]}
    assert {job[1] for job in jobs} == {"completed"}
    assert all(attempts <= most for _, _, attempts, most in jobs)
    effects, accepted = killed.children.counted("effect"), killed.children.counted("accepted")
    assert all(effects[job[0]] >= 1 for job in jobs)
    assert all(accepted[job[0]] <= 1 for job in jobs)


def test_the_surviving_worker_stops_normally(
    killed: KilledWorkers,
) -> None:
    assert killed.survivor_code == 0
    # Most of the killed workers had started jobs.
    assert len({entry["pid"] for entry in killed.children.ledger("start")}) > len(POINTS) / 2


# ── a job that kills its worker ────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_kills_its_worker_fails_and_costs_other_jobs_no_attempt(
    children: Children, queue: JobQueue, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    conn = connect()
    conn.execute("UPDATE howdah.maintenance SET period = '0.5 s' WHERE duty = 'recover'")
    nap = NewJob(job_type="nap", data={"seconds": 0.005}, max_attempts=5)
    killer = NewJob(job_type="killer", max_attempts=2)
    supervisor = children.start("--processes", "2", "--concurrency", "10", FAULT_APP_LEASE="2")
    supervisor.ready(2)
    queue.enqueue_many([*[nap] * 10, killer, *[nap] * 90])
    until(lambda: all_ended(conn), "every job ended")
    died = "worker process ended; restarting"
    jobs = conn.execute(
        "SELECT job_type, status, attempts, last_error FROM howdah.jobs ORDER BY job_type"
    ).fetchall()
    (_, status, attempts, error), *neighbours = jobs
    assert (status, attempts) == ("failed", 2)
    assert "the lease expired" in error
    assert Counter(neighbour[1:3] for neighbour in neighbours) == {("completed", 1): 100}
    assert {death["status"] for death in supervisor.logged(died)} == {-signal.SIGKILL}
    assert len(children.ledger("start")) >= 102  # the killer ran twice
    supervisor.send(signal.SIGTERM)
    assert supervisor.wait() == 0


# ── a worker that is paused ────────────────────────────────────────────────────────────────────────────


def test_a_paused_worker_cannot_complete_a_job_it_lost_and_logs_the_rejection(
    children: Children,
    queue: JobQueue,
    connect: Callable[..., psycopg.Connection[Any]],
    tmp_path: Path,
) -> None:
    conn = connect()
    workers = [children.start("--concurrency", "1", FAULT_APP_LEASE="2") for _ in range(2)]
    for worker in workers:
        worker.ready()
    gate = tmp_path / "gate"
    handle = queue.enqueue("gated", {"gate": str(gate)}, max_attempts=5)
    (start,) = until(lambda: children.ledger("start"), "the job started")
    (paused,) = [worker for worker in workers if worker.pid == start["pid"]]
    (other,) = [worker for worker in workers if worker is not paused]
    paused.send(signal.SIGSTOP)
    until(lambda: len(children.ledger("start")) > 1, "the other worker started the job")
    gate.touch()
    until(lambda: all_ended(conn), "the other worker completed the job")
    assert queue.get(handle.id).worker_id.split(":")[1] == str(other.pid)
    paused.send(signal.SIGCONT)
    message = "acknowledgement rejected: lease lost"
    (rejection,) = until(lambda: paused.logged(message), "the rejection was logged")
    assert rejection["level"] == "warning"
    assert (rejection["job_id"], rejection["job_type"]) == (str(handle.id), "gated")
    assert children.counted("accepted") == {str(handle.id): 1}
    assert [entry["pid"] for entry in children.ledger("accepted")] == [other.pid]
    assert (
        queue.get(handle.id).attempts <= 2
    )  # 1 if the worker was paused before its start was written
    # The worker that was paused still works.
    other.send(signal.SIGTERM)
    other.wait()
    queue.enqueue("nap", {"seconds": 0})
    until(lambda: len(children.ledger("accepted")) == 2, "the paused worker works again")
    assert paused.process.poll() is None


# ── task processes that are killed ───────────────────────────────────────────────────────────────────


def test_task_processes_that_exit_or_are_killed_are_replaced(
    children: Children, queue: JobQueue
) -> None:
    worker = children.start("--concurrency", "2").ready()
    for status in (0, 3):
        handle = queue.enqueue("leave", {"status": status}, max_attempts=1)
        until(lambda h=handle: queue.get(h.id).status == "failed", "the exit was detected")
        error = f"the task's process ended with status {status} before the task did"
        assert error in str(queue.get(handle.id).last_error)
    handle = queue.enqueue("process_nap", {"seconds": 0})
    until(lambda: queue.get(handle.id).status == "completed", "another process ran the next job")
    # Killing idle processes breaks the pool; the next job runs in a new pool.
    for pid in offspring(worker.pid):
        os.kill(pid, signal.SIGKILL)
    handle = queue.enqueue("process_nap", {"seconds": 0})
    until(lambda: queue.get(handle.id).status == "completed", "it ran in a new pool")
    # A signal to the whole process group stops the worker; its task processes ignore it.
    handle = queue.enqueue("process_nap", {"seconds": 0.5})
    until(lambda: str(handle.id) in children.counted("start"), "it started")
    processes = offspring(worker.pid)
    for pid in [*processes, worker.pid]:
        os.kill(pid, signal.SIGTERM)
    assert worker.wait() == 0
    job = queue.get(handle.id)
    assert (job.status, job.attempts) == ("completed", 1)
    until(lambda: not any(map(is_alive, processes)), "no process is left")
