"""One LISTEN connection per event loop, which passes notifications to its subscribers. It reconnects by
itself, and then calls every subscriber, because notifications may have been missed.

`healthy` is True if notifications are known to arrive: the listener has notified itself. Through a pooler in
transaction mode they do not arrive. Subscribers must poll as well, but less often."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg

from howdah.database.driver_errors import end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

CHANNELS = ("wake", "cancel", "job")
PING_SECONDS = 5.0
PROBE_SECONDS = 60.0  # while probes succeed: each one wakes every listener of the database
PROBE_TIMEOUT_SECONDS = 3.0
CONNECT_TIMEOUT_SECONDS = 5.0
MIN_RETRY_DELAY_SECONDS, MAX_RETRY_DELAY_SECONDS = 0.1, 2.0
STABLE_SECONDS = 10.0  # a connection that lasted longer resets the backoff


class Listener:
    """The connection and its subscribers. A callback receives the payload, or "" after a reconnect."""

    def __init__(self, url: str, schema: str) -> None:
        self._url = url
        self._schema = schema
        self._subscribers: dict[str, list[Callable[[str], None]]] = defaultdict(list)
        self._task: asyncio.Task[None] | None = None
        self._probe_channel = f"{schema}:{uuid4().hex[:12]}"
        self._quoted_probe_channel = '"' + self._probe_channel.replace('"', '""') + '"'
        self._probe_arrived = asyncio.Event()
        self._server_pid = 0
        self.connected = asyncio.Event()
        self.healthy = False

    def subscribe(self, channel: str, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call back for every notification on a channel, until the returned function is called."""
        self._subscribers[channel].append(callback)
        return lambda: self._subscribers[channel].remove(callback)

    def start(self) -> None:
        """Connect and listen, in a task of the running loop."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="howdah-listener")

    async def stop(self) -> None:
        """Close the connection."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None

    async def _run(self) -> None:
        delay = MIN_RETRY_DELAY_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._listen()
            except Exception as error:  # subscribers poll until it is back
                logger.info("listener disconnected; retrying", extra={"error": str(error)})
            finally:
                self.healthy = False
                self.connected.clear()
            if time.monotonic() - began > STABLE_SECONDS:
                delay = MIN_RETRY_DELAY_SECONDS
            else:
                delay = min(delay * 2, MAX_RETRY_DELAY_SECONDS)
            await asyncio.sleep(delay)

    async def _listen(self) -> None:
        # Only simple queries, and no statement cache: a pooler runs the next query in another session.
        conn = await asyncpg.connect(
            self._url,
            timeout=CONNECT_TIMEOUT_SECONDS,
            command_timeout=PROBE_TIMEOUT_SECONDS,
            statement_cache_size=0,
        )
        self._server_pid = conn.get_server_pid()
        ended = asyncio.Event()
        conn.add_termination_listener(lambda _: ended.set())
        try:
            for channel in CHANNELS:
                await conn.add_listener(f"{self._schema}:{channel}", self._on_notification)
            await conn.add_listener(self._probe_channel, self._on_notification)
            self.connected.set()
            for channel in CHANNELS:
                self._call_subscribers(channel, "")
            probe_at = 0.0
            while not conn.is_closed():
                if time.monotonic() >= probe_at:
                    await self._probe(conn)
                    period = PROBE_SECONDS if self.healthy else PING_SECONDS
                    probe_at = time.monotonic() + period
                else:
                    # A half-open connection fails here, within the command timeout.
                    await conn.execute("SELECT 1")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), PING_SECONDS)
        finally:
            # close() would wait for a server that may be gone.
            conn.terminate()

    async def _probe(self, conn: Any) -> None:
        self._probe_arrived.clear()
        await conn.execute(f"NOTIFY {self._quoted_probe_channel}")
        try:
            await asyncio.wait_for(self._probe_arrived.wait(), PROBE_TIMEOUT_SECONDS)
            self.healthy = True
        except TimeoutError:
            self.healthy = False

    def _on_notification(self, conn: Any, pid: int, channel: str, payload: str) -> None:
        if channel == self._probe_channel:
            # A pooler may run LISTEN and NOTIFY in the same session by chance, which proves nothing. The
            # process id is then not the one that the pooler reported.
            if pid == self._server_pid:
                self._probe_arrived.set()
        else:
            self._call_subscribers(channel.rpartition(":")[2], payload)

    def _call_subscribers(self, channel: str, payload: str) -> None:
        for callback in list(self._subscribers[channel]):
            try:
                callback(payload)
            except Exception:
                logger.exception("notification subscriber failed")
