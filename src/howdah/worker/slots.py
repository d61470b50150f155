"""The slots: long-lived coroutines, each running one job at a time from a common buffer."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from howdah.encoding import payload
from howdah.execution import fault_points
from howdah.execution.run import Run, make_context
from howdah.hooks import StateChange
from howdah.outcome import Cancelled, Failed, Lost, Outcome, Released
from howdah.worker.prefetch import Prefetch, Wanted
from howdah.worker.suspects import StartNotWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from howdah.execution.heartbeat import Heartbeat
    from howdah.hooks import Hooks
    from howdah.outcome import AbortReason
    from howdah.protocol.worker_statements import Claimed
    from howdah.task import Task
    from howdah.worker.completer import Completer
    from howdah.worker.executors import Executor
    from howdah.worker.suspects import Suspects

logger = logging.getLogger(__name__)

HOARDED = 1.0  # seconds in the buffer after which a job is better off elsewhere
YIELD_EVERY = 16
LAST_PATIENCE = 1.0


class Slots:
    """The buffer and the coroutines that empty it."""

    def __init__(
        self,
        count: int,
        tasks: Mapping[str, Task[..., Any]],
        executors: Mapping[str, Executor],
        *,
        suspects: Suspects,
        heartbeat: Heartbeat,
        completer: Completer,
        hooks: Hooks,
        resources: Mapping[str, Any],
    ) -> None:
        self._count = count
        self._tasks = tasks
        self._executors = executors
        self._suspects = suspects
        self._heartbeat = heartbeat
        self._completer = completer
        self._hooks = hooks
        self._resources = resources
        self._slots: list[asyncio.Task[None]] = []
        self._buffer: deque[Run] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._room = asyncio.Event()
        self._running: dict[Run, asyncio.Task[None] | None] = {}
        self._prefetch = Prefetch(count, tasks)
        self._closed = False
        self._clean = contextvars.Context()
        self._on_crash: Callable[[BaseException], None] = _ignore

    # ── for the fetcher ───────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        """How many jobs run now."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many claimed jobs no slot has taken yet."""
        return len(self._buffer)

    def wanted(self) -> Wanted:
        """What to claim."""
        if self._closed:
            return Wanted(0, 0, [])
        return self._prefetch.wanted(self._buffer, self._running)

    async def wait_for_room(self) -> None:
        """Wait until `wanted` may say something else."""
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOARDED / 2):
                await self._room.wait()

    def give_back_hoarded(self) -> None:
        """Give back what has waited here for long: the slots are taken by longer jobs than expected."""
        late = time.monotonic() - HOARDED
        while self._buffer and self._buffer[0].buffered < late:
            self._completer.put(self._buffer.popleft(), Released(0.0, "hoarded"))

    def take(self, jobs: Sequence[Claimed]) -> None:
        """Put claimed jobs into the buffer."""
        now = time.monotonic()
        for job in jobs:
            run = Run(job.id, job.lease_id, job, self._tasks[job.job_type], buffered=now)
            self._heartbeat.add(run)
            if self._closed:
                self._completer.put(run, Released(0.0, "shutdown"))
            else:
                self._buffer.append(run)
                self._call_a_slot()

    def _call_a_slot(self) -> None:
        while self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_result(None)
                return

    # ── for the runner ────────────────────────────────────────────────────────────────────────────

    def start(self, on_crash: Callable[[BaseException], None]) -> None:
        """Start the slots. `on_crash` hears of an error in one, which should not be."""

        self._on_crash, self._clean = on_crash, contextvars.copy_context()
        for number in range(self._count):
            self._add(f"howdah-slot-{number}")

    def _add(self, name: str) -> None:
        slot = asyncio.create_task(self._serve(), name=name, context=self._clean.copy())
        slot.add_done_callback(self._hear_of_end)
        self._slots.append(slot)

    def _hear_of_end(self, slot: asyncio.Task[None]) -> None:
        if not slot.cancelled() and (error := slot.exception()) is not None:
            self._on_crash(error)

    def close(self) -> None:
        """Give back what has not been started; run no more."""
        self._closed = True
        while self._buffer:
            self._completer.put(self._buffer.popleft(), Released(0.0, "shutdown"))
        while self._getters:
            self._call_a_slot()
        self._room.set()

    async def wait_until_empty(self) -> None:
        """Wait for the running jobs to end."""
        while self._running:
            self._room.clear()
            await self._room.wait()

    def interrupt(self) -> None:
        """Stop everything that runs, to be given back. Threads that do not listen are left behind."""
        for run in list(self._running):
            run.abort("shutdown")
            self._interrupt(run)

    def give_up(self) -> None:
        """Give back jobs whose handlers did not stop: this process is about to end."""
        for run in list(self._running):
            if not run.finishing:
                self._completer.put(run, Released(0.0, "shutdown"))

    async def stop(self) -> int:
        """End the slots. Gives how many do not: their handlers swallow every cancellation."""
        for slot in self._slots:
            slot.cancel()
        if not self._slots:
            return 0
        _, stuck = await asyncio.wait(self._slots, timeout=LAST_PATIENCE)
        return len(stuck)

    def stop_aborted(self, run: Run) -> None:
        """Stop a run that was aborted: it was cancelled, or is no longer ours."""
        if run in self._running:
            self._interrupt(run)
        elif run in self._buffer and run.abort_reason is not None:
            self._buffer.remove(run)
            self._completer.put(run, _not_started(run.abort_reason))

    def _interrupt(self, run: Run) -> None:
        """Cancel a handler in the loop or in a process. One in a thread stops at its next call of the
        context, and not before."""
        slot = self._running[run]
        if slot is not None and run.task.options.run_in != "thread":
            slot.cancel()

    # ── the slots ─────────────────────────────────────────────────────────────────────────────────

    async def _serve(self) -> None:
        me = asyncio.current_task()
        clean = contextvars.copy_context()
        served = 0
        while not self._closed:
            if not self._buffer:
                getter = asyncio.get_running_loop().create_future()
                self._getters.append(getter)
                await getter
                continue
            run = self._buffer.popleft()
            self._running[run] = me
            try:
                outcome = await self._execute(run, me)
            finally:
                del self._running[run]
                self._prefetch.ended += 1
                self._room.set()
            fault_points.reach("after-run")
            if not run.finishing:
                self._completer.put(run, outcome)
            if contextvars.copy_context() != clean:
                # What one handler puts into context variables is not for the next to find.
                self._replace(me)
                return
            served += 1
            if served % YIELD_EVERY == 0:
                # A handler that never waits would keep the fetcher and the completer from their work.
                await asyncio.sleep(0)

    def _replace(self, slot: asyncio.Task[None] | None) -> None:
        assert slot is not None  # noqa: S101
        self._slots.remove(slot)
        self._add(slot.get_name())

    async def _execute(self, run: Run, slot: asyncio.Task[None] | None) -> Outcome:
        """One job, to an outcome, whatever happens."""
        try:
            fault_points.reach("before-start")
            if run.job.claims - run.job.attempts > 1 and not await self._suspects.start(run):
                return Lost()
            return await self._call(run)
        except asyncio.CancelledError:
            if run.abort_reason is None:
                raise
            return _not_started(run.abort_reason)
        except StartNotWritten as error:
            return Released(1.0, str(error))
        except Exception as error:
            logger.exception("a slot failed", extra={"job_id": str(run.id)})
            return Failed(payload.format_error(error), None, 10.0)
        finally:
            # A cancellation of this slot was about the job that has ended now.
            while run.abort_reason is not None and slot is not None and slot.cancelling():
                slot.uncancel()

    async def _call(self, run: Run) -> Outcome:
        job, task = run.job, run.task
        context = make_context(
            task,
            job,
            data=msgspec.Raw(job.data),
            sink=self._heartbeat,
            run=run,
            resources=self._resources,
        )
        run.started = time.monotonic()
        if self._hooks.active:
            self._tell_running(job)
        outcome = await self._executors[task.options.run_in](task, context)
        self._prefetch.measure(job.job_type, time.monotonic() - run.started)
        return outcome

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


def _ignore(error: BaseException) -> None:
    """Before there are slots, none crashes."""


def _not_started(reason: AbortReason) -> Outcome:
    match reason:
        case "lost":
            return Lost()
        case "shutdown":
            return Released(0.0, "shutdown")
        case _:
            return Cancelled("cancelled before it started")
