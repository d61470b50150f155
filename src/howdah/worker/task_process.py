"""In a task process: finds the task, tells the worker how far it is, and runs the handler. `process_handle.py` is the
worker's side, `process_state.py` undoes what a handler has changed.

Every message names the number of its run: a thread that a handler has left behind may report when the next one runs.
Any thread may send, and so may a process that a handler has forked. Only the main thread receives: in its loop between
runs, and in the handler of SIGTERM during a run."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import inspect
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
from collections import deque
from multiprocessing import reduction, spawn
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from howdah.context import RunState
from howdah.encoding import payload
from howdah.execution import forks
from howdah.execution.handler import aborted, execute, outcome_of
from howdah.execution.run import make_context
from howdah.outcome import Aborted
from howdah.protocol.worker_statements import Claimed
from howdah.worker.process_messages import RECEIVED_BYTES, Messages, outcome_values
from howdah.worker.process_state import ProcessState, address_space, limit_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from howdah.context import Context
    from howdah.outcome import AbortReason, Outcome
    from howdah.task import Task

PARENT_CHECK_SECONDS = 1
# The share of a task's memory limit that earlier runs in the process may have kept.
KEPT_SHARE = 0.25


class NotImported(Exception):
    """The task's module cannot be imported, or its app's lifespans cannot be entered."""


class TooLittleMemory(Exception):
    """Earlier runs have kept too much of the address space for the memory limit of the task."""


class _Channel:
    """The `Sink` of this process: sends reports to the worker, and receives its messages. A report waits while the
    worker reads none, because too many events of the run are not written yet."""

    def __init__(self, end: socket.socket, worker: int) -> None:
        end.settimeout(None)
        end.set_inheritable(False)  # not for programs that handlers start
        # To check whether the worker is alive. Unlike a timeout of Python's, this one does not concern sends.
        timeout = struct.pack("ll", PARENT_CHECK_SECONDS, 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._socket = end
        self._worker = worker
        self._messages = Messages()
        self._inbox: deque[list[Any]] = deque()
        self._aborted: tuple[int, AbortReason] | None = None

    def send(self, kind: str, number: int, one: Any = None, two: Any = None) -> None:
        """Send a message about a run."""
        for datagram in self._messages.encode(kind, number, one, two)[1]:
            self._socket.send(datagram)

    def receive(self) -> list[Any]:
        """The next message."""
        while not self._inbox:
            try:
                self._sort(self._socket.recv(RECEIVED_BYTES))
            except BlockingIOError:
                if os.getppid() != self._worker:
                    os._exit(
                        1
                    )  # the worker was killed, on a system that does not kill its processes
        return self._inbox.popleft()

    def abort_reason(self, number: int) -> AbortReason | None:
        """Why the worker wants this run to stop, if it does."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._sort(self._socket.recv(RECEIVED_BYTES, socket.MSG_DONTWAIT))
        if self._aborted is None or self._aborted[0] != number:
            return None
        return self._aborted[1]

    def _sort(self, datagram: bytes) -> None:
        match self._messages.decode(datagram):
            case None:
                pass
            case ["abort", number, reason]:
                self._aborted = number, reason
            case message:
                self._inbox.append(message)

    def progress(self, run: RunState, percent: int | None, stage: str | None) -> None:
        """Send the newest progress of a run."""
        assert isinstance(run, _ChildRun)  # noqa: S101 - see `_run`
        self.send("progress", run.number, percent, stage)

    def event(self, run: RunState, kind: str, data: str) -> bool:
        """Send an event."""
        assert isinstance(run, _ChildRun)  # noqa: S101 - see `_run`
        self.send("event", run.number, kind, data)
        return True

    def wait_for_admission(self, number: int) -> None:
        """Wait until the worker has written the start of a suspect, however long that takes: the worker kills this
        process if the suspect is not to run."""
        self.send("imported", number)
        while self.receive() != ["enter", number]:
            pass


class _ChildRun(RunState):
    """The state of a run in the child. The worker has its own state of the run, and the two exchange messages."""

    def __init__(self, number: int, channel: _Channel) -> None:
        super().__init__()
        self.number = number
        self._channel = channel

    def complete_by_handler(self) -> None:
        super().complete_by_handler()
        self._channel.send("completed-by-handler", self.number)


_channel: _Channel | None = None
_running: Context | None = None
_tasks: dict[tuple[str, str], Task[..., Any]] = {}
_lifespans: list[Iterator[Any]] = []  # a generator that nothing refers to is closed
_resources: dict[int, Mapping[str, Any]] = {}
_clean: ProcessState | None = None  # since the last module was imported
_imported_bytes = 0  # the address space without what handlers have added


def main(start: dict[str, Any]) -> None:
    """The main function of a task process. `start` is what the worker has written to its standard input, which
    goes on with the pickled function that sets up the logging, as that of the worker."""
    forks.guard()
    _handle_signals()
    _exit_with_worker()
    this = multiprocessing.current_process()
    # A worker that is started by the import of the main module would start this program again.
    this._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare(start["main"])
    finally:
        del this._inheriting  # type: ignore[attr-defined]
    set_up = reduction.ForkingPickler.loads(sys.stdin.buffer.read())
    if set_up is not None:
        set_up()
        for handler in logging.getLogger().handlers:
            handler.addFilter(_add_job_id)
    _serve(_Channel(socket.socket(fileno=start["socket"]), start["worker"]))


def _serve(channel: _Channel) -> None:
    """Run the jobs that the worker sends, until it kills this process."""
    global _channel, _imported_bytes
    _channel, _imported_bytes = channel, address_space()
    while True:
        kind, number, *values = channel.receive()
        if kind != "run":
            continue  # about a run that has ended
        try:
            outcome, is_clean = _run(channel, number, *values)
        except NotImported as error:
            channel.send("not-imported", number, str(error))
        except TooLittleMemory:
            channel.send("declined", number)
        else:
            channel.send("ended" if is_clean else "ended-last", number, *outcome_values(outcome))


def _add_job_id(record: logging.LogRecord) -> bool:
    """Name the job that runs in a log record that names none. A process runs one job at a time."""
    if _running is not None and not hasattr(record, "job_id"):
        record.job_id = str(_running.id)
    return True


def _handle_signals() -> None:
    # Ctrl-C, init systems and closed terminals signal the whole process group, but only the worker may stop this process.
    forks.handle_signal(signal.SIGINT, _ignore)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        forks.handle_signal(signal.SIGHUP, _ignore)
    forks.handle_signal(signal.SIGTERM, _on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])


def _ignore(_signal: int, _frame: object) -> None:
    pass


def _on_sigterm(_signal: int, _frame: object) -> None:
    """Stop the handler if the worker wants its run to stop. Otherwise ignore the signal."""
    context = _running
    if context is None or _channel is None or not isinstance(context.run, _ChildRun):
        return
    reason = _channel.abort_reason(context.run.number)
    if reason is not None:
        raise aborted(context, reason)


def _exit_with_worker() -> None:
    """Let the kernel kill this process when its worker is killed."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, Linux only


def _run(
    channel: _Channel, number: int, module: str, name: str, claimed: list[Any], is_suspect: bool
) -> tuple[Outcome, bool]:
    """The outcome of a run, and whether this process is as it was before."""
    global _running
    task = _tasks.get((module, name)) or _find_task(module, name)
    limit = task.options.memory_limit
    if limit is not None and number > 1:  # a new process can do no better
        kept = address_space() - _imported_bytes
        if kept > KEPT_SHARE * (limit - _imported_bytes):
            raise TooLittleMemory
    if is_suspect:
        channel.wait_for_admission(number)
    job = Claimed(UUID(claimed[0]), UUID(claimed[1]), *claimed[2:])
    context = make_context(
        task,
        job,
        data=msgspec.Raw(job.data),
        sink=channel,
        run=_ChildRun(number, channel),
        resources=_resources[id(task.app)],
    )
    channel.send("entered", number)
    if limit is not None:
        limit_memory(limit)
    _running = context
    try:
        if (reason := channel.abort_reason(number)) is not None:  # its signal came before
            context.run.abort(reason)
        # The next handler must not see the context variables that this one has set.
        outcome = contextvars.Context().run(execute, task, context)
    except Aborted as error:  # the signal came just before the handler, or just after it
        outcome = outcome_of(task, context, error)
    finally:
        _running = None
        forks.leave_if_forked()
    return outcome, _clean is None or _clean.restore()


def _find_task(module: str, name: str) -> Task[..., Any]:
    """Import the task's module, and enter the lifespans of its app."""
    from howdah.task import Task

    global _clean, _imported_bytes
    before = address_space()
    try:
        namespace = vars(importlib.import_module(module))
        for value in namespace.values():
            if isinstance(value, Task) and value.name == name:
                _enter_lifespans(value)
                _handle_signals()
                _clean = ProcessState.now()
                _imported_bytes += address_space() - before
                _tasks[module, name] = value
                return value
    except BaseException as error:
        raise NotImported(payload.format_error(error)) from error
    why = f'InvalidOption: module {module} has no task named "{name}" at its top level.'
    if module == "__main__":
        # As `multiprocessing`, which cannot import it either.
        why += (
            " Tasks of a program that was started from a package, a zip file or a command line argument cannot run in "
            "processes: move them to a module."
        )
    raise NotImported(why)


def _enter_lifespans(task: Task[..., Any]) -> None:
    if id(task.app) in _resources:
        return
    resources: dict[str, Any] = {}
    for lifespan in task.app.lifespans:
        if inspect.isgeneratorfunction(lifespan):
            # Entered once and never left: the process ends by being killed.
            entered = lifespan()
            _lifespans.append(entered)
            resources.update(next(entered) or {})
    _resources[id(task.app)] = resources
