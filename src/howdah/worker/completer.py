"""Batches outcomes into statements. Executors decide outcomes; this only writes them.

There is no timer: whatever piled up while the last statement ran goes with the next, so an idle worker
acknowledges at once and a busy one in hundreds. A batch that the database refuses is split until the bad
outcome stands alone, and that one is written without what was bad about it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, TypeAlias

from howdah.database.driver_errors import is_transient
from howdah.encoding import payload
from howdah.errors import DatabaseUnreachable
from howdah.execution import fault_points
from howdah.hooks import StateChange
from howdah.outcome import (
    NOT_COMMITTED,
    Cancelled,
    Completed,
    CompletedByHandler,
    Failed,
    Lost,
    Outcome,
    Released,
)
from howdah.protocol.acknowledge import acknowledge, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from howdah.database.async_store import AsyncStore
    from howdah.execution.heartbeat import Heartbeat
    from howdah.execution.run import Run
    from howdah.hooks import Hooks
    from howdah.outcome import Acknowledgement
    from howdah.protocol.statements import Statement
    from howdah.protocol.worker_statements import Claimed, WorkerStatements
    from howdah.worker.throughput import Throughput

logger = logging.getLogger(__name__)

Finished: TypeAlias = "tuple[Run, Outcome]"
Written: TypeAlias = "tuple[Run, Acknowledgement]"

RETRY_PAUSE = 0.5


class Completer:
    """Writes outcomes, in the order in which they came."""

    def __init__(
        self,
        store: AsyncStore,
        statements: WorkerStatements,
        heartbeat: Heartbeat,
        hooks: Hooks,
        throughput: Throughput,
    ) -> None:
        self._store = store
        self._statements = statements
        self._heartbeat = heartbeat
        self._hooks = hooks
        self._throughput = throughput
        self._waiting: list[Finished] = []
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.written = 0

    def put(self, run: Run, outcome: Outcome) -> None:
        """Take an outcome to be written."""
        run.finishing = True
        self._waiting.append((run, outcome))
        self._wake.set()
        self._quiet.clear()

    async def drain(self) -> None:
        """Wait until everything that was put has been written."""
        await self._quiet.wait()

    async def run(self) -> None:
        """Write for as long as the worker lives."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._waiting = self._waiting, []
            if batch:
                await self._write(batch)
            if not self._waiting:
                self._quiet.set()

    async def _write(self, batch: list[Finished]) -> None:
        if any(run.dirty for run, _ in batch):
            await self._flush_reports()
        groups: dict[object, list[Written]] = defaultdict(list)
        times: Counter[UUID] = Counter()
        for run, outcome in batch:
            if isinstance(outcome, Lost):
                self._forget([(run, outcome)], set())
                continue
            # The answer names ids: two runs of one job, of which one is stale, go one after the other.
            times[run.id] += 1
            groups[kind_of(outcome), times[run.id]].append((run, outcome))
        for group in groups.values():
            await self._send(group)

    async def _flush_reports(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._heartbeat.flush)
            except DatabaseUnreachable:
                logger.warning("the last reports of some jobs wait for the database")
                continue
            except Exception:
                logger.warning("the last reports of some jobs could not be written", exc_info=True)
            return

    async def _send(self, group: list[Written], *, last_try: bool = False) -> None:
        fault_points.reach("before-acknowledge")
        while True:
            try:
                accepted = set(await self._store.run(self._statement(group)))
                break
            except Exception as error:
                if not _may_pass(error):
                    await self._split(group, error, last_try=last_try)
                    return
                # The leases decide: until they end, the outcome is worth keeping.
                logger.warning(
                    "outcomes wait for the database",
                    extra={"waiting": len(group), "error": str(error)},
                )
                await asyncio.sleep(RETRY_PAUSE)
        fault_points.reach("after-acknowledge")
        self._forget(group, accepted)

    async def _split(self, group: list[Written], error: Exception, *, last_try: bool) -> None:
        if len(group) > 1:
            middle = len(group) // 2
            await self._send(group[:middle])
            await self._send(group[middle:])
            return
        run, _ = group[0]
        logger.warning(
            "an outcome could not be written as it was",
            exc_info=error,
            extra={"job_id": str(run.id), "job_type": run.job.job_type},
        )
        if last_try:
            self._forget(group, set())  # its lease will end and the job come back
        else:
            last = Failed(payload.format_error(error), None, None)
            await self._send([(run, last)], last_try=True)

    def _statement(self, group: Sequence[Written]) -> Statement[list[UUID]]:
        now = time.monotonic()
        return acknowledge(
            self._statements,
            [run.id for run, _ in group],
            [run.lease_id for run, _ in group],
            [outcome for _, outcome in group],
            [None if run.started is None else now - run.started for run, _ in group],
        )

    def _forget(self, group: Sequence[Finished], accepted: set[UUID]) -> None:
        now = time.monotonic()
        self._heartbeat.remove(run for run, _ in group)
        self.written += len(accepted)
        ended: list[tuple[Claimed, str, float]] = []
        for run, outcome in group:
            if run.on_acknowledged is not None:
                run.on_acknowledged()
            state, error = _describe(run, outcome, run.id in accepted)
            if run.started is not None:
                ended.append((run.job, state, now - run.started))
            if state != "completed" or logger.isEnabledFor(logging.DEBUG):
                _log(run, state, error)
            if self._hooks.active:
                self._hooks.tell(_change(run, state, error))
        self._throughput.add(ended)


def _log(run: Run, state: str, error: str | None) -> None:
    fields = {
        "job_id": str(run.id),
        "job_type": run.job.job_type,
        "queue": run.job.queue,
        "attempt": run.job.attempts,
    }
    if state == "lost":
        logger.warning("a late acknowledgement was refused: the lease was lost", extra=fields)
    elif state in ("failed", "retrying"):
        logger.info("a job failed", extra={**fields, "state": state, "error": error})
    else:
        logger.debug("a job ended", extra={**fields, "state": state})


def _change(run: Run, state: str, error: str | None) -> StateChange:
    return StateChange(
        id=run.id,
        job_type=run.job.job_type,
        queue=run.job.queue,
        state=state,
        attempt=run.job.attempts,
        error=error,
        request_id=run.job.request_id,
    )


def _may_pass(error: Exception) -> bool:
    return isinstance(error, DatabaseUnreachable) or is_transient(error)


def _describe(run: Run, outcome: Outcome, accepted: bool) -> tuple[str, str | None]:
    if accepted and isinstance(outcome, Completed):
        return "completed", None
    match outcome:
        case CompletedByHandler():
            return ("retrying", NOT_COMMITTED) if accepted else ("completed", None)
        case _ if not accepted:
            return "lost", None
        case Failed(error, _, retry_in):
            again = retry_in is not None and run.job.attempts < run.job.max_attempts
            return ("retrying" if again else "failed"), error
        case Released():
            return "released", None
        case Cancelled(reason):
            return "cancelled", reason
        case _:
            return "lost", None
