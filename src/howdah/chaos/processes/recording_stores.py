"""Stores that record every statement and its reply in the ledger. Every claim, heartbeat and acknowledgement of a
worker or of a bare queue goes through a store."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

from howdah import async_queue, queue
from howdah.database.async_store import AsyncStore
from howdah.database.driver_errors import is_locked
from howdah.database.store import Store
from howdah.errors import DatabaseUnreachable
from howdah.worker import runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from uuid import UUID

    from howdah.chaos.ledger import Ledger
    from howdah.protocol.statements import Statement

T = TypeVar("T")

_ACKNOWLEDGING = {
    "complete_jobs": "complete",
    "complete_runs": "complete",
    "fail_jobs": "fail",
    "release_jobs": "release",
    "stop_jobs": "stop",
}
_CLAIMING = {"claim_job_batch", "claim_runs"}
_TIMELY = {*_ACKNOWLEDGING, *_CLAIMING, "extend_jobs", "start_jobs"}
LATE_SECONDS = 1.0
"""A later reply is recorded as late: the store was reconnecting in the meantime."""


class StatementRecorder:
    """Writes statements and their replies to the ledger."""

    def __init__(self, ledger: Ledger, lease: float) -> None:
        self._ledger = ledger
        self._lease = lease
        # By job and fence: when the claim was sent, and whether it is the last attempt.
        self._claims: dict[str, tuple[float, bool]] = {}
        self._announced: set[str] = set()
        self._in_trouble = False
        self._claimed_at = 0.0

    @contextlib.contextmanager
    def recording(self, statement: Statement[T], conn: Any) -> Iterator[Callable[[T], T]]:
        """Record a statement. The block sends it and passes the reply to the function that it gets."""
        function, asked = self.invoked(statement)

        def record(answer: T) -> T:
            if conn is None:  # otherwise the caller's COMMIT decides
                self.answered(function, asked, statement, answer)
            return answer

        try:
            yield record
        except BaseException as error:
            self.failed(function, asked, statement, error)
            raise

    def invoked(self, statement: Statement[Any]) -> tuple[str, float]:
        """Before a statement is sent: its operation, and the time."""
        function = statement.operation
        now = time.monotonic()
        if function in _ACKNOWLEDGING:
            what = _ACKNOWLEDGING[function]
            for job, fence, final in self._acknowledged(what, statement):
                self._ledger.write("ack-invoked", job=job, fence=fence, what=what, final=final)
        elif function == "start_jobs":
            for job, fence in _pairs(statement):
                self._ledger.write("announce", job=job, fence=fence)
        elif function == "extend_jobs":
            self._announce_begun(statement)
        return function, now

    def _announce_begun(self, statement: Statement[Any]) -> None:
        """A heartbeat writes which jobs have started, some of them before their thread runs."""
        for (job, fence), elapsed in zip(
            _pairs(statement), statement.parameters[3] or (), strict=False
        ):
            if elapsed is not None and job + fence not in self._announced:
                self._announced.add(job + fence)
                self._ledger.write("announce", job=job, fence=fence)

    def answered(self, function: str, asked: float, statement: Statement[Any], answer: Any) -> None:
        """After a statement was committed in its own transaction."""
        late = time.monotonic() - asked > LATE_SECONDS
        if self._in_trouble or (late and function in _TIMELY):
            self._in_trouble = False
            self._ledger.write("well", asked=asked, function=function)
        if function in _CLAIMING:
            self._claimed_at = time.monotonic()
            self._claimed(asked, answer, durable="synchronous_commit" not in statement.text)
        elif (
            function == "extend_jobs" and answer is not None
        ):  # a bare queue does not return the ids
            self._extended(asked, statement, answer)
        elif function in _ACKNOWLEDGING:
            self._answered(function, asked, statement, {str(each) for each in answer})

    def _answered(
        self, function: str, asked: float, statement: Statement[Any], accepted: set[str]
    ) -> None:
        what = _ACKNOWLEDGING[function]
        for job, fence, final in self._acknowledged(what, statement):
            kind = "ack-accepted" if job in accepted else "ack-refused"
            self._ledger.write(kind, job=job, fence=fence, what=what, final=final, asked=asked)
            self._claims.pop(job + fence, None)

    def failed(
        self, function: str, asked: float, statement: Statement[Any], error: BaseException
    ) -> None:
        """After a statement failed; whether it was committed may be unknown."""
        if isinstance(error, DatabaseUnreachable):
            self._in_trouble = True
            self._ledger.write("trouble", asked=asked, function=function, claimed=self._claimed_at)
        if function in _ACKNOWLEDGING and not is_locked(error):
            what = _ACKNOWLEDGING[function]
            for job, fence, final in self._acknowledged(what, statement):
                self._ledger.write(
                    "ack-unknown", job=job, fence=fence, what=what, final=final, asked=asked
                )

    def _claimed(self, asked: float, jobs: Any, *, durable: bool) -> None:
        for job in jobs:
            self._claims[f"{job.id}{job.lease_id}"] = asked, job.attempts >= job.max_attempts
            self._ledger.write(
                "claim", job=job.id, fence=job.lease_id, attempt=job.attempts, most=job.max_attempts,
                claims=job.claims, type=job.job_type, queue=job.queue, asked=asked,
                durable=durable,
            )  # fmt: skip

    def _extended(
        self, asked: float, statement: Statement[Any], answer: list[tuple[UUID, bool, bool, bool]]
    ) -> None:
        """Record only leases past half of their time: earlier extensions prove nothing."""
        extended = {str(each[0]) for each in answer if each[1]}
        for job, fence in _pairs(statement):
            since, _ = self._claims.get(job + fence, (asked, False))
            if job in extended and asked - since > self._lease / 2:
                self._ledger.write("beat", job=job, fence=fence, asked=asked)

    def _acknowledged(self, what: str, statement: Statement[Any]) -> list[tuple[str, str, bool]]:
        """For each job: its id, its fence, and whether the acknowledgement ends it."""
        pairs = _pairs(statement)
        if what != "fail":
            return [(job, fence, what in ("complete", "stop")) for job, fence in pairs]
        retries = [at is not None or delay is not None
                   for at, delay in zip(*statement.parameters[3:5], strict=True)]  # fmt: skip
        return [
            (job, fence, not retry or self._claims.get(job + fence, (0.0, False))[1])
            for (job, fence), retry in zip(pairs, retries, strict=True)
        ]


def _pairs(statement: Statement[Any]) -> list[tuple[str, str]]:
    ids, fences = statement.parameters[:2]
    return [(str(i), str(fence)) for i, fence in zip(ids, fences, strict=True)]


def install(ledger: Ledger, lease: float) -> None:
    """Make the workers and bare queues of this process record to the ledger."""
    recorder = StatementRecorder(ledger, lease)

    class RecordingAsyncStore(AsyncStore):
        async def run(self, statement: Statement[T], conn: Any = None) -> T:
            with recorder.recording(statement, conn) as record:
                return record(await super().run(statement, conn))

    class RecordingStore(Store):
        def run(self, statement: Statement[T], conn: Any = None) -> T:
            with recorder.recording(statement, conn) as record:
                return record(super().run(statement, conn))

    # The modules in which the worker and the queues look the names up.
    _replace(runner, AsyncStore, RecordingAsyncStore)
    _replace(runner, Store, RecordingStore)
    _replace(queue, Store, RecordingStore)
    _replace(async_queue, AsyncStore, RecordingAsyncStore)


def _replace(module: ModuleType, store: type, recording_store: type) -> None:
    if vars(module).get(store.__name__) is not store:
        raise LookupError(f"{module.__name__} does not use {store.__name__}: nothing is recorded")
    vars(module)[store.__name__] = recording_store
