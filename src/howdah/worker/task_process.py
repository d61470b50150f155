"""In a task process: finds the task, tells the worker how far it is, and runs the handler. `process_handle.py` is the
worker's side.

Every message names the number of its run: a thread that a handler has left behind may report when the next one runs."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import logging
import math
import os
import select
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import msgspec

from howdah.context import RunState
from howdah.encoding import payload
from howdah.execution import forks
from howdah.execution.handler import aborted, execute
from howdah.execution.run import make_context
from howdah.outcome import Outcome, Released
from howdah.protocol.worker_statements import Claimed
from howdah.worker.process_messages import RECEIVED_BYTES, Messages, outcome_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from howdah.context import Context
    from howdah.outcome import AbortReason
    from howdah.task import Task

ADMISSION_TIMEOUT_SECONDS = 60.0
# After so many events, the worker says when there is room for more.
ASK_EVENTS, ASK_BYTES = 500, 1 << 20
WAIT_SECONDS = (
    1.0  # then it checks whether its worker is alive, and what a signal may have left in the inbox
)


class NotImported(Exception):
    """The task's module cannot be imported, or its app's lifespans cannot be entered."""


class _Channel:
    """The `Sink` of this process: sends reports to the worker, and receives its messages."""

    def __init__(self, end: socket.socket, worker: int) -> None:
        self._socket = end
        self._worker = worker
        self._messages = Messages()
        self._inbox: deque[bytes] = deque()
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._events = self._bytes = 0

    def send(self, kind: str, number: int, one: Any = None, two: Any = None) -> None:
        """Send a message about a run."""
        for datagram in self._messages.encode(kind, number, one, two)[1]:
            self._socket.send(datagram)

    def receive(self, seconds: float = math.inf) -> list[Any] | None:
        """The next message, or None if there is none for so long."""
        deadline = time.monotonic() + seconds
        while True:
            while self._inbox:
                message: list[Any] | None = self._messages.decode(self._inbox.popleft())
                if message is not None:
                    return message
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._readable.poll(1000 * min(WAIT_SECONDS, left))
            self.read()
            if os.getppid() != self._worker:
                os._exit(
                    1
                )  # the worker was killed, on a system that does not kill its processes then

    def read(self) -> None:
        """Put what has arrived into the inbox. A signal handler may do so at any time."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._inbox.append(self._socket.recv(RECEIVED_BYTES, socket.MSG_DONTWAIT))

    def abort_reason(self, number: int) -> AbortReason | None:
        """Why the worker wants this run to stop, if it does."""
        self.read()
        for datagram in list(self._inbox):
            message = Messages().decode(datagram)
            if message is not None and message[:2] == ["abort", number]:
                return cast("AbortReason", message[2])
        return None

    def progress(self, run: RunState, percent: int | None, stage: str | None) -> None:
        """Send the newest progress of a run."""
        assert isinstance(run, _ChildRun)  # noqa: S101 - see `run`
        self.send("progress", run.number, percent, stage)

    def event(self, run: RunState, kind: str, data: str) -> bool:
        """Send an event. After some of them, wait until the worker has room for more."""
        assert isinstance(run, _ChildRun)  # noqa: S101 - see `run`
        self.send("event", run.number, kind, data)
        self._events, self._bytes = self._events + 1, self._bytes + len(data)
        if self._events >= ASK_EVENTS or self._bytes >= ASK_BYTES:
            self._events = self._bytes = 0
            self.send("full", run.number)
            # An abort ends the wait: its signal raises in this thread.
            while self.receive() != ["room", run.number]:
                pass
        return True

    def is_admitted(self, number: int) -> bool:
        """Wait until the worker has written the start of a suspect."""
        self.send("imported", number)
        end = time.monotonic() + ADMISSION_TIMEOUT_SECONDS
        while (left := end - time.monotonic()) > 0:
            if self.receive(left) == ["enter", number]:
                return True
        return False


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
_resources: dict[int, Mapping[str, Any]] = {}
_clean: _Surroundings | None = None  # since the last module was imported


def serve(end: socket.socket, worker: int, set_up: Callable[[], object] | None = None) -> None:
    """Run the jobs that the worker sends, until it kills this process. `set_up` sets up the logging, as that of the
    worker."""
    global _channel
    if set_up is not None:
        set_up()
        for handler in logging.getLogger().handlers:
            handler.addFilter(_add_job_id)
    _channel = _Channel(end, worker)
    forks.guard()
    _Surroundings.now().restore()
    _exit_with_worker()
    while True:
        message = _channel.receive()
        if message is not None and message[0] == "run":
            number, *values = message[1:]
            try:
                outcome = _run(_channel, number, *values)
            except NotImported as error:
                _channel.send("not-imported", number, str(error))
            else:
                _channel.send("ended", number, *outcome_values(outcome))


def _add_job_id(record: logging.LogRecord) -> bool:
    """Name the job that runs in a log record that names none. A process runs one job at a time."""
    if _running is not None and not hasattr(record, "job_id"):
        record.job_id = str(_running.id)
    return True


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What a handler may change in its process and the next one must not inherit."""

    directory: str
    environment: dict[str, str]
    umask: int

    @classmethod
    def now(cls) -> _Surroundings:
        umask = os.umask(0o077)  # the only way to read it
        os.umask(umask)
        try:
            directory = os.getcwd()
        except OSError:  # it was removed
            directory = "/"
        return cls(directory, dict(os.environ), umask)

    def restore(self) -> None:
        """Undo what the handler has changed, also signal handlers and timers."""
        # Ctrl-C and init systems signal the whole process group, but only the worker may stop this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _on_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(OSError):
            os.chdir(self.directory)
        os.umask(self.umask)
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)


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
) -> Outcome:
    global _running
    is_new = (module, name) not in _tasks
    task = _tasks[module, name] = _tasks.get((module, name)) or _find_task(module, name)
    if is_suspect and not channel.is_admitted(number):
        return Released()
    job = Claimed(UUID(claimed[0]), UUID(claimed[1]), *claimed[2:])
    context = make_context(
        task,
        job,
        data=msgspec.Raw(job.data),
        sink=channel,
        run=_ChildRun(number, channel),
        resources=_resources[id(task.app)],
    )
    if is_new or is_suspect:
        channel.send("entered", number)
    with _memory_limit(task.options.memory_limit):
        _running = context
        try:
            # The next handler must not see the context variables that this one has set.
            return contextvars.Context().run(execute, task, context)
        finally:
            _running = None
            forks.leave_if_forked()
            if _clean is not None:
                _clean.restore()


def _find_task(module: str, name: str) -> Task[..., Any]:
    """Import the task's module, and enter the lifespans of its app."""
    from howdah.task import Task

    global _clean
    try:
        namespace = vars(importlib.import_module(module))
        for value in namespace.values():
            if isinstance(value, Task) and value.name == name:
                _enter_lifespans(value)
                _clean = _Surroundings.now()
                return value
    except BaseException as error:
        raise NotImported(payload.format_error(error)) from error
    raise NotImported(
        f'InvalidOption: module {module} has no task named "{name}" at its top level.'
    )


def _enter_lifespans(task: Task[..., Any]) -> None:
    import inspect

    if id(task.app) in _resources:
        return
    resources: dict[str, Any] = {}
    for lifespan in task.app.lifespans:
        if inspect.isgeneratorfunction(lifespan):
            # Entered once and never left: the process ends by being killed.
            resources.update(next(lifespan()) or {})
    _resources[id(task.app)] = resources


@contextlib.contextmanager
def _memory_limit(limit: int | None) -> Any:
    if limit is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
