"""Values of which every event loop of every process has its own: connections, locks, futures and tasks work only in
the loop that made them. Several threads of a program may each run a loop at the same time."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value for each event loop, made when the loop first asks for it. Values of closed loops are dropped.

    Without a lock, which a fork could leave locked: only a loop's own thread adds its key, and each step on the
    dictionary is atomic."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[tuple[int, asyncio.AbstractEventLoop], T] = {}

    def get(self) -> T:
        """The value of the running loop."""
        key = (os.getpid(), asyncio.get_running_loop())
        value = self._values.get(key)
        if value is None:
            self._drop_closed()
            value = self._values[key] = self._make()
        return value

    def pop(self, loop: asyncio.AbstractEventLoop) -> T | None:
        """Remove and return the value of a loop, if it has one."""
        return self._values.pop((os.getpid(), loop), None)

    def _drop_closed(self) -> None:
        # The values of the parent's loops stay: destructors in the child would close what the parent uses.
        for key in list(self._values):
            if key[1].is_closed():
                self._values.pop(key, None)
