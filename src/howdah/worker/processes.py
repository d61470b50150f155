"""`run_in="process"`: handlers in processes of a pebble pool. At its time limit, and when its job is cancelled
or lost, a handler is terminated: `Aborted` is raised wherever it is, and a moment later, if it is still
there, its process is killed. One that crashes fails its own job and nobody else's.

A child sends progress and events to its worker as datagrams: they need no lock, which a killed process
could leave locked, and each arrives whole or not at all."""

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
from howdah.execution.handler import aborted, execute, judge
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

BEGIN_PATIENCE = 30.0  # for a process to take up a job while one is free
CLEANING_UP = 0.8  # seconds a handler has from SIGTERM to SIGKILL
MESSAGE_LIMIT = 200_000
WATCH = 0.5


class ProcessDied(Exception):
    """A task's process ended without an answer: a crash, the kernel's memory killer, or `os._exit`."""


class _Begun(NamedTuple):
    """A job that a process has taken up."""

    pid: int
    at: float


class ProcessExecutor:
    """The pool, and the socket on which its children report."""

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

        # By then they had their chance: see `_terminate`. What is left to the pool is SIGKILL.
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
                kind, job_id, one, two = msgspec.msgpack.decode(self._socket.recv(MESSAGE_LIMIT))
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
        assert isinstance(run, Run)  # noqa: S101 - as the slots made it
        self._runs[run.id] = run
        try:
            outcome = await self._execute(task, context, run)
            self._receive()  # reports that were sent before the answer come before it
            return outcome
        finally:
            if self._runs.get(run.id) is run:
                del self._runs[run.id]
                self._begun.pop(run.id, None)

    async def _execute(self, task: Task[..., Any], context: Context, run: Run) -> Outcome:
        import pebble

        try:
            return await self._answer(self._schedule(run), task, context)
        except TimeoutError:
            return judge(task, context, aborted(context, "timeout"))
        except asyncio.CancelledError as error:
            if run.abort_reason is None:
                raise
            return judge(task, context, error)
        except pebble.ProcessExpired as error:
            return judge(task, context, ProcessDied(_describe_death(error.exitcode)))
        except BrokenProcessPool:
            # Not this job's doing: it had not begun.
            return Released(1.0, "the process pool broke")
        except Exception as error:
            return judge(task, context, error)

    def _schedule(self, run: Run) -> Future[Outcome]:
        task = run.task
        work = (locate(task), task.name, plain_values(run.job))
        limit = task.options.timeout
        last = None if limit is None else limit + CLEANING_UP
        if self._pool is None:
            self._pool = self._start()
        try:
            return self._pool.schedule(_run_child, args=work, timeout=last)
        except RuntimeError:
            # A child that died while it was idle breaks a pool for good.
            self._replace()
            return self._pool.schedule(_run_child, args=work, timeout=last)

    def _replace(self) -> None:
        logger.warning("the process pool broke; a new one is made")
        broken = self._close()
        asyncio.get_running_loop().run_in_executor(None, _stop_pool, broken)
        self._pool = self._start()

    async def _answer(
        self, future: Future[Outcome], task: Task[..., Any], context: Context
    ) -> Outcome:
        answer = asyncio.wrap_future(future)
        try:
            return await self._watch(answer, task, context)
        except asyncio.CancelledError:
            if context.run.abort_reason is not None and not answer.done():
                self._terminate(context)
                await asyncio.wait([answer], timeout=CLEANING_UP)
            raise
        finally:
            answer.cancel()  # and with it its process, if that is still at it
            if self._directory is not None:
                (self._directory / context.id.hex).unlink(missing_ok=True)

    async def _watch(
        self, answer: asyncio.Future[Outcome], task: Task[..., Any], context: Context
    ) -> Outcome:
        job_id, limit = context.id, task.options.timeout
        waiting = time.monotonic()
        while True:
            gone = self._is_gone(job_id)  # first, as an answer may arrive in between
            begun = self._begun.get(job_id)
            pause = WATCH
            if begun is not None and limit is not None and context.run.abort_reason is None:
                pause = min(pause, begun.at + limit - time.monotonic())
            await asyncio.wait([answer], timeout=max(0.0, pause))
            if answer.cancelled():
                raise BrokenProcessPool  # its pool was replaced
            if answer.done():
                return await answer
            if begun is not None and limit is not None and time.monotonic() > begun.at + limit:
                if context.run.abort("timeout"):
                    self._terminate(context)
            elif begun is not None or len(self._begun) >= self._size:
                waiting = time.monotonic()
            elif time.monotonic() - waiting > BEGIN_PATIENCE:
                # An idle child that was killed may have taken the pool's lock with it.
                if not self._begun:
                    self._replace()
                raise BrokenProcessPool
            if gone:
                # It left with status 0, which the pool takes for a child that had nothing to do.
                raise ProcessDied(_describe_death(0))

    def _terminate(self, context: Context) -> None:
        """Have `Aborted` raised in the handler. A note says whom the signal is about, and why: by the
        time it arrives the process may be busy with another job, and others send SIGTERM too."""
        self._receive()
        begun = self._begun.get(context.id)
        if begun is None or self._directory is None or self._is_gone(context.id):
            return
        (self._directory / context.id.hex).write_text(context.run.abort_reason or "cancelled")
        with contextlib.suppress(ProcessLookupError):
            os.kill(begun.pid, signal.SIGTERM)

    def _is_gone(self, job_id: UUID) -> bool:
        begun = self._begun.get(job_id)
        return begun is not None and all(
            begun.pid != child.pid for child in multiprocessing.active_children()
        )

    async def stop(self) -> None:
        """Kill what still runs and remove the socket."""
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
        pool.join(5)


def require_pebble() -> None:
    """Say at the start what would otherwise fail every job."""
    if importlib.util.find_spec("pebble") is None:
        raise InvalidOption(
            'tasks that run_in="process" need the package pebble: pip install "howdah[process]".'
        )


def locate(task: Task[..., Any]) -> str:
    """The module in whose namespace a child will find the task."""
    module = task.function.__module__
    if task.function.__qualname__ != task.function.__name__:
        raise InvalidOption(
            f'task "{task.name}" runs in a process and is defined inside {task.function.__qualname__}; '
            "move it to the top level of its module, where a new process can find it."
        )
    return module


def plain_values(job: Claimed) -> dict[str, Any]:
    """A job for the pickle that crosses to a child: ids, numbers, and its data as JSON text."""
    return msgspec.structs.asdict(job)


def _describe_death(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"the task's process was killed by {signal.Signals(-code).name}"
    return f"the task's process ended with status {code} before the task did"


# ── in the child ──────────────────────────────────────────────────────────────────────────────────────


class _Reports:
    """The `Sink` of a child: datagrams to its worker."""

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
    """The state of a run in the process of its handler; the worker has a state of its own."""

    def __init__(self, job_id: UUID, reports: _Reports) -> None:
        super().__init__()
        self._job_id = job_id
        self._reports = reports

    def complete_by_handler(self) -> None:
        super().complete_by_handler()
        self._reports.completed_by_handler(self._job_id)


_reports: _Reports | None = None
_notes = Path()  # where the worker says which job to stop
_running: Context | None = None
_resources: dict[int, Mapping[str, Any]] = {}


def _begin_child(address: str) -> None:
    global _reports, _notes
    _reports, _notes = _Reports(address), Path(address).parent
    # Ctrl-C and an init system reach the whole group; when this process stops is for its worker to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_handler)
    # A worker that was killed leaves no orphans behind.
    _die_with_parent()


def _stop_handler(_signal: int, _frame: object) -> None:
    """SIGTERM: stop the handler if the worker has left a note about it; else it is not for us."""
    context = _running
    if context is None:
        return
    with contextlib.suppress(FileNotFoundError):
        reason = cast("AbortReason", (_notes / context.id.hex).read_text())
        raise aborted(context, reason)


def _die_with_parent() -> None:
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
            # What a handler puts into context variables is not for the next to find.
            outcome = contextvars.Context().run(execute, task, context)
        finally:
            _running = None
    if isinstance(outcome, Failed):
        # The exception itself may not be picklable; its text is.
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
                # Entered for as long as the process lives; it ends by being killed.
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
