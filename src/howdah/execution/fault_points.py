"""Fault points: named places where tests make a worker die, stall or fail. Inert in production: without
HOWDAH_FAULT in the environment `reach` is a dictionary look-up that finds nothing.

HOWDAH_FAULT="after-claim:kill:3" sends SIGKILL to the process the third time it gets there; `exit`
leaves with status 17, `stop` sends SIGSTOP, `raise` raises.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

POINTS = {
    "before-claim": "the fetcher is about to claim",
    "after-claim": "jobs were claimed and are not yet in the buffer",
    "before-start": "a slot has taken a job and not yet run it",
    "after-start": "started_at of a job claimed before was written, its handler not yet called",
    "after-run": "a handler has returned and its outcome is not yet with the completer",
    "before-acknowledge": "the completer is about to send outcomes",
    "after-acknowledge": "outcomes were committed and are not yet reported",
    "before-heartbeat": "leases are about to be extended",
    "after-heartbeat": "leases were extended",
    "before-maintenance": "maintenance is about to run",
    "during-shutdown": "the worker has stopped claiming and is about to give jobs back",
}

_hooks: dict[str, Callable[[], None]] = {}


class InjectedFault(Exception):
    """What the action `raise` raises."""


def reach(point: str) -> None:
    """Say that the process is at this point."""
    hook = _hooks.get(point)
    if hook is not None:
        hook()


def set_fault(point: str, hook: Callable[[], None] | None) -> None:
    """Put a hook at a point, or take it away. For tests."""
    if point not in POINTS:
        raise KeyError(f"there is no fault point {point!r}; there are {', '.join(POINTS)}")
    if hook is None:
        _hooks.pop(point, None)
    else:
        _hooks[point] = hook


def _from_environment(text: str) -> None:
    point, _, rest = text.partition(":")
    action, _, count = rest.partition(":")
    left = int(count or 1)

    def hook() -> None:
        nonlocal left
        left -= 1
        if left:
            return
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(17)
            case _:
                raise InjectedFault(point)

    set_fault(point, hook)


if "HOWDAH_FAULT" in os.environ:
    _from_environment(os.environ["HOWDAH_FAULT"])
