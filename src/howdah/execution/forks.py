"""Ends a process that a handler forked, when it returns into the code of the worker: it has a copy of the worker's
connections and of its event loop, and would run and acknowledge jobs a second time. Signals do in such a process what
they do in any other."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from types import FrameType

    Handler: TypeAlias = Callable[[int, FrameType | None], object]

FORKED_EXIT_STATUS = 1

_is_forked = False
_loop: asyncio.AbstractEventLoop | None = None
_loop_thread = 0
_is_registered = False
_handlers: dict[int, tuple[Handler, Handler]] = {}  # as given, and as installed


def guard(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Call at the start of a process that runs handlers, in the thread of its event loop if it has one."""
    global _is_forked, _loop, _loop_thread
    _is_forked, _loop, _loop_thread = False, loop, threading.get_ident()
    _watch_forks()


def handle_signal(number: int, handler: Handler) -> None:
    """Handle a signal in this process, and not in those that are forked from it: `terminate` and the pools of
    `multiprocessing` rely on SIGTERM. To ignore a signal, give a function that does nothing: `exec` inherits SIG_IGN."""
    _watch_forks()
    if number not in _handlers or _handlers[number][0] is not handler:
        _handlers[number] = handler, _in_this_process(handler)
    installed = _handlers[number][1]
    if signal.getsignal(number) is not installed:
        signal.signal(number, installed)


def _in_this_process(handler: Handler) -> Handler:
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            handler(number, frame)
        else:  # the signal arrived before `_on_fork` was called
            _leave_signals()
            os.kill(os.getpid(), number)

    return handle


def leave_if_forked() -> None:
    """Called after a handler: end this process if the handler has forked it."""
    if _is_forked:
        _leave()


def _watch_forks() -> None:
    global _is_registered
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_on_fork)


def _on_fork() -> None:
    global _is_forked
    _is_forked = True
    _leave_signals()
    if _loop is not None and threading.get_ident() == _loop_thread and not _loop.is_closed():
        # A child that awaits would enter its copy of the loop. `multiprocessing` never returns to it.
        _loop.call_soon(_leave)
        ready = getattr(_loop, "_ready", None)  # asyncio's own loop: before every other callback
        if ready:
            ready.rotate(1)


def _leave_signals() -> None:
    """Reset the handlers that are ours. The thread that has forked is the main thread of the new process."""
    for number, (_, installed) in _handlers.items():
        if signal.getsignal(number) is installed:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    _handlers.clear()
    if _loop is not None:
        signal.set_wakeup_fd(-1)  # it would wake the loop of the worker


def _leave() -> None:
    os._exit(FORKED_EXIT_STATUS)
