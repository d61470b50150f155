"""The row of a worker in `workers`: registered before the worker starts, written with every heartbeat, removed when it
stops. A row belongs to one life of a worker (decision 0037)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

from howdah.database.async_store import AsyncStore
from howdah.database.backoff import Backoff
from howdah.database.driver_errors import is_refused
from howdah.encoding.safe_logger import get_logger
from howdah.errors import ConnectionLimit, DatabaseClosed, DatabaseReadOnly, DatabaseUnreachable
from howdah.execution.repeated_lines import RepeatedLines
from howdah.worker.event_loop import wait_for_first
from howdah.worker.throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from howdah.app import App
    from howdah.protocol.statements import Statement

logger = get_logger(__name__)

START_TIMEOUT_SECONDS = 60.0
START_ATTEMPT_TIMEOUT_SECONDS = 3.0
START_RETRY_SECONDS, MAX_START_RETRY_SECONDS = 0.25, 2.0


class Registration:
    """The row of one life of a worker, and its counts."""

    def __init__(self, app: App, worker_id: str, queues: Sequence[str], concurrency: int) -> None:
        self._app = app
        self._worker_id = worker_id
        self._queues = queues
        self._concurrency = concurrency
        self._may_exist = False
        self.life = uuid4()
        self.throughput = Throughput()

    async def register(self, stopping: asyncio.Event) -> bool:
        """Register with the database as soon as it answers. False if the worker was stopped before that."""
        store = AsyncStore(
            self._app.database,
            self._app.schema,
            create=self._app.create,
            timeout=START_ATTEMPT_TIMEOUT_SECONDS,
        )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        backoff, lines = Backoff(START_RETRY_SECONDS, MAX_START_RETRY_SECONDS), RepeatedLines()
        self._may_exist = True  # also if the answer is lost
        try:
            while not stopping.is_set():
                registering = asyncio.ensure_future(store.run(self.insert()))
                await wait_for_first(registering, stopping.wait())
                if not registering.done():
                    return False
                error = registering.exception()
                if error is None:
                    return True
                if not _is_worth_retrying(error, deadline):
                    raise error
                lines.log(
                    logger, logging.WARNING, "database unreachable; retrying",
                    kind=type(error).__name__, fields={"error": str(error)},
                )  # fmt: skip
                await wait_for_first(asyncio.sleep(backoff.next()), stopping.wait())
        finally:
            await store.close()
        return False

    async def remove(self, store: AsyncStore, timeout: float, last: Statement[bool] | None) -> None:
        """Remove the row if it may exist, after a last heartbeat."""
        if not self._may_exist:
            return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(timeout):
                if last is not None:
                    await store.run(last)
                await store.run(self._app.statements.remove_worker(self._worker_id, self.life))
                self._may_exist = False

    def insert(self, *, idle: bool = True) -> Statement[None]:
        """The statement that registers this life, for the first time or because its row is gone."""
        tasks = self._app.tasks.values()
        return self._app.statements.register_worker(
            self._worker_id,
            socket.gethostname(),
            os.getpid(),
            self._queues,
            list(self._app.tasks),
            sorted({task.options.priority for task in tasks}),
            msgspec.json.encode({"concurrency": self._concurrency}).decode(),
            self.life,
            idle,
        )

    def beat(self, running: int) -> Statement[bool]:
        """The statement that shows that this life goes on, with its counts since the last one."""
        info = msgspec.json.encode({"concurrency": self._concurrency, "running": running})
        return self._app.statements.beat_worker(
            self._worker_id, info.decode(), self.throughput.take(), self.life
        )


def _is_worth_retrying(error: BaseException, deadline: float) -> bool:
    """Whether the database may accept the worker later. A wrong password stays wrong, and so may the address of a
    server that never answered. A server that answered and cannot serve is no misconfiguration."""
    if not isinstance(error, DatabaseUnreachable):
        return False
    if error.__cause__ is not None and is_refused(error.__cause__):
        return False
    has_answered = isinstance(error, DatabaseReadOnly | ConnectionLimit | DatabaseClosed)
    return has_answered or time.monotonic() <= deadline
