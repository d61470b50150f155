"""Runs pending jobs in the process of the test: claimed, run and acknowledged with the statements that a worker
uses, until no job is due. One generator yields the steps; `drain` and `adrain` only take them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from howdah.errors import HowdahError
from howdah.execution.run import make_context
from howdah.outcome import (
    Completed,
    CompletedByHandler,
    Failed,
    Lost,
    Outcome,
    Released,
)
from howdah.protocol.acknowledge import acknowledge
from howdah.protocol.schema_name import quote_schema
from howdah.protocol.statements import Statement
from howdah.testing import running

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from howdah.app import App
    from howdah.context import RunState
    from howdah.model import Job

LEASE = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainResult:
    """The number of runs by outcome. `errors` are the messages of the jobs that failed permanently."""

    completed: int = 0
    failed: int = 0
    retried: int = 0
    snoozed: int = 0
    cancelled: int = 0
    errors: tuple[str, ...] = ()


def drain(
    app: App,
    *,
    queues: Iterable[str] | None = None,
    with_scheduled: bool = False,
    limit: int = 10_000,
    conn: Any = None,
    resources: Mapping[str, Any] | None = None,
) -> DrainResult:
    """Run all due jobs of the app's tasks in this process, at most `limit` runs.

    `with_scheduled` also runs jobs that are delayed, snoozed or waiting for a retry, in due order. With
    `conn`, jobs are claimed, run and acknowledged on your connection, in your open transaction; jobs that
    handlers enqueue through this app are part of it. Handlers read `resources` from `ctx.resources`."""
    steps = _steps(app, queues, with_scheduled, limit, resources)
    with _on_connection(app, conn):
        return _result(running.drive(steps, app.backend.run))


async def adrain(
    app: App,
    *,
    queues: Iterable[str] | None = None,
    with_scheduled: bool = False,
    limit: int = 10_000,
    conn: Any = None,
    resources: Mapping[str, Any] | None = None,
) -> DrainResult:
    """`drain`, awaited. Async tasks run in this event loop, others in a thread."""
    steps = _steps(app, queues, with_scheduled, limit, resources)
    with _on_async_connection(app, conn):
        return _result(await running.drive_async(steps, app.abackend.run))


def _result(ended: list[tuple[str, str | None]]) -> DrainResult:
    errors = tuple(error or "" for state, error in ended if state == "failed")
    return DrainResult(**Counter(state for state, _ in ended if state != "lost"), errors=errors)


# ── the steps ─────────────────────────────────────────────────────────────────────────────────────


def _steps(
    app: App,
    queues: Iterable[str] | None,
    with_scheduled: bool,
    limit: int,
    resources: Mapping[str, Any] | None,
) -> running.Steps[list[tuple[str, str | None]]]:
    wanted = None if queues is None else [queues] if isinstance(queues, str) else list(queues)
    types = list(app.tasks)
    ended: list[tuple[str, str | None]] = []
    advanced = False
    while len(ended) < limit:
        yield _assign_keys(app.schema)
        found = yield _find_queues(app.schema, types)
        jobs = yield app.statements.claim_job_batch(
            app.backend.operations.worker_id, types, 1, LEASE, found if wanted is None else wanted,
            started=True, due_from=-math.inf,
        )  # fmt: skip
        if jobs:
            advanced = False
            ended.append((yield from _run(app, jobs[0], resources)))
        elif with_scheduled and not advanced:
            yield _make_due(app.schema, types, wanted)
            advanced = True
        else:
            break
    return ended


def _run(app: App, job: Job, resources: Mapping[str, Any] | None) -> Generator[Any, Any, Any]:
    """One run and its acknowledgement. Returns the state of the job and its error."""
    task, ids, leases = app.tasks[job.job_type], [job.id], [job.lease_id or job.id]
    reports = _Reports(ids, leases)
    context = make_context(task, job, data=job.data, sink=reports, resources=resources)
    outcome: Outcome = yield task, context
    try:
        yield from reports.statements(app, outcome)
        accepted: list[UUID] = []
        if not isinstance(outcome, Lost):
            accepted = yield acknowledge(app.statements, ids, leases, [outcome])
        after: Job | None = yield app.statements.get(job.id)
    except Exception as error:
        # An SQL error of the handler aborts the caller's transaction, so this statement failed: the
        # handler's error is the cause to show.
        raise error from (outcome.cause if isinstance(outcome, Failed) else None)
    running.raise_interrupt(outcome)
    return _state(outcome, bool(accepted), after)


def _state(outcome: Outcome, accepted: bool, after: Job | None) -> tuple[str, str | None]:
    match outcome:
        case CompletedByHandler() if not accepted:
            return "completed", None  # its transaction completed the job
        case _ if not accepted:
            return "lost", None
        case Completed():
            return "completed", None
    if after is None or not after.status.is_final:
        return ("snoozed" if isinstance(outcome, Released) else "retried"), None
    return str(after.status), after.last_error


class _Reports:
    """The `Sink` of one run: keeps the reports of the handler, which are written before its outcome."""

    def __init__(self, ids: list[UUID], leases: list[UUID]) -> None:
        self._ids, self._leases = ids, leases
        self._progress: tuple[int | None, str | None] | None = None
        self._events: list[tuple[str, str]] = []

    def progress(self, run: RunState, percent: int | None, stage: str | None) -> None:
        """Keep the newest progress."""
        self._progress = (percent, stage)

    def event(self, run: RunState, kind: str, data: str) -> bool:
        """Keep an event."""
        self._events.append((kind, data))
        return True

    def statements(self, app: App, outcome: Outcome) -> Iterator[Statement[Any]]:
        """The statements that write the reports."""
        ids, leases = self._ids, self._leases
        if self._progress is not None:
            percent, stage = self._progress
            yield app.statements.report_progress(ids, leases, [percent], [stage])
        if self._events:
            n = len(self._events)
            kinds, datas = [kind for kind, _ in self._events], [data for _, data in self._events]
            yield app.statements.add_events(ids * n, leases * n, kinds, datas)
            if isinstance(outcome, CompletedByHandler):
                yield app.statements.add_late_events(ids * n, leases * n, kinds, datas)


# ── statements of tests ──────────────────────────────────────────────────────────────────────────


def _assign_keys(schema: str) -> Statement[None]:
    """Assign every ordering key without a holder to its first job. Otherwise the commit does this. SET
    CONSTRAINTS would too, but it would also check the caller's own deferred constraints."""
    s = quote_schema(schema)
    return Statement(
        "assign_key",
        f"SELECT count({s}.assign_key(k.ordering_key)) FROM ("
        f"SELECT j.ordering_key FROM {s}.live_jobs AS j WHERE j.ordering_key IS NOT NULL "
        "GROUP BY j.ordering_key HAVING NOT bool_or(j.holds_key)) AS k",
        (),
        lambda rows: None,
    )


def _find_queues(schema: str, types: Sequence[str]) -> Statement[list[str]]:
    """The queues with pending jobs of these tasks. Missing lanes are created."""
    s = quote_schema(schema)
    return Statement(
        "add_missing_lane",
        f"SELECT p.queue, {s}.add_missing_lane(p.queue, p.job_type, p.priority) "
        "FROM (SELECT DISTINCT j.queue::text, j.job_type::text, j.priority::int "
        f"FROM {s}.live_jobs AS j WHERE j.status = 'pending' AND j.blockers = 0 "
        "AND j.job_type = ANY ($1::text[])) AS p",
        (list(types),),
        lambda rows: sorted({row[0] for row in rows}) or ["default"],
    )


def _make_due(schema: str, types: Sequence[str], queues: Sequence[str] | None) -> Statement[None]:
    """Make scheduled jobs due now, in due order."""
    s = quote_schema(schema)
    return Statement(
        "make_due",
        f"WITH later AS (SELECT j.id, row_number() OVER (ORDER BY j.run_at DESC, j.id DESC) AS n "
        f"FROM {s}.live_jobs AS j "
        "WHERE j.status = 'pending' AND j.run_at > clock_timestamp() "
        "AND j.job_type = ANY ($1::text[]) AND ($2::text[] IS NULL OR j.queue = ANY ($2::text[]))), "
        f"updated AS (UPDATE {s}.live_jobs AS j "
        "SET run_at = statement_timestamp() - l.n * interval '1 microsecond' "
        "FROM later AS l WHERE j.id = l.id RETURNING j.id) "
        "SELECT count(*) FROM updated",
        (list(types), None if queues is None else list(queues)),
        lambda rows: None,
    )


# ── on the caller's connection ────────────────────────────────────────────────────────────────────


class _CallerStore:
    """A store that runs all statements on the caller's connection."""

    def __init__(self, store: Any, run: Any) -> None:
        self._store = store
        self.run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def run_all(self, statements: Sequence[Statement[Any]]) -> list[Any]:
        return [self.run(statement) for statement in statements]


class _AsyncCallerStore(_CallerStore):
    async def run_all(self, statements: Sequence[Statement[Any]]) -> list[Any]:  # type: ignore[override]
        return [await self.run(statement) for statement in statements]


@contextlib.contextmanager
def _replaced(app: App, store: _CallerStore, astore: _AsyncCallerStore) -> Iterator[None]:
    before = app.backend.store, app.abackend.store
    vars(app.backend)["store"], vars(app.abackend)["store"] = store, astore
    try:
        yield
    finally:
        app.backend.store, app.abackend.store = before


@contextlib.contextmanager
def _on_connection(app: App, conn: Any) -> Iterator[None]:
    if conn is None:
        yield
        return
    store, astore = app.backend.store, app.abackend.store

    def run(statement: Statement[Any], own: Any = None) -> Any:
        return store.run(statement, conn if own is None else own)

    async def arun(statement: Statement[Any], own: Any = None) -> Any:
        return await astore.run(statement, own) if own is not None else run(statement)

    with _replaced(app, _CallerStore(store, run), _AsyncCallerStore(astore, arun)):
        yield


@contextlib.contextmanager
def _on_async_connection(app: App, conn: Any) -> Iterator[None]:
    if conn is None:
        yield
        return
    store, astore = app.backend.store, app.abackend.store
    loop = asyncio.get_running_loop()

    async def arun(statement: Statement[Any], own: Any = None) -> Any:
        return await astore.run(statement, conn if own is None else own)

    def run(statement: Statement[Any], own: Any = None) -> Any:
        if own is not None:
            return store.run(statement, own)
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is loop:
                raise HowdahError(
                    "a handler called the sync queue in the event loop of the connection that adrain "
                    "uses, and would block that loop forever; call aenqueue there."
                )
        return asyncio.run_coroutine_threadsafe(arun(statement), loop).result()

    with _replaced(app, _CallerStore(store, run), _AsyncCallerStore(astore, arun)):
        yield
