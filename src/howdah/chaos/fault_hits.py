"""Which faults hit a job in flight: decided after the run from exit codes and the ledger, not from the schedule. A
fault that hit no job in flight proves nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from howdah.chaos.processes.producer import HARMFUL_TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.chaos.history import FaultWindow, History

KILLED_BY_OWN_JOB = "killed by its own job"


def windows(history: History, lease: float) -> list[FaultWindow]:
    """The faults that hit a job in flight."""
    return [window for window in history.windows.values() if _has_hit(history, window, lease)]


def count(history: History, lease: float) -> dict[str, int]:
    """The number of hits per fault name, with the harm that handlers did to their own worker."""
    found = Counter(window.name for window in windows(history, lease))
    targets = {window.target for window in history.windows.values()}
    for worker, line in history.exits.items():
        if line["role"] != "producer" and line["code"] == -9 and worker not in targets:
            found[KILLED_BY_OWN_JOB] += 1
    found.update(_harmful_runs(history))
    return dict(found)


def _has_hit(history: History, window: FaultWindow, lease: float) -> bool:
    at, target = window.begin.t, window.target
    if target is None:
        return any(history.in_flight(worker, at) for worker in history.by_worker())
    exited = history.exits.get(target)
    if window.name.startswith("kill"):
        if exited is None or exited["code"] != -9:
            return False
        # A worker with an armed fault point is hit when it reaches the point and exits.
        at = exited.t if window.begin.get("point") else at
    if window.scope == "producer":
        calls = history.enqueues.values()
        return any(call.invoked.pid == target and call.answer is None for call in calls)
    if window.name.startswith("pause") and window.until() - at <= lease:
        return False
    return bool(history.in_flight(target, at))


def _harmful_runs(history: History) -> Iterator[str]:
    """The types of harmful jobs that started while other jobs were in flight in the same worker."""
    for leases in history.jobs.values():
        for lease in leases:
            if lease.claim is None or lease.claim["type"] not in HARMFUL_TASKS:
                continue
            for start in lease.starts:
                if any(near.job != lease.job for near in history.in_flight(lease.worker, start.t)):
                    yield lease.claim["type"]


def recovery_times(history: History) -> dict[str, list[float]]:
    """Seconds until recovery, by fault name: until each job that was in flight in a killed or paused worker was
    claimed again, and until work resumed after a fault that hit every process."""
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
        exited = history.exits.get(window.target)
        at = exited.t if exited is not None and window.begin.get("point") else window.begin.t
        for lease in history.in_flight(window.target, at):
            later = [x.began for x in history.jobs[lease.job] if x.began > at]
            found += [min(later) - at] if later else []
    return {name: sorted(seconds) for name, seconds in times.items() if seconds}
