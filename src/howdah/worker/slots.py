"""The slots: long-lived coroutines, each running one job at a time from a common buffer. There is no asyncio task
per job (decision 0009)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from howdah.encoding import payload
from howdah.execution import fault_points
from howdah.execution.run import Run, make_context
from howdah.outcome import Cancelled, Failed, Lost, Outcome, Released
from howdah.worker.prefetch import NO_DEMAND, Demand, Prefetch
from howdah.worker.suspects import StartNotWritten, is_suspect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from howdah.execution.heartbeat import Heartbeat
    from howdah.hooks import Hooks
    from howdah.outcome import AbortReason
    from howdah.protocol.worker_statements import Claimed
    from howdah.task import Task
    from howdah.worker.completer import Completer
    from howdah.worker.executors import Executor
    from howdah.worker.suspects import Suspects

logger = logging.getLogger(__name__)

BUFFER_SECONDS = 1.0  # a job that has been in the buffer for so long is released to other workers
YIELD_EVERY_JOBS = 16
STOP_TIMEOUT_SECONDS = 1.0
START_RETRY_SECONDS = 1.0
SLOT_FAILED_RETRY_SECONDS = 10.0


class Slots:
    """The buffer of prefetched jobs, and the coroutines that run them. An error in a slot itself, which would be
    a bug, goes to `on_crash`."""

    def __init__(
        self,
        count: int,
        tasks: Mapping[str, Task[..., Any]],
        executors: Mapping[str, Executor],
        *,
        suspects: Suspects,
        heartbeat: Heartbeat,
        completer: Completer,
        hooks: Hooks,
        resources: Mapping[str, Any],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._count = count
        self._tasks = tasks
        self._executors = executors
        self._suspects = suspects
        self._heartbeat = heartbeat
        self._completer = completer
        self._hooks = hooks
        self._resources = resources
        self._on_crash = on_crash
        self._slots: list[asyncio.Task[None]] = []
        self._buffer: deque[Run] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()
        self._running: dict[Run, asyncio.Task[None]] = {}
        self._prefetch = Prefetch(count, tasks)
        self._closed = False
        self._clean_variables = contextvars.Context()

    # ── for the fetcher ───────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        """How many jobs are running."""
        return len(self._running)

    @property
    def prefetched(self) -> int:
        """How many jobs are in the buffer."""
        return len(self._buffer)

    def demand(self) -> Demand:
        """How many jobs to claim, and of which types."""
        return NO_DEMAND if self._closed else self._prefetch.demand(self._buffer, self._running)

    async def wait_for_demand(self) -> None:
        """Wait until `demand` may have changed."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BUFFER_SECONDS / 2):
                await self._changed.wait()

    def release_overdue(self) -> None:
        """Release jobs that have been in the buffer for too long: the running jobs take longer than expected."""
        overdue = time.monotonic() - BUFFER_SECONDS
        while self._buffer and self._buffer[0].buffered < overdue:
            self._completer.put(self._buffer.popleft(), Released())

    def put(self, jobs: Sequence[Claimed]) -> None:
        """Put claimed jobs into the buffer."""
        now = time.monotonic()
        for job in jobs:
            run = Run(job.id, job.lease_id, job, self._tasks[job.job_type], buffered=now)
            self._heartbeat.add(run)
            if self._closed:
                self._completer.put(run, Released())
            else:
                self._buffer.append(run)
                self._wake_slot()

    def _wake_slot(self) -> None:
        while self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                return

    # ── for the runner ────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the slots."""
        self._clean_variables = contextvars.copy_context()
        for number in range(self._count):
            self._add_slot(f"howdah-slot-{number}")

    def _add_slot(self, name: str) -> None:
        slot = asyncio.create_task(
            self._run_jobs(), name=name, context=self._clean_variables.copy()
        )
        slot.add_done_callback(self._on_slot_end)
        self._slots.append(slot)

    def _on_slot_end(self, slot: asyncio.Task[None]) -> None:
        if not slot.cancelled() and (error := slot.exception()) is not None:
            self._on_crash(error)

    def close(self) -> None:
        """Release the jobs in the buffer; start no more."""
        self._closed = True
        while self._buffer:
            self._completer.put(self._buffer.popleft(), Released())
        while self._idle:
            self._wake_slot()
        self._changed.set()

    async def wait_until_empty(self) -> None:
        """Wait for the running jobs to end."""
        while self._running:
            self._changed.clear()
            await self._changed.wait()

    def interrupt(self) -> None:
        """Stop the running handlers, to release their jobs. A handler in a thread that never calls its context
        keeps running."""
        for run in list(self._running):
            run.abort("shutdown")
            self._cancel(run)

    def release_running(self) -> None:
        """Release the jobs of handlers that did not stop: this process is about to end."""
        for run in list(self._running):
            if not run.finishing:
                self._completer.put(run, Released())

    async def stop(self) -> int:
        """End the slots. Returns how many did not end, because their handlers ignore cancellation."""
        for slot in self._slots:
            slot.cancel()
        if not self._slots:
            return 0
        _, stuck = await asyncio.wait(self._slots, timeout=STOP_TIMEOUT_SECONDS)
        return len(stuck)

    def stop_aborted(self, run: Run) -> None:
        """Stop a run that was aborted: its job was cancelled, or its lease was lost."""
        if run in self._running:
            self._cancel(run)
        elif run in self._buffer and run.abort_reason is not None:
            self._buffer.remove(run)
            self._completer.put(run, _outcome_before_start(run.abort_reason))

    def _cancel(self, run: Run) -> None:
        """Cancel a handler in the event loop or in a process. A handler in a thread stops at its next call of
        the context, and not before."""
        if run.task.options.run_in != "thread":
            self._running[run].cancel()

    # ── the slots ─────────────────────────────────────────────────────────────────────────────────

    async def _run_jobs(self) -> None:
        slot = asyncio.current_task()
        assert slot is not None  # noqa: S101
        clean_variables = contextvars.copy_context()
        count = 0
        while not self._closed:
            if not self._buffer:
                idle = asyncio.get_running_loop().create_future()
                self._idle.append(idle)
                await idle
                continue
            run = self._buffer.popleft()
            self._running[run] = slot
            try:
                outcome = await self._execute(run, slot)
            finally:
                del self._running[run]
                self._prefetch.ended += 1
                self._changed.set()
            fault_points.reach("after-run")
            if not run.finishing:
                self._completer.put(run, outcome)
            if contextvars.copy_context() != clean_variables:
                # The next handler must not see the context variables that this one has set.
                self._replace(slot)
                return
            count += 1
            if count % YIELD_EVERY_JOBS == 0:
                # A handler that never awaits would keep the fetcher and the completer from running.
                await asyncio.sleep(0)

    def _replace(self, slot: asyncio.Task[None]) -> None:
        self._slots.remove(slot)
        self._add_slot(slot.get_name())

    async def _execute(self, run: Run, slot: asyncio.Task[None]) -> Outcome:
        """Run one job to an outcome. Raises only if the slot itself is cancelled."""
        try:
            fault_points.reach("before-start")
            if is_suspect(run) and not await self._suspects.start(run):
                return Lost()
            return await self._call_handler(run)
        except asyncio.CancelledError:
            if run.abort_reason is None:
                raise
            return _outcome_before_start(run.abort_reason)
        except StartNotWritten as error:
            logger.warning(
                "start of a suspect could not be written; releasing the job",
                extra={"job_id": str(run.id), "error": str(error)},
            )
            return Released(START_RETRY_SECONDS)
        except Exception as error:
            logger.exception("slot failed", extra={"job_id": str(run.id)})
            return Failed(payload.format_error(error), None, SLOT_FAILED_RETRY_SECONDS)
        finally:
            # The slot was cancelled to stop the run that has now ended.
            while run.abort_reason is not None and slot.cancelling():
                slot.uncancel()

    async def _call_handler(self, run: Run) -> Outcome:
        job, task = run.job, run.task
        context = make_context(
            task,
            job,
            data=msgspec.Raw(job.data),
            sink=self._heartbeat,
            run=run,
            resources=self._resources,
        )
        run.started = time.monotonic()
        if self._hooks.active:
            self._hooks.notify(job, "running")
        outcome = await self._executors[task.options.run_in](task, context)
        self._prefetch.measure(job.job_type, time.monotonic() - run.started)
        return outcome


def _outcome_before_start(reason: AbortReason) -> Outcome:
    """The outcome of a run that was aborted before its handler was called."""
    match reason:
        case "lost":
            return Lost()
        case "shutdown":
            return Released()
        case _:
            return Cancelled("cancelled before it started")
