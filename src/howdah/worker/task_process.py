"""In a task process: finds the task, tells the worker how far it is, and runs the handler. `processes.py` is the
worker's side.

Every message names the fence of its run, not only the job: a worker may have claimed the same job again."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from howdah.context import RunState
from howdah.errors import InvalidOption
from howdah.execution import forks
from howdah.execution.handler import aborted, execute
from howdah.execution.run import make_context
from howdah.outcome import Failed, Released
from howdah.protocol.worker_statements import Claimed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    from howdah.context import Context
    from howdah.outcome import AbortReason, Outcome
    from howdah.task import Task

ADMISSION_TIMEOUT_SECONDS = 60.0
ASK_EVENTS, ASK_BYTES = (
    500,
    1 << 20,
)  # after so many events, the worker says when there is room for more


ROOM = " has room"


def fence(job_id: UUID, lease_id: UUID) -> str:
    """The name of one run of a job, in messages and for the file that aborts it."""
    return f"{job_id.hex}-{lease_id.hex}"


class _Reports:
    """The `Sink` of this process. It sends datagrams to the worker, and receives the admission of suspects."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own = Path(address).parent / f"child-{os.getpid()}"
        own.unlink(missing_ok=True)  # of an earlier process with this pid
        self._socket.bind(str(own))
        self._socket.connect(address)
        self._events = self._bytes = 0

    def send(self, kind: str, fence: str, one: Any = None, two: Any = None) -> None:
        """Send a message about a run."""
        self._socket.send(msgspec.msgpack.encode((kind, fence, one, two)))

    def progress(self, run: RunState, percent: int | None, stage: str | None) -> None:
        """Send the newest progress of a run."""
        assert isinstance(run, _ChildRun)  # noqa: S101 - see `run`
        self.send("progress", run.fence, percent, stage)

    def event(self, run: RunState, kind: str, data: str) -> bool:
        """Send an event. After some of them, wait until the worker has room for more."""
        assert isinstance(run, _ChildRun)  # noqa: S101 - see `run`
        self.send("event", run.fence, kind, data)
        self._events, self._bytes = self._events + 1, self._bytes + len(data)
        if self._events >= ASK_EVENTS or self._bytes >= ASK_BYTES:
            self._events = self._bytes = 0
            self.send("full", run.fence)
            # An abort ends the wait: its signal raises in this thread.
            while self._socket.recv(1000).decode() != run.fence + ROOM:
                pass
        return True

    def is_admitted(self, fence: str) -> bool:
        """Wait until the worker has written the start of a suspect."""
        self.send("imported", fence)
        end = time.monotonic() + ADMISSION_TIMEOUT_SECONDS
        try:
            while (left := end - time.monotonic()) > 0:
                self._socket.settimeout(left)
                with contextlib.suppress(TimeoutError):
                    # The connected socket takes datagrams of the worker alone.
                    if self._socket.recv(1000).decode() == fence:
                        return True
        finally:
            self._socket.settimeout(None)
        return False


class _ChildRun(RunState):
    """The state of a run in the child. The worker has its own state of the run, and the two exchange messages."""

    def __init__(self, fence: str, reports: _Reports) -> None:
        super().__init__()
        self.fence = fence
        self._reports = reports

    def complete_by_handler(self) -> None:
        super().complete_by_handler()
        self._reports.send("completed-by-handler", self.fence)


_reports: _Reports | None = None
_directory = Path()  # the worker leaves a file here for each run to stop
_running: Context | None = None
_resources: dict[int, Mapping[str, Any]] = {}


def begin(address: str, set_up: Callable[[], object] | None = None) -> None:
    """Prepare a new process of the pool. `set_up` sets up its logging, as that of the worker."""
    global _reports, _directory
    if set_up is not None:
        set_up()
        for handler in logging.getLogger().handlers:
            handler.addFilter(_add_job_id)
    _reports, _directory = _Reports(address), Path(address).parent
    forks.guard()
    _Surroundings.now().restore()
    _exit_with_worker()


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
    """Stop the handler if the worker has left a file about its run. Otherwise ignore the signal."""
    context = _running
    if context is None or not isinstance(context.run, _ChildRun):
        return
    with contextlib.suppress(FileNotFoundError):
        reason = cast("AbortReason", (_directory / context.run.fence).read_text())
        raise aborted(context, reason)


def _exit_with_worker() -> None:
    """Let the kernel kill this process when its worker is killed."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, Linux only


def run(module: str, name: str, claimed: dict[str, Any], is_suspect: bool) -> Outcome:
    """Run one job. The pool calls it in this process."""
    assert _reports is not None  # noqa: S101 - see `begin`
    job = Claimed(**claimed)
    state = _ChildRun(fence(job.id, job.lease_id), _reports)
    _reports.send("taken", state.fence, os.getpid())
    task = _find_task(module, name)
    resources = _child_resources(task)
    if is_suspect and not _reports.is_admitted(state.fence):
        return Released()
    before = _Surroundings.now()
    context = make_context(
        task, job, data=msgspec.Raw(job.data), sink=_reports, run=state, resources=resources
    )
    global _running
    _reports.send("entered", state.fence)
    with _memory_limit(task.options.memory_limit):
        _running = context
        try:
            # The next handler must not see the context variables that this one has set.
            outcome = contextvars.Context().run(execute, task, context)
        finally:
            _running = None
            forks.leave_if_forked()
    before.restore()
    if isinstance(outcome, Failed):
        # Without the exception, which may not be picklable.
        outcome = Failed(outcome.error, outcome.traceback, outcome.retry_in)
    return outcome


def _find_task(module: str, name: str) -> Task[..., Any]:
    from howdah.task import Task

    namespace = vars(importlib.import_module(module))
    for value in namespace.values():
        if isinstance(value, Task) and value.name == name:
            return value
    raise InvalidOption(f'module {module} has no task named "{name}" at its top level.')


def _child_resources(task: Task[..., Any]) -> Mapping[str, Any]:
    import inspect

    key = id(task.app)
    if key not in _resources:
        resources: dict[str, Any] = {}
        for lifespan in task.app.lifespans:
            if inspect.isgeneratorfunction(lifespan):
                # Entered once and never left: the process ends by being killed.
                resources.update(next(lifespan()) or {})
        _resources[key] = resources
    return _resources[key]


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
