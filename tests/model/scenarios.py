"""Short walks, each to one guard of the protocol. They assert nothing: `System` compares after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference import HOUR, Spec

if TYPE_CHECKING:
    from system import System

KEYED = Spec(key="k")


def a_stale_fence_is_used_again(system: System) -> None:
    system.enqueue(0, Spec(), Spec())
    claims = system.claim(0, batch=1) + system.claim(0, batch=1)
    system.extend(0, claims[1:])
    system.recover(1)
    system.pass_time(1)
    system.extend(0, claims[1:])
    system.recover(1)
    (again,) = system.claim(1)
    system.extend(0, claims)
    system.progress(0, claims, 50)
    system.start(0, claims)
    system.complete(0, claims)
    system.fail(0, claims)
    system.release(0, claims)
    system.stop(0, claims)
    system.complete(1, [again])


def two_claim_at_once(system: System) -> None:
    system.enqueue(0, Spec(), Spec())
    system.begin(1)
    system.claim(1, batch=1)
    system.claim(2, batch=1)
    system.commit(1)


def two_workers_claim_at_once(system: System) -> None:
    system.enqueue(0, Spec(), Spec())
    system.begin(1)
    system.claim(1, batch=1, alone=False)
    system.claim(2, batch=1, alone=False)
    system.commit(1)


def a_job_fails_until_its_end(system: System) -> None:
    (job,) = system.enqueue(0, Spec(max_attempts=2))
    for _ in range(3):
        system.fail(0, system.claim(0))
    system.retry(0, [job])
    system.fail(0, system.claim(0), None)


def a_job_kills_its_workers(system: System) -> None:
    system.enqueue(0, Spec(max_attempts=2))
    for _ in range(3):
        system.claim(0, started=True)
        system.pass_time(1)
        system.recover(0)


def a_job_kills_its_workers_before_they_can_say_so(system: System) -> None:
    system.enqueue(0, Spec(max_attempts=2))
    for _ in range(13):
        system.claim(0, alone=False)
        system.pass_time(1)
        system.recover(0)


def a_neighbour_kills_the_worker(system: System) -> None:
    system.enqueue(0, Spec(), Spec(max_attempts=1), Spec())
    system.start(0, system.claim(0)[:1])
    system.pass_time(1)
    system.recover(0)
    system.release(0, system.claim(0, alone=False))


def a_killer_and_its_neighbours_are_claimed_in_a_bare_loop(system: System) -> None:
    system.enqueue(0, Spec(), Spec(), Spec(max_attempts=1), Spec())
    for _ in range(5):
        system.claim(0)
        system.pass_time(1)
        system.recover(0)
        system.enqueue(0, Spec(priority=150), Spec())
        system.complete(0, system.claim(1))


def a_producer_is_slower_than_the_sweeps(system: System) -> None:
    system.enqueue(0, Spec())
    system.complete(0, system.claim(0))
    system.begin(2)
    system.enqueue(2, Spec())
    system.pass_time(1)
    for _ in range(3):
        system.sweep()  # raises the head above the job
    system.commit(2)
    system.sweep()
    system.claim(1)


def a_key_is_taken_while_its_holder_is_locked(system: System) -> None:
    system.enqueue(0, KEYED)
    system.begin(1)
    system.claim(1)
    system.enqueue(2, KEYED)
    system.commit(1)
    system.assign_keys()


def a_key_goes_along_its_line(system: System) -> None:
    system.enqueue(0, KEYED, KEYED, KEYED)
    for _ in range(3):
        system.complete(0, system.claim(0))


def a_producer_of_a_key_commits_late(system: System) -> None:
    system.begin(0)
    system.enqueue(0, KEYED, KEYED)
    system.enqueue(1, KEYED)
    system.commit(0)


def a_rival_enqueues_between_two_jobs_of_a_key(system: System) -> None:
    system.begin(0)
    system.enqueue(0, KEYED)
    system.enqueue(1, KEYED)
    system.enqueue(0, KEYED, KEYED)
    system.commit(0)
    system.drain()


def a_producer_of_a_key_spans_sweeps(system: System) -> None:
    """Its job is put behind the holder by the duty `keys`: the holder is locked when it commits."""
    system.begin(0)
    system.enqueue(0, KEYED)
    system.enqueue(1, KEYED, KEYED)
    system.complete(1, system.claim(1))
    for _ in range(3):
        system.sweep()
    system.begin(1)
    claims = system.claim(1)
    system.commit(0)
    system.commit(1)
    system.assign_keys()
    system.complete(1, claims)


def a_holder_ends_before_a_late_job_is_behind_it(system: System) -> None:
    system.begin(0)
    system.enqueue(0, KEYED)
    system.enqueue(1, KEYED)
    system.begin(1)
    claims = system.claim(1)
    system.commit(0)
    system.commit(1)
    system.enqueue(2, KEYED)
    system.complete(1, claims)


def a_waiting_job_is_being_cancelled(system: System) -> None:
    _, waiting, _ = system.enqueue(0, KEYED, KEYED, KEYED)
    system.begin(1)
    system.cancel(1, [waiting])
    system.complete(0, system.claim(0))
    system.assign_keys()
    system.commit(1)
    system.assign_keys()


def a_completion_is_repeated(system: System) -> None:
    system.enqueue(0, Spec())
    (lost,) = system.claim(0)
    system.pass_time(1)
    system.recover(0)
    (own,) = system.claim(1)
    system.complete(1, [own])
    system.complete(1, [own], again=True)
    system.complete(0, [lost], again=True)


def recovery_meets_a_handler_at_work(system: System) -> None:
    system.enqueue(0, Spec(), Spec())
    claims = system.claim(0)
    system.pass_time(1)
    system.begin(0)
    system.complete(0, claims[:1])
    system.recover(1)
    system.commit(0)


def a_claim_commits_after_its_lease_expired(system: System) -> None:
    system.enqueue(0, Spec())
    system.begin(0)
    system.claim(0)
    system.pass_time(2)
    for _ in range(3):
        system.run_duty("recover")
        system.run_duty("late")
    system.commit(0)
    system.run_duty("late")
    system.drain()


def a_job_comes_back_below_the_head(system: System) -> None:
    system.enqueue(0, Spec())
    claims = system.claim(0)
    system.pass_time(1)
    system.sweep()
    system.release(0, claims)
    system.claim(1)


def an_idempotency_key_is_used_again(system: System) -> None:
    once = Spec(once="i")
    system.enqueue(0, once, once)
    system.enqueue(1, once)
    system.pass_time(1)
    system.enqueue(1, once)
    system.run_duty("prune")


def a_failed_job_frees_its_idempotency_key(system: System) -> None:
    once = Spec(once="i")
    (first,) = system.enqueue(0, once)
    system.enqueue(0, Spec(job_type="b", once="i"))
    system.fail(1, system.claim(1, ["a"]), retry_in=None)
    (second,) = system.enqueue(0, once)
    system.retry(0, [first])
    system.cancel(0, [second])
    system.retry(0, [first, second])
    system.enqueue(1, once)


def a_key_expires_while_a_transaction_that_frees_it_is_open(system: System) -> None:
    once = Spec(once="i")
    (first,) = system.enqueue(0, once)
    system.begin(1)
    system.cancel(1, [first])
    system.enqueue(0, once)
    system.pass_time(1)
    system.enqueue(0, once)
    system.commit(1)
    system.enqueue(0, once)
    system.run_duty("prune")
    system.enqueue(0, once)


def a_finished_job_is_enqueued_again(system: System) -> None:
    (job,) = system.enqueue(0, Spec())
    system.enqueue_again(0, job, again=False)
    system.begin(1)
    system.complete(1, system.claim(1))
    system.enqueue_again(0, job, again=False)
    system.commit(1)
    system.enqueue_again(0, job, again=False)
    system.enqueue_again(0, job)
    system.claim(0)


def two_add_a_lane(system: System) -> None:
    system.begin(0)
    system.enqueue(0, Spec(job_type="b"))
    system.enqueue(1, Spec(job_type="b"))
    system.sweep()
    system.claim(1)
    system.rollback(0)


def jobs_of_one_key_are_reopened_while_its_holder_is_locked(system: System) -> None:
    jobs = system.enqueue(0, KEYED, KEYED)
    system.cancel(0, jobs)
    system.assign_keys()
    (holder,) = system.enqueue(0, KEYED)
    system.begin(1)
    system.cancel(1, [holder])
    system.retry(0, jobs)
    system.rollback(1)


def a_lock_outlasts_the_lease(system: System) -> None:
    jobs = system.enqueue(0, Spec(), Spec(), Spec())
    alive = system.claim(0, batch=2)
    system.claim(0, batch=1)
    system.begin(1)
    system.cancel(1, jobs)
    system.pass_time(1)
    system.extend(0, alive[:1], started=True)
    system.rollback(1)
    system.run_duty("recover")
    system.complete(0, alive)


def a_worker_dies_while_its_job_is_locked(system: System) -> None:
    (locked, _) = system.enqueue(0, Spec(), Spec())
    system.claim(0)
    system.begin(1)
    system.cancel(1, [locked])
    system.pass_time(1)
    system.recover(0)
    system.run_duty("recover")
    system.rollback(1)
    system.pass_time(1)
    system.run_duty("recover")


def a_heartbeat_stays_open_while_recovery_runs(system: System) -> None:
    system.enqueue(0, Spec(), Spec())
    claims = system.claim(0)
    system.pass_time(1)
    for end in (system.commit, system.rollback):
        system.begin(1)
        system.extend(1, claims[:1])
        system.recover(0)
        system.run_duty("recover")
        end(1)
        system.run_duty("recover")
        system.pass_time(1)
    system.extend(0, claims)


def a_worker_beats_while_its_jobs_are_recovered(system: System) -> None:
    system.enqueue(0, Spec(), Spec())
    claims = system.claim(0)
    system.pass_time(1)
    for end in (system.rollback, system.commit):
        system.begin(1)
        system.recover(1)
        system.extend(0, claims, more=[claims[0].lease])
        end(1)
        system.extend(0, claims, more=[claims[0].lease])
        system.pass_time(1)


def a_claim_of_two_lanes_is_recovered(system: System) -> None:
    system.enqueue(0, Spec(), Spec(), Spec(priority=150))
    claims = system.claim(0)
    system.complete(0, claims[1:])
    system.extend(0, [], more=[claims[0].lease])
    system.pass_time(1)
    system.extend(0, claims[:1])
    system.recover(0)
    system.pass_time(1)
    system.run_duty("recover")


def a_heartbeat_removes_ended_leases(system: System) -> None:
    system.enqueue(0, Spec(), Spec(), Spec(priority=150))
    first, *others = system.claim(0, alone=False)
    leases = [first.lease, others[0].lease]
    system.complete(0, [first, others[0]], in_one_step=True)
    system.extend(0, [], ended=leases)
    system.pass_time(1)
    system.recover(0)
    system.complete(0, system.claim(0, alone=False), in_one_step=True)


def a_stale_fence_completes_in_one_step(system: System) -> None:
    system.enqueue(0, Spec(), Spec())
    stale, other = system.claim(0, alone=False)
    system.pass_time(1)
    system.recover(0)
    again, last = system.claim(1, alone=False)
    system.complete(0, [stale, other], in_one_step=True)
    system.complete(1, [again, last], in_one_step=True)


def a_claimed_job_is_cancelled(system: System) -> None:
    jobs = system.enqueue(0, Spec(), Spec(), Spec(), Spec())
    failed, released, _, _ = system.claim(0)
    system.cancel(1, jobs)
    system.fail(0, [failed])
    system.release(0, [released], HOUR)
    system.pass_time(1)
    system.recover(0)


def priority_and_due_time_decide(system: System) -> None:
    system.enqueue(0, Spec(), Spec(priority=150), Spec(job_type="b"), Spec(delay=1), Spec())
    system.claim(0, batch=2)
    system.claim(1)
    system.pass_time(1)
    system.claim(1)


SCENARIOS = [
    value for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", None) == __name__
]  # fmt: skip
