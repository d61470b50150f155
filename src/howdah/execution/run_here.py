"""`task.run`: a job that is enqueued and claimed in one statement and runs in the caller's own process. Its
lease is kept alive by a heartbeat; if the process dies, the lease ends and a worker takes the job over."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from howdah.encoding import payload
from howdah.encoding.arguments import decode_result
from howdah.errors import HowdahError, InvalidOption, LeaseLost, TaskInFlight
from howdah.execution.handler import aexecute, execute
from howdah.execution.heartbeat import Heartbeat
from howdah.execution.run import Run, make_context
from howdah.model import Job, NewJob
from howdah.outcome import (
    NOT_COMMITTED,
    Completed,
    CompletedByHandler,
    Failed,
    Lost,
    Outcome,
    Released,
)
from howdah.protocol.acknowledge import acknowledge
from howdah.protocol.worker_statements import Claimed

if TYPE_CHECKING:
    from howdah.app import App
    from howdah.task import Task


def run(task: Task[..., Any], job: NewJob) -> Any:
    """Run a task here and now; an `async def` in an event loop made for it."""
    if task.options.run_in == "async":
        if _is_in_a_loop():
            raise InvalidOption(f"{task.name} is an async def: in an event loop, await its arun().")
        return asyncio.run(arun(task, job))
    begun = _begin(task.app, job)
    if isinstance(begun, Job):
        return _stored(task, begun)
    attempt = _Attempt(task, begun)
    outcome = execute(task, attempt.context)
    return attempt.end(outcome)


async def arun(task: Task[..., Any], job: NewJob) -> Any:
    """Run a task here and now; the few statements around it go through a thread."""
    if task.options.run_in != "async":
        return await asyncio.to_thread(run, task, job)
    begun = await asyncio.to_thread(_begin, task.app, job)
    if isinstance(begun, Job):
        return _stored(task, begun)
    attempt = _Attempt(task, begun)
    try:
        outcome = await attempt.execute()
    except asyncio.CancelledError:
        # The caller has lost interest, and the job goes on: a worker takes it over now, instead of when
        # the lease has ended.
        await asyncio.shield(asyncio.to_thread(attempt.write, Released(0.0, "cancelled")))
        raise
    return await asyncio.to_thread(attempt.end, outcome)


def _is_in_a_loop() -> bool:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


def _begin(app: App, job: NewJob) -> Claimed | Job:
    """The new job, claimed, or the job that holds the idempotency key."""
    encoded = app.backend.operations.encode(job)
    statement = app.statements.enqueue_and_claim(
        msgspec.json.encode(encoded).decode(),
        app.backend.operations.worker_id,
        app.lease,
        app.idempotency_ttl,
        uuid4(),
    )
    job_id, lease_id = app.backend.run(statement)
    if lease_id is None:
        return app.queue.get(job_id)
    return Claimed(
        id=job_id,
        lease_id=lease_id,
        job_type=job.job_type,
        queue=job.queue,
        data=bytes(encoded["data"]).decode(),
        attempts=1,
        max_attempts=job.max_attempts,
        claims=1,
        request_id=encoded.get("request_id"),
        traceparent=job.traceparent,
        idempotency_key=job.idempotency_key,
        waited=0.0,
    )


def _stored(task: Task[..., Any], job: Job) -> Any:
    if not job.status.is_final:
        raise TaskInFlight(job.id)
    return task.read_result(job)


class _Attempt:
    """The first attempt, here; its lease is kept from now on."""

    def __init__(self, task: Task[..., Any], job: Claimed) -> None:
        app = task.app
        self._task = task
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[Outcome]] | None = None
        self._heartbeat = Heartbeat(app.backend.store, app.statements, app.lease, self._on_abort)
        self._run = Run(job.id, job.lease_id, job, task)
        self.context = make_context(
            task, job, data=msgspec.Raw(job.data), sink=self._heartbeat, run=self._run
        )
        self._heartbeat.add(self._run)
        self._heartbeat.start()

    async def execute(self) -> Outcome:
        """Run an async handler, in an asyncio task of its own that an abort can cancel."""
        work = asyncio.create_task(aexecute(self._task, self.context))
        self._work = (asyncio.get_running_loop(), work)
        if self._run.abort_reason is not None:  # before there was a task to cancel
            work.cancel()
        return await work

    def _on_abort(self, run: Run) -> None:
        # In the heartbeat's thread. A sync handler is told at its next call of the context.
        if self._work is not None:
            loop, work = self._work
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(work.cancel)

    def write(self, outcome: Outcome) -> bool:
        """Write the outcome, and whether it was accepted."""
        self._run.finishing = True
        self._heartbeat.stop()
        if isinstance(outcome, Lost):
            return False
        app, run = self._task.app, self._run
        statement = acknowledge(app.statements, [run.id], [run.lease_id], [outcome])
        return bool(app.backend.run(statement))

    def end(self, outcome: Outcome) -> Any:
        """Write the outcome, and give the result or raise what the caller should see."""
        accepted = self.write(outcome)
        match outcome:
            case CompletedByHandler() if accepted:
                raise HowdahError(f"job {self._run.id}: {NOT_COMMITTED}.")
            case CompletedByHandler():
                pass
            case _ if not accepted:
                raise LeaseLost([self._run.id]) from getattr(outcome, "cause", None)
            case Completed(result):
                value = None if result is None else payload.decode(result)
                return decode_result(value, self._task.arguments.returns)
            case Failed(cause=BaseException() as cause):
                raise cause
            case Released():
                raise TaskInFlight(self._run.id)
        return self._task.read_result(self._task.app.queue.get(self._run.id))
