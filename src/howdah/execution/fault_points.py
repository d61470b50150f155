"""Fault points: named places where tests kill a worker, stop it, or make it fail. Inert in production: without
HOWDAH_FAULT in the environment, `reach` is one failed dictionary lookup.

HOWDAH_FAULT="after-claim:kill:3" sends SIGKILL to the process when it reaches that point for the third time.
`exit` exits with status 17, `stop` sends SIGSTOP, `raise` raises `InjectedFault`.
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
    "before-start": "a slot has taken a job and has not yet run it",
    "after-start": "started_at of a suspect was written, and its handler has not been called yet",
    "after-run": "a handler has returned, and the completer does not have its outcome yet",
    "before-acknowledge": "the completer is about to send outcomes",
    "after-acknowledge": "outcomes were committed, and the heartbeat still has the runs",
    "before-heartbeat": "leases are about to be extended",
    "after-heartbeat": "leases were extended",
    "before-maintenance": "maintenance is about to run",
    "during-shutdown": "the worker is about to release jobs that have not started",
}

hooks: dict[str, Callable[[], None]] = {}
"""What to call at a point. Only tests set these."""


class InjectedFault(Exception):
    """Raised by the action `raise`."""


def reach(point: str) -> None:
    """Run the hook of this point, if a test has set one."""
    hook = hooks.get(point)
    if hook is not None:
        hook()


def _from_environment(text: str) -> None:
    point, _, rest = text.partition(":")
    if point not in POINTS:
        raise KeyError(f"unknown fault point {point!r}; known: {', '.join(POINTS)}")
    action, _, count = rest.partition(":")
    remaining = int(count or 1)

    def hook() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining:
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

    hooks[point] = hook


if "HOWDAH_FAULT" in os.environ:
    _from_environment(os.environ["HOWDAH_FAULT"])
