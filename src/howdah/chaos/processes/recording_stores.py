"""Stores that write to the ledger what they ask of the database and what it answers: the one place through
which every claim, heartbeat and acknowledgement of a worker goes, and of a bare queue as well."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from howdah import async_queue, queue
from howdah.database.async_store import AsyncStore
from howdah.database.store import Store
from howdah.errors import DatabaseUnreachable, LeaseLost
from howdah.worker import runner

if TYPE_CHECKING:
    from uuid import UUID

    from howdah.chaos.ledger import Ledger
    from howdah.protocol.statements import Statement

T = TypeVar("T")

_ACKNOWLEDGING = {
    "complete_jobs": "complete",
    "fail_jobs": "fail",
    "release_jobs": "release",
    "stop_jobs": "stop",
}
_TIMELY = {*_ACKNOWLEDGING, "claim_job_batch", "extend_jobs", "start_jobs"}
LATE = 1.0
"""Seconds for an answer above which it is noted: the store has been trying to reconnect meanwhile."""


class Notes:
    """Turns statements and their answers into lines of the ledger."""

    def __init__(self, ledger: Ledger, lease: float) -> None:
        self._ledger = ledger
        self._lease = lease
        self._claims: dict[
            str, tuple[float, bool]
        ] = {}  # of each job and fence: since when, and if last
        self._announced: set[str] = set()
        self._in_trouble = False
        self._claimed_at = 0.0

    def invoked(self, statement: Statement[Any]) -> tuple[str, float]:
        """Before a statement is sent: what it is, and when."""
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
        """A heartbeat tells the database which jobs have begun, some of them before their thread runs."""
        for (job, fence), elapsed in zip(
            _pairs(statement), statement.parameters[3] or (), strict=False
        ):
            if elapsed is not None and job + fence not in self._announced:
                self._announced.add(job + fence)
                self._ledger.write("announce", job=job, fence=fence)

    def answered(self, function: str, asked: float, statement: Statement[Any], answer: Any) -> None:
        """After a statement was committed, in a transaction of its own."""
        late = time.monotonic() - asked > LATE
        if self._in_trouble or (late and function in _TIMELY):
            self._in_trouble = False
            self._ledger.write("well", asked=asked, function=function)
        if function == "claim_job_batch":
            self._claimed_at = time.monotonic()
            self._claimed(asked, answer, durable="synchronous_commit" not in statement.text)
        elif function == "extend_jobs" and answer is not None:  # a bare queue does not say of which
            self._extended(asked, statement, answer)
        elif function in _ACKNOWLEDGING:
            # A bare queue has nothing to say if all were accepted, and else raises `LeaseLost`.
            ids = statement.parameters[0] if answer is None else answer
            self._answered(function, asked, statement, {str(each) for each in ids})

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
        """After a statement of which nobody knows whether it was committed."""
        if isinstance(error, DatabaseUnreachable):
            self._in_trouble = True
            self._ledger.write("trouble", asked=asked, function=function, claimed=self._claimed_at)
        if function in _ACKNOWLEDGING and isinstance(error, LeaseLost):
            lost = set(error.ids)
            kept = {str(each) for each in statement.parameters[0] if each not in lost}
            self._answered(function, asked, statement, kept)
        elif function in _ACKNOWLEDGING:
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
        """Only of leases that would otherwise soon run out, as the others prove nothing."""
        extended = {str(each[0]) for each in answer if each[1]}
        for job, fence in _pairs(statement):
            since, _ = self._claims.get(job + fence, (asked, False))
            if job in extended and asked - since > self._lease / 2:
                self._ledger.write("beat", job=job, fence=fence, asked=asked)

    def _acknowledged(self, what: str, statement: Statement[Any]) -> list[tuple[str, str, bool]]:
        """Job, fence and whether it ends the job, of each."""
        pairs = _pairs(statement)
        if what != "fail":
            return [(job, fence, what in ("complete", "stop")) for job, fence in pairs]
        again = [at is not None or pause is not None
                 for at, pause in zip(*statement.parameters[3:5], strict=True)]  # fmt: skip
        return [
            (job, fence, not retry or self._claims.get(job + fence, (0.0, False))[1])
            for (job, fence), retry in zip(pairs, again, strict=True)
        ]


def _pairs(statement: Statement[Any]) -> list[tuple[str, str]]:
    ids, fences = statement.parameters[:2]
    return [(str(i), str(fence)) for i, fence in zip(ids, fences, strict=True)]


def watch(ledger: Ledger, lease: float) -> None:
    """From now on the workers and bare queues of this process write to the ledger."""
    notes = Notes(ledger, lease)

    class WatchedAsyncStore(AsyncStore):
        async def run(self, statement: Statement[T], conn: Any = None) -> T:
            function, asked = notes.invoked(statement)
            try:
                answer = await super().run(statement, conn)
            except BaseException as error:
                notes.failed(function, asked, statement, error)
                raise
            if conn is None:  # else it is up to the caller's COMMIT
                notes.answered(function, asked, statement, answer)
            return answer

    class WatchedStore(Store):
        def run(self, statement: Statement[T], conn: Any = None) -> T:
            function, asked = notes.invoked(statement)
            try:
                answer = super().run(statement, conn)
            except BaseException as error:
                notes.failed(function, asked, statement, error)
                raise
            if conn is None:  # else it is up to the caller's COMMIT
                notes.answered(function, asked, statement, answer)
            return answer

    # Where the worker and the bare queue look the names up.
    vars(runner)["AsyncStore"] = WatchedAsyncStore
    vars(runner)["Store"] = WatchedStore
    vars(queue)["Store"] = WatchedStore
    vars(async_queue)["AsyncStore"] = WatchedAsyncStore
