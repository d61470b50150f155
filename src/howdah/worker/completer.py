"""Writes outcomes in batches. Executors decide outcomes; the completer only writes them.

There is no timer: the outcomes that arrive while a statement runs form the next batch, so an idle worker
acknowledges immediately and a busy worker acknowledges hundreds at a time. A batch that the database rejects is
split until the bad outcome is alone. That job is then failed with the database's error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias

from howdah.database.driver_errors import is_transient
from howdah.encoding import payload
from howdah.errors import DatabaseUnreachable
from howdah.execution import fault_points
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

RETRY_SECONDS = 0.5


class Completer:
    """Writes outcomes in the order in which they arrive."""

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
        self._outcomes: list[Finished] = []
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self.written = 0

    def put(self, run: Run, outcome: Outcome) -> None:
        """Add an outcome to the next batch."""
        run.finishing = True
        self._outcomes.append((run, outcome))
        self._arrived.set()
        self._drained.clear()

    async def drain(self) -> None:
        """Wait until every outcome has been written."""
        await self._drained.wait()

    async def run(self) -> None:
        """Write outcomes until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._outcomes = self._outcomes, []
            if batch:
                await self._write(batch)
            if not self._outcomes:
                self._drained.set()

    async def _write(self, batch: list[Finished]) -> None:
        if any(run.dirty for run, _ in batch):
            await self._flush_reports()
        groups: dict[object, list[Written]] = defaultdict(list)
        counts: dict[UUID, int] = {}
        for run, outcome in batch:
            if isinstance(outcome, Lost):
                self._finish([(run, outcome)], set())
                continue
            # The answer contains job ids. So two runs of one job, one of which is stale, go into two statements.
            counts[run.id] = number = counts.get(run.id, 0) + 1
            groups[kind_of(outcome), number].append((run, outcome))
        for group in groups.values():
            await self._send(group)

    async def _flush_reports(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._heartbeat.flush)
            except DatabaseUnreachable:
                logger.warning("database unreachable; retrying to write reports")
                continue
            except Exception:
                logger.warning("reports could not be written", exc_info=True)
            return

    async def _send(self, group: list[Written], *, last_try: bool = False) -> None:
        fault_points.reach("before-acknowledge")
        while True:
            try:
                accepted = set(await self._store.run(self._statement(group)))
                break
            except Exception as error:
                if not _is_transient(error):
                    await self._split(group, error, last_try=last_try)
                    return
                # Retry until the database answers: after the lease has expired it may reject the write.
                logger.warning(
                    "outcomes could not be written; retrying",
                    extra={"outcomes": len(group), "error": str(error)},
                )
                await asyncio.sleep(RETRY_SECONDS)
        fault_points.reach("after-acknowledge")
        self._finish(group, accepted)

    async def _split(self, group: list[Written], error: Exception, *, last_try: bool) -> None:
        if len(group) > 1:
            middle = len(group) // 2
            await self._send(group[:middle])
            await self._send(group[middle:])
            return
        run, _ = group[0]
        logger.warning(
            "outcome rejected by the database",
            exc_info=error,
            extra={"job_id": str(run.id), "job_type": run.job.job_type},
        )
        if last_try:
            self._finish(group, set())  # its lease will expire and the job will be recovered
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

    def _finish(self, group: Sequence[Finished], accepted: set[UUID]) -> None:
        now = time.monotonic()
        self._heartbeat.remove(run for run, _ in group)
        self.written += len(accepted)
        ended: list[tuple[Claimed, str, float]] = []
        for run, outcome in group:
            if run.on_acknowledged is not None:
                run.on_acknowledged()
            state, error = _state_after(run, outcome, run.id in accepted)
            if run.started is not None:
                ended.append((run.job, state, now - run.started))
            if state != "completed" or logger.isEnabledFor(logging.DEBUG):
                _log(run, state, error)
            if self._hooks.active:
                self._hooks.notify(run.job, state, error)
        self._throughput.add(ended)


def _log(run: Run, state: str, error: str | None) -> None:
    fields = {
        "job_id": str(run.id),
        "job_type": run.job.job_type,
        "queue": run.job.queue,
        "attempt": run.job.attempts,
    }
    if state == "lost":
        logger.warning("acknowledgement rejected: lease lost", extra=fields)
    elif state in ("failed", "retrying"):
        logger.info("job failed", extra={**fields, "state": state, "error": error})
    else:
        logger.debug("job ended", extra={**fields, "state": state})


def _is_transient(error: Exception) -> bool:
    return isinstance(error, DatabaseUnreachable) or is_transient(error)


def _state_after(run: Run, outcome: Outcome, accepted: bool) -> tuple[str, str | None]:
    """The `StateChange.state` of a job after its acknowledgement, and its error."""
    if accepted and isinstance(outcome, Completed):  # first: nearly all are
        return "completed", None
    match outcome:
        case CompletedByHandler():
            return ("retrying", NOT_COMMITTED) if accepted else ("completed", None)
        case _ if not accepted:
            return "lost", None
        case Failed(error, _, retry_in):
            retries = retry_in is not None and run.job.attempts < run.job.max_attempts
            return ("retrying" if retries else "failed"), error
        case Released():
            return "released", None
        case Cancelled(reason):
            return "cancelled", reason
        case _:
            return "lost", None
