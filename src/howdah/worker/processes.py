"""`run_in="process"`: runs handlers in the processes of a pebble pool. A handler is terminated at its timeout, and
when its job is cancelled or its lease is lost: SIGTERM raises `Aborted` in the handler, and if the handler is still
running 0.8 s later, its process is killed (decision 0013). A process that crashes fails its own job and no other.

A child (`task_process.py`) sends progress and events to its worker as datagrams. They need no lock, which a killed
process could leave locked, and each arrives whole or not at all (decision 0011)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from howdah.database.own_thread import run_in_own_thread
from howdah.encoding.safe_logger import get_logger
from howdah.errors import InvalidOption
from howdah.execution.handler import aborted, outcome_of
from howdah.execution.run import Run
from howdah.outcome import Lost, Released
from howdah.worker import task_process
from howdah.worker.process_directory import make_directory
from howdah.worker.suspects import StartNotWritten, is_suspect

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    import pebble

    from howdah.context import Context
    from howdah.execution.heartbeat import Heartbeat
    from howdah.hooks import Hooks
    from howdah.outcome import Outcome
    from howdah.protocol.worker_statements import Claimed
    from howdah.task import Task
    from howdah.worker.suspects import Suspects

logger = get_logger(__name__)

BEGIN_TIMEOUT_SECONDS = 30.0  # for a process to take a job while one is free
IMPORT_TIMEOUT_SECONDS = 120.0  # for a process that took a job to enter its handler
TERMINATE_SECONDS = 0.8  # from SIGTERM to SIGKILL
POOL_RETRY_SECONDS = 1.0
POOL_STOP_TIMEOUT_SECONDS = 5.0
MESSAGE_BYTES = 200_000
CHECK_SECONDS = 0.5
FULL_CHECK_SECONDS = 0.05


class ImportNotDone(Exception):
    """A task process took a job and did not enter its handler in time."""


class ProcessDied(Exception):
    """A task process ended before its handler did: a crash, the kernel's out-of-memory killer, or `os._exit`."""


@dataclass(slots=True, eq=False)
class _Child:
    """What the processes of the pool have said about one run."""

    run: Run
    pid: int | None = None
    """The process that has taken the job. It imports the task's module first."""
    taken_at: float = 0.0
    has_imported: bool = False
    is_full: bool = False
    """It waits until there is room for more events."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class ProcessExecutor:
    """The pool of task processes, and the socket that receives their reports.

    A run starts when its process enters the handler, not when the job is given to the pool: a worker that is
    killed while the process imports a module must not use up an attempt."""

    def __init__(
        self,
        size: int,
        sink: Heartbeat,
        suspects: Suspects,
        hooks: Hooks,
        set_up: Callable[[], object] | None = None,
    ) -> None:
        self._size = size
        self._set_up = set_up
        self._sink = sink
        self._suspects = suspects
        self._hooks = hooks
        self._children: dict[str, _Child] = {}
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
            initializer=task_process.begin,
            initargs=(self._socket.getsockname(), self._set_up),
        )

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._socket is not None:
                kind, fence, one, two = msgspec.msgpack.decode(self._socket.recv(MESSAGE_BYTES))
                child = self._children.get(fence)
                if child is None:
                    continue  # the run has ended
                match kind:
                    case "progress":
                        self._sink.progress(child.run, one, two)
                    case "event":
                        self._sink.event(child.run, one, two)
                    case "completed-by-handler":
                        child.run.complete_by_handler()
                    case "taken":
                        child.pid, child.taken_at = one, time.monotonic()
                        child.changed.set()
                    case "imported":
                        child.has_imported = True
                        child.changed.set()
                    case "entered":
                        self._enter(child)
                    case "full":
                        child.is_full = True
                        self._tell_room(child)

    def _tell_room(self, child: _Child) -> None:
        """Let a process that has sent many events go on, if enough of them are written."""
        if child.is_full and self._sink.has_room(child.run):
            child.is_full = False
            self._send(child, task_process.ROOM)

    def _send(self, child: _Child, text: str = "") -> None:
        fence = task_process.fence(child.run.id, child.run.lease_id)
        if self._socket is not None and self._directory is not None:
            with contextlib.suppress(OSError):  # the process was killed; `_has_exited` notices
                to = str(self._directory / f"child-{child.pid}")
                self._socket.sendto((fence + text).encode(), to)

    def _enter(self, child: _Child) -> None:
        child.run.started = time.monotonic()
        child.changed.set()
        if self._hooks.active:
            self._hooks.notify(child.run.job, "running")

    async def execute(self, task: Task[..., Any], context: Context) -> Outcome:
        """Run a handler in a process of the pool."""
        run = context.run
        assert isinstance(run, Run)  # noqa: S101 - the slots make it
        fence = task_process.fence(run.id, run.lease_id)
        child = self._children[fence] = _Child(run)
        try:
            outcome = await self._execute(task, context, child)
            self._receive()  # the reports that the child sent before its outcome
            return outcome
        finally:
            del self._children[fence]
            if self._directory is not None:
                (self._directory / fence).unlink(missing_ok=True)

    async def _execute(self, task: Task[..., Any], context: Context, child: _Child) -> Outcome:
        run = child.run
        try:
            import pebble

            future = self._schedule(run)
        except Exception as error:
            # No handler was entered, so no attempt is used: too many open files, no memory for a process.
            logger.warning(
                "task processes cannot be started; releasing the job",
                extra={"job_id": str(run.id), "error": str(error)},
            )
            return Released(POOL_RETRY_SECONDS)
        try:
            return await self._wait(future, context, child)
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
        except StartNotWritten:
            raise
        except Exception as error:
            return outcome_of(task, context, error)

    def _schedule(self, run: Run) -> Future[Outcome]:
        task = run.task
        work = (locate(task), task.name, plain_values(run.job), is_suspect(run))
        if self._pool is None:
            self._pool = self._start()
        try:
            return self._pool.schedule(task_process.run, args=work)
        except RuntimeError:
            # A child that is killed while idle breaks the pool permanently.
            self._replace_pool()
            return self._pool.schedule(task_process.run, args=work)

    def _replace_pool(self) -> None:
        logger.warning("process pool broke; starting a new one")
        broken = self._close()
        threading.Thread(target=_stop_pool, args=(broken,), name="howdah-pool", daemon=True).start()
        self._pool = self._start()

    async def _wait(self, future: Future[Outcome], context: Context, child: _Child) -> Outcome:
        answer = asyncio.wrap_future(future)
        answer.add_done_callback(lambda _: child.changed.set())
        try:
            return await self._wait_or_terminate(answer, context, child)
        except asyncio.CancelledError:
            if context.run.abort_reason is not None and not answer.done():
                self._terminate(child)
                await asyncio.wait([answer], timeout=TERMINATE_SECONDS)
            raise
        finally:
            answer.cancel()  # kills its process, if that is still running it

    async def _wait_or_terminate(
        self, answer: asyncio.Future[Outcome], context: Context, child: _Child
    ) -> Outcome:
        run, limit = child.run, child.run.task.options.timeout
        waiting_since = time.monotonic()
        while True:
            has_exited = _has_exited(child)  # read first: the outcome may arrive in between
            child.changed.clear()
            self._tell_room(child)
            seconds = FULL_CHECK_SECONDS if child.is_full else CHECK_SECONDS
            if run.started is not None and limit is not None:
                # From the entry of the handler: the import of its module does not count.
                over = time.monotonic() - run.started - limit
                if over > TERMINATE_SECONDS:
                    raise TimeoutError
                if over >= 0 and run.abort("timeout"):
                    self._terminate(child)
                seconds = min(seconds, -over if over < 0 else TERMINATE_SECONDS - over + 0.01)
            if not answer.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, seconds)):
                        await child.changed.wait()
            if answer.cancelled():
                raise BrokenProcessPool  # the pool was replaced
            if answer.done():
                return await answer
            if child.has_imported:
                child.has_imported = False
                if not await self._admit(child):
                    return Lost()
            self._check_begin(child, waiting_since)
            if child.pid is not None or self._taken() >= self._size:
                waiting_since = time.monotonic()
            if has_exited:
                # With status 0, which the pool treats as the normal end of an idle child.
                raise ProcessDied(_format_exit(0))

    async def _admit(self, child: _Child) -> bool:
        """Let a process that has imported the module of a suspect enter its handler, after the start was written:
        if the job kills this worker too, the attempt counts."""
        if not await self._suspects.start(child.run):
            return False
        self._send(child)
        return True

    def _check_begin(self, child: _Child, waiting_since: float) -> None:
        """Raise if the job does not begin although a process is free, or its process does not enter the handler."""
        now = time.monotonic()
        if child.pid is None:
            if now - waiting_since > BEGIN_TIMEOUT_SECONDS:
                # A child that was killed while idle may have left the pool's lock locked.
                if not self._taken():
                    self._replace_pool()
                raise BrokenProcessPool
        elif child.run.started is None and now - child.taken_at > IMPORT_TIMEOUT_SECONDS:
            module = child.run.task.function.__module__
            raise ImportNotDone(
                f"the task's process did not import {module} and enter the handler within "
                f"{IMPORT_TIMEOUT_SECONDS:g} s"
            )

    def _taken(self) -> int:
        """How many processes have taken a job."""
        return sum(child.pid is not None for child in self._children.values())

    def _terminate(self, child: _Child) -> None:
        """Raise `Aborted` in the handler, by SIGTERM. A file names the run and the reason: when the signal
        arrives, the process may run another job, and other programs send SIGTERM too."""
        self._receive()
        if child.pid is None or self._directory is None or _has_exited(child):
            return
        run = child.run
        note = self._directory / task_process.fence(run.id, run.lease_id)
        note.write_text(run.abort_reason or "cancelled")
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)

    async def stop(self, timeout: float = POOL_STOP_TIMEOUT_SECONDS) -> None:
        """Kill the running handlers and remove the socket."""
        if self._pool is not None:
            await run_in_own_thread(_stop_pool, self._close(), timeout)

    def _close(self) -> pebble.ProcessPool:
        pool, self._pool = self._pool, None
        assert pool is not None and self._socket is not None and self._directory is not None  # noqa: S101, PT018
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        shutil.rmtree(self._directory, ignore_errors=True)
        return pool


def _stop_pool(pool: pebble.ProcessPool, timeout: float = POOL_STOP_TIMEOUT_SECONDS) -> None:
    with contextlib.suppress(Exception):
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join(timeout)


def _has_exited(child: _Child) -> bool:
    """Whether the process that took the job has ended. A handler of this worker may have waited for it (SIGCHLD
    ignored, `os.waitpid(-1)`); then only the pid tells."""
    if child.pid is None:
        return False
    try:
        os.kill(child.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return True  # the pid belongs to another user's process
    return all(child.pid != process.pid for process in multiprocessing.active_children())


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
