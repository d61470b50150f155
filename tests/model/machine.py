"""Random walks through the protocol with three clients.

Every step draws the same choices in every state of the queue, and they select one of the actions that are possible
there: so what Hypothesis draws never depends on the database. The actions only select arguments; `System` runs each
one and compares. Rows that another client's open transaction has locked are left out where the protocol would wait."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clients import CLIENTS
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from reference import HOUR, Spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from system import Claim, System

SETTINGS = settings(
    max_examples=int(os.environ.get("HOWDAH_MODEL_EXAMPLES", "20")),
    stateful_step_count=60,
    deadline=None,
    derandomize="HOWDAH_MODEL_EXAMPLES" not in os.environ,
    database=None,
    # Not shrunk: it takes minutes, and the test's timeout would hide the violation.
    phases=[Phase.generate],
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
FINAL = ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Choice:
    """Every choice that an action may need."""

    client: int
    places: list[int]
    jobs: list[Spec]
    n: int
    yes: bool
    either: bool

    @property
    def hours(self) -> int:
        return int(self.n == 0)


specs = st.builds(
    Spec,
    job_type=st.sampled_from("aab"),
    priority=st.sampled_from([100, 100, 150]),
    delay=st.sampled_from([0, 0, 0, 1]),
    key=st.sampled_from([None, None, "k", "k", "l"]),
    once=st.sampled_from([None, None, None, "i", "j"]),
    max_attempts=st.sampled_from([1, 2, 3]),
)
choices = st.builds(
    Choice,
    client=st.sampled_from(range(CLIENTS)),
    places=st.lists(st.sampled_from(range(24)), min_size=1, max_size=4),
    jobs=st.lists(specs, min_size=1, max_size=3),
    n=st.sampled_from(range(4)),
    yes=st.booleans(),
    either=st.booleans(),
)


class Protocol(RuleBasedStateMachine):
    """A walk, one action per step."""

    system: System  # shared by all walks: created by the test, cleared before each walk

    def __init__(self) -> None:
        super().__init__()
        self.system.clear()

    @initialize(jobs=st.lists(specs, min_size=1, max_size=6))
    def begin_with(self, jobs: list[Spec]) -> None:
        self.system.enqueue(0, *jobs)

    @rule(action=st.sampled_from(range(1000)), choice=choices)
    def step(self, action: int, choice: Choice) -> None:
        possible = [act for act, condition in ACTIONS if condition(self)]
        act = possible[action % len(possible)]
        note(f"    {act.__name__}")
        act(self, choice)

    def teardown(self) -> None:
        """Every walk without a failure ends with an empty queue."""
        if sys.exc_info()[0] is None:
            self.system.drain()

    def any_job(self, *statuses: str) -> bool:
        return any(job.status in statuses for job in self.system.reference.jobs.values())

    def claims(self, choice: Choice) -> list[Claim]:
        """Some claims of any age, then one that is live."""
        reference, client = self.system.reference, choice.client
        free = [c for c in self.system.claims if not reference.lock_of_another(client, c.id)]
        live = [c for c in free if reference.holds(client, c.id, c.lease)]
        some = [free[-1 - n % len(free)] for n in choice.places[1:] if free]
        return some + [live[choice.places[0] % len(live)] for _ in live[:1]]

    def ids(self, choice: Choice, *statuses: str) -> list[UUID]:
        """Some jobs of these statuses, then one of any status."""
        reference, client = self.system.reference, choice.client
        view = reference.view(client)
        free = [i for i in self.system.ids if not reference.lock_of_another(client, i)]
        fitting = [i for i in free if i in view and view[i].status in statuses]
        some = [fitting[n % len(fitting)] for n in choice.places[1:] if fitting]
        return some + [free[choice.places[0] % len(free)] for _ in free[:1]]


ACTIONS: list[tuple[Callable[[Protocol, Choice], None], Callable[[Protocol], object]]] = []


def action(
    condition: Callable[[Protocol], object], *, weight: int = 1
) -> Callable[[Callable[[Protocol, Choice], None]], None]:
    def register(act: Callable[[Protocol, Choice], None]) -> None:
        ACTIONS.extend([(act, condition)] * weight)

    return register


def always(walk: Protocol) -> bool:
    return True


def is_claimed(walk: Protocol) -> bool:
    return walk.any_job("claimed")


def is_pending(walk: Protocol) -> bool:
    return walk.any_job("pending")


# ── transactions and time ─────────────────────────────────────────────────────────────────────────


@action(lambda walk: len(walk.system.reference.open) < CLIENTS, weight=2)
def begin(walk: Protocol, choice: Choice) -> None:
    closed = [client for client in range(CLIENTS) if not walk.system.is_open(client)]
    walk.system.begin(closed[choice.client % len(closed)])


@action(lambda walk: walk.system.reference.open, weight=3)
def end(walk: Protocol, choice: Choice) -> None:
    ends = sorted(walk.system.reference.open)
    client = ends[choice.client % len(ends)]
    if choice.n:
        walk.system.commit(client)
    else:
        walk.system.rollback(client)


@action(always)
def time_passes(walk: Protocol, choice: Choice) -> None:
    walk.system.pass_time(1 + choice.n % 2)


# ── producing ─────────────────────────────────────────────────────────────────────────────────────


@action(always, weight=3)
def enqueue(walk: Protocol, choice: Choice) -> None:
    walk.system.enqueue(choice.client, *choice.jobs)


@action(always)
def enqueue_again(walk: Protocol, choice: Choice) -> None:
    view = walk.system.reference.view(choice.client)
    for job_id in walk.ids(choice)[:1]:
        if job_id in view:
            walk.system.enqueue_again(choice.client, job_id, again=choice.yes)


@action(lambda walk: not walk.system.reference.open)
def a_producer_is_slower_than_the_margin(walk: Protocol, choice: Choice) -> None:
    job = choice.jobs[0]
    walk.system.begin(0)
    walk.system.enqueue(0, job)
    walk.system.pass_time(1)
    walk.system.enqueue(1, Spec(job_type=job.job_type, priority=job.priority))
    walk.system.sweep()
    walk.system.claim(1)


# ── claiming and acknowledging ────────────────────────────────────────────────────────────────────


@action(is_pending, weight=4)
def claim(walk: Protocol, choice: Choice) -> None:
    walk.system.claim(
        choice.client,
        [None, None, ["a"], ["b", "a"]][choice.n],
        len(choice.places),
        ignore_heads=choice.yes,
        started=choice.either,
        alone=choice.places[-1] % 3 > 0,
        suspects_first=choice.places[0] % 16 == 0,
    )


@action(lambda walk: walk.system.claims, weight=2)
def complete(walk: Protocol, choice: Choice) -> None:
    walk.system.complete(
        choice.client, walk.claims(choice), again=choice.yes, in_one_step=choice.either
    )


@action(is_claimed, weight=2)
def fail(walk: Protocol, choice: Choice) -> None:
    retry_in = None if choice.n == 1 else choice.hours * HOUR
    walk.system.fail(choice.client, walk.claims(choice), retry_in)


@action(is_claimed)
def release(walk: Protocol, choice: Choice) -> None:
    walk.system.release(choice.client, walk.claims(choice), choice.hours * HOUR)


@action(is_claimed)
def start(walk: Protocol, choice: Choice) -> None:
    walk.system.start(choice.client, walk.claims(choice))


@action(is_claimed)
def stop(walk: Protocol, choice: Choice) -> None:
    walk.system.stop(choice.client, walk.claims(choice))


@action(is_claimed)
def extend(walk: Protocol, choice: Choice) -> None:
    known = walk.system.claims[::-1]
    claims = list(dict.fromkeys(known[n % len(known)] for n in choice.places))
    more = [known[choice.n % len(known)].lease] if choice.either else []
    ended = [claim.lease for claim in claims] if choice.places[0] % 3 == 0 else []
    walk.system.extend(choice.client, claims, started=choice.yes, more=more, ended=ended)


@action(is_claimed)
def progress(walk: Protocol, choice: Choice) -> None:
    known = walk.system.claims[::-1]
    claims = list(dict.fromkeys(known[n % len(known)] for n in choice.places))
    walk.system.progress(choice.client, claims, [10, 50, 80, 200][choice.n])


# ── operating and maintaining ─────────────────────────────────────────────────────────────────────


@action(lambda walk: walk.any_job("pending", "claimed"))
def cancel(walk: Protocol, choice: Choice) -> None:
    walk.system.cancel(choice.client, walk.ids(choice, "pending", "claimed"))


@action(lambda walk: walk.any_job(*FINAL))
def retry(walk: Protocol, choice: Choice) -> None:
    walk.system.retry(choice.client, walk.ids(choice, *FINAL))


@action(is_claimed)
def take_over(walk: Protocol, choice: Choice) -> None:
    walk.system.take_over(choice.client, walk.ids(choice, "claimed"))


@action(is_claimed, weight=2)
def leases_run_out(walk: Protocol, choice: Choice) -> None:
    walk.system.pass_time(1)
    walk.system.recover(choice.client)


@action(lambda walk: is_claimed(walk) and not walk.system.reference.open)
def a_lock_outlasts_the_lease(walk: Protocol, choice: Choice) -> None:
    claims = walk.claims(choice)
    walk.system.begin(1)
    walk.system.cancel(1, [claim.id for claim in claims])
    walk.system.pass_time(1)
    walk.system.extend(0, claims)
    if choice.n:
        walk.system.rollback(1)
        walk.system.recover(choice.client)


@action(lambda walk: is_pending(walk) and not walk.system.is_open(0))
def a_worker_dies_again_and_again(walk: Protocol, choice: Choice) -> None:
    for _ in range([1, 1, 2, 13][choice.n]):
        if not walk.system.claim(0, batch=1, alone=choice.yes):
            break
        walk.system.pass_time(1)
        walk.system.recover(0)


@action(always, weight=2)
def maintain(walk: Protocol, choice: Choice) -> None:
    duties = ["keys", "sweep", "recover", "late" if choice.yes else "prune"]
    walk.system.run_duty(duties[choice.n])
