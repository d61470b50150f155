"""Durations, times and numbers that make no sense: every function refuses them in words or gives them the documented
meaning, and no job becomes unreachable."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pytest
from calls import claim, enqueue, fences, rows, status

from howdah import InvalidOption, JobQueue

if TYPE_CHECKING:
    Connection = psycopg.Connection[Any]

WORK = {"job_type": "work"}
CLAIMED = "%(ids)s, %(lease_ids)s"
VALUES = {
    "interval": ["NULL", "0", "-1 second", "1000000 years", "-1000000 years", "infinity", "-infinity"],
    "timestamptz": ["NULL", "infinity", "-infinity", "0001-01-01 BC", "200000-01-01"],
    "int": ["NULL", "0", "-1", "2147483647", "-2147483648"],
    "float8": ["NULL", "NaN", "infinity", "-infinity", "-1", "1e300"],
}  # fmt: skip
REFUSED = (psycopg.errors.InvalidParameterValue, psycopg.errors.CheckViolation)


class Parameter(NamedTuple):
    call: str
    """The call, with {} for the value."""
    kind: str
    accepted: frozenset[str]
    """The values with a documented meaning."""


def parameter(call: str, kind: str, *accepted: str) -> Parameter:
    return Parameter(call, kind, frozenset(accepted))


PARAMETERS = {
    "claim_job_batch.p_batch_size": parameter("claim_job_batch('w', p_batch_size => {})", "int"),
    "claim_job_batch.p_lease": parameter("claim_job_batch('w', p_lease => {})", "interval"),
    "claim_runs.p_batch_size": parameter("claim_runs('w', NULL, {}, '30 s', '{{default}}')", "int"),
    "claim_runs.p_lease": parameter("claim_runs('w', NULL, 1, {}, '{{default}}')", "interval"),
    "claim_runs.p_due_from": parameter(
        "claim_runs('w', NULL, 1, '30 s', '{{default}}', {})", "timestamptz", *VALUES["timestamptz"]
    ),
    "claim_job_batch.p_due_from": parameter(
        "claim_job_batch('w', p_due_from => {})", "timestamptz", *VALUES["timestamptz"]
    ),
    "pass_wake.p_due_from": parameter(
        "pass_wake('w', p_due_from => {})", "timestamptz", *VALUES["timestamptz"]
    ),
    "extend_jobs.p_lease": parameter(f"extend_jobs({CLAIMED}, {{}})", "interval"),
    "extend_jobs.p_elapsed": parameter(
        f"extend_jobs({CLAIMED}, p_elapsed => ARRAY[{{}}])", "float8", *VALUES["float8"]
    ),
    "enqueue_and_claim.p_lease": parameter(
        """enqueue_and_claim('{{"job_type": "work"}}', 'w', {})""", "interval"
    ),
    "enqueue_and_claim.p_idempotency_ttl": parameter(
        """enqueue_and_claim('{{"job_type": "work", "idempotency_key": "k"}}', 'w',
           p_idempotency_ttl => {})""", "interval", "0",
    ),
    "enqueue_jobs.p_idempotency_ttl": parameter(
        """enqueue_jobs('[{{"job_type": "work", "idempotency_key": "k"}}]',
           p_idempotency_ttl => {})""", "interval", "0",
    ),
    "enqueue_job.p_idempotency_ttl": parameter(
        "enqueue_job('work', p_idempotency_key => 'k', p_idempotency_ttl => {})", "interval", "0"
    ),
    "enqueue_job.p_run_at": parameter(
        "enqueue_job('work', p_run_at => {})", "timestamptz", "NULL", "-infinity", "0001-01-01 BC"
    ),
    "enqueue_job.p_keep": parameter("enqueue_job('work', p_keep => {})", "interval", "NULL", "0"),
    "enqueue_job.p_priority": parameter("enqueue_job('work', p_priority => {})", "int", "NULL", "0", "-1"),
    "enqueue_job.p_max_attempts": parameter("enqueue_job('work', p_max_attempts => {})", "int", "NULL"),
    "complete_jobs.p_elapsed": parameter(
        f"complete_jobs({CLAIMED}, p_elapsed => ARRAY[{{}}])", "float8", *VALUES["float8"]
    ),
    "complete_runs.p_elapsed": parameter(
        f"complete_runs({CLAIMED}, p_elapsed => ARRAY[{{}}])", "float8", *VALUES["float8"]
    ),
    "fail_jobs.p_retry_at": parameter(
        f"fail_jobs({CLAIMED}, '{{{{no}}}}', ARRAY[{{}}])", "timestamptz", *VALUES["timestamptz"]
    ),
    "fail_jobs.p_retry_in": parameter(
        f"fail_jobs({CLAIMED}, '{{{{no}}}}', p_retry_in => ARRAY[{{}}])", "interval", *VALUES["interval"]
    ),
    "fail_jobs.p_elapsed": parameter(
        f"fail_jobs({CLAIMED}, '{{{{no}}}}', p_retry_in => '{{{{NULL}}}}', p_elapsed => ARRAY[{{}}])",
        "float8", *VALUES["float8"],
    ),
    "release_jobs.p_delay": parameter(f"release_jobs({CLAIMED}, {{}})", "interval", "0"),
    "recover_stale_jobs.p_timeout": parameter("recover_stale_jobs({})", "interval", "NULL", "0"),
    "recover_stale_jobs.p_limit": parameter("recover_stale_jobs(NULL, {})", "int", "2147483647"),
    "clear_finished.p_older_than": parameter("clear_finished({})", "interval", "0"),
    "watch_jobs.p_for": parameter("watch_jobs('watcher', %(ids)s, {})", "interval", "0"),
    "next_due_at.p_after": parameter("next_due_at(p_after => {})", "timestamptz", *VALUES["timestamptz"]),
    "report_progress.p_progress": parameter(
        f"report_progress({CLAIMED}, ARRAY[{{}}])", "int", *VALUES["int"]
    ),
}  # fmt: skip
# Stored or compared as they are; a lane of a priority that no job can have is never used.
NAMES = {
    "add_events.p_numbers", "add_late_events.p_numbers", "get_events.p_after", "register_worker.p_pid",
    "register_worker.p_priorities",
}  # fmt: skip
CASES = [(name, given) for name, each in PARAMETERS.items() for given in VALUES[each.kind]]


def test_every_duration_time_and_number_of_the_contract_is_tried(conn: Connection) -> None:
    found = rows(
        conn,
        "SELECT p.proname || '.' || a.name AS name "
        "FROM pg_proc AS p, unnest(p.proargnames, p.proargtypes::oid[]) AS a (name, type) "
        "WHERE p.pronamespace = 'howdah'::regnamespace AND p.prosecdef "
        "AND a.type = ANY ('{interval,interval[],timestamptz,timestamptz[],int,int[],bigint,bigint[],"
        "float8,float8[]}'::regtype[]::oid[])",
    )
    assert {row.name for row in found} == PARAMETERS.keys() | NAMES


@pytest.fixture
def job(conn: Connection) -> Any:
    enqueue(conn, WORK)
    (job,) = claim(conn)
    enqueue(conn, WORK)
    return job


@pytest.mark.parametrize(("name", "given"), CASES)
def test_a_value_is_refused_in_words_or_has_its_documented_meaning(
    conn: Connection, job: Any, name: str, given: str
) -> None:
    call, kind, accepted = PARAMETERS[name]
    if kind == "interval" and "infinity" in given and conn.info.server_version < 170000:
        given = "178000000 years" if given == "infinity" else "-178000000 years"
        accepted = accepted | {given} if "infinity" in accepted else accepted
    literal = f"NULL::{kind}" if given == "NULL" else f"'{given}'::{kind}"
    try:
        conn.execute(
            f"SELECT * FROM howdah.{call.format(literal)}".encode(),
            {"ids": [job.id], "lease_ids": [job.lease_id]},
        )
    except REFUSED as refused:
        assert given not in accepted
        parameter = name.partition(".")[2]
        words = str(refused) + str(refused.diag.constraint_name)
        assert parameter in words or parameter.removeprefix("p_") in words
        assert status(conn, job.id) == "claimed"
    else:
        assert given in accepted
    unreachable = rows(
        conn,
        "SELECT j.id FROM howdah.live_jobs AS j LEFT JOIN howdah.leases AS l USING (lease_id) "
        "WHERE NOT isfinite(j.run_at) OR j.lease_id IS NOT NULL "
        "AND (l.expires_at <= j.created_at + interval '31 days' AND j.id = ANY (l.job_ids)) IS NOT TRUE",
    )
    assert unreachable == []


@pytest.mark.parametrize("lease", [0, -1, float("nan"), float("inf"), 1e300, timedelta(days=31)])
def test_a_queue_refuses_a_lease_that_makes_no_sense(
    conn: Connection, database: str, lease: Any
) -> None:
    enqueue(conn, WORK)
    with contextlib.closing(JobQueue(database)) as queue:
        (job,) = queue.claim()
        with pytest.raises(InvalidOption, match=r"^lease is "):
            queue.extend(job, lease=lease)


@pytest.mark.parametrize("retry_in", ["1000000 years", "-1000000 years"])
def test_an_odd_retry_delay_does_not_refuse_the_other_outcomes_of_its_batch(
    conn: Connection, retry_in: str
) -> None:
    enqueue(conn, WORK, WORK)
    jobs = claim(conn)
    accepted = rows(
        conn,
        "SELECT howdah.fail_jobs(%s, %s, '{no,no}', p_retry_in => ARRAY[interval '0', %s])",
        *fences(jobs),
        retry_in,
    )
    assert len(accepted) == 2


def test_a_job_that_ends_without_an_elapsed_time_started_when_it_was_claimed(
    conn: Connection, job: Any
) -> None:
    conn.execute("SELECT howdah.complete_jobs(%s, %s)", fences([job]))
    found = rows(conn, "SELECT started_at = claimed_at AS same FROM howdah.get_jobs(%s)", [job.id])
    assert found == [(True,)]
