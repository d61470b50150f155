"""The slots of one executor: long-lived coroutines, each running one job at a time from the executor's buffer. There
is no asyncio task per job (decision 0009), and no job inherits anything from the job before it (decision 0027)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from howdah.database.service_task import WorkerTask
from howdah.encoding import payload
from howdah.encoding.safe_logger import get_logger
from howdah.execution import fault_points, forks
from howdah.execution.handler import outcome_of
from howdah.execution.run import Run, make_context
from howdah.outcome import Aborted, Cancelled, Failed, Lost, Outcome, Released
from howdah.worker.prefetch import Demand, Prefetch
from howdah.worker.suspects import StartNotWritten, is_suspect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from howdah.execution.heartbeat import Heartbeat
    from howdah.hooks import Hooks
    from howdah.outcome import AbortReason
    from howdah.task import Task
    from howdah.worker.completer import Completer
    from howdah.worker.executors import Executor
    from howdah.worker.suspects import Suspects

logger = get_logger(__name__)

BUFFER_SECONDS = 1.0  # a job that has been in the buffer for so long is released to other workers
YIELD_EVERY_JOBS = 16
STUCK_SECONDS = 10.0  # a handler that runs so long after its abort does not react to it
START_RETRY_SECONDS = 1.0
SLOT_FAILED_RETRY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the slots of every executor use. An error in a slot itself, which would be a bug, goes to `on_crash`;
    `on_ended` is called with an executor's slots after each run, `on_refused` with the context of a job that
    tried to cancel a slot of another job."""

    suspects: Suspects
    heartbeat: Heartbeat
    completer: Completer
    hooks: Hooks
    resources: Mapping[str, Any]
    on_crash: Callable[[BaseException], None]
    on_ended: Callable[[ExecutorSlots], None]
    on_refused: Callable[[Any], None]
    abandon_seconds: float
    """An async handler that still runs so long after its abort or its timeout is abandoned."""


class SlotTask(WorkerTask):
    """The asyncio task of a slot. Only the job that runs in it can cancel it: not another job, and not a timer
    that an earlier job has left behind."""

    run: Run | None = None
    _must_cancel: bool  # of asyncio.Task: a cancellation that was requested and not delivered yet

    def accepts(self, job: Any) -> bool:
        """Whether the job runs in this slot."""
        return job.run is self.run


class ExecutorSlots:
    """The buffer of prefetched jobs of one executor, and the coroutines that run them."""

    def __init__(
        self,
        name: str,
        count: int,
        tasks: Mapping[str, Task[..., Any]],
        execute: Executor,
        surroundings: Surroundings,
    ) -> None:
        self.name = name
        self._count = count
        self._execute_task = execute
        self._with = surroundings
        self._slots: list[SlotTask] = []
        self._idle: deque[asyncio.Future[None]] = deque()
        self._abandoned: list[SlotTask] = []
        self._looked_for_stuck_at = 0.0
        self._aborted_at: dict[Run, float] = {}
        self._prefetch = Prefetch(count, tasks)
        self._closed = False
        self._stopped = False
        self._others_cancelled_at = 0.0
        self._cancellers: set[Any] = set()
        self._clean_variables = contextvars.Context()
        self._clean_items: list[tuple[contextvars.ContextVar[Any], Any]] = []
        self.is_available: Callable[[], bool] = lambda: True
        """Whether the executor can run a job now."""
        self.buffer: deque[Run] = deque()
        self.running: dict[Run, SlotTask] = {}
        self.wants_more = False
        """Whether a free slot changes the demand that was last asked for: it was not for every type."""

    # ── for the fetcher ───────────────────────────────────────────────────────────────────────────

    def demand(self) -> list[Demand]:
        """How many jobs to claim, and of which types."""
        # A job whose outcome could not be written for long is better claimed by another worker.
        is_shut = self._closed or self._with.completer.is_full or not self.is_available()
        demands = [] if is_shut else self._prefetch.demand(self.buffer, self.running)
        self.wants_more = not (demands and demands[0].is_whole)
        return demands

    @property
    def is_below_target(self) -> bool:
        """Whether the buffer has room, as of the last demand."""
        return len(self.buffer) <= self._prefetch.target // 2

    def put(self, run: Run) -> None:
        """Put a claimed job into the buffer."""
        if self._closed:
            self._with.completer.put(run, Released())
            return
        self.buffer.append(run)
        self._wake_slot()

    def release_overdue(self) -> None:
        """Release jobs that have been in the buffer for too long: the running jobs take longer than expected."""
        overdue = time.monotonic() - BUFFER_SECONDS
        with contextlib.suppress(IndexError):  # empty; the heartbeat's thread takes jobs, too
            while self.buffer[0].buffered < overdue:
                self._with.completer.put(self.buffer.popleft(), Released())
        if self.name == "async" and self._looked_for_stuck_at < overdue:
            self._looked_for_stuck_at = time.monotonic()
            self._abandon_stuck()

    def _abandon_stuck(self) -> None:
        """Give up handlers that swallow every cancellation: their jobs end, and other jobs use their slots. The
        thread executor does the same, and a process is killed."""
        late = time.monotonic() - self._with.abandon_seconds
        for run, slot in list(self.running.items()):
            timeout = run.task.options.timeout
            if timeout is not None and run.started is not None and run.started + timeout < late:
                run.abort("timeout")
            elif self._aborted_at.get(run, late) >= late:
                continue
            logger.warning(
                "handler does not stop; abandoning it",
                extra={
                    "job_id": str(run.id),
                    "job_type": run.job.job_type,
                    "why": run.abort_reason,
                },
            )
            context = make_context(run.task, run.job, data=None, sink=None, run=run)
            if not run.finishing:
                error = Aborted(run.abort_reason or "timeout")
                self._with.completer.put(run, outcome_of(run.task, context, error))
            self._abandoned.append(slot)
            self._forget(run)
            self._replace(slot)

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
            self._add_slot(f"howdah-{self.name}-{number}")

    def _add_slot(self, name: str) -> None:
        variables = self._clean_variables.copy()
        slot = SlotTask(
            self._run_jobs(), name=name, context=variables, on_refused=self._with.on_refused
        )
        self._clean_items = list(variables.items())
        slot.add_done_callback(self._on_slot_end)
        self._slots.append(slot)

    def _on_slot_end(self, slot: asyncio.Task[None]) -> None:
        error = None if slot.cancelled() else slot.exception()
        if error is not None:
            self._with.on_crash(error)
        if slot in self._slots and not self._closed:
            logger.error(
                "slot ended unexpectedly; starting another", extra={"slot": slot.get_name()}
            )
            self._slots.remove(slot)
            self._add_slot(slot.get_name())

    def runs(self) -> list[Run]:
        """The runs in the slots, also those of handlers that were abandoned and have not ended."""
        return [slot.run for slot in (*self._slots, *self._abandoned) if slot.run is not None]

    def answers(self) -> bool:
        """Whether a job that is claimed now can run: the executor is available, every slot exists, and not all of them
        are occupied by handlers that were aborted and do not stop."""
        if not self.is_available() or sum(not slot.done() for slot in self._slots) < self._count:
            return False
        late = time.monotonic() - STUCK_SECONDS
        return sum(at < late for at in self._aborted_at.values()) < self._count

    def close(self) -> None:
        """Release the jobs in the buffer; start no more."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._with.completer.put(self.buffer.popleft(), Released())
        while self._idle:
            self._wake_slot()

    def interrupt(self) -> None:
        """Stop the running handlers, to release their jobs. A handler in a thread that never calls its context
        keeps running."""
        for run in list(self.running):
            run.abort("shutdown")
            self._cancel(run)

    def release_running(self) -> None:
        """Release the jobs of handlers that did not stop: this process is about to end."""
        for run in list(self.running):
            if not run.finishing:
                self._with.completer.put(run, Released())

    def end(self) -> list[SlotTask]:
        """Cancel the slots, and return them."""
        self._closed = self._stopped = True
        slots = [*self._slots, *(slot for slot in self._abandoned if not slot.done())]
        for slot in slots:
            slot.end()
        return slots

    def stop_aborted(self, run: Run) -> None:
        """Stop a run that was aborted: its job was cancelled, or its lease was lost."""
        if run in self.running:
            self._cancel(run)
        elif run.abort_reason is not None:
            with contextlib.suppress(ValueError):  # not in the buffer
                self.buffer.remove(run)
                self._with.completer.put(run, _outcome_before_start(run.abort_reason))

    def _cancel(self, run: Run) -> None:
        """Cancel a handler in the event loop or in a process. A handler in a thread stops at its next call of
        the context, and not before."""
        self._aborted_at.setdefault(run, time.monotonic())
        if self.name != "thread":
            self.running[run].end()

    def note_cancelled_tasks(self, canceller: Any) -> None:
        """A run has cancelled the tasks of other jobs, perhaps also tasks that their handlers wait for."""
        self._others_cancelled_at = time.monotonic()
        if canceller in self.running:
            self._cancellers.add(canceller)

    # ── the slots ─────────────────────────────────────────────────────────────────────────────────

    async def _run_jobs(self) -> None:
        slot = asyncio.current_task()
        assert isinstance(slot, SlotTask)  # noqa: S101
        count = 0
        while not self._closed:
            if not self.buffer:
                idle = asyncio.get_running_loop().create_future()
                self._idle.append(idle)
                await idle
                continue
            try:
                run = self.buffer.popleft()
            except IndexError:
                continue  # the heartbeat's thread has just taken it
            self.running[run] = slot
            slot.run = run
            try:
                outcome = await self._execute(run)
            finally:
                slot.run = None
                if run in self.running:
                    self._forget(run)
            if self._abandoned and slot in self._abandoned:
                self._abandoned.remove(slot)
                return
            fault_points.reach("after-run")
            if not run.finishing:
                self._with.completer.put(run, outcome)
            if slot.cancelling() or slot._must_cancel or self._variables_changed():
                # The next handler must not inherit a cancellation or the context variables of this one.
                self._replace(slot)
                return
            if self._with.completer.is_full:
                await self._with.completer.wait_for_room()
            count += 1
            if count % YIELD_EVERY_JOBS == 0:
                # A handler that never awaits would keep the fetcher and the completer from running.
                await asyncio.sleep(0)

    def _forget(self, run: Run) -> None:
        """A run has ended, or was abandoned."""
        del self.running[run]
        if self._aborted_at:
            self._aborted_at.pop(run, None)
        if self._cancellers:
            self._cancellers.discard(run)
        self._prefetch.ended += 1
        self._with.on_ended(self)

    def _variables_changed(self) -> bool:
        # By identity: `==` of a value runs code of the handler, and may raise, as that of a numpy array does.
        now = contextvars.copy_context()
        if len(now) != len(self._clean_items):
            return True
        for variable, value in self._clean_items:  # noqa: SIM110 - a generator costs twice as much
            if now.get(variable, now) is not value:
                return True
        return False

    def _replace(self, slot: SlotTask) -> None:
        self._slots.remove(slot)
        self._add_slot(slot.get_name())

    async def _execute(self, run: Run) -> Outcome:
        """Run one job to an outcome. Raises only if the slot itself is cancelled."""
        try:
            fault_points.reach("before-start")
            if (
                self.name != "process"
                and is_suspect(run)
                and not await self._with.suspects.start(run)
            ):
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

    async def _call_handler(self, run: Run) -> Outcome:
        job, task = run.job, run.task
        context = make_context(
            task,
            job,
            data=msgspec.Raw(job.data),
            sink=self._with.heartbeat,
            run=run,
            resources=self._with.resources,
        )
        if self.name != "process":  # a process says when it enters the handler
            run.started = time.monotonic()
            if self._with.hooks.active:
                self._with.hooks.notify(job, "running")
        try:
            outcome = await self._execute_task(task, context)
        except asyncio.CancelledError as error:
            if run.abort_reason is not None or self._stopped:
                raise
            outcome = outcome_of(task, context, error)  # the handler has cancelled its own task
        forks.leave_if_forked()
        started = run.started
        if started is None:
            return outcome
        if (
            self._others_cancelled_at > started
            and run not in self._cancellers
            and isinstance(outcome, Failed)
            and isinstance(outcome.cause, asyncio.CancelledError)
        ):
            return Released()  # another handler has cancelled a task that this one waited for
        self._prefetch.measure(job.job_type, time.monotonic() - started)
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
