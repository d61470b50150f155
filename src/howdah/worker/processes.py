"""`run_in="process"`: runs handlers in the processes of a pebble pool. A handler is terminated at its timeout, and
when its job is cancelled or its lease is lost: SIGTERM raises `Aborted` in the handler, and if the handler is still
running 0.8 s later, its process is killed (decision 0013). A process that crashes fails its own job and no other.

A child sends progress and events to its worker as datagrams. They need no lock, which a killed process could leave
locked, and each arrives whole or not at all (decision 0011)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import importlib.util
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from uuid import UUID

import msgspec

from howdah.context import RunState
from howdah.errors import InvalidOption
from howdah.execution.handler import aborted, execute, outcome_of
from howdah.execution.run import Run, make_context
from howdah.outcome import Failed, Released
from howdah.protocol.worker_statements import Claimed
from howdah.worker.process_directory import make_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    import pebble

    from howdah.context import Context, Sink
    from howdah.outcome import AbortReason, Outcome
    from howdah.task import Task

logger = logging.getLogger(__name__)

BEGIN_TIMEOUT_SECONDS = 30.0  # for a process to begin a job while one is free
TERMINATE_SECONDS = 0.8  # from SIGTERM to SIGKILL
POOL_RETRY_SECONDS = 1.0
POOL_STOP_TIMEOUT_SECONDS = 5
MESSAGE_BYTES = 200_000
CHECK_SECONDS = 0.5


class ProcessDied(Exception):
    """A task process ended before its handler did: a crash, the kernel's out-of-memory killer, or `os._exit`."""


class _Begun(NamedTuple):
    """The process that has begun a job, and when it did."""

    pid: int
    at: float


class ProcessExecutor:
    """The pool of task processes, and the socket that receives their reports."""

    def __init__(self, size: int, sink: Sink) -> None:
        self._size = size
        self._runs: dict[UUID, Run] = {}
        self._begun: dict[UUID, _Begun] = {}
        self._sink = sink
        self._pool: pebble.ProcessPool | None = None
        self._directory: Path | None = None
        self._socket: socket.socket | None = None

    def _start(self) -> pebble.ProcessPool:
        import pebble

        # `_terminate` has sent SIGTERM before; the pool's own SIGTERM is followed by SIGKILL without a delay.
        pebble.CONSTS.term_timeout = 0.05
        self._directory, self._socket = make_directory()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._receive)
        return pebble.ProcessPool(
            max_workers=self._size,
            context=multiprocessing.get_context("spawn"),
            initializer=_begin_child,
            initargs=(self._socket.getsockname(),),
        )

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._socket is not None:
                kind, job_id, one, two = msgspec.msgpack.decode(self._socket.recv(MESSAGE_BYTES))
                match kind:
                    case "progress":
                        self._sink.progress(UUID(bytes=job_id), one, two)
                    case "event":
                        self._sink.event(UUID(bytes=job_id), one, two)
                    case "completed-by-handler" if run := self._runs.get(UUID(bytes=job_id)):
                        run.complete_by_handler()
                    case "begin" if UUID(bytes=job_id) in self._runs:
                        self._begun[UUID(bytes=job_id)] = _Begun(one, time.monotonic())

    async def execute(self, task: Task[..., Any], context: Context) -> Outcome:
        """Run a handler in a process of the pool."""
        run = context.run
        assert isinstance(run, Run)  # noqa: S101 - the slots make it
        self._runs[run.id] = run
        try:
            outcome = await self._execute(task, context, run)
            self._receive()  # the reports that the child sent before its outcome
            return outcome
        finally:
            if self._runs.get(run.id) is run:
                del self._runs[run.id]
                self._begun.pop(run.id, None)

    async def _execute(self, task: Task[..., Any], context: Context, run: Run) -> Outcome:
        import pebble

        try:
            return await self._wait(self._schedule(run), task, context)
        except TimeoutError:
            return outcome_of(task, context, aborted(context, "timeout"))
        except asyncio.CancelledError as error:
            if run.abort_reason is None:
                raise
            return outcome_of(task, context, error)
        except pebble.ProcessExpired as error:
            return outcome_of(task, context, ProcessDied(_format_exit(error.exitcode)))
        except BrokenProcessPool:
            return Released(POOL_RETRY_SECONDS)  # the job had not begun
        except Exception as error:
            return outcome_of(task, context, error)

    def _schedule(self, run: Run) -> Future[Outcome]:
        task = run.task
        work = (locate(task), task.name, plain_values(run.job))
        timeout = task.options.timeout
        kill_after = None if timeout is None else timeout + TERMINATE_SECONDS
        if self._pool is None:
            self._pool = self._start()
        try:
            return self._pool.schedule(_run_child, args=work, timeout=kill_after)
        except RuntimeError:
            # A child that is killed while idle breaks the pool permanently.
            self._replace_pool()
            return self._pool.schedule(_run_child, args=work, timeout=kill_after)

    def _replace_pool(self) -> None:
        logger.warning("process pool broke; starting a new one")
        broken = self._close()
        asyncio.get_running_loop().run_in_executor(None, _stop_pool, broken)
        self._pool = self._start()

    async def _wait(
        self, future: Future[Outcome], task: Task[..., Any], context: Context
    ) -> Outcome:
        answer = asyncio.wrap_future(future)
        try:
            return await self._wait_or_terminate(answer, task, context)
        except asyncio.CancelledError:
            if context.run.abort_reason is not None and not answer.done():
                self._terminate(context)
                await asyncio.wait([answer], timeout=TERMINATE_SECONDS)
            raise
        finally:
            answer.cancel()  # kills its process, if that is still running it
            if self._directory is not None:
                (self._directory / context.id.hex).unlink(missing_ok=True)

    async def _wait_or_terminate(
        self, answer: asyncio.Future[Outcome], task: Task[..., Any], context: Context
    ) -> Outcome:
        job_id, limit = context.id, task.options.timeout
        waiting_since = time.monotonic()
        while True:
            has_exited = self._has_exited(job_id)  # read first: the outcome may arrive in between
            begun = self._begun.get(job_id)
            seconds = CHECK_SECONDS
            if begun is not None and limit is not None and context.run.abort_reason is None:
                seconds = min(seconds, begun.at + limit - time.monotonic())
            await asyncio.wait([answer], timeout=max(0.0, seconds))
            if answer.cancelled():
                raise BrokenProcessPool  # the pool was replaced
            if answer.done():
                return await answer
            if begun is not None and limit is not None and time.monotonic() > begun.at + limit:
                if context.run.abort("timeout"):
                    self._terminate(context)
            elif begun is not None or len(self._begun) >= self._size:
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > BEGIN_TIMEOUT_SECONDS:
                # A child that was killed while idle may have left the pool's lock locked.
                if not self._begun:
                    self._replace_pool()
                raise BrokenProcessPool
            if has_exited:
                # With status 0, which the pool treats as the normal end of an idle child.
                raise ProcessDied(_format_exit(0))

    def _terminate(self, context: Context) -> None:
        """Raise `Aborted` in the handler, by SIGTERM. A file names the job and the reason: when the signal
        arrives, the process may run another job, and other programs send SIGTERM too."""
        self._receive()
        begun = self._begun.get(context.id)
        if begun is None or self._directory is None or self._has_exited(context.id):
            return
        (self._directory / context.id.hex).write_text(context.run.abort_reason or "cancelled")
        with contextlib.suppress(ProcessLookupError):
            os.kill(begun.pid, signal.SIGTERM)

    def _has_exited(self, job_id: UUID) -> bool:
        begun = self._begun.get(job_id)
        return begun is not None and all(
            begun.pid != child.pid for child in multiprocessing.active_children()
        )

    async def stop(self) -> None:
        """Kill the running handlers and remove the socket."""
        if self._pool is not None:
            await asyncio.to_thread(_stop_pool, self._close())

    def _close(self) -> pebble.ProcessPool:
        pool, self._pool = self._pool, None
        assert pool is not None and self._socket is not None and self._directory is not None  # noqa: S101, PT018
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        shutil.rmtree(self._directory, ignore_errors=True)
        return pool


def _stop_pool(pool: pebble.ProcessPool) -> None:
    with contextlib.suppress(Exception):
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join(POOL_STOP_TIMEOUT_SECONDS)


def require_pebble() -> None:
    """Raise when the worker starts: without pebble every job would fail."""
    if importlib.util.find_spec("pebble") is None:
        raise InvalidOption(
            'tasks with run_in="process" need the package pebble: pip install "howdah[process]".'
        )


def locate(task: Task[..., Any]) -> str:
    """The module in which a child finds the task."""
    module = task.function.__module__
    if task.function.__qualname__ != task.function.__name__:
        raise InvalidOption(
            f'task "{task.name}" has run_in="process" and is defined inside {task.function.__qualname__}; '
            "move it to the top level of its module, where a new process can import it."
        )
    return module


def plain_values(job: Claimed) -> dict[str, Any]:
    """A job as the pool pickles it for a child: ids, numbers, and its data as JSON text."""
    return msgspec.structs.asdict(job)


def _format_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"the task's process was killed by {signal.Signals(-code).name}"
    return f"the task's process ended with status {code} before the task did"


# ── in the child process ──────────────────────────────────────────────────────────────────────────────────────


class _Reports:
    """The `Sink` of a child. It sends datagrams to the worker."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(address)

    def _send(self, kind: str, job_id: UUID, one: Any, two: Any) -> None:
        self._socket.send(msgspec.msgpack.encode((kind, job_id.bytes, one, two)))

    def progress(self, job_id: UUID, percent: int | None, stage: str | None) -> None:
        self._send("progress", job_id, percent, stage)

    def event(self, job_id: UUID, kind: str, data: str) -> None:
        self._send("event", job_id, kind, data)

    def completed_by_handler(self, job_id: UUID) -> None:
        self._send("completed-by-handler", job_id, None, None)

    def begin(self, job_id: UUID) -> None:
        self._send("begin", job_id, os.getpid(), None)


class _ChildRun(RunState):
    """The state of a run in the child. The worker has its own state of the run, and the two exchange messages."""

    def __init__(self, job_id: UUID, reports: _Reports) -> None:
        super().__init__()
        self._job_id = job_id
        self._reports = reports

    def complete_by_handler(self) -> None:
        super().complete_by_handler()
        self._reports.completed_by_handler(self._job_id)


_reports: _Reports | None = None
_directory = Path()  # the worker leaves a file here for each job to stop
_running: Context | None = None
_resources: dict[int, Mapping[str, Any]] = {}


def _begin_child(address: str) -> None:
    global _reports, _directory
    _reports, _directory = _Reports(address), Path(address).parent
    # Ctrl-C and init systems signal the whole process group, but only the worker may stop this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _on_sigterm)
    _exit_with_worker()


def _on_sigterm(_signal: int, _frame: object) -> None:
    """Stop the handler if the worker has left a file about its job. Otherwise ignore the signal."""
    context = _running
    if context is None:
        return
    with contextlib.suppress(FileNotFoundError):
        reason = cast("AbortReason", (_directory / context.id.hex).read_text())
        raise aborted(context, reason)


def _exit_with_worker() -> None:
    """Let the kernel kill this process when its worker is killed."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, Linux only


def _run_child(module: str, name: str, claimed: dict[str, Any]) -> Outcome:
    assert _reports is not None  # noqa: S101 - see `_begin_child`
    job = Claimed(**claimed)
    _reports.begin(job.id)
    task = _find_task(module, name)
    context = make_context(
        task,
        job,
        data=msgspec.Raw(job.data),
        sink=_reports,
        run=_ChildRun(job.id, _reports),
        resources=_child_resources(task),
    )
    global _running
    with _memory_limit(task.options.memory_limit):
        _running = context
        try:
            # The next handler must not see the context variables that this one has set.
            outcome = contextvars.Context().run(execute, task, context)
        finally:
            _running = None
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
