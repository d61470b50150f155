"""Defects that the model found, each as the shortest walk that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference import Spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    import psycopg
    from system import System


def test_a_stale_and_a_live_fence_of_one_job_complete_it_with_the_result_of_the_live_one(
    system: System,
) -> None:
    system.enqueue(0, Spec())
    (stale,) = system.claim(0)
    system.pass_time(1)
    system.recover(1)
    (live,) = system.claim(0)
    assert system.complete(0, [stale, live]) == [
        live.id
    ]  # `System` compares the result, which is that of `live`


def test_progress_under_a_stale_fence_is_not_returned_as_reported(system: System) -> None:
    system.enqueue(0, Spec())
    (stale,) = system.claim(0)
    system.release(0, [stale])
    (live,) = system.claim(0)
    system.progress(0, [stale, live], 50)


def test_an_event_under_a_stale_fence_is_not_written_beside_a_live_one(
    system: System, connect: Callable[..., psycopg.Connection]
) -> None:
    system.enqueue(0, Spec())
    (stale,) = system.claim(0)
    system.release(0, [stale])
    (live,) = system.claim(0)
    with connect() as conn:
        conn.execute(
            'SELECT howdah.add_events(%s, %s, \'{stale,live,live}\', \'{"{}","{}","{}"}\')',
            ([live.id] * 3, [stale.lease, live.lease, live.lease]),
        )
        kinds = conn.execute("SELECT kind FROM howdah.job_events").fetchall()
        counted = conn.execute("SELECT events_count FROM howdah.live_jobs").fetchall()
    assert (kinds, counted) == ([("live",), ("live",)], [(2,)])
    with connect() as conn:  # the reference tracks only error events
        conn.execute("UPDATE howdah.live_jobs SET events_count = 0")


def test_a_job_without_a_lane_keeps_its_due_time_when_its_key_is_assigned(system: System) -> None:
    system.begin(0)
    system.enqueue(0, Spec(job_type="b"))  # adds the lane, invisible to others until the commit
    system.enqueue(1, Spec(job_type="b", key="k"))
    system.rollback(0)


def test_a_late_job_that_was_locked_while_its_key_was_assigned_is_not_stuck(
    system: System,
) -> None:
    system.begin(0)
    (late,) = system.enqueue(0, Spec(key="k"))
    system.enqueue(1, Spec(key="k"))
    system.begin(1)
    (holder,) = system.claim(1)
    system.commit(0)  # the holder is locked: left unassigned
    system.commit(1)
    system.begin(2)
    system.cancel(2, [late])
    system.assign_keys()
    system.rollback(2)
    system.complete(1, [holder])
    system.assign_keys()
    assert [claim.id for claim in system.claim(0)] == [late]


def test_an_enqueue_does_not_wait_for_a_handler_that_reports_and_completes_in_one_transaction(
    system: System,
) -> None:
    """The handler's first write is compatible with KEY SHARE, its second is not: there SKIP LOCKED follows the row to
    its newer version, and waits."""
    system.enqueue(0, Spec(key="k"))
    claims = system.claim(0)
    system.begin(0)
    system.progress(0, claims, 50)
    system.complete(0, claims)
    (following,) = system.enqueue(1, Spec(key="k"))
    system.commit(0)
    system.assign_keys()
    assert [claim.id for claim in system.claim(1)] == [following]


def test_late_jobs_run_after_the_key_holder_in_enqueue_order(system: System) -> None:
    system.begin(0)
    late = system.enqueue(0, *[Spec(key="k")] * 4)
    system.enqueue(1, Spec(key="k"))
    system.commit(0)
    system.complete(0, system.claim(0))
    assert _run_all(system) == late


def test_a_key_released_under_an_old_snapshot_is_assigned_to_its_next_job(
    system: System, connect: Callable[..., psycopg.Connection]
) -> None:
    system.enqueue(0, Spec(key="k"))
    (holder,) = system.claim(0)
    old = connect(autocommit=False)
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    old.execute("SELECT count(*) FROM howdah.live_jobs")
    (following,) = system.enqueue(1, Spec(key="k"))
    old.execute("SELECT howdah.complete_jobs(%s, %s)", ([holder.id], [holder.lease]))
    old.commit()
    with connect() as conn:
        conn.execute("SELECT howdah.assign_keys()")
        claimed = conn.execute("SELECT id FROM howdah.claim_job_batch('w')").fetchall()
    assert claimed == [(following,)]
    system.clear()  # the reference did not track these statements


def test_a_locked_job_in_an_acknowledgement_does_not_affect_the_others(system: System) -> None:
    """An acknowledgement waits up to a second for rows that an open transaction has locked, then rejects them."""
    system.enqueue(0, Spec(), Spec())
    own, neighbour = system.claim(0)
    system.begin(1)
    system.complete(1, [own])
    answer = system.acknowledge(0, "complete_jobs(%s, %s)", [own, neighbour])
    assert answer == [neighbour.id]
    system.clients.connections[1].commit()
    system.clear()


def _run_all(system: System) -> list[UUID]:
    order = []
    while claims := system.claim(0, batch=1):
        order += [claim.id for claim in claims]
        system.complete(0, claims)
    return order
