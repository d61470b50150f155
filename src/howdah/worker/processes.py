"""`run_in="process"`: runs handlers in task processes. A handler is terminated at its timeout, and when its job is
cancelled or its lease is lost: SIGTERM raises `Aborted` in the handler, and if the handler is still running 0.8 s
later, its process is killed (decision 0013). A process that crashes fails its own job and no other."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING, Any

from howdah.database.backoff import Backoff
from howdah.encoding.safe_logger import get_logger
from howdah.errors import InvalidOption, TooManyEvents
from howdah.execution.handler import aborted, outcome_of
from howdah.execution.run import Run
from howdah.outcome import Lost, Outcome, Released
from howdah.protocol.worker_statements import Claimed
from howdah.worker.process_handle import Launcher, TaskProcess
from howdah.worker.process_messages import make_outcome
from howdah.worker.suspects import is_suspect

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.context import Context
    from howdah.execution.heartbeat import Heartbeat
    from howdah.hooks import Hooks
    from howdah.task import Task
    from howdah.worker.suspects import Suspects

logger = get_logger(__name__)

IMPORT_TIMEOUT_SECONDS = (
    120.0  # for a process to start, import the task's module and enter its handler
)
TERMINATE_SECONDS = 0.8  # from SIGTERM to SIGKILL
START_RETRY_SECONDS, MAX_START_RETRY_SECONDS = 1.0, 30.0
FULL_CHECK_SECONDS = 0.05
_OTHER_COLUMNS = Claimed.__struct_fields__[2:]


class ImportNotDone(Exception):
    """A task process took a job and did not enter its handler in time."""


class ProcessDied(Exception):
    """A task process ended before its handler did: a crash, the kernel's out-of-memory killer, or `os._exit`."""


class NotImported(Exception):
    """A task process could not import the task's module. It can take other jobs."""


class NotTaken(Exception):
    """A task process could not be started, or ended before it took the job."""


class Declined(Exception):
    """Earlier runs in a task process have kept too much memory for the memory limit of the task, or its module cannot be
    imported there. Another process takes the job."""


class _Assignment:
    """One run in a task process. `answer` is an outcome, or None: the module of a suspect was imported."""

    __slots__ = ("answer", "is_last", "process", "run", "task", "timer")

    def __init__(self, run: Run, process: TaskProcess) -> None:
        self.run = run
        self.task = run.task
        self.process = process
        self.answer: asyncio.Future[Outcome | None] = process.loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.is_last = False
        """Whether the handler has changed its process so that no other may run in it."""

    def outcome(self) -> Outcome | None:
        """The outcome, if there is one yet."""
        answer = self.answer
        is_answered = answer.done() and not answer.cancelled() and answer.exception() is None
        return answer.result() if is_answered else None

    def error(self) -> BaseException | None:
        """Why there is no outcome, if there is none."""
        answer = self.answer
        return answer.exception() if answer.done() and not answer.cancelled() else None

    def set_timer(self, seconds: float, callback: Callable[[_Assignment], None]) -> None:
        """Call back after this time, and not at the time that was set before."""
        self.cancel_timer()
        self.timer = self.process.loop.call_later(seconds, callback, self)

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def time_out(self) -> None:
        self.fail(TimeoutError())

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class ProcessExecutor:
    """The task processes of a worker. There are never more than it has slots for them.

    A run starts when its process enters the handler, not when the process gets the job: a worker that is killed
    while the process imports a module must not use up an attempt."""

    def __init__(
        self,
        sink: Heartbeat,
        suspects: Suspects,
        hooks: Hooks,
        set_up: Callable[[], object] | None = None,
    ) -> None:
        self._launcher = Launcher(set_up)
        self._backoff = Backoff(START_RETRY_SECONDS, MAX_START_RETRY_SECONDS)
        self._start_not_before = 0.0
        self._sink = sink
        self._suspects = suspects
        self._hooks = hooks
        self._idle: list[TaskProcess] = []
        self._assigned: dict[TaskProcess, _Assignment] = {}
        self._all: set[TaskProcess] = set()
        self._exited = asyncio.Event()

    def is_available(self) -> bool:
        """Whether a job that is claimed now can run: False for some time after a process could not be started."""
        return bool(self._idle) or time.monotonic() >= self._start_not_before

    async def execute(self, task: Task[..., Any], context: Context) -> Outcome:
        """Run a handler in a task process."""
        run = context.run
        assert isinstance(run, Run)  # noqa: S101 - the slots make it
        try:
            while True:
                with contextlib.suppress(Declined):
                    return await self._execute(run, context)
        except asyncio.CancelledError as error:
            if run.abort_reason is None:
                raise
            return outcome_of(task, context, error)
        except TimeoutError:
            return outcome_of(task, context, aborted(context, "timeout"))
        except (OSError, NotTaken) as error:
            return self._not_started(run, error)
        except (ProcessDied, NotImported, ImportNotDone) as error:
            return outcome_of(task, context, error)

    async def _execute(self, run: Run, context: Context) -> Outcome:
        process = self._idle.pop() if self._idle else self._start()
        assignment = self._assigned[process] = _Assignment(run, process)
        try:
            process.hand_over(
                locate(run.task), run.task.name, plain_values(run.job), is_suspect(run)
            )
            assignment.set_timer(IMPORT_TIMEOUT_SECONDS, self._on_import_timeout)
            return await self._wait(assignment, context)
        finally:
            self._end(assignment)

    def _start(self) -> TaskProcess:
        try:
            process = TaskProcess(self._launcher, self._on_message, self._on_exit)
        except Exception as error:
            raise NotTaken(str(error)) from error
        self._all.add(process)
        return process

    def _not_started(self, run: Run, error: Exception) -> Released:
        """No handler was entered, so no attempt is used: too many open files, no memory for a process, a program that
        is being replaced."""
        now = time.monotonic()
        if now >= self._start_not_before:  # all slots fail together, and count once
            self._start_not_before = now + self._backoff.next()
        logger.warning(
            "task process cannot be started; releasing the job",
            extra={"job_id": str(run.id), "error": str(error)},
        )
        run.started = None
        return Released(self._start_not_before - now)

    async def _wait(self, assignment: _Assignment, context: Context) -> Outcome:
        while True:
            try:
                outcome = await assignment.answer
            except asyncio.CancelledError:
                reason = context.run.abort_reason
                if reason is None:
                    raise
                outcome = await self._terminate_and_wait(assignment)
                if outcome is None or reason == "lost":
                    raise
            if outcome is not None:
                return outcome
            # If the suspect kills this worker too, the attempt counts.
            if not await self._suspects.start(assignment.run):
                return Lost()
            assignment.answer = assignment.process.loop.create_future()
            assignment.set_timer(IMPORT_TIMEOUT_SECONDS, self._on_import_timeout)
            assignment.process.send("enter")

    def _end(self, assignment: _Assignment) -> None:
        """The run has ended, or nobody waits for it any more."""
        assignment.cancel_timer()
        process = assignment.process
        self._assigned.pop(process, None)
        process.forget_parts()
        process.resume()
        is_reusable = assignment.outcome() is not None and not assignment.is_last
        if not process.has_exited and (is_reusable or isinstance(assignment.error(), NotImported)):
            self._idle.append(process)
        else:
            process.kill()

    # ── messages ──────────────────────────────────────────────────────────────────────────────────

    def _on_message(self, process: TaskProcess, message: list[Any]) -> None:
        assignment = self._assigned.get(process)
        kind, number, one, two = message
        if assignment is None or number != process.runs:
            return  # of a run that has ended: a thread that it has left behind
        match kind:
            case "ended" | "ended-last":
                assignment.is_last = kind == "ended-last"
                if not assignment.answer.done():
                    assignment.answer.set_result(make_outcome(one, two))
            case "progress":
                self._sink.progress(assignment.run, one, two)
            case "event":
                self._on_event(assignment, one, two)
            case "completed-by-handler":
                assignment.run.complete_by_handler()
            case "imported":
                self._has_taken(assignment)
                if not assignment.answer.done():
                    assignment.answer.set_result(None)
            case "not-imported":
                self._has_taken(assignment)
                # An earlier handler may have changed what the process imports: a new one decides.
                assignment.fail(NotImported(one) if process.runs == 1 else Declined())
            case "declined":
                assignment.fail(Declined())
            case "entered":
                self._enter(assignment)

    def _has_taken(self, assignment: _Assignment) -> None:
        assignment.cancel_timer()
        self._backoff.reset()

    def _enter(self, assignment: _Assignment) -> None:
        """The handler is being entered: its timeout begins."""
        self._has_taken(assignment)
        run, timeout = assignment.run, assignment.task.options.timeout
        run.started = time.monotonic()
        if timeout is not None and run.abort_reason is None:
            assignment.set_timer(timeout, self._on_timeout)
        if self._hooks.active:
            self._hooks.notify(run.job, "running")

    def _on_event(self, assignment: _Assignment, kind: str, data: str) -> None:
        """Add an event. If too many are not written yet, let the process wait until some are."""
        run = assignment.run
        with contextlib.suppress(TooManyEvents):  # of a run that was aborted; no other gets so far
            self._sink.event(run, kind, data)
        if run.abort_reason is None and not self._sink.has_room(run):
            assignment.process.pause()
            self._resume_later(assignment)

    def _resume_later(self, assignment: _Assignment) -> None:
        assignment.process.loop.call_later(FULL_CHECK_SECONDS, self._resume, assignment)

    def _resume(self, assignment: _Assignment) -> None:
        if self._assigned.get(assignment.process) is not assignment:
            return
        if self._sink.has_room(assignment.run):
            assignment.process.resume()
        else:
            self._resume_later(assignment)

    # ── stopping a handler ────────────────────────────────────────────────────────────────────────

    def _on_import_timeout(self, assignment: _Assignment) -> None:
        module = assignment.task.function.__module__
        assignment.fail(ImportNotDone(
            f"the task's process did not import {module} and enter the handler within "
            f"{IMPORT_TIMEOUT_SECONDS:g} s"
        ))  # fmt: skip

    def _on_timeout(self, assignment: _Assignment) -> None:
        assignment.run.abort("timeout")
        self._terminate(assignment)
        assignment.set_timer(TERMINATE_SECONDS, _Assignment.time_out)

    def _terminate(self, assignment: _Assignment) -> None:
        """Raise `Aborted` in the handler, by SIGTERM. A message names the run and the reason: when the signal
        arrives, the process may run another job, and other programs send SIGTERM too."""
        process = assignment.process
        process.send("abort", assignment.run.abort_reason or "cancelled")
        process.raise_in_handler()
        process.resume()

    async def _terminate_and_wait(self, assignment: _Assignment) -> Outcome | None:
        """Terminate the handler of an aborted run, and give it some time to clean up. Returns the outcome, if it has
        one: a handler may complete its job although it is interrupted."""
        if assignment.answer.cancelled():  # with the slot, which waited for it
            assignment.answer = assignment.process.loop.create_future()
        if not assignment.answer.done():
            self._terminate(assignment)
            await asyncio.wait([assignment.answer], timeout=TERMINATE_SECONDS)
        return assignment.outcome()

    # ── exits ─────────────────────────────────────────────────────────────────────────────────────

    def _on_exit(self, process: TaskProcess) -> None:
        self._all.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        assignment = self._assigned.get(process)
        if assignment is not None:
            if process.has_taken_run:
                assignment.fail(ProcessDied(_format_exit(process.exit_status)))
            else:
                assignment.run.started = None
                assignment.fail(NotTaken(_format_exit(process.exit_status)))
        self._exited.set()

    async def stop(self, timeout: float) -> None:
        """Kill the task processes."""
        for process in self._all:
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._all:
                    self._exited.clear()
                    await self._exited.wait()


def locate(task: Task[..., Any]) -> str:
    """The module in which a child finds the task."""
    module = task.function.__module__
    if task.function.__qualname__ != task.function.__name__:
        raise InvalidOption(
            f'task "{task.name}" has run_in="process" and is defined inside {task.function.__qualname__}; '
            "move it to the top level of its module, where a new process can import it."
        )
    return module


def plain_values(job: Claimed) -> list[Any]:
    """A job as it is sent to a task process: text, numbers, and its data as JSON text."""
    return [str(job.id), str(job.lease_id), *[getattr(job, name) for name in _OTHER_COLUMNS]]


def _format_exit(status: int | None) -> str:
    if status is None:
        return "the task's process ended before the task did"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"the task's process was killed by {signal.Signals(-status).name}"
    return f"the task's process ended with status {status} before the task did"
