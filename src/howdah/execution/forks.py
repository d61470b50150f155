"""Ends a process that a handler forked, when it returns into the code of the worker: it has a copy of the worker's
connections and of its event loop, and would run and acknowledge jobs a second time."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

FORKED_EXIT_STATUS = 1

_is_forked = False
_loop: asyncio.AbstractEventLoop | None = None
_loop_thread = 0
_is_registered = False


def guard(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Call at the start of a process that runs handlers, in the thread of its event loop if it has one."""
    global _is_forked, _loop, _loop_thread, _is_registered
    _is_forked, _loop, _loop_thread = False, loop, threading.get_ident()
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_on_fork)


def leave_if_forked() -> None:
    """Called after a handler: end this process if the handler has forked it."""
    if _is_forked:
        _leave()


def _on_fork() -> None:
    global _is_forked
    _is_forked = True
    if _loop is not None and threading.get_ident() == _loop_thread and not _loop.is_closed():
        # A child that awaits would enter its copy of the loop. `multiprocessing` never returns to it.
        _loop.call_soon(_leave)
        ready = getattr(_loop, "_ready", None)  # asyncio's own loop: before every other callback
        if ready:
            ready.rotate(1)


def _leave() -> None:
    os._exit(FORKED_EXIT_STATUS)
