"""Proves that the model catches mistakes: each guard of the protocol is removed once, in the installed function, and
the walk that depends on it must then end in a violation."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import scenarios
from hypothesis import Phase, settings
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import run_state_machine_as_test
from machine import SETTINGS, Protocol
from reference import Violation
from system import System

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg


@dataclass(frozen=True, slots=True)
class Mutant:
    """A removed guard: the text of the function that is replaced, and the walk that catches it."""

    guard: str
    function: str
    edits: dict[str, str]
    caught_by: Callable[[System], None]
    says: str
    walks: int = 0  # random walks that catch it too; 0: not tried


MUTANTS = [
    Mutant(
        "the fence of an acknowledgement",
        "lock_leased",
        {
            "AND (j.id, j.lease_id) IN (": "AND (j.id, j.lease_id) NOT IN (",
            "j.lease_id = u.lease_id": "true",
        },
        scenarios.a_stale_fence_is_used_again,
        says="no other",
        walks=200,
    ),
    Mutant(
        "the fence of a heartbeat",
        "extend_jobs",
        {"j.lease_id = a.lease_id": "true"},
        scenarios.a_stale_fence_is_used_again,
        says="what is mine",
    ),
    Mutant(
        "the fence of a progress report",
        "report_progress",
        {"j.lease_id = a.lease_id": "true"},
        scenarios.a_stale_fence_is_used_again,
        says="what is mine",
    ),
    Mutant(
        "a claim skips what is locked",
        "claim_job_batch",
        {"FOR UPDATE SKIP LOCKED": "FOR UPDATE"},
        scenarios.two_claim_at_once,
        says="P5: waited",
        walks=200,
    ),
    Mutant(
        "a claim locks what it takes",
        "claim_job_batch",
        {"FOR UPDATE SKIP LOCKED": ""},
        scenarios.two_claim_at_once,
        says="P5: waited",
    ),
    Mutant(
        "the cap on attempts of a failure",
        "fail_jobs",
        {"AND j.attempts < j.max_attempts": ""},
        scenarios.a_job_fails_until_its_end,
        says="expected {'status': 'failed'",
    ),
    Mutant(
        "the cap on attempts of a recovery",
        "requeue_jobs",
        {"OR j.attempts < j.max_attempts": "OR true"},
        scenarios.a_job_kills_its_workers,
        says="expected {'status': 'failed'",
        walks=200,
    ),
    Mutant(
        "the limit of attempts that do not count",
        "requeue_jobs",
        {"j.claims - j.attempts < 10": "true"},
        scenarios.a_job_kills_its_workers_before_they_can_say_so,
        says="'attempts': 1, 'claims': 11",
    ),
    Mutant(
        "an attempt of a job that was only prefetched does not count",
        "requeue_jobs",
        {
            "p_why = 'release' OR (j.started_at IS NULL AND j.claims - j.attempts < 10))::int": "false)::int"
        },
        scenarios.a_neighbour_kills_the_worker,
        says="'attempts': 0, 'claims': 1,",
        walks=200,
    ),
    Mutant(
        "a suspect is claimed alone",
        "claim_job_batch",
        {"p.claims = p.attempts OR NOT p_suspects_alone": "true"},
        scenarios.a_killer_and_its_neighbours_are_claimed_in_a_bare_loop,
        says="P7: a claim takes",
        walks=200,
    ),
    Mutant(
        "a suspect that is claimed alone uses an attempt",
        "claim_job_batch",
        {"p_started OR v_suspect IS NOT NULL": "p_started"},
        scenarios.a_killer_and_its_neighbours_are_claimed_in_a_bare_loop,
        says="'started': True",
    ),
    Mutant(
        "the search for late leases goes back for a transaction that has ended",
        "recover_late",
        {"WHERE w.key <> ALL (v_open)": "WHERE false"},
        scenarios.a_claim_commits_after_its_lease_expired,
        says="the state of job",
    ),
    Mutant(
        "a requeued job is due above the head",
        "requeue_at",
        {"greatest(p_run_at, (": "coalesce(p_run_at, ("},
        scenarios.a_job_comes_back_below_the_head,
        says="the due time of",
    ),
    Mutant(
        "the sweep lowers a head that hides a job",
        "sweep_lane",
        {"v_from timestamptz := least(p_from, p_head)": "v_from timestamptz := p_head"},
        scenarios.a_producer_is_slower_than_the_sweeps,
        says="hidden after a sweep",
    ),
    Mutant(
        "the heads that an open transaction may have read are kept",
        "noted_writers",
        {"(p_noted ->> o.writer)::bigint,": ""},
        scenarios.a_producer_is_slower_than_the_sweeps,
        says="hidden after a sweep",
    ),
    Mutant(
        "an enqueue does not wait for a lane",
        "add_lane",
        {"IF pg_try_advisory_xact_lock(": "IF 0 <> ("},
        scenarios.two_add_a_lane,
        says="P5: waited",
    ),
    Mutant(
        "the second check for a key holder",
        "assign_key",
        {"WHERE j.ordering_key = p_key AND j.holds_key AND j.seq >= v_floor": "WHERE false"},
        scenarios.a_key_is_taken_while_its_holder_is_locked,
        says="the state of job",
        walks=200,
    ),
    Mutant(
        "a floor of keys lies below the jobs of open transactions",
        "key_floors",
        {"p_lasting_seq + 1": "9223372036854775807"},
        scenarios.a_producer_of_a_key_spans_sweeps,
        says="the line before a key",
    ),
    Mutant(
        "a floor of keys waits for transactions that span sweeps",
        "store_sweep",
        {"unnest(coalesce(v_last.seqs[1], 0) || v_new.seqs[2:])": "unnest(v_last.seqs[1:1])"},
        scenarios.a_producer_of_a_key_spans_sweeps,
        says="the line before a key",
    ),
    Mutant(
        "jobs that commit late go behind the key holder",
        "assign_key",
        {"UPDATE live_jobs AS j SET seq = DEFAULT WHERE j.id = v_late;": "NULL;"},
        scenarios.a_producer_of_a_key_commits_late,
        says="the line before a key",
    ),
    Mutant(
        "the jobs of a transaction keep their order behind the key holder",
        "assign_key",
        {"p_from_seq > 0 AND p_from_seq < v_holder_seq AND is_own_write(w.xmin)": "false"},
        scenarios.a_rival_enqueues_between_two_jobs_of_a_key,
        says="the line before a key",
    ),
    Mutant(
        "a key is handed over to the first waiting job",
        "hand_over_keys",
        {"ORDER BY j.seq": "ORDER BY j.seq DESC"},
        scenarios.a_key_goes_along_its_line,
        says="'holds_key': True",
        walks=200,
    ),
    Mutant(
        "a key that is unassigned is handed over to a job that committed late",
        "hand_over_keys",
        {"THEN key_floor(v_freed.key) ELSE": "THEN v_freed.seq ELSE"},
        scenarios.a_holder_ends_before_a_late_job_is_behind_it,
        says="the state of job",
    ),
    Mutant(
        "handing over a key does not wait",
        "give_key_to_job",
        {"FOR UPDATE SKIP LOCKED": "FOR UPDATE"},
        scenarios.a_waiting_job_is_being_cancelled,
        says="P5: waited",
    ),
    Mutant(
        "a job with a key is enqueued blocked",
        "enqueue_jobs",
        {"(i.ordering_key IS NOT NULL)::int": "0"},
        scenarios.a_key_goes_along_its_line,
        says="'holds_key': True",
    ),
    Mutant(
        "a completion that is resent is accepted under its own fence only",
        "complete_jobs",
        {"AND f.lease_id = a.lease_id": ""},
        scenarios.a_completion_is_repeated,
        says="no other",
    ),
    Mutant(
        "recovery skips what is locked",
        "recover_leases",
        {"FOR UPDATE OF j SKIP LOCKED": "FOR UPDATE OF j"},
        scenarios.recovery_meets_a_handler_at_work,
        says="P5: waited",
    ),
    Mutant(
        "an idempotency key is taken once in its lifetime",
        "take_idempotency_keys",
        {
            "AND i.expires_at > v_expired_before": "AND i.job_id = ANY (p_ids)",
            "AND (k.expires_at <= v_expired_before": "AND (true",
        },
        scenarios.an_idempotency_key_is_used_again,
        says="enqueue_jobs answers",
    ),
    Mutant(
        "a job that failed frees its idempotency key",
        "finish_jobs",
        {"PERFORM free_idempotency_keys(p_ids)": "NULL"},
        scenarios.a_failed_job_frees_its_idempotency_key,
        says="enqueue_jobs answers",
    ),
    Mutant(
        "a transaction that frees a key does not lock it",
        "free_idempotency_keys",
        {
            "SELECT k.holding_id, k.job_id FROM idempotency_keys AS k WHERE k.job_id = ANY (p_ids)": "SELECT k.holding_id, k.job_id FROM idempotency_keys AS k WHERE k.job_id = ANY (p_ids) "
            "FOR UPDATE"
        },
        scenarios.a_key_expires_while_a_transaction_that_frees_it_is_open,
        says="P5: waited",
    ),
    Mutant(
        "a job whose idempotency key another job has taken is not reopened",
        "retry_jobs",
        {"AND k.job_id <> f.id": "AND false"},
        scenarios.a_failed_job_frees_its_idempotency_key,
        says="another job has just taken",
    ),
    Mutant(
        "an id that is enqueued again after it finished is the same job",
        "finished_ids",
        {"find_all_finished(p_ids)": "find_all_finished('{}')"},
        scenarios.a_finished_job_is_enqueued_again,
        says="enqueue_jobs answers",
    ),
    Mutant(
        "a key is left to the duty once by a transaction with subtransactions",
        "is_own_write",
        {"v_ahead < 2147483648": "false"},
        scenarios.jobs_of_one_key_are_reopened_while_its_holder_is_locked,
        says="the unassigned keys",
    ),
    Mutant(
        "a lease has every job of its claim",
        "claim_job_batch",
        {"array_agg(t.id)": "(array_agg(t.id ORDER BY t.run_at, t.id))[2:]"},
        scenarios.a_claim_of_two_lanes_is_recovered,
        says="P9: .* is claimed without a lease that recovery can find",
        walks=200,
    ),
    Mutant(
        "a lease has every job of its claim by a worker",
        "claim_runs",
        {"array_agg(t.id)": "(array_agg(t.id ORDER BY t.run_at, t.id))[2:]"},
        scenarios.a_heartbeat_removes_ended_leases,
        says="P9: .* is claimed without a lease that recovery can find",
        walks=200,
    ),
    Mutant(
        "a heartbeat removes no lease that has a job",
        "remove_ended_leases",
        {" EXCEPT SELECT h.lease_id FROM held_jobs(v_ids, v_fences) AS h": ""},
        scenarios.a_heartbeat_removes_ended_leases,
        says="P9: .* is claimed without a lease that recovery can find",
        walks=200,
    ),
    Mutant(
        "the fence of a completion in one step",
        "finish_jobs",
        {"AND (p_lease_ids IS NULL OR j.lease_id = a.lease_id)": ""},
        scenarios.a_stale_fence_completes_in_one_step,
        says="no other",
        walks=200,
    ),
    Mutant(
        "a claim by a worker locks what it takes",
        "claim_runs",
        {"FOR UPDATE SKIP LOCKED": ""},
        scenarios.two_workers_claim_at_once,
        says="P5: waited",
    ),
    Mutant(
        "a heartbeat extends no other lease",
        "extend_leases",
        {"WHERE e.lease_id = ANY (p_lease_ids)": "WHERE true"},
        scenarios.a_lock_outlasts_the_lease,
        says="the time left of lease",
        walks=200,
    ),
    Mutant(
        "no lock of a job keeps a heartbeat from the lease",
        "extend_jobs",
        {
            "extend_leases(v_held || p_more_leases,": "extend_leases(ARRAY (SELECT j.lease_id FROM live_jobs AS j "
            "WHERE j.lease_id = ANY (v_held) FOR NO KEY UPDATE SKIP LOCKED) || p_more_leases,"
        },
        scenarios.a_lock_outlasts_the_lease,
        says="what is mine",
        walks=200,
    ),
    Mutant(
        "a heartbeat leaves a lease that is being recovered",
        "extend_leases",
        {"FOR NO KEY UPDATE SKIP LOCKED": ""},
        scenarios.a_worker_beats_while_its_jobs_are_recovered,
        says="P5: waited",
        walks=200,
    ),
    Mutant(
        "a heartbeat says which leases are left",
        "extend_jobs",
        {"extend_leases(v_held || p_more_leases,": "extend_leases(v_held,"},
        scenarios.a_claim_of_two_lanes_is_recovered,
        says="which leases are left",
        walks=200,
    ),
    Mutant(
        "recovery takes no lease that has not expired",
        "lock_leases",
        {"l.expires_at BETWEEN p_from AND p_until": "true"},
        scenarios.a_stale_fence_is_used_again,
        says="recovery finds every expired lease",
        walks=200,
    ),
    Mutant(
        "recovery locks the lease before it takes its jobs",
        "lock_leases",
        {"FOR UPDATE SKIP LOCKED": ""},
        scenarios.a_heartbeat_stays_open_while_recovery_runs,
        says="P5: waited",
        walks=200,
    ),
    Mutant(
        "recovery skips a lease that is being extended",
        "lock_leases",
        {"FOR UPDATE SKIP LOCKED": "FOR UPDATE"},
        scenarios.a_heartbeat_stays_open_while_recovery_runs,
        says="P5: waited",
    ),
    Mutant(
        "a lease that was locked is recovered only if it is not extended",
        "lock_leases",
        {"CASE WHEN p_timeout IS NULL THEN l.expires_at <= p_until END": "p_timeout IS NULL"},
        scenarios.a_heartbeat_stays_open_while_recovery_runs,
        says="the state of job",
    ),
    Mutant(
        "a lease stays while one of its jobs is locked",
        "recover_leases",
        {"EXCEPT SELECT unnest(v_fences)": ""},
        scenarios.recovery_meets_a_handler_at_work,
        says="P9: ",
        walks=200,
    ),
    Mutant(
        "a lease with a locked job is tried again soon",
        "postpone_leases",
        {"AND l.expires_at <= clock_timestamp()": "AND false"},
        scenarios.a_worker_dies_while_its_job_is_locked,
        says="P9: a lease whose job is locked",
        walks=200,
    ),
    Mutant(
        "a lease without jobs is removed",
        "recover_leases",
        {
            "WHERE l.lease_id = ANY (ARRAY (\n        SELECT o": "WHERE false AND l.lease_id = ANY (ARRAY (SELECT o"
        },
        scenarios.a_claim_of_two_lanes_is_recovered,
        says="recovery did not remove the lease",
    ),
    Mutant(
        "a cancelled job is not retried",
        "fail_jobs",
        {"AND NOT j.cancel_requested": ""},
        scenarios.a_claimed_job_is_cancelled,
        says="expected {'status': 'cancelled'",
    ),
]


@contextlib.contextmanager
def mutated(conn: psycopg.Connection, mutant: Mutant) -> Iterator[None]:
    """Edits the installed function, asserts that the edit applies, and restores the function afterwards."""

    def definition() -> str:
        query = "SELECT pg_get_functiondef(%s::regproc)"
        row = conn.execute(query, (f"howdah.{mutant.function}",)).fetchone()
        assert row is not None
        text: str = row[0]
        return text

    original = edited = definition()
    for old, new in mutant.edits.items():
        assert old in edited, f"{mutant.function} no longer contains {old!r}: adapt the mutant"
        edited = edited.replace(old, new)
    assert edited != original
    conn.execute(edited.encode())
    try:
        assert definition() == edited
        yield
    finally:
        conn.execute(original.encode())
        assert definition() == original


@pytest.fixture(scope="module")
def shared_system(model_url: str) -> Iterator[System]:
    """With a short timeout: a mutant that waits is caught soon."""
    system = System(model_url, patience="300ms")
    yield system
    system.close()


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda s: s.__name__)
def test_the_walk_keeps_the_protocol(system: System, scenario: Callable[[System], None]) -> None:
    scenario(system)
    system.drain()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.guard)
def test_a_walk_catches_the_mutant(
    system: System, connect: Callable[[], psycopg.Connection], mutant: Mutant
) -> None:
    with mutated(connect(), mutant), pytest.raises(Violation, match=mutant.says):
        mutant.caught_by(system)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.walks], ids=lambda mutant: mutant.guard)
def test_random_walks_catch_the_mutant(
    system: System, connect: Callable[[], psycopg.Connection], mutant: Mutant
) -> None:
    Protocol.system = system
    found = settings(
        SETTINGS,
        max_examples=mutant.walks,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    with mutated(connect(), mutant), pytest.raises((Violation, FlakyFailure)):
        run_state_machine_as_test(Protocol, settings=found)
