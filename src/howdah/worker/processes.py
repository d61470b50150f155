"""`run_in="process"`: runs handlers in task processes. A handler is terminated at its timeout, and when its job is
cancelled or its lease is lost: SIGTERM raises `Aborted` in the handler, and if the handler is still running 0.8 s
later, its process is killed (decision 0013). A process that crashes fails its own job and no other."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING, Any

from howdah.encoding.safe_logger import get_logger
from howdah.errors import InvalidOption
from howdah.execution.handler import aborted, outcome_of
from howdah.execution.run import Run
from howdah.outcome import Lost, Outcome, Released
from howdah.protocol.worker_statements import Claimed
from howdah.worker.process_handle import TaskProcess
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
START_RETRY_SECONDS = 1.0
FULL_CHECK_SECONDS = 0.05
_OTHER_COLUMNS = Claimed.__struct_fields__[2:]


class ImportNotDone(Exception):
    """A task process took a job and did not enter its handler in time."""


class ProcessDied(Exception):
    """A task process ended before its handler did: a crash, the kernel's out-of-memory killer, or `os._exit`."""


class NotImported(Exception):
    """A task process could not import the task's module. It can take other jobs."""


class NotTaken(Exception):
    """A task process ended before it took the job."""


class _Assignment:
    """One run in a task process. `answer` is an outcome, or None: the module of a suspect was imported."""

    __slots__ = ("answer", "process", "run", "task", "timer")

    def __init__(self, run: Run, process: TaskProcess) -> None:
        self.run = run
        self.task = run.task
        self.process = process
        self.answer: asyncio.Future[Outcome | None] = process.loop.create_future()
        self.timer: asyncio.TimerHandle | None = None

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
    while the process imports a module must not use up an attempt. A process that has entered a handler of this task
    before enters it at once, and does not say so."""

    def __init__(
        self,
        sink: Heartbeat,
        suspects: Suspects,
        hooks: Hooks,
        set_up: Callable[[], object] | None = None,
    ) -> None:
        self._set_up = set_up
        self._sink = sink
        self._suspects = suspects
        self._hooks = hooks
        self._idle: list[TaskProcess] = []
        self._assigned: dict[TaskProcess, _Assignment] = {}
        self._all: set[TaskProcess] = set()
        self._exited = asyncio.Event()

    async def execute(self, task: Task[..., Any], context: Context) -> Outcome:
        """Run a handler in a task process."""
        run = context.run
        assert isinstance(run, Run)  # noqa: S101 - the slots make it
        try:
            process = self._idle.pop() if self._idle else self._start()
        except Exception as error:
            return _not_started(run, error)
        assignment = self._assigned[process] = _Assignment(run, process)
        try:
            self._hand_over(assignment)
            return await self._wait(assignment, context)
        except asyncio.CancelledError as error:
            if run.abort_reason is None:
                raise
            return outcome_of(task, context, error)
        except TimeoutError:
            return outcome_of(task, context, aborted(context, "timeout"))
        except OSError as error:
            return _not_started(run, error)
        except NotTaken:
            return Released()
        except (ProcessDied, NotImported, ImportNotDone) as error:
            return outcome_of(task, context, error)
        finally:
            self._end(assignment)

    def _start(self) -> TaskProcess:
        process = TaskProcess(self._set_up, self._on_message, self._on_exit)
        self._all.add(process)
        return process

    def _hand_over(self, assignment: _Assignment) -> None:
        process, run = assignment.process, assignment.run
        suspect = is_suspect(run)
        process.hand_over(locate(run.task), run.task.name, plain_values(run.job), suspect)
        if run.task.name in process.entered and not suspect:
            self._enter(assignment)
        else:
            assignment.set_timer(IMPORT_TIMEOUT_SECONDS, self._on_import_timeout)

    async def _wait(self, assignment: _Assignment, context: Context) -> Outcome:
        while True:
            try:
                outcome = await assignment.answer
            except asyncio.CancelledError:
                if context.run.abort_reason is not None:
                    await self._terminate_and_wait(assignment)
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
        if process.has_exited:
            return
        answer = assignment.answer
        error = answer.exception() if answer.done() and not answer.cancelled() else None
        if isinstance(error, NotImported) or (error is None and _is_outcome(answer)):
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
            case "ended":
                process.entered.add(assignment.task.name)
                if not assignment.answer.done():
                    assignment.answer.set_result(make_outcome(one, two))
            case "progress":
                self._sink.progress(assignment.run, one, two)
            case "event":
                self._sink.event(assignment.run, one, two)
            case "completed-by-handler":
                assignment.run.complete_by_handler()
            case "imported":
                assignment.cancel_timer()
                if not assignment.answer.done():
                    assignment.answer.set_result(None)
            case "not-imported":
                assignment.fail(NotImported(one))
            case "entered":
                self._enter(assignment)
            case "full":
                self._tell_room(assignment)

    def _enter(self, assignment: _Assignment) -> None:
        """The handler is being entered: its timeout begins."""
        run, timeout = assignment.run, assignment.task.options.timeout
        run.started = time.monotonic()
        if timeout is None:
            assignment.cancel_timer()
        else:
            assignment.set_timer(timeout, self._on_timeout)
        if self._hooks.active:
            self._hooks.notify(run.job, "running")

    def _tell_room(self, assignment: _Assignment) -> None:
        """Let a process that has sent many events go on, if enough of them are written."""
        if assignment.answer.done():
            return
        if self._sink.has_room(assignment.run):
            assignment.process.send("room")
        else:
            assignment.process.loop.call_later(FULL_CHECK_SECONDS, self._tell_room, assignment)

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

    async def _terminate_and_wait(self, assignment: _Assignment) -> None:
        """Terminate the handler of an aborted run, and give it some time to clean up."""
        if assignment.answer.cancelled():  # with the slot, which waited for it
            assignment.answer = assignment.process.loop.create_future()
        elif assignment.answer.done():
            return
        self._terminate(assignment)
        with contextlib.suppress(Exception):
            await asyncio.wait([assignment.answer], timeout=TERMINATE_SECONDS)

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
                assignment.fail(NotTaken())
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


def _is_outcome(answer: asyncio.Future[Outcome | None]) -> bool:
    return answer.done() and not answer.cancelled() and answer.result() is not None


def _not_started(run: Run, error: Exception) -> Released:
    """No handler was entered, so no attempt is used: too many open files, no memory for a process."""
    logger.warning(
        "task process cannot be started; releasing the job",
        extra={"job_id": str(run.id), "error": str(error)},
    )
    run.started = None
    return Released(START_RETRY_SECONDS)


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
