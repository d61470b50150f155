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
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from howdah import faults, payload
from howdah.errors import InvalidOption
from howdah.heartbeat import Heartbeat, Run
from howdah.hooks import Hooks
from howdah.listener import Listener
from howdah.store import AsyncStore, Store
from howdah.worker.completer import Completer
from howdah.worker.executors import Executor, LoopExecutor, ThreadExecutor
from howdah.worker.fetcher import Fetcher
from howdah.worker.processes import ProcessExecutor, locate
from howdah.worker.slots import Slots
from howdah.worker.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from howdah.app import App
    from howdah.model import Seconds
    from howdah.statements import Statement

logger = logging.getLogger(__name__)

CONCURRENCY = 32
GRACE = 30.0
TICK = 1.0
INTERRUPT_PATIENCE = 5.0
STATEMENT_TIMEOUT = 5.0


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
        self.app = app
        self.queues = (
            list(queues) if queues else sorted({t.options.queue for t in app.tasks.values()})
        )
        self.concurrency = concurrency
        self.processes = processes or os.cpu_count() or 1
        self.grace = payload.to_timedelta(grace, "grace").total_seconds()
        self.lease = (
            app.lease if lease is None else payload.to_timedelta(lease, "lease", minimum=0.001)
        )
        self.worker_id = worker_id or f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid4().hex[:6]}"
        self.ready = asyncio.Event()
        self._tally = Tally()
        self._stopping = asyncio.Event()
        self._now = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Stop gracefully; a second call stops at once. Safe to call from a signal handler."""
        if self._stopping.is_set():
            self._now.set()
        self._stopping.set()

    def health(self) -> dict[str, object]:
        """Whether this worker lives and is ready for work, for a health endpoint."""
        started = self.ready.is_set()
        beat = self._heartbeat.age() if started else None
        fresh = beat is not None and beat < max(15.0, self.lease.total_seconds())
        return {
            "live": not started or fresh,
            "ready": started and fresh and not self._stopping.is_set(),
            "worker_id": self.worker_id,
            "running": self._slots.running if started else 0,
            "heartbeat_age": None if beat is None else round(beat, 1),
        }

    async def run(self) -> None:
        """Work until `stop`."""
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as life:
            resources = await self._enter_lifespans(life)
            store = AsyncStore(
                self.app.database, self.app.schema, timeout=60, command_timeout=STATEMENT_TIMEOUT
            )
            life.push_async_callback(store.close)
            await self._live(store, resources, life)

    async def _enter_lifespans(self, life: contextlib.AsyncExitStack) -> Mapping[str, Any]:
        resources: dict[str, Any] = {}
        for lifespan in self.app.lifespans:
            if inspect.isasyncgenfunction(lifespan):
                given = await life.enter_async_context(contextlib.asynccontextmanager(lifespan)())
            else:
                given = life.enter_context(contextlib.contextmanager(lifespan)())
            resources.update(given or {})
        return resources

    async def _live(
        self, store: AsyncStore, resources: Mapping[str, Any], life: contextlib.AsyncExitStack
    ) -> None:
        app, statements = self.app, self.app.statements
        await store.run(self._register())
        hooks = Hooks(app.hooks)
        beating = Store(await store.url(), app.schema, create=False, timeout=STATEMENT_TIMEOUT)
        heartbeat = Heartbeat(beating, statements, self.lease, self._on_abort, self._touch)
        completer = Completer(store, statements, heartbeat, hooks, self._tally)
        processes = ProcessExecutor(min(self.processes, self.concurrency), heartbeat)
        executors: dict[str, Executor] = {
            "async": LoopExecutor(),
            "thread": ThreadExecutor(self.lease.total_seconds()),
            "process": processes,
        }
        self._slots = slots = Slots(
            self.concurrency, app.tasks, executors,
            store=store, statements=statements, heartbeat=heartbeat, completer=completer,
            hooks=hooks, resources=resources,
        )  # fmt: skip
        self._heartbeat = heartbeat
        listener = Listener(await store.url(), app.schema)
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
            async with asyncio.TaskGroup() as group:
                working = slots.start(group)
                writing = group.create_task(completer.run(), name="howdah-completer")
                ticking = group.create_task(self._tick(store), name="howdah-maintenance")
                fetching = group.create_task(fetcher.run(self._stopping), name="howdah-fetcher")
                await self._stopping.wait()
                fetching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await fetching
                await self._wind_down(slots, completer)
                for task in [*working, writing, ticking]:
                    task.cancel()
        finally:
            await listener.stop()
            await processes.stop()
            await asyncio.to_thread(heartbeat.stop)
            await asyncio.to_thread(hooks.stop)
            with contextlib.suppress(Exception):
                await store.run(self._touch())
                await store.run(statements.remove_worker(self.worker_id))
            beating.close()
            logger.info("worker stopped", extra={"worker_id": self.worker_id})

    async def _wind_down(self, slots: Slots, completer: Completer) -> None:
        faults.reach("during-shutdown")
        slots.close()
        waits = [
            asyncio.ensure_future(slots.wait_until_empty()),
            asyncio.ensure_future(self._now.wait()),
        ]
        await asyncio.wait(waits, timeout=self.grace, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if slots.running:
            slots.interrupt()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERRUPT_PATIENCE):
                    await slots.wait_until_empty()
            slots.give_up()
        await completer.drain()

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
            self.worker_id, msgspec.json.encode(info).decode(), self._tally.take()
        )

    async def _tick(self, store: AsyncStore) -> None:
        """Maintenance: whoever comes first when a duty is due does it."""
        while True:
            await asyncio.sleep(TICK)
            faults.reach("before-maintenance")
            try:
                for duty, took, error in await store.run(self.app.statements.run_maintenance()):
                    if error is not None:
                        logger.warning(
                            "a maintenance duty failed",
                            extra={"duty": duty, "took": str(took), "error": error},
                        )
            except Exception as error:
                logger.warning("maintenance failed", extra={"error": str(error)})

    def _hear_cancel(self, text: str) -> None:
        ids = set(msgspec.json.decode(text)) if text else set()
        if not ids or any(str(run.id) in ids for run in self._heartbeat.runs()):
            self._heartbeat.poke()

    def _on_abort(self, run: Run, why: str) -> None:
        # In the heartbeat's thread.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._slots.abort, run, why)
