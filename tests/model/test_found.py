"""What the model found, each as the shortest walk that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference import Spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    import psycopg
    from system import System


def test_a_stale_fence_lends_nothing_to_the_live_one_of_the_same_job(system: System) -> None:
    system.enqueue(0, Spec())
    (stale,) = system.claim(0)
    system.pass_time(1)
    system.recover(1)
    (live,) = system.claim(0)
    assert system.complete(0, [stale, live]) == [live.id]  # and the result is that of `live`


def test_progress_under_a_stale_fence_is_not_said_to_be_reported(system: System) -> None:
    system.enqueue(0, Spec())
    (stale,) = system.claim(0)
    system.release(0, [stale])
    (live,) = system.claim(0)
    system.progress(0, [stale, live], 50)


def test_an_event_under_a_stale_fence_is_not_written_beside_a_live_one(
    system: System, connect_model: Callable[..., psycopg.Connection]
) -> None:
    system.enqueue(0, Spec())
    (stale,) = system.claim(0)
    system.release(0, [stale])
    (live,) = system.claim(0)
    with connect_model() as conn:
        conn.execute(
            'SELECT howdah.add_events(%s, %s, \'{stale,live,live}\', \'{"{}","{}","{}"}\')',
            ([live.id] * 3, [stale.lease, live.lease, live.lease]),
        )
        kinds = conn.execute("SELECT kind FROM howdah.job_events").fetchall()
        counted = conn.execute("SELECT events_count FROM howdah.live_jobs").fetchall()
    assert (kinds, counted) == ([("live",), ("live",)], [(2,)])
    with connect_model() as conn:  # the reference knows nothing of events that are not errors
        conn.execute("UPDATE howdah.live_jobs SET events_count = 0")


def test_a_job_without_a_lane_keeps_its_due_time_when_it_gets_its_key(system: System) -> None:
    system.begin(0)
    system.enqueue(0, Spec(job_type="b"))  # adds the lane, and keeps it to itself
    system.enqueue(1, Spec(job_type="b", key="k"))
    system.rollback(0)


def test_a_late_job_that_was_locked_when_it_was_sent_behind_the_holder_is_not_stuck(
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
    """The handler's first write is one that KEY SHARE goes along with, its second is not: there
    SKIP LOCKED follows the row to its newer version, and waits."""
    system.enqueue(0, Spec(key="k"))
    claims = system.claim(0)
    system.begin(0)
    system.progress(0, claims, 50)
    system.complete(0, claims)
    (following,) = system.enqueue(1, Spec(key="k"))
    system.commit(0)
    system.assign_keys()
    assert [claim.id for claim in system.claim(1)] == [following]


def test_late_jobs_go_behind_the_holder_in_the_order_they_were_enqueued(system: System) -> None:
    system.begin(0)
    late = system.enqueue(0, *[Spec(key="k")] * 4)
    system.enqueue(1, Spec(key="k"))
    system.commit(0)
    system.complete(0, system.claim(0))
    assert _run_all(system) == late


def test_a_key_freed_under_an_old_snapshot_still_finds_its_next_job(
    system: System, connect_model: Callable[..., psycopg.Connection]
) -> None:
    system.enqueue(0, Spec(key="k"))
    (holder,) = system.claim(0)
    old = connect_model(autocommit=False)
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    old.execute("SELECT count(*) FROM howdah.live_jobs")
    (following,) = system.enqueue(1, Spec(key="k"))
    old.execute("SELECT howdah.complete_jobs(%s, %s)", ([holder.id], [holder.lease]))
    old.commit()
    with connect_model() as conn:
        conn.execute("SELECT howdah.assign_keys()")
        claimed = conn.execute("SELECT id FROM howdah.claim_job_batch('w')").fetchall()
    assert claimed == [(following,)]
    system.clear()  # done behind the reference's back


def test_a_handler_that_holds_its_own_job_costs_its_neighbours_nothing(system: System) -> None:
    """Rows that an open transaction has are waited for, a second at most, then refused."""
    system.enqueue(0, Spec(), Spec())
    own, neighbour = system.claim(0)
    system.begin(1)
    system.complete(1, [own])
    answer = system.acknowledge(0, "complete_jobs(%s, %s)", [own, neighbour])
    assert answer == [neighbour.id]
    system.connections[1].commit()
    system.clear()


def _run_all(system: System) -> list[UUID]:
    order = []
    while claims := system.claim(0, batch=1):
        order += [claim.id for claim in claims]
        system.complete(0, claims)
    return order
