"""Which faults hit: decided after the run from exit codes and the ledger, not from the schedule. A fault that
found nobody with a job in hand has shown nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from howdah.chaos.processes.producer import MISFITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.chaos.history import History, Window

OWN = "killed by its own job"


def windows(history: History, lease: float) -> list[Window]:
    """The faults that found a job in the middle."""
    return [window for window in history.windows.values() if _has_hit(history, window, lease)]


def count(history: History, lease: float) -> dict[str, int]:
    """The same by name, and with them what bad handlers did to the worker that ran them."""
    found = Counter(window.name for window in windows(history, lease))
    handled = {window.target for window in history.windows.values()}
    for worker, line in history.exits.items():
        if line["role"] != "producer" and line["code"] == -9 and worker not in handled:
            found[OWN] += 1
    found.update(_misfits(history))
    return dict(found)


def _has_hit(history: History, window: Window, lease: float) -> bool:
    at, target = window.begin.t, window.target
    if target is None:
        return any(history.in_flight(worker, at) for worker in history.by_worker())
    died = history.exits.get(target)
    if window.name.startswith("kill"):
        if died is None or died["code"] != -9:
            return False
        # One that waits for its fault point is hit when it dies.
        at = died.t if window.begin.get("point") else at
    if window.scope == "producer":
        calls = history.enqueues.values()
        return any(call.invoked.pid == target and call.answer is None for call in calls)
    if window.name.startswith("pause") and window.until() - at <= lease:
        return False
    return bool(history.in_flight(target, at))


def _misfits(history: History) -> Iterator[str]:
    """Bad handlers that had neighbours when they began."""
    for leases in history.jobs.values():
        for lease in leases:
            if lease.claim is None or lease.claim["type"] not in MISFITS:
                continue
            for start in lease.starts:
                if any(near.job != lease.job for near in history.in_flight(lease.worker, start.t)):
                    yield lease.claim["type"]


def recovery_times(history: History) -> dict[str, list[float]]:
    """How long it took, by the fault's name: until each job that a dead or paused worker had was claimed
    again, and until work resumed after a fault that hit everybody."""
    times: dict[str, list[float]] = {}
    accepted = sorted(
        line.t for leases in history.jobs.values() for lease in leases for line in lease.accepted
    )
    for window in history.windows.values():
        found = times.setdefault(window.name, [])
        if window.target is None:
            if window.end is not None:
                after = next((t for t in accepted if t > window.end.t), None)
                found += [] if after is None else [after - window.end.t]
            continue
        died = history.exits.get(window.target)
        at = died.t if died is not None and window.begin.get("point") else window.begin.t
        for lease in history.in_flight(window.target, at):
            later = [x.began for x in history.jobs[lease.job] if x.began > at]
            found += [min(later) - at] if later else []
    return {name: sorted(seconds) for name, seconds in times.items() if seconds}
