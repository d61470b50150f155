"""Watches a job until it ends: yields a snapshot after each change, and every event exactly once, also the events
from before the watcher started. Notifications make it fast; polling every second covers lost notifications (decision 0010).

The code is async; sync callers run it in a background event loop, one per process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID, uuid4

import msgspec

from howdah.async_queue import backend_of
from howdah.database.listener import Listener
from howdah.errors import HowdahError, JobNotFound, NotPermitted
from howdah.model import Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping

    from howdah.async_queue import AsyncJobQueue
    from howdah.model import Event, Job
    from howdah.protocol.worker_statements import WorkerStatements

T = TypeVar("T")

POLL_SECONDS = 1.0
POLL_SPACING = 20  # the next poll is at least this many times the duration of a read later
STATEMENT_JOBS = 1000
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


class Together(Generic[T]):
    """Joins the calls of many waiters: those of one moment, and those that arrive while a statement runs, become
    one statement."""

    def __init__(self, send: Callable[[list[UUID]], Awaitable[Mapping[UUID, T]]]) -> None:
        self._send = send
        self._waiting: dict[UUID, asyncio.Future[T | None]] = {}
        self._sending: asyncio.Task[None] | None = None
        self.took_seconds = 0.0

    async def call(self, job_id: UUID) -> T | None:
        """The answer for one job; None if there is none."""
        if job_id not in self._waiting:
            self._waiting[job_id] = asyncio.get_running_loop().create_future()
        answer = self._waiting[job_id]
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all(), name="howdah-watcher")
        # A waiter that is cancelled must not cancel the answer of another one.
        return await asyncio.shield(answer)

    async def _send_all(self) -> None:
        await asyncio.sleep(0)  # the other waiters that were woken at the same moment
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            began = time.monotonic()
            try:
                ids = list(waiting)
                answers: dict[UUID, T] = {}
                for start in range(0, len(ids), STATEMENT_JOBS):
                    answers.update(await self._send(ids[start : start + STATEMENT_JOBS]))
            except BaseException as error:
                for answer in waiting.values():
                    if isinstance(error, Exception):
                        answer.set_exception(error)
                        answer.exception()  # its waiter may be gone
                    else:
                        answer.cancel()
                if not isinstance(error, Exception):
                    raise
            else:
                for job_id, answer in waiting.items():
                    answer.set_result(answers.get(job_id))
            self.took_seconds = time.monotonic() - began


class Watcher:
    """Watches jobs from one event loop, over one listening connection. All its waiters read together."""

    def __init__(self, queue: AsyncJobQueue, statements: WorkerStatements) -> None:
        self._queue = queue
        self._store = backend_of(queue).store
        self._statements = statements
        self._name = f"{os.getpid()}:{uuid4().hex[:12]}"
        self._watched: dict[UUID, set[asyncio.Event]] = {}
        self._listener: Listener | None = None
        self._connect_until = 0.0
        self._phase = random.random()  # noqa: S311 - processes do not poll at the same moment
        self._reads: Together[Job] = Together(self._read_jobs)
        self._renewals: Together[None] = Together(self._watch_jobs)
        self._removals: Together[None] = Together(self._unwatch_jobs)

    async def _read_jobs(self, ids: list[UUID]) -> dict[UUID, Job]:
        return {job.id: job for job in await self._store.run(self._statements.get_many(ids))}

    async def _watch_jobs(self, ids: list[UUID]) -> dict[UUID, None]:
        await self._store.run(self._statements.watch_jobs(self._name, ids, WATCH_DURATION))
        return {}

    async def _unwatch_jobs(self, ids: list[UUID]) -> dict[UUID, None]:
        await self._store.run(self._statements.unwatch_jobs(self._name, ids))
        return {}

    async def _listen(self) -> None:
        if self._listener is None:
            listener = Listener(await self._store.url(), self._statements.schema)
            if self._listener is None:
                self._listener = listener
                self._listener.subscribe("job", self._on_notification)
                self._listener.start()
                self._connect_until = time.monotonic() + CONNECT_TIMEOUT_SECONDS
        # Where notifications do not arrive, only the first waiters wait for them.
        left = self._connect_until - time.monotonic()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._listener.connected.wait(), left)

    def _seconds_to_poll(self) -> float:
        """The waiters of a watcher poll at the same moments, so that one statement reads for all of them. A read
        that takes long is not repeated every second."""
        period = max(POLL_SECONDS, POLL_SPACING * self._reads.took_seconds)
        return period - (time.monotonic() + self._phase * period) % period

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
                        await self._renewals.call(job_id)
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
                    await asyncio.wait_for(notified.wait(), self._seconds_to_poll())
        finally:
            self._watched[job_id].discard(notified)
            if not self._watched[job_id]:
                del self._watched[job_id]
                with contextlib.suppress(HowdahError):  # the row in `watchers` expires anyway
                    await self._removals.call(job_id)

    async def _read(self, job_id: UUID, last: Job | None) -> Job:
        job = await self._reads.call(job_id)
        if job is None:
            if last is None or last.keep != timedelta(0):
                raise JobNotFound(job_id)
            # With keep=0 a job is removed when it completes, and only then.
            return msgspec.structs.replace(last, status=Status.COMPLETED, progress=100)
        return job

    async def get(self, job_id: UUID) -> Job:
        """The job as it is now."""
        return await self._read(job_id, None)

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
