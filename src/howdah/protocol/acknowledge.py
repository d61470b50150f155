"""Turns outcomes of runs into the statement that writes them. The worker's completer, `task.run` and
`howdah.testing.drain` all acknowledge through this module; they decide when to send the statement."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, assert_never, cast

from howdah.encoding import validation
from howdah.outcome import (
    NOT_COMMITTED,
    Cancelled,
    Completed,
    CompletedByHandler,
    Failed,
    Released,
)

if TYPE_CHECKING:
    from uuid import UUID

    from howdah.outcome import Acknowledgement
    from howdah.protocol.statements import Statement
    from howdah.protocol.worker_statements import WorkerStatements

NOT_COMMITTED_RETRY = timedelta(seconds=1)


def kind_of(outcome: Acknowledgement) -> object:
    """Outcomes of equal kind fit into one statement: one type, and for released jobs one delay."""
    return outcome.delay if isinstance(outcome, Released) else type(outcome)


def acknowledge(
    statements: WorkerStatements,
    ids: list[UUID],
    lease_ids: list[UUID],
    outcomes: list[Acknowledgement],
    elapsed: list[float | None] | None = None,
    *,
    skip_locked: bool = True,
) -> Statement[list[UUID]]:
    """The statement that writes outcomes of one kind; its rows are the ids that were accepted.

    `elapsed` is the seconds since each job started, or None for a job that has not started. With `skip_locked`, jobs
    that other transactions have locked are rejected; without it, completions raise, and cost less."""
    match outcomes[0]:
        case Completed():
            results = [each.result for each in cast("list[Completed]", outcomes)]
            complete = statements.complete_jobs if skip_locked else statements.complete_runs
            return complete(ids, lease_ids, results, elapsed)
        case Failed():
            failures = [each for each in outcomes if isinstance(each, Failed)]
            return statements.fail_jobs(
                ids,
                lease_ids,
                [each.error for each in failures],
                [None] * len(ids),
                [
                    None
                    if each.retry_in is None
                    else validation.to_timedelta(each.retry_in, "retry")
                    for each in failures
                ],
                elapsed=elapsed,
                tracebacks=[each.traceback for each in failures],
            )
        case CompletedByHandler():
            # Rejected if the handler's transaction committed; otherwise the attempt has failed.
            n = len(ids)
            return statements.fail_jobs(
                ids, lease_ids, [NOT_COMMITTED] * n, [None] * n, [NOT_COMMITTED_RETRY] * n
            )
        case Released(delay):
            return statements.release_jobs(ids, lease_ids, validation.to_timedelta(delay, "delay"))
        case Cancelled():
            reasons = [each.reason for each in outcomes if isinstance(each, Cancelled)]
            return statements.stop_jobs(ids, lease_ids, reasons)
        case unknown:
            assert_never(unknown)
