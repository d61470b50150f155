"""Watches a job until it ends: yields a snapshot after each change, and every event exactly once, also the events
from before the watcher started. Notifications make it fast; polling every second covers lost notifications (decision 0010).

The code is async; sync callers run it in a background event loop, one per process."""

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

POLL_SECONDS = 1.0
CONNECT_TIMEOUT_SECONDS = 1.0
WATCH_DURATION = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a watched job: the job as it is now, and the events since the last change."""

    job: Job
    events: tuple[Event, ...]

    @property
    def status(self) -> Status:
        """The job's status."""
        return self.job.status

    @property
    def progress(self) -> int:
        """The job's progress in percent."""
        return self.job.progress

    @property
    def stage(self) -> str | None:
        """The job's current stage."""
        return self.job.current_stage


class Watcher:
    """Watches jobs from one event loop, over one listening connection."""

    def __init__(self, queue: AsyncJobQueue, statements: WorkerStatements) -> None:
        self._queue = queue
        self._store = backend_of(queue).store
        self._statements = statements
        self._name = f"{os.getpid()}:{uuid4().hex[:12]}"
        self._watched: dict[UUID, set[asyncio.Event]] = {}
        self._listener: Listener | None = None

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = Listener(await self._store.url(), self._statements.schema)
            self._listener.subscribe("job", self._on_notification)
            self._listener.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._listener.connected.wait(), CONNECT_TIMEOUT_SECONDS)

    def _on_notification(self, payload: str) -> None:
        """The payload is a job's id, or empty if notifications may have been lost: then every watcher reads."""
        if payload:
            for event in self._watched.get(UUID(payload), ()):
                event.set()
        else:
            for events in self._watched.values():
                for event in events:
                    event.set()

    async def changes(self, job_id: UUID) -> AsyncIterator[Change]:
        """The job as it is now, then every visible change until it ends."""
        statements, store = self._statements, self._store
        notified = asyncio.Event()
        self._watched.setdefault(job_id, set()).add(notified)
        renew_at = 0.0
        last: Job | None = None
        events_count = last_event = 0
        try:
            await self._listen()
            while True:
                if time.monotonic() > renew_at:
                    renew_at = time.monotonic() + WATCH_DURATION.total_seconds() / 2
                    try:
                        await store.run(statements.watch_jobs(self._name, [job_id], WATCH_DURATION))
                    except NotPermitted:
                        renew_at = (
                            math.inf
                        )  # a role that may only read gets no notifications and polls
                notified.clear()
                job = await self._read(job_id, last)
                events: tuple[Event, ...] = ()
                if job.events_count != events_count:
                    events_count = job.events_count
                    events = tuple(await self._queue.events(job_id, after=last_event))
                    last_event = events[-1].event_id if events else last_event
                if last is None or events or _differs(last, job):
                    last = job
                    yield Change(job, events)
                if job.status.is_final:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(notified.wait(), POLL_SECONDS)
        finally:
            self._watched[job_id].discard(notified)
            if not self._watched[job_id]:
                del self._watched[job_id]
                with contextlib.suppress(HowdahError):  # the row in `watchers` expires anyway
                    await store.run(statements.unwatch_jobs(self._name, [job_id]))

    async def _read(self, job_id: UUID, last: Job | None) -> Job:
        try:
            return await self._queue.get(job_id)
        except JobNotFound:
            if last is None or last.keep != timedelta(0):
                raise
            # With keep=0 a job is removed when it completes, and only then.
            return msgspec.structs.replace(last, status=Status.COMPLETED, progress=100)

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


_loops_of_parents: list[object] = []


class Background:
    """An event loop in a daemon thread, one per process, for sync callers. It starts on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        os.register_at_fork(after_in_child=self._forget_loop)

    def _forget_loop(self) -> None:
        # Keep a reference: the destructor of the parent's loop would close the parent's selector and sockets.
        _loops_of_parents.append(self.loop)
        self._lock = threading.Lock()
        self.loop = None

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self.loop.run_forever, name="howdah-background", daemon=True
                ).start()
            return self.loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for its result."""
        future = asyncio.run_coroutine_threadsafe(work, self._start())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """Iterate over an async iterator in the loop."""
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
