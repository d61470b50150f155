"""All slots of a worker. Each executor has its own slots, buffer and prefetch, so that long jobs of one executor
neither delay the jobs of another nor are claimed before they can run (decision 0028)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from howdah.encoding.safe_logger import get_logger
from howdah.execution.run import Run
from howdah.worker.event_loop import LoopClock
from howdah.worker.executor_slots import BUFFER_SECONDS, ExecutorSlots, Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from howdah.execution.heartbeat import Heartbeat
    from howdah.hooks import Hooks
    from howdah.protocol.worker_statements import Claimed
    from howdah.task import Task
    from howdah.worker.completer import Completer
    from howdah.worker.executors import Executor
    from howdah.worker.prefetch import Demand
    from howdah.worker.suspects import Suspects

logger = get_logger(__name__)

STOP_TIMEOUT_SECONDS = 1.0
BLOCKED_SECONDS = 2 * BUFFER_SECONDS  # then the loop itself releases nothing
REPORT_SECONDS = 1.0  # one line for all tasks that a handler cancels


class Slots:
    """The slots of every executor that has tasks. `executors` has the number of slots of each, and its function."""

    def __init__(
        self,
        tasks: Mapping[str, Task[..., Any]],
        executors: Mapping[str, tuple[int, Executor]],
        *,
        suspects: Suspects,
        heartbeat: Heartbeat,
        completer: Completer,
        hooks: Hooks,
        resources: Mapping[str, Any],
        on_crash: Callable[[BaseException], None],
        abandon_seconds: float,
    ) -> None:
        self._tasks = tasks
        self._heartbeat = heartbeat
        self._hooks = hooks
        self._clock = LoopClock()
        self._changed = asyncio.Event()
        self._on_demand: Callable[[], None] | None = None
        self._reported_at = -REPORT_SECONDS
        surroundings = Surroundings(
            suspects=suspects, heartbeat=heartbeat, completer=completer, hooks=hooks,
            resources=resources, on_crash=on_crash, on_ended=self._on_ended, on_refused=self.refuse,
            abandon_seconds=abandon_seconds,
        )  # fmt: skip
        completer.on_room = self._on_room
        self._executors: dict[str, ExecutorSlots] = {}
        for name, (count, execute) in executors.items():
            own = {key: task for key, task in tasks.items() if task.options.run_in == name}
            if own:
                self._executors[name] = ExecutorSlots(name, count, own, execute, surroundings)
        self._all = list(self._executors.values())
        self._by_type = {key: self._executors[task.options.run_in] for key, task in tasks.items()}

    # ── for the fetcher ───────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        """How many jobs are running."""
        return sum(len(each.running) for each in self._all)

    @property
    def prefetched(self) -> int:
        """How many jobs are in the buffers."""
        return sum(len(each.buffer) for each in self._all)

    def demand(self) -> list[list[Demand]]:
        """What to claim for each executor that has room."""
        return [demands for each in self._all if (demands := each.demand())]

    def full_types(self) -> frozenset[str]:
        """The job types for which there is no room now."""
        room = {name for each in self.demand() for demand in each for name in demand.job_types}
        return frozenset(self._by_type.keys() - room)

    async def wait_for_demand(self) -> None:
        """Wait until `demand` may have changed."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BUFFER_SECONDS / 2):
                await self._changed.wait()

    def on_demand(self, callback: Callable[[], None]) -> None:
        """Call back when an executor that had no room has some again: the fetcher may be waiting for jobs of the
        other executors."""
        self._on_demand = callback

    def _on_ended(self, executor: ExecutorSlots) -> None:
        self._changed.set()
        if executor.wants_more and executor.is_below_target and self._on_demand is not None:
            executor.wants_more = False
            self._on_demand()

    def _on_room(self) -> None:
        """The completer can take outcomes again."""
        self._changed.set()
        if self._on_demand is not None:
            self._on_demand()

    def release_overdue(self) -> None:
        """Release jobs that have been in a buffer for too long."""
        for each in self._all:
            each.release_overdue()

    def put(self, jobs: Sequence[Claimed]) -> None:
        """Put claimed jobs into the buffers."""
        now = time.monotonic()
        tasks, by_type = self._tasks, self._by_type
        runs = [Run(job.id, job.lease_id, job, tasks[job.job_type], buffered=now) for job in jobs]
        self._heartbeat.add(runs)
        for run in runs:
            by_type[run.job.job_type].put(run)

    def claim_while(self, name: str, is_available: Callable[[], bool]) -> None:
        """Claim jobs for an executor only while this function returns True."""
        if name in self._executors:
            self._executors[name].is_available = is_available

    # ── for the runner ────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the slots."""
        self._clock.start()
        for each in self._all:
            each.start()

    def runs(self) -> list[Run]:
        """The runs in the slots, also those of handlers that were abandoned and have not ended."""
        return [run for each in self._all for run in each.runs()]

    def answer(self) -> bool:
        """Whether every executor can run the jobs that are claimed for it, and the event loop is not blocked."""
        return not self.is_blocked and all(each.answers() for each in self._all)

    @property
    def is_blocked(self) -> bool:
        """Whether a handler has blocked the event loop for long. For any thread."""
        return self._clock.blocked_seconds() > BLOCKED_SECONDS

    def take_unstarted(self) -> list[Run]:
        """In the heartbeat's thread: take the jobs out of the buffers if the event loop is blocked. Removing a job from
        its buffer is atomic: either this thread has it, to release it, or a slot has it, to run it."""
        taken: list[Run] = []
        if self.is_blocked:
            for each in self._all:
                with contextlib.suppress(IndexError):
                    while True:
                        taken.append(each.buffer.popleft())
        if self._hooks.active:
            for run in taken:
                self._hooks.notify(run.job, "released")
        return taken

    def close(self) -> None:
        """Release the jobs in the buffers; start no more."""
        for each in self._all:
            each.close()
        self._changed.set()

    async def wait_until_empty(self) -> None:
        """Wait for the running jobs to end."""
        while self.running:
            self._changed.clear()
            await self._changed.wait()

    def interrupt(self) -> None:
        """Stop the running handlers, to release their jobs."""
        for each in self._all:
            each.interrupt()

    def release_running(self) -> None:
        """Release the jobs of handlers that did not stop: this process is about to end."""
        for each in self._all:
            each.release_running()

    async def stop(self) -> int:
        """End the slots. Returns how many did not end, because their handlers ignore cancellation."""
        self._clock.stop()
        slots = [slot for each in self._all for slot in each.end()]
        if not slots:
            return 0
        _, stuck = await asyncio.wait(slots, timeout=STOP_TIMEOUT_SECONDS)
        return len(stuck)

    def stop_aborted(self, run: Run) -> None:
        """Stop a run that was aborted: its job was cancelled, or its lease was lost."""
        self._by_type[run.job.job_type].stop_aborted(run)

    def refuse(self, context: Any) -> None:
        """Report a handler that tried to cancel tasks of the worker or of other jobs. They continue."""
        for each in self._all:
            each.note_cancelled_tasks(None if context is None else context.run)
        if time.monotonic() - self._reported_at > REPORT_SECONDS:
            self._reported_at = time.monotonic()
            unknown = {"job_id": None, "job_type": None}  # a thread that a handler has started
            logger.warning(
                "a handler cancelled asyncio tasks that are not its own; those of the worker continue",
                extra=unknown
                if context is None
                else {"job_id": str(context.id), "job_type": context.job_type},
            )
