"""`task.run`: a job that is enqueued and claimed in one statement and runs in the caller's own process. Its
lease is kept alive by a heartbeat; if the process dies, the lease ends and a worker takes the job over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from howdah import payload
from howdah.arguments import decode_result
from howdah.context import Context
from howdah.errors import LeaseLost, TaskInFlight
from howdah.execution import aexecute, execute
from howdah.heartbeat import Heartbeat, Run
from howdah.model import Claim, Job, NewJob
from howdah.outcome import Cancelled, Completed, Failed, Lost, Outcome, Released, Settled

if TYPE_CHECKING:
    from uuid import UUID

    from howdah.app import App, Task
    from howdah.statements import Statement


def run(task: Task[..., Any], job: NewJob) -> Any:
    """Run a sync task here and now."""
    begun = _begin(task.app, job)
    if isinstance(begun, Job):
        return _stored(task, begun)
    context, heartbeat = _start(task, job, begun)
    try:
        outcome = execute(task, context)
    finally:
        heartbeat.stop()
    return _end(task, begun, outcome)


async def arun(task: Task[..., Any], job: NewJob) -> Any:
    """Run an async task here and now; the few statements around it go through a thread."""
    begun = await asyncio.to_thread(_begin, task.app, job)
    if isinstance(begun, Job):
        return _stored(task, begun)
    context, heartbeat = _start(task, job, begun)
    try:
        if task.options.run_in == "async":
            outcome = await aexecute(task, context)
        else:
            outcome = await asyncio.to_thread(execute, task, context)
    finally:
        await asyncio.to_thread(heartbeat.stop)
    return await asyncio.to_thread(_end, task, begun, outcome)


def _begin(app: App, job: NewJob) -> Claim | Job:
    """The claim of a new job, or the job that holds the idempotency key."""
    encoded = app.queue._do.encode(job)
    statement = app.statements.enqueue_and_claim(
        msgspec.json.encode(encoded).decode(),
        app.queue._do.worker_id,
        app.lease,
        app.idempotency_ttl,
    )
    job_id, lease_id = app.queue._store.run(statement)
    return app.queue.get(job_id) if lease_id is None else Claim(job_id, lease_id)


def _stored(task: Task[..., Any], job: Job) -> Any:
    if not job.status.is_final:
        raise TaskInFlight(job.id)
    return task.read_result(job)


def _start(task: Task[..., Any], job: NewJob, claim: Claim) -> tuple[Context, Heartbeat]:
    app = task.app
    context_slot: list[Run] = []

    def on_abort(run: Run, why: str) -> None:
        context_slot[0].abort = why

    heartbeat = Heartbeat(app.queue._store, app.statements, app.lease, on_abort)
    context = Context(
        id=claim.id,
        job_type=task.name,
        queue=job.queue,
        data=job.data,
        max_attempts=job.max_attempts,
        request_id=job.request_id,
        idempotency_key=job.idempotency_key,
        lease_id=claim.lease_id,
        timeout=task.options.timeout,
        sink=heartbeat,
    )
    run = Run(claim.id, claim.lease_id, job, task, context)
    context_slot.append(run)
    heartbeat.add(run)
    heartbeat.start()
    return context, heartbeat


def _end(task: Task[..., Any], claim: Claim, outcome: Outcome) -> Any:
    """Write the outcome, and give the result or raise what the caller should see."""
    store, statements = task.app.queue._store, task.app.statements
    ids, leases = [claim.id], [claim.lease_id]
    statement: Statement[list[UUID]]
    match outcome:
        case Completed(result):
            statement = statements.complete_jobs(ids, leases, [result])
        case Failed(error, trace, retry_in):
            pause = None if retry_in is None else payload.to_timedelta(retry_in, "retry")
            statement = statements.fail_jobs(
                ids, leases, [error], [None], [pause], tracebacks=[trace]
            )
        case Released(delay, _):
            statement = statements.release_jobs(ids, leases, payload.to_timedelta(delay, "delay"))
        case Cancelled(reason):
            statement = statements.stop_jobs(ids, leases, [reason])
        case Lost() | Settled():
            statement = statements.stop_jobs([], [], [])
    accepted = store.run(statement)
    if isinstance(outcome, Lost) or (not accepted and not isinstance(outcome, Settled)):
        raise LeaseLost(ids)
    match outcome:
        case Completed(result):
            value = None if result is None else payload.decode(result)
            return decode_result(value, task.arguments.returns)
        case Failed(cause=BaseException() as cause):
            raise cause
        case Released():
            raise TaskInFlight(claim.id)
    return task.read_result(task.app.queue.get(claim.id))
