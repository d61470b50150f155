"""The slots: long-lived coroutines, each running one job at a time from a common buffer. Measures how long
jobs take, which tells the fetcher how far ahead to claim."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from howdah import faults, payload
from howdah.context import Context
from howdah.heartbeat import Run
from howdah.hooks import StateChange
from howdah.outcome import Cancelled, Failed, Lost, Outcome, Released
from howdah.worker.executors import stop_run
from howdah.worker.fetcher import AHEAD, PREFETCH_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from howdah.app import Task
    from howdah.heartbeat import Heartbeat
    from howdah.hooks import Hooks
    from howdah.store import AsyncStore
    from howdah.worker.completer import Completer
    from howdah.worker.executors import Executor
    from howdah.worker_statements import Claimed, WorkerStatements

logger = logging.getLogger(__name__)

SMOOTHING = 0.1
YIELD_EVERY = 16


class Slots:
    """The buffer and the coroutines that empty it."""

    def __init__(
        self,
        count: int,
        tasks: Mapping[str, Task[..., Any]],
        executors: Mapping[str, Executor],
        *,
        store: AsyncStore,
        statements: WorkerStatements,
        heartbeat: Heartbeat,
        completer: Completer,
        hooks: Hooks,
        resources: Mapping[str, Any],
    ) -> None:
        self._count = count
        self._tasks = tasks
        self._executors = executors
        self._store = store
        self._statements = statements
        self._heartbeat = heartbeat
        self._completer = completer
        self._hooks = hooks
        self._resources = resources
        self._buffer: deque[Run] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._room = asyncio.Event()
        self._running: dict[Run, asyncio.Task[None] | None] = {}
        self._seconds: dict[str, float] = {}  # smoothed duration of each type
        self._typical: float | None = None
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    # ── for the fetcher ───────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        """How many jobs run now."""
        return len(self._running)

    def _prefetch(self) -> int:
        if self._typical is None or self._typical >= AHEAD:
            return 0
        return min(PREFETCH_LIMIT, int(self._count * AHEAD / max(self._typical, 1e-6)))

    def wanted(self) -> int:
        """How many more jobs to claim; 0 while more than half of what should be at hand is."""
        ahead = self._prefetch()
        here = len(self._buffer) + len(self._running)
        if ahead and len(self._buffer) > ahead // 2:
            return 0
        return self._count + ahead - here

    async def wait_for_room(self) -> None:
        """Wait until `wanted` may say something else."""
        self._room.clear()
        await self._room.wait()

    def take(self, jobs: Sequence[Claimed]) -> list[Claimed]:
        """Put claimed jobs into the buffer. Gives back those of long types that no slot is free for."""
        free = self._count - len(self._running) - len(self._buffer)
        too_many = []
        for job in jobs:
            if free <= 0 and self._seconds.get(job.job_type, math.inf) >= AHEAD:
                too_many.append(job)
                continue
            free -= 1
            run = Run(job.id, job.lease_id, job, self._tasks[job.job_type])
            self._heartbeat.add(run)
            self._buffer.append(run)
            if self._getters:
                getter = self._getters.popleft()
                if not getter.done():
                    getter.set_result(None)
        return too_many

    # ── for the runner ────────────────────────────────────────────────────────────────────────────

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start the slots."""
        return [
            group.create_task(self._serve(), name=f"howdah-slot-{n}") for n in range(self._count)
        ]

    def close(self) -> None:
        """Give back what has not been started; run no more."""
        self._closed = True
        while self._buffer:
            self._completer.put(self._buffer.popleft(), Released(0.0, "shutdown"))
        self._room.set()

    async def wait_until_empty(self) -> None:
        """Wait for the running jobs to end."""
        await self._empty.wait()

    def interrupt(self) -> None:
        """Stop everything that runs, to be given back. Threads that do not listen are left behind."""
        for run, slot in list(self._running.items()):
            stop_run(run, "shutdown", slot)

    def give_up(self) -> None:
        """Give back jobs whose handlers did not stop: this process is about to end."""
        for run in list(self._running):
            if not run.finishing:
                self._completer.put(run, Released(0.0, "shutdown"))

    def abort(self, run: Run, why: str) -> None:
        """Stop one job: it was cancelled, or is no longer ours."""
        if run in self._running:
            stop_run(run, why, self._running[run])
        elif run in self._buffer:
            self._buffer.remove(run)
            outcome: Outcome = Lost() if why == "lost" else Cancelled("cancelled before it started")
            self._completer.put(run, outcome)

    # ── the slots ─────────────────────────────────────────────────────────────────────────────────

    async def _serve(self) -> None:
        served = 0
        while True:
            while not self._buffer or self._closed:
                getter = asyncio.get_running_loop().create_future()
                self._getters.append(getter)
                await getter
            run = self._buffer.popleft()
            self._running[run] = asyncio.current_task()
            self._empty.clear()
            try:
                outcome = await self._execute(run)
            finally:
                del self._running[run]
                if not self._running:
                    self._empty.set()
            faults.reach("after-run")
            if not run.finishing:
                self._completer.put(run, outcome)
            self._room.set()
            served += 1
            if served % YIELD_EVERY == 0:
                # A handler that never waits would keep the fetcher and the completer from their work.
                await asyncio.sleep(0)

    async def _execute(self, run: Run) -> Outcome:
        """One job, to an outcome, whatever happens."""
        job, task = run.job, run.task
        try:
            faults.reach("before-start")
            if job.claims > 1 and not await self._announce(run):
                return Lost()
            data = payload.decode(job.data)
            context = Context(
                id=job.id,
                job_type=job.job_type,
                queue=job.queue,
                data=data,
                attempt=job.attempts,
                max_attempts=job.max_attempts,
                request_id=job.request_id,
                idempotency_key=job.idempotency_key,
                lease_id=job.lease_id,
                timeout=task.options.timeout,
                sink=self._heartbeat,
                resources=self._resources,
            )
            context.abort = run.abort
            run.context = context
            run.started = began = time.monotonic()
            if self._hooks.active:
                self._tell_running(job)
            outcome = await self._executors[task.options.run_in].execute(task, context)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if run.abort is None or current is None:
                raise
            outcome = Lost() if run.abort == "lost" else Cancelled("cancelled before it started")
        except Exception as error:
            logger.exception("a slot failed", extra={"job_id": str(job.id)})
            return Failed(payload.describe_error(error), None, 10.0)
        finally:
            # A cancellation of this slot was about the job that has ended now.
            current = asyncio.current_task()
            while current is not None and run.context is not None and current.cancelling():
                current.uncancel()
        if run.started is not None:
            self._measure(job.job_type, time.monotonic() - began)
        return outcome

    async def _announce(self, run: Run) -> bool:
        """Write started_at before a job runs that was claimed before: if it kills this process, the
        attempt counts."""
        accepted = await self._store.run(self._statements.start_jobs([run.id], [run.lease_id]))
        faults.reach("after-start")
        return bool(accepted)

    def _measure(self, job_type: str, seconds: float) -> None:
        known = self._seconds.get(job_type)
        self._seconds[job_type] = (
            seconds if known is None else known + SMOOTHING * (seconds - known)
        )
        typical = self._typical
        self._typical = seconds if typical is None else typical + SMOOTHING * (seconds - typical)

    def _tell_running(self, job: Claimed) -> None:
        self._hooks.tell(
            StateChange(
                id=job.id,
                job_type=job.job_type,
                queue=job.queue,
                state="running",
                attempt=job.attempts,
                request_id=job.request_id,
            )
        )
