"""What wakes a fetcher: notifications, the due times that they name, and free slots. It remembers for which job types
the worker was woken until a claim has answered them. The fetcher waits and claims."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NEAR_SECONDS = 5.0  # jobs that are due later are found by a poll
DUE_STEP_SECONDS = 0.005  # due times of notifications are rounded up to this


def wake_channel(worker_id: str) -> str:
    """The channel of a worker without its schema, as the SQL function `wake_channel` names it."""
    return "wake:" + hashlib.sha256(worker_id[:100].encode()).hexdigest()[:8]


class Taken(NamedTuple):
    """What one statement answers: the types that the worker was woken for, and the least due times of its jobs."""

    job_types: set[str]
    due: dict[str, float]

    @property
    def due_from(self) -> float | None:
        """The least of the due times, if there is one. If its enqueue took long to commit, the head of its lane may have
        passed such a job."""
        return min(self.due.values(), default=None)


class Wakes:
    """The wakes of one worker, in its event loop."""

    def __init__(self, job_types: Sequence[str], queues: Sequence[str]) -> None:
        self._job_types = frozenset(job_types)
        self._queues = frozenset(queues)
        self._ended = asyncio.Event()
        self._woken = False  # the wait was ended by something other than its timer
        self.unanswered: set[str] = set()
        """The types that it was woken for and that no claim since has found less of than it asked for."""
        self._notified: set[str] = set()  # the types that were named since the last claim
        self._due: dict[str, float] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._types_due: dict[int, set[str]] = {}
        # Seconds from our monotonic clock to the database's clock, at least: the answer that told the time may have
        # been slow. Our wall clock may jump.
        self._clock_offset: float | None = None

    def close(self) -> None:
        """Forget the due times."""
        for timer in self._timers.values():
            timer.cancel()

    # ── what wakes ────────────────────────────────────────────────────────────────────────────────

    def wake(self) -> None:
        """End the current wait."""
        self._woken = True
        self._ended.set()

    def on_notification(self, text: str) -> None:
        """The payload is [[queue, job type, least due time], …], or [] if the list would not fit. It is empty
        if notifications may have been lost."""
        lanes = msgspec.json.decode(text) if text else []
        mine = [lane for lane in lanes if lane[0] in self._queues and lane[1] in self._job_types]
        if lanes and not mine:
            return
        for _, job_type, due, *_ in mine:
            self._note_due(job_type, due)
        types = {lane[1] for lane in mine} or set(self._job_types)
        if mine and self._clock_offset is not None:
            now = time.monotonic() + self._clock_offset
            for _, job_type, due, *_ in mine:
                if now < due < now + NEAR_SECONDS:
                    self._wake_at(due, now, job_type)
            types = {lane[1] for lane in mine if lane[2] <= now}
        if types:
            self._wake_to_claim(types)

    def set_clock(self, database_now: float) -> None:
        """The database's clock shows this time now, or showed it a moment ago."""
        self._clock_offset = database_now - time.monotonic()

    def _note_due(self, job_type: str, due: float) -> None:
        self._due[job_type] = min(due, self._due.get(job_type, due))

    def _wake_at(self, due: float, now: float, job_type: str) -> None:
        """Wake when a job is due. Its worker was chosen when it was enqueued, so it claims on time; the others
        learn of later due times when they poll."""
        step = math.ceil(due / DUE_STEP_SECONDS)
        self._types_due.setdefault(step, set()).add(job_type)
        if step not in self._timers:
            # A timer that sets an event, not a timeout: a timeout would cancel the task of this part.
            self._timers[step] = asyncio.get_running_loop().call_later(
                step * DUE_STEP_SECONDS - now, self._on_due, step
            )

    def _on_due(self, step: int) -> None:
        self._timers.pop(step, None)
        self._wake_to_claim(self._types_due.pop(step))

    def _wake_to_claim(self, job_types: set[str]) -> None:
        self.unanswered |= job_types
        self._notified |= job_types
        self.wake()

    # ── for the fetcher ───────────────────────────────────────────────────────────────────────────

    async def wait(self, seconds: float) -> bool:
        """Wait for this time. Returns at once, and True, if the worker is or was woken."""
        timer = asyncio.get_running_loop().call_later(seconds, self._ended.set)
        try:
            await self._ended.wait()
        finally:
            timer.cancel()
        woken = self._woken
        self.forget()
        return woken

    async def wait_until_woken(self) -> None:
        """Wait for the next wake, which is not forgotten."""
        await self._ended.wait()

    def forget(self) -> None:
        """The next wait is for what wakes from now on."""
        self._woken = False
        self._ended.clear()

    def take_notified(self) -> set[str]:
        """The types that notifications have named since the last call."""
        types, self._notified = self._notified, set()
        return types

    def take(self, job_types: Iterable[str]) -> Taken:
        """What a statement for these types answers. If they are noted again meanwhile, that is for the next one."""
        if not self.unanswered and not self._due:
            return Taken(set(), {})
        asked = self.unanswered.intersection(job_types)
        self.unanswered -= asked
        named = self._due.keys() & set(job_types)
        return Taken(asked, {name: self._due.pop(name) for name in named})

    def put_back(self, taken: Taken) -> None:
        """The statement failed."""
        self.unanswered |= taken.job_types
        for job_type, due in taken.due.items():
            self._note_due(job_type, due)
