"""`task.run`: enqueues and claims a job in one statement and runs it in the caller's process. A heartbeat extends
its lease; if the process is killed, the lease expires and a worker runs the job."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from howdah.database.own_thread import run_in_own_thread
from howdah.encoding import payload
from howdah.encoding.arguments import decode_result
from howdah.errors import HowdahError, InvalidOption, JobLocked, LeaseLost, TaskInFlight
from howdah.execution.handler import aexecute, execute, outcome_of
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
from howdah.protocol.settling import settle
from howdah.protocol.worker_statements import Claimed

if TYPE_CHECKING:
    from howdah.app import App
    from howdah.task import Task

REPORTS_TIMEOUT_SECONDS = 5.0  # an outcome waits so long for the reports of its run


def run(task: Task[..., Any], job: NewJob) -> Any:
    """Run a task in this thread; an `async def` in a new event loop."""
    if task.options.run_in == "async":
        if _has_running_loop():
            raise InvalidOption(
                f"{task.name} is an async def and this thread runs an event loop; await its arun() instead."
            )
        return asyncio.run(arun(task, job))
    claimed = _enqueue_and_claim(task.app, job)
    if isinstance(claimed, Job):
        return _stored_result(task, claimed)
    attempt = _Attempt(task, claimed)
    outcome = execute(task, attempt.context)
    return attempt.end(outcome)


async def arun(task: Task[..., Any], job: NewJob) -> Any:
    """Run a task in this event loop; the statements before and after it run in a thread."""
    if task.options.run_in != "async":
        return await run_in_own_thread(run, task, job)
    claimed = await run_in_own_thread(_enqueue_and_claim, task.app, job)
    if isinstance(claimed, Job):
        return _stored_result(task, claimed)
    attempt = _Attempt(task, claimed)
    try:
        outcome = await attempt.execute()
    except asyncio.CancelledError:
        # The caller was cancelled; the job was not. Release it, so that a worker can run it before the
        # lease expires.
        await asyncio.shield(run_in_own_thread(attempt.acknowledge, Released()))
        raise
    return await run_in_own_thread(attempt.end, outcome)


def _has_running_loop() -> bool:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


def _enqueue_and_claim(app: App, job: NewJob) -> Claimed | Job:
    """The new job, claimed, or the existing job with the same idempotency key."""
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


def _stored_result(task: Task[..., Any], job: Job) -> Any:
    if not job.status.is_final:
        raise TaskInFlight(job.id)
    return task.read_result(job)


class _Attempt:
    """The first attempt of a job, in this process. A heartbeat extends its lease from now on."""

    def __init__(self, task: Task[..., Any], job: Claimed) -> None:
        app = task.app
        self._task = task
        self._handler: tuple[asyncio.AbstractEventLoop, asyncio.Task[Outcome]] | None = None
        self._heartbeat = Heartbeat(app.backend.store, app.statements, app.lease, self._on_abort)
        self._run = Run(job.id, job.lease_id, job, task)
        self.context = make_context(
            task, job, data=msgspec.Raw(job.data), sink=self._heartbeat, run=self._run
        )
        self._heartbeat.add([self._run])
        self._heartbeat.start()

    async def execute(self) -> Outcome:
        """Run an async handler in a new asyncio task, which an abort can cancel."""
        handler = asyncio.create_task(aexecute(self._task, self.context))
        self._handler = (asyncio.get_running_loop(), handler)
        if self._run.abort_reason is not None:  # aborted before there was a task to cancel
            handler.cancel()
        try:
            return await handler
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return outcome_of(self._task, self.context, error)  # the handler cancelled its own task

    def _on_abort(self, run: Run) -> None:
        # Called in the heartbeat's thread. A sync handler stops at its next call of the context.
        if self._handler is not None:
            loop, handler = self._handler
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(handler.cancel)

    def acknowledge(self, outcome: Outcome) -> bool:
        """Write the outcome; returns whether it was accepted."""
        app, run = self._task.app, self._run
        run.finishing = True
        try:
            with contextlib.suppress(TimeoutError):
                self._heartbeat.when_reported(run).result(REPORTS_TIMEOUT_SECONDS)
            if isinstance(outcome, Lost):
                return False
            statement = acknowledge(app.statements, [run.id], [run.lease_id], [outcome])
            steps = settle(app.statements, [run.id], [run.lease_id], lambda _: statement)
            settled = app.backend.settle(steps)
        finally:
            self._heartbeat.stop()  # not before: the job may be locked for longer than its lease
        if settled.locked:
            raise JobLocked(settled.locked) from getattr(outcome, "cause", None)
        return not settled.lost

    def end(self, outcome: Outcome) -> Any:
        """Write the outcome. Return the result to the caller, or raise."""
        accepted = self.acknowledge(outcome)
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
