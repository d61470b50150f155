"""A worker's life: start everything, run until told to stop, stop in good order.

    fetcher ──claims──▶ slots (async | thread | process) ──outcomes──▶ completer
    heartbeat, in a thread of its own: leases, progress, cancellations

Shutdown: stop claiming, give unstarted jobs back, wait for the grace period while leases and cancellations
stay alive, then interrupt and give back what still runs. A second request to stop skips the waiting."""

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
STATEMENT_TIMEOUT = 4.0  # work resumes within five seconds, also where a line has gone silent
START_ATTEMPT = 3.0
START_PATIENCE = 60.0
CLAIM_PATIENCE = 2.0
INTERRUPT_PATIENCE = 5.0
DRAIN_PATIENCE = 5.0
AT_ONCE = 1.0


class Worker:
    """Runs the tasks of an app in this process. `run` lives until `stop` is called."""

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
        self._now = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self.abandoned = 0
        """How many handlers did not stop when `run` ended. The jobs were given back."""

    def stop(self) -> None:
        """Stop gracefully; a second call stops at once. Safe to call from a signal handler."""
        if self._stopping.is_set():
            self._now.set()
        self._stopping.set()

    def health(self) -> dict[str, object]:
        """Whether this worker lives and is ready for work, for a health endpoint."""
        started = self.ready.is_set()
        beat = self._heartbeat.age() if started else None
        fresh = beat is not None and beat < 2 * self._heartbeat.period + STATEMENT_TIMEOUT
        return {
            # A database that is gone is no reason to be killed.
            "live": not started or self._heartbeat.is_alive() or self._stopping.is_set(),
            "ready": started and fresh and not self._stopping.is_set(),
            "worker_id": self.worker_id,
            "running": self._slots.running if started else 0,
            "heartbeat_age": None if beat is None else round(beat, 1),
        }

    async def run(self) -> None:
        """Work until `stop`. Raises what broke the worker, if something did."""
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as life:
            resources = await self._enter_lifespans(life)
            store = AsyncStore(
                self.app.database, self.app.schema, command_timeout=STATEMENT_TIMEOUT
            )
            life.push_async_callback(store.close)
            if await self._join():
                await self._live(store, resources)
        if self._failure is not None:
            raise self._failure

    async def _join(self) -> bool:
        """Register with the database as soon as it answers. False if told to stop before that."""
        store = AsyncStore(
            self.app.database, self.app.schema, create=self.app.create, timeout=START_ATTEMPT
        )
        give_up = time.monotonic() + START_PATIENCE
        try:
            while not self._stopping.is_set():
                joining = asyncio.ensure_future(store.run(self._register()))
                await _first(joining, self._stopping.wait())
                if not joining.done():
                    return False
                error = joining.exception()
                if error is None:
                    return True
                if time.monotonic() > give_up or not _may_answer(error):
                    raise error
                logger.warning(
                    "the database does not answer and will be asked again",
                    extra={"error": str(error)},
                )
                await _first(asyncio.sleep(1), self._stopping.wait())
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

    async def _live(self, store: AsyncStore, resources: Mapping[str, Any]) -> None:
        app, statements = self.app, self.app.statements
        hooks = Hooks(app.hooks)
        seconds = self.lease.total_seconds()
        url = await store.url()
        beating = Store(
            url,
            app.schema,
            create=False,
            timeout=STATEMENT_TIMEOUT,
            # Short leases need a quick second try.
            command_timeout=min(STATEMENT_TIMEOUT, max(1.0, seconds / 3)),
        )
        heartbeat = Heartbeat(beating, statements, self.lease, self._on_abort, self._touch)
        completer = Completer(store, statements, heartbeat, hooks, self._throughput)
        threads = ThreadExecutor(seconds)
        processes = ProcessExecutor(min(self.processes, self.concurrency), heartbeat)
        executors: dict[str, Executor] = {
            "async": aexecute, "thread": threads.execute, "process": processes.execute,
        }  # fmt: skip
        self._slots = slots = Slots(
            self.concurrency, app.tasks, executors,
            suspects=Suspects(store, statements), heartbeat=heartbeat, completer=completer,
            hooks=hooks, resources=resources,
        )  # fmt: skip
        self._heartbeat = heartbeat
        listener = Listener(url, app.schema)
        listener.subscribe("cancel", self._hear_cancel)
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
            await self._work(store, slots, completer, fetcher)
        finally:
            self.abandoned = await slots.stop() + threads.busy
            await listener.stop()
            await processes.stop()
            await asyncio.to_thread(heartbeat.stop)
            await asyncio.to_thread(hooks.stop)
            await self._leave(store)
            await asyncio.to_thread(beating.close)
            logger.info("worker stopped", extra={"worker_id": self.worker_id})

    async def _work(
        self, store: AsyncStore, slots: Slots, completer: Completer, fetcher: Fetcher
    ) -> None:
        slots.start(self._crash)
        async with asyncio.TaskGroup() as group:

            def serve(what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                return group.create_task(self._guard(what, work), name=f"howdah-{what}")

            services = [
                serve("completer", completer.run()),
                serve("maintenance", maintain(store, self.app.statements)),
                serve("fetcher", fetcher.run(self._stopping)),
            ]
            try:
                await self._stopping.wait()
            finally:
                if not self._stopping.is_set():  # cancelled by whoever called `run`
                    self.stop()
                    self.stop()
                fetcher.wake()
                await self._wind_down(slots, completer, services[-1])
                await end_tasks(*services)

    async def _guard(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """A part of the worker. If it breaks, the worker ends: half of one helps nobody."""
        try:
            await work
        except Exception as error:
            logger.critical("the %s broke and the worker stops", what)
            self._crash(error)
            if what == "completer":
                self._now.set()  # what jobs still come to cannot be written: their leases decide

    def _crash(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    async def _wind_down(
        self, slots: Slots, completer: Completer, fetching: asyncio.Task[None]
    ) -> None:
        fault_points.reach("during-shutdown")
        end = time.monotonic() + self.grace
        slots.close()
        logger.info(
            "worker stopping",
            extra={"worker_id": self.worker_id, "running": slots.running, "grace": self.grace},
        )
        # A claim that is under way may bring jobs, which then go back at once, not when leases end.
        await asyncio.wait([fetching], timeout=CLAIM_PATIENCE)
        fetching.cancel()
        await self._wait(slots.wait_until_empty(), self.grace)
        if slots.running:
            slots.interrupt()
            # From here on a second request does not shorten it: handlers get a moment to clean up.
            patience = AT_ONCE if self._now.is_set() else INTERRUPT_PATIENCE
            await _first(slots.wait_until_empty(), asyncio.sleep(patience))
            slots.give_up()
        if self._now.is_set():
            await _first(completer.drain(), asyncio.sleep(AT_ONCE))
        else:
            left = max(end - time.monotonic(), DRAIN_PATIENCE)
            await self._wait(completer.drain(), left)

    async def _wait(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        """Wait for something, for so long, or until a second request to stop."""
        await _first(work, asyncio.sleep(seconds), self._now.wait())

    async def _leave(self, store: AsyncStore) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(AT_ONCE if self._now.is_set() else DRAIN_PATIENCE):
                await store.run(self._touch())
                await store.run(self.app.statements.remove_worker(self.worker_id))

    def _register(self) -> Statement[None]:
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

    def _touch(self) -> Statement[None]:
        info = {"concurrency": self.concurrency, "running": self._slots.running}
        return self.app.statements.beat_worker(
            self.worker_id, msgspec.json.encode(info).decode(), self._throughput.take()
        )

    def _hear_cancel(self, text: str) -> None:
        ids = set(msgspec.json.decode(text)) if text else set()
        if not ids or any(str(run.id) in ids for run in self._heartbeat.runs()):
            self._heartbeat.poke()

    def _on_abort(self, run: Run) -> None:
        # In the heartbeat's thread.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._slots.stop_aborted, run)


def _may_answer(error: BaseException) -> bool:
    """Whether a database that did not answer may do so yet: it did not turn us away."""
    return isinstance(error, DatabaseUnreachable) and not (
        error.__cause__ is not None and is_refused(error.__cause__)
    )


async def _first(*works: Awaitable[object]) -> None:
    """Wait for the first of these, and let go of the others."""
    waits = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
