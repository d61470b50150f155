"""Signal handling for commands that must clean up, however they end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Handle SIGTERM and a closed terminal like Ctrl-C: run every `finally`, and ignore further signals."""

    def stop(number: int, frame: object) -> None:
        ignore_stops()
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, for use inside `stoppable`. A signal cancels the task instead of raising an exception,
    which could be lost in whatever callback is running."""
    signals: list[int] = []

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop(number: int) -> None:
            signals.append(number)
            task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number)
        return await task

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        ignore_stops()
        raise SystemExit(128 + signals[0]) from None
    finally:
        if not signals:
            for number, handler in before.items():
                signal.signal(number, handler)


def ignore_stops() -> None:
    """Ignore further signals during cleanup: another Ctrl-C would leave part of it undone."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
