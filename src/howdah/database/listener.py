"""One LISTEN connection per event loop, with fan-out to whoever subscribed. Reconnects by itself, and
then tells every subscriber that something may have been missed.

`healthy` says that notifications are known to arrive (they do not through a pooler in transaction mode):
the listener notifies itself and waits for it. Whoever subscribes must poll as well, only less often."""

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
PROBE_SECONDS = 60.0  # while they succeed: each notification wakes every listener of the database
PROBE_TIMEOUT_SECONDS = 3.0


class Listener:
    """The connection and its subscribers. Callbacks get the payload; "" after a reconnect."""

    def __init__(self, url: str, schema: str) -> None:
        self._url = url
        self._schema = schema
        self._subscribers: dict[str, list[Callable[[str], None]]] = defaultdict(list)
        self._task: asyncio.Task[None] | None = None
        self._ping = f"{schema}:{uuid4().hex[:12]}"
        self._quoted_ping = '"' + self._ping.replace('"', '""') + '"'
        self._heard = asyncio.Event()
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
        pause = 0.1
        while True:
            began = time.monotonic()
            try:
                await self._listen()
            except Exception as error:  # whatever broke it: subscribers poll meanwhile
                logger.info("the listening connection broke", extra={"error": str(error)})
            finally:
                self.healthy = False
                self.connected.clear()
            pause = 0.1 if time.monotonic() - began > 10 else min(pause * 2, 2.0)
            await asyncio.sleep(pause)

    async def _listen(self) -> None:
        # Simple queries only, and nothing kept: a pooler would give the next one another session.
        conn = await asyncpg.connect(
            self._url, timeout=5.0, command_timeout=PROBE_TIMEOUT_SECONDS, statement_cache_size=0
        )
        self._server_pid = conn.get_server_pid()
        ended = asyncio.Event()
        conn.add_termination_listener(lambda _: ended.set())
        try:
            for channel in CHANNELS:
                await conn.add_listener(f"{self._schema}:{channel}", self._tell)
            await conn.add_listener(self._ping, self._tell)
            self.connected.set()
            for channel in CHANNELS:
                self._call(channel, "")
            probe_at = 0.0
            while not conn.is_closed():
                if time.monotonic() >= probe_at:
                    await self._probe(conn)
                    period = PROBE_SECONDS if self.healthy else PING_SECONDS
                    probe_at = time.monotonic() + period
                else:
                    await conn.execute(
                        "SELECT 1"
                    )  # a connection that is cut off fails here, in time
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), PING_SECONDS)
        finally:
            # Not close(): that would wait for a server that may be gone.
            conn.terminate()

    async def _probe(self, conn: Any) -> None:
        self._heard.clear()
        await conn.execute(f"NOTIFY {self._quoted_ping}")
        try:
            await asyncio.wait_for(self._heard.wait(), PROBE_TIMEOUT_SECONDS)
            self.healthy = True
        except TimeoutError:
            self.healthy = False

    def _tell(self, conn: Any, pid: int, channel: str, payload: str) -> None:
        if channel == self._ping:
            # Behind a pooler LISTEN and NOTIFY may meet in one session by chance, which proves nothing.
            # Its process id is then not the one that the pooler gave us.
            if pid == self._server_pid:
                self._heard.set()
        else:
            self._call(channel.rpartition(":")[2], payload)

    def _call(self, channel: str, payload: str) -> None:
        for callback in list(self._subscribers[channel]):
            try:
                callback(payload)
            except Exception:
                logger.exception("a subscriber of notifications failed")
