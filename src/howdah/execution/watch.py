"""Following one job until it ends: a snapshot whenever something changed, and every event exactly once,
however late the watcher joined. Notifications make it quick; reading again every second makes it sure.

Async inside; sync callers run it on a background loop of their process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4

import msgspec

from howdah.async_queue import backend_of
from howdah.database.listener import Listener
from howdah.errors import HowdahError, JobNotFound, NotPermitted
from howdah.model import Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

    from howdah.async_queue import AsyncJobQueue
    from howdah.model import Event, Job
    from howdah.protocol.worker_statements import WorkerStatements

T = TypeVar("T")

POLL = 1.0
WATCH_FOR = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Change:
    """What a watcher is told: the job as it is now, and the events since the last change."""

    job: Job
    events: tuple[Event, ...]

    @property
    def status(self) -> Status:
        """What the job is doing."""
        return self.job.status

    @property
    def progress(self) -> int:
        """Percent."""
        return self.job.progress

    @property
    def stage(self) -> str | None:
        """What it is at."""
        return self.job.current_stage


class Watcher:
    """Watches jobs from one event loop, over one listening connection."""

    def __init__(self, queue: AsyncJobQueue, statements: WorkerStatements) -> None:
        self._queue = queue
        self._store = backend_of(queue).store
        self._statements = statements
        self._name = f"{os.getpid()}:{uuid4().hex[:12]}"
        self._awaited: dict[UUID, set[asyncio.Event]] = {}
        self._listener: Listener | None = None

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = Listener(await self._store.url(), self._statements.schema)
            self._listener.subscribe("job", self._tell)
            self._listener.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._listener.connected.wait(), 1.0)

    def _tell(self, payload: str) -> None:
        if payload:
            for event in self._awaited.get(UUID(payload), ()):
                event.set()
        else:
            for events in self._awaited.values():
                for event in events:
                    event.set()

    async def changes(self, job_id: UUID) -> AsyncIterator[Change]:
        """Every change of a job that can be told from the last, from now until it ends."""
        statements, store = self._statements, self._store
        woken = asyncio.Event()
        self._awaited.setdefault(job_id, set()).add(woken)
        asked_until = 0.0
        seen: Job | None = None
        counted = last_event = 0
        try:
            await self._listen()
            while True:
                if time.monotonic() > asked_until:
                    asked_until = time.monotonic() + WATCH_FOR.total_seconds() / 2
                    try:
                        await store.run(statements.watch_jobs(self._name, [job_id], WATCH_FOR))
                    except NotPermitted:
                        asked_until = math.inf  # it may only look: then it looks every second
                woken.clear()
                job = await self._look(job_id, seen)
                events: tuple[Event, ...] = ()
                if job.events_count != counted:
                    counted = job.events_count
                    events = tuple(await self._queue.events(job_id, after=last_event))
                    last_event = events[-1].event_id if events else last_event
                if seen is None or events or _differs(seen, job):
                    seen = job
                    yield Change(job, events)
                if job.status.is_final:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), POLL)
        finally:
            self._awaited[job_id].discard(woken)
            if not self._awaited[job_id]:
                del self._awaited[job_id]
                with contextlib.suppress(HowdahError):  # it expires by itself
                    await store.run(statements.unwatch_jobs(self._name, [job_id]))

    async def _look(self, job_id: UUID, seen: Job | None) -> Job:
        try:
            return await self._queue.get(job_id)
        except JobNotFound:
            if seen is None or seen.keep != timedelta(0):
                raise
            # With keep=0 it is removed as soon as it is completed, and only then.
            return msgspec.structs.replace(seen, status=Status.COMPLETED, progress=100)

    async def get(self, job_id: UUID) -> Job:
        """The job as it is now."""
        return await self._queue.get(job_id)

    async def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            await self._listener.stop()
            self._listener = None
        await self._queue.close()


def _differs(one: Job, other: Job) -> bool:
    return (one.status, one.progress, one.current_stage, one.attempts) != (
        other.status,
        other.progress,
        other.current_stage,
        other.attempts,
    )


_left_by_parents: list[object] = []


class Background:
    """An event loop in a daemon thread, one per process, for sync callers; started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # The parent's loop is kept: its end would touch a selector and sockets that are the parent's.
        _left_by_parents.append(self.loop)
        self._lock = threading.Lock()
        self.loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self.loop.run_forever, name="howdah-background", daemon=True
                ).start()
            return self.loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for its result."""
        future = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """Iterate over an async iterator there."""
        try:
            while True:
                try:
                    yield self.run(anext(source))  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                self.run(close())


background = Background()
