"""How long to wait before the next attempt: the only backoff in Howdah. Every loop that retries uses it.

Delays double up to a limit. Jitter spreads them, so that a fleet does not reconnect all at once."""

from __future__ import annotations

import random

FIRST_SECONDS = 0.05
MOST_SECONDS = 1.0
ANSWERED_MOST_SECONDS = 3.0
"""The limit if the server answered and cannot serve: it is read-only, has no free connection, or the
database accepts none."""


class Backoff:
    """The delays of one loop. `reset` after a success."""

    def __init__(self, first: float = FIRST_SECONDS, most: float = MOST_SECONDS) -> None:
        self._first = first
        self._most = most
        self._delay = 0.0

    def next(self) -> float:
        """Seconds to wait before the next attempt."""
        self._delay = doubled(self._delay, self._first, self._most)
        return jittered(self._delay)

    def reset(self) -> None:
        """Start from the first delay again."""
        self._delay = 0.0


def doubled(last: float, first: float, most: float) -> float:
    """The delay after one of `last` seconds, before jitter."""
    return min(max(2 * last, first), most)


def jittered(seconds: float) -> float:
    """Between half of the seconds and all of them."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - spreads attempts
