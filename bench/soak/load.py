"""The load of a soak: the kinds of jobs, how many of each per second, and what must be left of each kind."""

from __future__ import annotations

KEY_SECONDS = 60
"""The lifetime of idempotency keys in the soak, so that expired ones are removed while it runs."""
BRIEF_SECONDS = 60
"""The `keep` of the kind `brief`."""
ORDERING_KEYS = 40
SINGLE = "soak.single"
"""The type that only `claimer.py` claims, one job at a time."""

MIXED = {
    "no_op": 560.0,  # async, kept for the default time
    "gone": 150.0,  # async, keep=0
    "brief": 60.0,  # async, keep=60
    "single": 100.0,
    "threaded": 70.0,
    "ordered": 50.0,
    "delayed": 40.0,
    "reporting": 30.0,  # progress, two events
    "keyed": 30.0,  # idempotency keys, every second one a repetition
    "flaky": 20.0,  # fails once
    "gone_flaky": 10.0,  # the same with keep=0: its events must go with it
    "cancelled": 10.0,
    "awaited": 10.0,
    "doomed": 5.0,  # fails for good
    "in_process": 5.0,
}
"""1,150 jobs per second."""
SINGLES = {"single": 1000.0, "no_op": 20.0}
"""Claims of one job at a time, and a few jobs for the workers, which do the maintenance."""
LOADS = {"mixed": MIXED, "single": SINGLES}

EXECUTOR_KINDS = {"no_op", "threaded", "in_process"}
"""A kind for each executor of a worker."""
UNKEPT = ("gone", "gone_flaky")
"""Kinds that leave no row."""
FINAL = {"doomed": "failed", "cancelled": "cancelled"}
"""The status that a kind ends with; all others complete."""


def scaled(load: dict[str, float], rate: float | None) -> dict[str, float]:
    """The load with another total of jobs per second."""
    factor = 1.0 if rate is None else rate / sum(load.values())
    return {kind: each * factor for kind, each in load.items()}
