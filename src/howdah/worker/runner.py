"""Starts and stops a worker.

    fetcher ──claims──▶ slots (async | thread | process) ──outcomes──▶ completer
    heartbeat, in its own thread: leases, progress, cancellations

Shutdown: stop claiming, release the jobs that have not started, and wait for running jobs for the grace period, with
leases and cancellations still working. Then interrupt and release the jobs that still run. A second request to stop
skips the waiting."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import socket
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from howdah.database.async_store import AsyncStore
from howdah.database.driver_errors import end_tasks
from howdah.database.listener import Listener
from howdah.database.own_thread import own_name_resolution, run_in_own_thread
from howdah.database.service_task import WorkerTask
from howdah.database.store import Store
from howdah.encoding import validation
from howdah.encoding.safe_logger import get_logger
from howdah.errors import InvalidOption
from howdah.execution import fault_points, forks
from howdah.execution.handler import aexecute
from howdah.execution.heartbeat import Heartbeat
from howdah.execution.repeated_lines import report_hook
from howdah.hooks import Hooks
from howdah.worker.completer import Completer
from howdah.worker.event_loop import wait_for_first
from howdah.worker.executors import Executor, ThreadExecutor
from howdah.worker.fetcher import Fetcher
from howdah.worker.lifespans import Lifespans
from howdah.worker.maintenance import maintain
from howdah.worker.outcome_queue import STATEMENT_TIMEOUT_SECONDS
from howdah.worker.processes import ProcessExecutor, locate
from howdah.worker.registration import Registration
from howdah.worker.slots import Slots
from howdah.worker.suspects import Suspects

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from howdah.app import App
    from howdah.execution.run import Run
    from howdah.model import Seconds

logger = get_logger(__name__)

CONCURRENCY = 32
GRACE = 30.0
LISTEN_TIMEOUT_SECONDS = 1.0
WATCH_SECONDS = 1.0
CLAIM_TIMEOUT_SECONDS = 2.0
INTERRUPT_TIMEOUT_SECONDS = 5.0
DRAIN_TIMEOUT_SECONDS = 5.0
STEP_TIMEOUT_SECONDS = 5.0
STOP_NOW_TIMEOUT_SECONDS = 1.0  # for each step, after the second request to stop
# For all steps after the grace period together, 15 with those that have only the least time: a server that is silent
# makes every step take its whole time.
STOP_SECONDS = 10.0
LEAST_STEP_SECONDS = 0.5


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
        self.app = app
        self.queues = (
            list(queues) if queues else sorted({t.options.queue for t in app.tasks.values()})
        )
        self.concurrency = concurrency
        self.processes = processes or os.cpu_count() or 1
        self.grace = validation.to_timedelta(grace, "grace").total_seconds()
        self.lease = app.lease if lease is None else validation.to_lease(lease)
        self.worker_id = worker_id or f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid4().hex[:6]}"
        self._registration = Registration(app, self.worker_id, self.queues, concurrency)
        self.life = self._registration.life
        """Distinguishes this worker from another with the same `worker_id`, before or beside it."""
        self.set_up_process: Callable[[], object] | None = None
        """Called in each new task process, which has none of this process's logging. It is pickled."""
        self.ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopping_now = asyncio.Event()
        self.lifespans = Lifespans(app.lifespans, self._stopping)
        self._stop_by = math.inf
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
            "ready": started
            and fresh
            and self._heartbeat.is_alive()
            and self._heartbeat.can_extend
            and self._slots.answer()
            and not self._stopping.is_set(),
            "worker_id": self.worker_id,
            "running": self._slots.running if started else 0,
            "heartbeat_age": None if beat is None else round(beat, 1),
        }

    def _running_jobs(self) -> list[Run]:
        """The jobs whose handlers run."""
        return self._slots.runs() if self.ready.is_set() else []

    async def run(self) -> None:
        """Run jobs until `stop` is called. Raises the error that broke the worker, if one did."""
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as life:
            if not await self.lifespans.enter(life):
                return
            store = AsyncStore(
                self.app.database, self.app.schema, command_timeout=STATEMENT_TIMEOUT_SECONDS
            )
            life.push_async_callback(self._close, store.close)
            life.enter_context(own_name_resolution())
            forks.guard(self._loop)
            # Also if it ends before it runs: a registration without an answer may have been written.
            life.push_async_callback(
                self._registration.remove, store, STOP_NOW_TIMEOUT_SECONDS, None
            )
            if await self._registration.register(self._stopping):
                await self._supervise(self._run_parts(store, self.lifespans.resources))
        if self._failure is not None:
            raise self._failure

    async def _supervise(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the parts to their end. If the caller is cancelled, they stop at once; but a handler that cancels all
        tasks of the event loop does not stop its worker."""
        refused = 0

        def refuse(context: object) -> None:
            nonlocal refused
            refused += 1
            self._slots.refuse(context)

        this = asyncio.current_task()
        parts = WorkerTask(work, name="howdah-worker", on_refused=refuse)
        is_cancelled = False
        while not parts.done():
            try:
                await asyncio.wait([parts])
            except asyncio.CancelledError:
                if refused and this is not None:
                    refused = 0
                    this.uncancel()
                    continue
                is_cancelled = True
                self.stop()
                self.stop()
        parts.result()
        if is_cancelled:
            raise asyncio.CancelledError

    async def _run_parts(self, store: AsyncStore, resources: Mapping[str, Any]) -> None:
        app, statements = self.app, self.app.statements
        seconds = self.lease.total_seconds()
        url = await store.url()
        heartbeat_store = self._make_heartbeat_store(url)
        heartbeat = Heartbeat(
            heartbeat_store,
            statements,
            self.lease,
            self._on_abort,
            lambda: self._registration.beat(self._slots.running),
            lambda: self._registration.insert(idle=fetcher.is_flagged_idle),
            lambda: self._slots.take_unstarted(),
        )
        hooks = Hooks(app.hooks, functools.partial(report_hook, heartbeat.lines))
        completer = Completer(store, statements, heartbeat, hooks, self._registration.throughput)
        threads = ThreadExecutor(seconds)
        suspects = Suspects(store, statements)
        size = min(self.processes, self.concurrency)
        processes = ProcessExecutor(heartbeat, suspects, hooks, self.set_up_process)
        executors: dict[str, tuple[int, Executor]] = {
            "async": (self.concurrency, aexecute),
            "thread": (self.concurrency, threads.execute),
            "process": (size, processes.execute),
        }
        self._slots = slots = Slots(
            app.tasks, executors, suspects=suspects, heartbeat=heartbeat, completer=completer,
            hooks=hooks, resources=resources, on_crash=self._crash, abandon_seconds=seconds,
        )  # fmt: skip
        slots.claim_while("process", processes.is_available)
        self._heartbeat = heartbeat
        listener = Listener(url, app.schema)
        listener.subscribe("cancel", self._on_cancel)
        fetcher = Fetcher(
            store, statements, slots, listener, heartbeat=heartbeat,
            worker_id=self.worker_id, life=self.life, job_types=list(app.tasks), queues=self.queues, lease=self.lease,
        )  # fmt: skip
        # The fetcher claims after the first beat: what a worker claims it can keep.
        heartbeat.beat_soon()
        heartbeat.start()
        listener.start()
        logger.info(
            "worker started",
            extra={"worker_id": self.worker_id, "queues": self.queues, "tasks": len(app.tasks)},
        )
        self.ready.set()
        try:
            # Before jobs are claimed: at the limit of connections it would find none later.
            await wait_for_first(
                listener.connected.wait(),
                asyncio.sleep(LISTEN_TIMEOUT_SECONDS),
                self._stopping.wait(),
            )
            await self._run_services(store, slots, completer, fetcher)
        finally:
            self.abandoned = await slots.stop() + threads.busy
            await listener.stop()
            await processes.stop(self._timeout(STEP_TIMEOUT_SECONDS))
            await self._stop_heartbeat(store, heartbeat, hooks)
            await self._close(lambda: run_in_own_thread(heartbeat_store.close))
            logger.info("worker stopped", extra={"worker_id": self.worker_id})

    def _make_heartbeat_store(self, url: str) -> Store:
        # Short leases need a quick retry.
        seconds = max(1.0, self.lease.total_seconds() / 3)
        return Store(
            url,
            self.app.schema,
            create=False,
            timeout=STATEMENT_TIMEOUT_SECONDS,
            command_timeout=min(STATEMENT_TIMEOUT_SECONDS, seconds),
        )

    async def _stop_heartbeat(self, store: AsyncStore, heartbeat: Heartbeat, hooks: Hooks) -> None:
        """Write what is left of reports and log lines, and remove the worker's row after a last beat."""
        await run_in_own_thread(heartbeat.stop, self._timeout(STEP_TIMEOUT_SECONDS))
        await run_in_own_thread(hooks.stop, self._timeout(STEP_TIMEOUT_SECONDS))
        heartbeat.lines.summarize(everything=True)
        await self._registration.remove(
            store,
            self._timeout(DRAIN_TIMEOUT_SECONDS),
            self._registration.beat(self._slots.running),
        )

    async def _run_services(
        self, store: AsyncStore, slots: Slots, completer: Completer, fetcher: Fetcher
    ) -> None:
        slots.start()

        def serve(part: str, work: Callable[[], Coroutine[Any, Any, None]]) -> WorkerTask:
            return WorkerTask(
                self._guard(part, work), name=f"howdah-{part}", on_refused=slots.refuse
            )

        services = [
            serve("completer", completer.run),
            serve("completer-large", completer.run_large),
            serve("completer-rejected", completer.run_rejected),
            serve(
                "maintenance",
                lambda: maintain(store, self.app.statements, self._heartbeat.outages.report),
            ),
            serve("heartbeat", self._watch_heartbeat),
            serve("fetcher", lambda: fetcher.run(self._stopping)),
        ]
        try:
            await self._stopping.wait()
            fetcher.wake()
            await self._shut_down(slots, completer, services[-1])
        finally:
            await end_tasks(*services)

    async def _guard(self, part: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a part of the worker. If the part fails, the whole worker stops."""
        this = asyncio.current_task()
        while True:
            try:
                await work()
                return
            except asyncio.CancelledError:
                if this is None or this.cancelling():
                    raise
                # A handler cancelled a task that the part was waiting for.
                logger.warning("part of the worker was cancelled; continuing", extra={"part": part})
            except GeneratorExit:  # the event loop was closed
                raise
            except BaseException as error:
                self._crash(error)
                if part.startswith(("completer", "heartbeat")):
                    # No more outcomes can be written, or no leases extended: other workers recover the jobs.
                    self._stopping_now.set()
                logger.critical("part of the worker failed; stopping", extra={"part": part})
                return

    async def _watch_heartbeat(self) -> None:
        """Raise if the heartbeat's thread ends, as one does in which a handler has raised an exception."""
        while self._heartbeat.is_alive():  # noqa: ASYNC110 - a thread that is killed sets no event
            await asyncio.sleep(WATCH_SECONDS)
        raise RuntimeError("the heartbeat's thread has ended; no lease can be extended.")

    def _crash(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    async def _shut_down(self, slots: Slots, completer: Completer, fetching: WorkerTask) -> None:
        fault_points.reach("during-shutdown")
        deadline = time.monotonic() + self.grace
        self._stop_by = deadline + STOP_SECONDS
        slots.close()
        logger.info(
            "worker stopping",
            extra={"worker_id": self.worker_id, "running": slots.running, "grace": self.grace},
        )
        # A claim in flight may return jobs. They are released now instead of after their leases expire.
        await asyncio.wait([fetching], timeout=CLAIM_TIMEOUT_SECONDS)
        fetching.end()
        await self._wait(slots.wait_until_empty(), max(0.0, deadline - time.monotonic()))
        if slots.running:
            slots.interrupt()
            # A second request to stop does not shorten this: handlers get a moment to clean up.
            timeout = self._timeout(INTERRUPT_TIMEOUT_SECONDS)
            await wait_for_first(slots.wait_until_empty(), asyncio.sleep(timeout))
            slots.release_running()
        if self._stopping_now.is_set():
            completer.hurry()
            await wait_for_first(completer.drain(), asyncio.sleep(STOP_NOW_TIMEOUT_SECONDS))
        else:
            remaining = max(deadline - time.monotonic(), self._timeout(DRAIN_TIMEOUT_SECONDS))
            await self._wait(completer.drain(), remaining - STOP_NOW_TIMEOUT_SECONDS)
            completer.hurry()
            await self._wait(completer.drain(), STOP_NOW_TIMEOUT_SECONDS)

    def _timeout(self, seconds: float) -> float:
        """Seconds for one step of the stop. The steps share one deadline."""
        most = STOP_NOW_TIMEOUT_SECONDS if self._stopping_now.is_set() else seconds
        return max(LEAST_STEP_SECONDS, min(most, self._stop_by - time.monotonic()))

    async def _close(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout(STEP_TIMEOUT_SECONDS)):
                await close()

    async def _wait(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        """Wait for some work, for at most `seconds`, or until a second request to stop."""
        await wait_for_first(work, asyncio.sleep(seconds), self._stopping_now.wait())

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
