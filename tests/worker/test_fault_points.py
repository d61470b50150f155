"""Workers that are killed, paused and poisoned: nothing is lost, nothing is accepted twice, and a job that
kills its worker comes to an end without taking its neighbours with it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from children import Children, all_ended, is_alive, offspring, until
from howdah import JobQueue, NewJob
from howdah.execution.fault_points import POINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from uuid import UUID

    from howdah.embedded import EmbeddedServer

JOBS = 40
# Not the first time where the first time is before there is any work.
WHEN = {
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


class Massacre:
    """One worker dies at each fault point, all at the same time; one survives them all."""

    def __init__(self, children: Children, conn: psycopg.Connection[Any]) -> None:
        self.children, self.conn = children, conn
        self.ids: dict[str, list[UUID]] = {point: [] for point in POINTS}
        self._told = False
        survivor = children.start("--queues", ",".join(POINTS), FAULT_APP_LEASE="2").ready()
        self.victims = {
            point: children.start(
                "--queues", point, "--concurrency", "4",
                FAULT_APP_LEASE="2", HOWDAH_FAULT=f"{point}:kill:{WHEN.get(point, 1)}",
            )
            for point in POINTS
        }  # fmt: skip
        with contextlib.closing(JobQueue(children.database)) as queue:
            for point in POINTS:
                self._enqueue(queue, point)  # some die before they could be fed
            until(lambda: self._feed(queue), "every worker that should die did")
        self.codes = {point: victim.wait() for point, victim in self.victims.items()}
        until(lambda: all_ended(conn), "every job ended")
        survivor.send(signal.SIGTERM)
        self.survivor_code = survivor.wait()

    def _feed(self, queue: JobQueue) -> bool:
        """Give every victim that lives some work, in case that the survivor is quicker."""
        living = [point for point, v in self.victims.items() if v.process.poll() is None]
        for point in living:
            if not self.victims[point].said("worker started"):
                continue
            waiting = self.conn.execute("SELECT howdah.pending_count(%s)", [point]).fetchone()
            if waiting == (0,):
                self._enqueue(queue, point)
        victim = self.victims["during-shutdown"]
        if not self._told and any(e["pid"] == victim.pid for e in self.children.ledger("start")):
            self._told = True
            victim.send(signal.SIGTERM)
        return not living

    def _enqueue(self, queue: JobQueue, point: str) -> None:
        """Half of the jobs look as if two workers had died with them before: these are announced."""
        job = NewJob(job_type="nap", data={"seconds": 0.05}, queue=point, max_attempts=5)
        with self.conn.transaction():
            ids = [handle.id for handle in queue.enqueue_many([job] * JOBS, conn=self.conn)]
            self.conn.execute(
                "UPDATE howdah.live_jobs SET claims = 2 WHERE id = ANY (%s)", [ids[::2]]
            )
        self.ids[point] += ids


@pytest.fixture(scope="module")
def massacre(
    server: EmbeddedServer, template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Massacre]:
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE massacre TEMPLATE {template}".encode())
        url = server.url.replace("/howdah?", "/massacre?")
        children = Children(tmp_path_factory.mktemp("massacre"), url)
        try:
            with psycopg.connect(url, autocommit=True) as conn:
                conn.execute(
                    "UPDATE howdah.maintenance SET period = '0.5 s' WHERE duty = 'recover'"
                )
                yield Massacre(children, conn)
        finally:
            children.close()
            admin.execute("DROP DATABASE massacre WITH (FORCE)")


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_is_killed_at_any_point_loses_no_job(massacre: Massacre, point: str) -> None:
    assert massacre.codes[point] == -signal.SIGKILL  # it got there
    jobs = massacre.conn.execute(
        "SELECT id::text, status, attempts, max_attempts FROM howdah.jobs WHERE id = ANY (%s)",
        [massacre.ids[point]],
    ).fetchall()
    assert Counter(job[0] for job in jobs) == {str(job_id): 1 for job_id in massacre.ids[point]}
    assert {job[1] for job in jobs} == {"completed"}
    assert all(attempts <= most for _, _, attempts, most in jobs)
    effects, accepted = massacre.children.counted("effect"), massacre.children.counted("accepted")
    assert all(effects[job[0]] >= 1 for job in jobs)
    assert all(accepted[job[0]] <= 1 for job in jobs)


def test_the_worker_that_survives_the_others_stops_as_if_nothing_had_been(
    massacre: Massacre,
) -> None:
    assert massacre.survivor_code == 0
    # Most of those that died had begun to work.
    assert len({entry["pid"] for entry in massacre.children.ledger("start")}) > len(POINTS) / 2


# ── one that kills ────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_kills_its_worker_ends_as_failed_and_costs_its_neighbours_nothing(
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
    assert {death["status"] for death in supervisor.said(died)} == {-signal.SIGKILL}
    assert len(children.ledger("start")) >= 102  # it did run, more than once
    supervisor.send(signal.SIGTERM)
    assert supervisor.wait() == 0


# ── one that is paused ────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_was_paused_past_its_lease_is_refused_and_says_so(
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
    (refusal,) = until(lambda: paused.said(message), "the refusal was logged")
    assert refusal["level"] == "warning"
    assert (refusal["job_id"], refusal["job_type"]) == (str(handle.id), "gated")
    assert children.counted("accepted") == {str(handle.id): 1}
    assert [entry["pid"] for entry in children.ledger("accepted")] == [other.pid]
    assert queue.get(handle.id).attempts <= 2  # one, if it was paused before it said it had started
    # It is none the worse for it.
    other.send(signal.SIGTERM)
    other.wait()
    queue.enqueue("nap", {"seconds": 0})
    until(lambda: len(children.ledger("accepted")) == 2, "the paused worker works again")
    assert paused.process.poll() is None


# ── processes of tasks that die ───────────────────────────────────────────────────────────────────


def test_processes_of_tasks_may_die_at_work_or_idle_and_others_take_their_place(
    children: Children, queue: JobQueue
) -> None:
    worker = children.start("--concurrency", "2").ready()
    for status in (0, 3):
        handle = queue.enqueue("leave", {"status": status}, max_attempts=1)
        until(lambda h=handle: queue.get(h.id).status == "failed", "it was noticed")
        error = f"the task's process ended with status {status} before the task did"
        assert error in str(queue.get(handle.id).last_error)
    handle = queue.enqueue("process_nap", {"seconds": 0})
    until(lambda: queue.get(handle.id).status == "completed", "another process took the next")
    # Idle ones that are killed break the pool; the next job finds a new one.
    for pid in offspring(worker.pid):
        os.kill(pid, signal.SIGKILL)
    handle = queue.enqueue("process_nap", {"seconds": 0})
    until(lambda: queue.get(handle.id).status == "completed", "it ran in a new pool")
    # A signal to the whole group is for the worker; the processes of its tasks carry on.
    handle = queue.enqueue("process_nap", {"seconds": 0.5})
    until(lambda: str(handle.id) in children.counted("start"), "it started")
    processes = offspring(worker.pid)
    for pid in [*processes, worker.pid]:
        os.kill(pid, signal.SIGTERM)
    assert worker.wait() == 0
    job = queue.get(handle.id)
    assert (job.status, job.attempts) == ("completed", 1)
    until(lambda: not any(map(is_alive, processes)), "no process is left")
