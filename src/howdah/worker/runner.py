"""Starts and stops a worker.

    fetcher ──claims──▶ slots (async | thread | process) ──outcomes──▶ completer
    heartbeat, in its own thread: leases, progress, cancellations

Shutdown: stop claiming, release the jobs that have not started, and wait for running jobs for the grace period, with
leases and cancellations still working. Then interrupt and release the jobs that still run. A second request to stop
skips the waiting."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from howdah.database.async_store import AsyncStore
from howdah.database.driver_errors import end_tasks, is_refused
from howdah.database.listener import Listener
from howdah.database.store import Store
from howdah.encoding import validation
from howdah.errors import DatabaseUnreachable, InvalidOption
from howdah.execution import fault_points
from howdah.execution.handler import aexecute
from howdah.execution.heartbeat import Heartbeat
from howdah.hooks import Hooks
from howdah.worker.completer import Completer
from howdah.worker.executors import Executor, ThreadExecutor
from howdah.worker.fetcher import Fetcher
from howdah.worker.maintenance import maintain
from howdah.worker.processes import ProcessExecutor, locate, require_pebble
from howdah.worker.slots import Slots
from howdah.worker.suspects import Suspects
from howdah.worker.throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Mapping, Sequence

    from howdah.app import App
    from howdah.execution.run import Run
    from howdah.model import Seconds
    from howdah.protocol.statements import Statement

logger = logging.getLogger(__name__)

CONCURRENCY = 32
GRACE = 30.0
STATEMENT_TIMEOUT_SECONDS = 4.0  # work resumes within 5 s, also after a connection has gone silent
START_TIMEOUT_SECONDS = 60.0
START_ATTEMPT_TIMEOUT_SECONDS = 3.0
START_RETRY_SECONDS = 1.0
CLAIM_TIMEOUT_SECONDS = 2.0
INTERRUPT_TIMEOUT_SECONDS = 5.0
DRAIN_TIMEOUT_SECONDS = 5.0
STOP_NOW_TIMEOUT_SECONDS = 1.0  # for each step, after the second request to stop


class Worker:
    """Runs the tasks of an app in this process. `run` returns after `stop` is called."""

    def __init__(
        self,
        app: App,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int = CONCURRENCY,
        grace: Seconds = GRACE,
        lease: Seconds | None = None,
        worker_id: str | None = None,
        processes: int | None = None,
    ) -> None:
        if not app.tasks:
            raise InvalidOption("the app has no tasks; import the modules that define them first.")
        if not isinstance(concurrency, int) or not 1 <= concurrency <= 10_000:
            raise InvalidOption(f"concurrency is {concurrency!r}; it must be between 1 and 10000.")
        for task in app.tasks.values():
            if task.options.run_in == "process":
                locate(task)
                require_pebble()
        self.app = app
        self.queues = (
            list(queues) if queues else sorted({t.options.queue for t in app.tasks.values()})
        )
        self.concurrency = concurrency
        self.processes = processes or os.cpu_count() or 1
        self.grace = validation.to_timedelta(grace, "grace").total_seconds()
        self.lease = (
            app.lease if lease is None else validation.to_timedelta(lease, "lease", minimum=0.001)
        )
        self.worker_id = worker_id or f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid4().hex[:6]}"
        self.ready = asyncio.Event()
        self._throughput = Throughput()
        self._stopping = asyncio.Event()
        self._stopping_now = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self.abandoned = 0
        """How many handlers did not stop when `run` ended. Their jobs were released."""

    def stop(self) -> None:
        """Stop gracefully. A second call stops now. Safe to call from a signal handler."""
        if self._stopping.is_set():
            self._stopping_now.set()
        self._stopping.set()

    def health(self) -> dict[str, object]:
        """Whether this worker is live and ready, for a health endpoint."""
        started = self.ready.is_set()
        beat = self._heartbeat.age() if started else None
        fresh = beat is not None and beat < 2 * self._heartbeat.period + STATEMENT_TIMEOUT_SECONDS
        return {
            # Not about the database: restarting the worker would not bring it back.
            "live": not started or self._heartbeat.is_alive() or self._stopping.is_set(),
            "ready": started and fresh and not self._stopping.is_set(),
            "worker_id": self.worker_id,
            "running": self._slots.running if started else 0,
            "heartbeat_age": None if beat is None else round(beat, 1),
        }

    async def run(self) -> None:
        """Run jobs until `stop` is called. Raises the error that broke the worker, if one did."""
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as life:
            resources = await self._enter_lifespans(life)
            store = AsyncStore(
                self.app.database, self.app.schema, command_timeout=STATEMENT_TIMEOUT_SECONDS
            )
            life.push_async_callback(store.close)
            if await self._register():
                await self._run_parts(store, resources)
        if self._failure is not None:
            raise self._failure

    async def _register(self) -> bool:
        """Register with the database as soon as it answers. False if `stop` was called before that."""
        store = AsyncStore(
            self.app.database,
            self.app.schema,
            create=self.app.create,
            timeout=START_ATTEMPT_TIMEOUT_SECONDS,
        )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        try:
            while not self._stopping.is_set():
                registering = asyncio.ensure_future(store.run(self._register_worker()))
                await _wait_for_first(registering, self._stopping.wait())
                if not registering.done():
                    return False
                error = registering.exception()
                if error is None:
                    return True
                if time.monotonic() > deadline or not _is_worth_retrying(error):
                    raise error
                logger.warning("database unreachable; retrying", extra={"error": str(error)})
                await _wait_for_first(asyncio.sleep(START_RETRY_SECONDS), self._stopping.wait())
        finally:
            await store.close()
        return False

    async def _enter_lifespans(self, life: contextlib.AsyncExitStack) -> Mapping[str, Any]:
        resources: dict[str, Any] = {}
        for lifespan in self.app.lifespans:
            if inspect.isasyncgenfunction(lifespan):
                given = await life.enter_async_context(contextlib.asynccontextmanager(lifespan)())
            else:
                given = life.enter_context(contextlib.contextmanager(lifespan)())
            resources.update(given or {})
        return resources

    async def _run_parts(self, store: AsyncStore, resources: Mapping[str, Any]) -> None:
        app, statements = self.app, self.app.statements
        hooks = Hooks(app.hooks)
        seconds = self.lease.total_seconds()
        url = await store.url()
        heartbeat_store = Store(
            url,
            app.schema,
            create=False,
            timeout=STATEMENT_TIMEOUT_SECONDS,
            # Short leases need a quick retry.
            command_timeout=min(STATEMENT_TIMEOUT_SECONDS, max(1.0, seconds / 3)),
        )
        heartbeat = Heartbeat(
            heartbeat_store, statements, self.lease, self._on_abort, self._beat_worker
        )
        completer = Completer(store, statements, heartbeat, hooks, self._throughput)
        threads = ThreadExecutor(seconds)
        processes = ProcessExecutor(min(self.processes, self.concurrency), heartbeat)
        executors: dict[str, Executor] = {
            "async": aexecute, "thread": threads.execute, "process": processes.execute,
        }  # fmt: skip
        self._slots = slots = Slots(
            self.concurrency, app.tasks, executors,
            suspects=Suspects(store, statements), heartbeat=heartbeat, completer=completer,
            hooks=hooks, resources=resources, on_crash=self._crash,
        )  # fmt: skip
        self._heartbeat = heartbeat
        listener = Listener(url, app.schema)
        listener.subscribe("cancel", self._on_cancel)
        fetcher = Fetcher(
            store, statements, slots, listener,
            worker_id=self.worker_id, job_types=list(app.tasks), queues=self.queues, lease=self.lease,
        )  # fmt: skip
        heartbeat.start()
        listener.start()
        logger.info(
            "worker started",
            extra={"worker_id": self.worker_id, "queues": self.queues, "tasks": len(app.tasks)},
        )
        self.ready.set()
        try:
            await self._run_services(store, slots, completer, fetcher)
        finally:
            self.abandoned = await slots.stop() + threads.busy
            await listener.stop()
            await processes.stop()
            await asyncio.to_thread(heartbeat.stop)
            await asyncio.to_thread(hooks.stop)
            await self._unregister(store)
            await asyncio.to_thread(heartbeat_store.close)
            logger.info("worker stopped", extra={"worker_id": self.worker_id})

    async def _run_services(
        self, store: AsyncStore, slots: Slots, completer: Completer, fetcher: Fetcher
    ) -> None:
        slots.start()
        async with asyncio.TaskGroup() as group:

            def serve(part: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                return group.create_task(self._guard(part, work), name=f"howdah-{part}")

            services = [
                serve("completer", completer.run()),
                serve("maintenance", maintain(store, self.app.statements)),
                serve("fetcher", fetcher.run(self._stopping)),
            ]
            try:
                await self._stopping.wait()
            finally:
                if not self._stopping.is_set():  # the caller of `run` was cancelled
                    self.stop()
                    self.stop()
                fetcher.wake()
                await self._shut_down(slots, completer, services[-1])
                await end_tasks(*services)

    async def _guard(self, part: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the worker. If the part fails, the whole worker stops."""
        try:
            await work
        except Exception as error:
            logger.critical("part of the worker failed; stopping", extra={"part": part})
            self._crash(error)
            if part == "completer":
                # No more outcomes can be written. The jobs are recovered when their leases expire.
                self._stopping_now.set()

    def _crash(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    async def _shut_down(
        self, slots: Slots, completer: Completer, fetching: asyncio.Task[None]
    ) -> None:
        fault_points.reach("during-shutdown")
        deadline = time.monotonic() + self.grace
        slots.close()
        logger.info(
            "worker stopping",
            extra={"worker_id": self.worker_id, "running": slots.running, "grace": self.grace},
        )
        # A claim in flight may return jobs. They are released now instead of after their leases expire.
        await asyncio.wait([fetching], timeout=CLAIM_TIMEOUT_SECONDS)
        fetching.cancel()
        await self._wait(slots.wait_until_empty(), self.grace)
        if slots.running:
            slots.interrupt()
            # A second request to stop does not shorten this: handlers get a moment to clean up.
            timeout = self._timeout(INTERRUPT_TIMEOUT_SECONDS)
            await _wait_for_first(slots.wait_until_empty(), asyncio.sleep(timeout))
            slots.release_running()
        if self._stopping_now.is_set():
            await _wait_for_first(completer.drain(), asyncio.sleep(STOP_NOW_TIMEOUT_SECONDS))
        else:
            remaining = max(deadline - time.monotonic(), DRAIN_TIMEOUT_SECONDS)
            await self._wait(completer.drain(), remaining)

    def _timeout(self, seconds: float) -> float:
        return STOP_NOW_TIMEOUT_SECONDS if self._stopping_now.is_set() else seconds

    async def _wait(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        """Wait for some work, for at most `seconds`, or until a second request to stop."""
        await _wait_for_first(work, asyncio.sleep(seconds), self._stopping_now.wait())

    async def _unregister(self, store: AsyncStore) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._timeout(DRAIN_TIMEOUT_SECONDS)):
                await store.run(self._beat_worker())
                await store.run(self.app.statements.remove_worker(self.worker_id))

    def _register_worker(self) -> Statement[None]:
        tasks = self.app.tasks.values()
        return self.app.statements.register_worker(
            self.worker_id,
            socket.gethostname(),
            os.getpid(),
            self.queues,
            list(self.app.tasks),
            sorted({task.options.priority for task in tasks}),
            msgspec.json.encode({"concurrency": self.concurrency}).decode(),
        )

    def _beat_worker(self) -> Statement[None]:
        info = {"concurrency": self.concurrency, "running": self._slots.running}
        return self.app.statements.beat_worker(
            self.worker_id, msgspec.json.encode(info).decode(), self._throughput.take()
        )

    def _on_cancel(self, text: str) -> None:
        """A notification of cancelled jobs: their ids, or nothing if notifications may have been lost."""
        ids = set(msgspec.json.decode(text)) if text else set()
        if not ids or any(str(run.id) in ids for run in self._heartbeat.runs()):
            self._heartbeat.beat_soon()

    def _on_abort(self, run: Run) -> None:
        # Called in the heartbeat's thread.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._slots.stop_aborted, run)


def _is_worth_retrying(error: BaseException) -> bool:
    """Whether the database was unreachable. A database that refused the login will refuse it again."""
    return isinstance(error, DatabaseUnreachable) and not (
        error.__cause__ is not None and is_refused(error.__cause__)
    )


async def _wait_for_first(*works: Awaitable[object]) -> None:
    """Wait for the first of these to end, and cancel the others."""
    waits = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
