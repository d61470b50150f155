"""Writes outcomes in batches. Executors decide outcomes; the completer only writes them.

There is no timer: the outcomes that arrive while a statement runs form the next batch, so an idle worker
acknowledges immediately and a busy worker acknowledges hundreds at a time. A batch is bounded, and one that the
server does not write in time is written in smaller ones (decision 0041). A batch that the database rejects is split
until the bad outcome is alone. That job is then failed with the database's error; a failure or a cancellation is
written with its text in ASCII instead. No statement waits for a job that another transaction has locked. Outcomes that
are not accepted are left to `rejected_outcomes.py`, which returns those whose lease was not lost. An outcome whose run has
reports to write waits for them in `reporting_outcomes.py`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias, cast

from howdah.database.backoff import Backoff
from howdah.database.driver_errors import (
    is_locked,
    is_statement_cancelled,
    is_too_much,
    is_transient,
)
from howdah.encoding import payload
from howdah.encoding.safe_logger import get_logger
from howdah.errors import DatabaseTimeout, DatabaseUnreachable
from howdah.execution import fault_points
from howdah.execution.repeated_lines import shape_of
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
from howdah.worker.outcome_queue import MAX_BYTES, OutcomeQueue, size_of
from howdah.worker.rejected_outcomes import RejectedOutcomes
from howdah.worker.reporting_outcomes import ReportingOutcomes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from uuid import UUID

    from howdah.database.async_store import AsyncStore
    from howdah.execution.heartbeat import Heartbeat
    from howdah.execution.repeated_lines import RepeatedLines
    from howdah.execution.run import Run
    from howdah.hooks import Hooks
    from howdah.outcome import Acknowledgement
    from howdah.protocol.statements import Statement
    from howdah.protocol.worker_statements import Claimed, WorkerStatements
    from howdah.worker.outcome_queue import Finished
    from howdah.worker.throughput import Throughput

logger = get_logger(__name__)

Written: TypeAlias = "tuple[Run, Acknowledgement]"

RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 2.0
CANCELLED_TRIES = 3
"""How often one outcome is sent although `statement_timeout` or `lock_timeout` ends the statement: the others wait for it.
Then a completed attempt counts as failed, and is retried."""
CANCELLED_RETRY_SECONDS = 10.0
# More unwritten outcomes than this stop the slots and the fetcher: outcomes that arrive faster than they can be
# written would otherwise fill the memory, and the worker would keep jobs that others could run.
FULL_OUTCOMES, FULL_BYTES = 8000, 16 << 20


class Completer:
    """Writes outcomes in the order in which they arrive. A large one, and one that the server is slow to write, is
    written beside the others (`run_large`), which do not wait for it."""

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
        self._lines = heartbeat.lines
        self._queue, self._large = OutcomeQueue(), OutcomeQueue()
        self._rejected = RejectedOutcomes(
            store, statements, self._lines, self._queue_outcome, self._lose, self._on_locked
        )
        self._unwritten = 0
        self._locked: set[Run] = set()  # of the unwritten; they do not count as a full completer
        self._reporting = ReportingOutcomes(heartbeat, self._add, self._on_locked)
        self._bytes = 0  # of the unwritten outcomes that are not locked
        self._drained = asyncio.Event()
        self._drained.set()
        self._room = asyncio.Event()
        self.is_full = False
        """Whether so many outcomes are unwritten that no more jobs may be claimed or started."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when it is no longer full."""
        self.written = 0

    def put(self, run: Run, outcome: Outcome) -> None:
        """Add an outcome to the next batch."""
        run.finishing = True
        run.size = size = size_of(run, outcome)
        if not self._unwritten:
            self._drained.clear()
        self._unwritten += 1
        self._bytes += size
        if self._bytes >= FULL_BYTES or self._unwritten - len(self._locked) >= FULL_OUTCOMES:
            self.is_full = True
            self._room.clear()
        self._queue_outcome(run, outcome)

    def _queue_outcome(self, run: Run, outcome: Outcome) -> None:
        if run.dirty:
            self._reporting.put(run, outcome)
        else:
            self._add(run, outcome)

    def _on_locked(self, run: Run) -> None:
        """Another transaction has locked the job, perhaps for long. Other jobs continue meanwhile."""
        if run in self._locked:
            return
        self._locked.add(run)
        self._bytes -= run.size
        self._check_room()
        if run.on_acknowledged is not None:
            run.on_acknowledged()  # a suspect that has ended does not kill the worker

    def _add(self, run: Run, outcome: Outcome) -> None:
        (self._queue if run.size <= MAX_BYTES else self._large).put((run, outcome))

    def hurry(self) -> None:
        """Write every outcome now, without the reports that are not written yet."""
        self._reporting.hurry()

    async def drain(self) -> None:
        """Wait until every outcome has been written."""
        await self._drained.wait()

    async def wait_for_room(self) -> None:
        """Wait until the completer is no longer full."""
        while self.is_full:
            await self._room.wait()

    async def run(self) -> None:
        """Write outcomes until cancelled."""
        await self._write_all(self._queue)

    async def run_large(self) -> None:
        """Write large outcomes until cancelled."""
        await self._write_all(self._large)

    async def run_rejected(self) -> None:
        """Find out why outcomes were rejected until cancelled."""
        await self._rejected.run()

    async def _write_all(self, queue: OutcomeQueue) -> None:
        backoff = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS)
        while True:
            await queue.arrived.wait()
            batch = queue.take()
            if not batch:
                continue
            try:
                if await self._write(queue, batch):
                    backoff.reset()
                else:
                    await asyncio.sleep(backoff.next())
            except asyncio.CancelledError:
                # If this part continues, it writes what is left. What was written is rejected then.
                queue.put_back(
                    each
                    for each in batch
                    if not each[0].is_acknowledged and each[0] not in self._rejected
                )
                raise

    async def _write(self, queue: OutcomeQueue, batch: list[Finished]) -> bool:
        """Write a batch. False if some of it has to be written again."""
        written = [await self._send(queue, group) for group in self._groups(batch)]
        return all(written)

    def _groups(self, batch: list[Finished]) -> list[list[Written]]:
        """The outcomes of a batch, by the statement that writes them."""
        is_uniform = {type(outcome) for _, outcome in batch} == {Completed}
        if is_uniform and len({run.id for run, _ in batch}) == len(batch):
            return [cast("list[Written]", batch)]  # nearly always
        groups: dict[object, list[Written]] = defaultdict(list)
        counts: dict[UUID, int] = {}
        for run, outcome in batch:
            if isinstance(outcome, Lost):
                self._finish([(run, outcome)], ())
                continue
            # The answer contains job ids. So two runs of one job, one of which is stale, go into two statements.
            counts[run.id] = number = counts.get(run.id, 0) + 1
            groups[kind_of(outcome), number].append((run, outcome))
        return list(groups.values())

    async def _send(
        self,
        queue: OutcomeQueue,
        group: list[Written],
        *,
        last_try: bool = False,
        skip_locked: bool = False,
    ) -> bool:
        """Write outcomes of one kind. False if they have to be written again, in smaller statements."""
        fault_points.reach("before-acknowledge")
        backoff = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS)
        resent: list[bool] = []
        tries = 0
        skip_locked = skip_locked or any(run.rejections for run, _ in group)
        statement = _noting_resends(self._statement(group, skip_locked), resent, queue.timeout)
        if any(run.in_doubt for run, _ in group) and statement.resend is not None:
            statement = statement.resend()
        while True:
            try:
                accepted: Collection[UUID] = await self._store.run(statement)
                break
            except Exception as error:
                if resent or isinstance(error, DatabaseTimeout):
                    for run, _ in group:
                        run.in_doubt = True
                if is_locked(error) and not skip_locked:
                    return await self._send(queue, group, last_try=last_try, skip_locked=True)
                tries += 1
                is_cancelled = len(group) == 1 and is_statement_cancelled(error)
                if not _is_transient(error) or (is_cancelled and tries >= CANCELLED_TRIES):
                    return await self._split(queue, group, error, last_try=last_try)
                # Retry until the database answers: after the lease has expired it may reject the write.
                self._lines.log(
                    logger, logging.WARNING, "outcomes could not be written; retrying",
                    kind=("outcomes", type(error)),
                    fields={"outcomes": len(group), "error": str(error)},
                )  # fmt: skip
                if is_too_much(error) and not is_cancelled:
                    self._write_later(queue, group)
                    return False
                await asyncio.sleep(backoff.next())
                # Not the first form: what an attempt without an answer has written counts as its own.
                if statement.resend is not None:
                    statement = statement.resend()
        fault_points.reach("after-acknowledge")
        if accepted:  # not if another transaction, perhaps an earlier send, has locked them all
            queue.grow()
        if len(accepted) < len(group):
            accepted = set(accepted)
            rejected = [each for each in group if each[0].id not in accepted]
            for run, _ in rejected:
                run.in_doubt = run.in_doubt or bool(resent)
            self._rejected.put(rejected)
            group = [each for each in group if each[0].id in accepted]
        self._finish(group, accepted)
        return True

    def _lose(self, group: list[Finished]) -> None:
        self._finish(group, ())

    def _write_later(self, queue: OutcomeQueue, group: list[Written]) -> None:
        """A statement was too much for the server: write fewer outcomes at once. An outcome that takes too long
        by itself must not delay the others."""
        later = self._large if len(group) == 1 else queue
        later.shrink(len(group))
        later.put_back(group)

    async def _split(
        self, queue: OutcomeQueue, group: list[Written], error: Exception, *, last_try: bool
    ) -> bool:
        if len(group) > 1:
            middle = len(group) // 2
            halves = group[:middle], group[middle:]
            return all([await self._send(queue, half) for half in halves])
        run, outcome = group[0]
        logger.warning(
            "outcome rejected by the database",
            exc_info=error,
            extra={"job_id": str(run.id), "job_type": run.job.job_type},
        )
        if last_try:
            self._heartbeat.give_up([run])
            self._finish(group, ())
            return True
        return await self._send(queue, [(run, _writable(outcome, error))], last_try=True)

    def _statement(self, group: Sequence[Written], skip_locked: bool) -> Statement[list[UUID]]:
        now = time.monotonic()
        return acknowledge(
            self._statements,
            [run.id for run, _ in group],
            [run.lease_id for run, _ in group],
            [outcome for _, outcome in group],
            [None if run.started is None else now - run.started for run, _ in group],
            skip_locked=skip_locked,
        )

    def _finish(self, group: Sequence[Finished], accepted: Collection[UUID]) -> None:
        """Outcomes were written, all of the group or none, or their lease was lost."""
        now = time.monotonic()
        is_accepted = bool(accepted)
        self._heartbeat.remove([run for run, _ in group], is_accepted=is_accepted)
        self.written += len(accepted)
        is_logged, hooks = logger.isEnabledFor(logging.DEBUG), self._hooks
        ended: list[tuple[Claimed, str, float]] = []
        for run, outcome in group:
            if run.is_acknowledged:
                continue
            run.is_acknowledged = True
            self._unwritten -= 1
            if self._locked and run in self._locked:
                self._locked.remove(run)
            else:
                self._bytes -= run.size
            if run.on_acknowledged is not None:
                run.on_acknowledged()
            state, error = _state_after(run, outcome, is_accepted)
            if run.started is not None:
                ended.append((run.job, state, now - run.started))
            if is_logged or state != "completed":
                _log(self._lines, run, state, error, resent=run.in_doubt)
            if hooks.active:
                hooks.notify(run.job, state, error)
        self._throughput.add(ended)
        if not self._unwritten:
            self._drained.set()
        self._check_room()

    def _check_room(self) -> None:
        unwritten = self._unwritten - len(self._locked)
        if self.is_full and 2 * self._bytes < FULL_BYTES and 2 * unwritten < FULL_OUTCOMES:
            self.is_full = False
            self._room.set()
            self.on_room()


def _writable(outcome: Acknowledgement, error: Exception) -> Acknowledgement:
    """What to write for an outcome that the database rejected with this error. Its texts are ASCII: the encoding of the
    database may not have the other characters."""
    match outcome:
        case Failed(text, traceback, retry_in, cause):
            return Failed(_to_ascii(text), traceback and _to_ascii(traceback), retry_in, cause)
        case Cancelled(reason):
            return Cancelled(_to_ascii(reason))
    retry_in = CANCELLED_RETRY_SECONDS if is_statement_cancelled(error) else None
    return Failed(_to_ascii(payload.format_error(error)), None, retry_in)


def _to_ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def _noting_resends(
    statement: Statement[list[UUID]], resent: list[bool], timeout: float
) -> Statement[list[UUID]]:
    """The statement; `resent` is no longer empty after it was sent again for want of an answer."""
    statement = dataclasses.replace(statement, timeout=timeout, is_divisible=True)

    def resend() -> Statement[list[UUID]]:
        resent.append(True)
        again = statement if statement.resend is None else statement.resend()
        again = dataclasses.replace(again, timeout=timeout, is_divisible=True)
        return dataclasses.replace(again, resend=lambda: again)

    return dataclasses.replace(statement, resend=resend)


def _log(lines: RepeatedLines, run: Run, state: str, error: str | None, *, resent: bool) -> None:
    fields = {
        "job_id": str(run.id),
        "job_type": run.job.job_type,
        "queue": run.job.queue,
        "attempt": run.job.attempts,
    }
    if state == "lost" and resent:
        # A failure or a release leaves nothing by which its lease could be recognized.
        logger.info(
            "acknowledgement sent again and not needed: it was written before, or the lease was lost",
            extra=fields,
        )
    elif state == "lost":
        logger.warning("acknowledgement rejected: lease lost", extra=fields)
    elif state in ("failed", "retrying"):
        # Attempts that fail alike are counted; the last attempt of a job always has its line.
        lines.log(
            logger, logging.INFO, "job failed",
            kind=("job failed", run.job.job_type, shape_of(error or "")),
            fields={**fields, "state": state, "error": error},
            always=state == "failed",
        )  # fmt: skip
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
