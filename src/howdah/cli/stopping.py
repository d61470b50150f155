"""For commands that take something down again when they end, however they end."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Ends on SIGTERM and on a closed terminal like on Ctrl-C: through every `finally`, undisturbed."""

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


def ignore_stops() -> None:
    """From here on everything is taken down; another Ctrl-C would leave some of it behind."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
