"""One LISTEN connection per event loop, which passes notifications to its subscribers. It reconnects by
itself, and then calls every subscriber, because notifications may have been missed.

`healthy` is True if notifications are known to arrive: the listener has notified itself. Subscribers must poll as
well, but less often.

Through a pooler in transaction mode clients share sessions: a LISTEN would stay in a session that others use, and its
notifications would reach them. So the listener listens only in a session that it does not share, and closes a
connection on which its own notification does not arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg

from howdah.database.backoff import Backoff, jittered
from howdah.database.driver_errors import end_tasks
from howdah.database.service_task import ServiceTask
from howdah.encoding.safe_logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)

PING_SECONDS = 5.0
PROBE_SECONDS = 60.0  # while probes succeed: each one wakes every listener of the database
PROBE_TIMEOUT_SECONDS = 3.0
CONNECT_TIMEOUT_SECONDS = 5.0
MIN_RETRY_DELAY_SECONDS, MAX_RETRY_DELAY_SECONDS = 0.1, 2.0
SHARED_RETRY_SECONDS = 300.0  # a pooler's mode rarely changes
SHARED_ROUNDS = 5
STABLE_SECONDS = 10.0  # a connection that lasted longer resets the backoff


class SharedSession(Exception):
    """Notifications cannot be relied on here, and LISTEN would disturb other clients."""


class Listener:
    """The connection and its subscribers. A callback receives the payload, or "" after a reconnect."""

    def __init__(self, url: str, schema: str) -> None:
        self._url = url
        self._schema = schema
        self._subscribers: dict[str, list[Callable[[str], None]]] = defaultdict(list)
        self._task: ServiceTask | None = None
        self._probe_channel = f"{schema}:{uuid4().hex[:12]}"
        self._quoted_probe_channel = '"' + self._probe_channel.replace('"', '""') + '"'
        self._probe_arrived = asyncio.Event()
        self._server_pid = 0
        self.connected = asyncio.Event()
        """Set when it listens, or when it is known that it cannot."""
        self.healthy = False

    def subscribe(self, channel: str, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call back for every notification on a channel, until the returned function is called. The listener
        listens on the channels that have subscribers when it connects."""
        self._subscribers[channel].append(callback)
        return lambda: self._subscribers[channel].remove(callback)

    def start(self) -> None:
        """Connect and listen, in a task of the running loop."""
        if self._task is None or self._task.done():
            self._task = ServiceTask(self._run(), name="howdah-listener")

    async def stop(self) -> None:
        """Close the connection."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None

    async def _run(self) -> None:
        backoff = Backoff(MIN_RETRY_DELAY_SECONDS, MAX_RETRY_DELAY_SECONDS)
        was_shared = False
        while True:
            began = time.monotonic()
            try:
                await self._listen()
            except SharedSession as error:
                self.connected.set()  # there is nothing to wait for
                if not was_shared:
                    logger.info("not listening; polling instead", extra={"reason": str(error)})
                was_shared = True
                await asyncio.sleep(jittered(SHARED_RETRY_SECONDS))
                continue
            except Exception as error:  # subscribers poll until it is back
                logger.info("listener disconnected; retrying", extra={"error": str(error)})
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                # A handler has cancelled a task that this one was waiting for.
            finally:
                self.healthy = False
            self.connected.clear()
            was_shared = False
            if time.monotonic() - began > STABLE_SECONDS:
                backoff.reset()
            await asyncio.sleep(backoff.next())

    async def _listen(self) -> None:
        conn = await _connect(self._url)
        ended = asyncio.Event()
        conn.add_termination_listener(lambda _: ended.set())
        try:
            self._server_pid = await self._own_session(conn)
            for channel in list(self._subscribers):
                await conn.add_listener(f"{self._schema}:{channel}", self._on_notification)
            await conn.add_listener(self._probe_channel, self._on_notification)
            self.connected.set()
            for channel in list(self._subscribers):
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

    async def _own_session(self, conn: Any) -> int:
        """The process id of the server session that only this connection uses."""
        pid = await _backend_pid(conn)
        if pid == conn.get_server_pid():
            return pid  # without a pooler in between
        # In session mode the session stays the same and no other client gets it. In transaction mode the
        # pooler hands the session that was just released to the next client, or another one to this client.
        other = await _connect(self._url)
        try:
            for _ in range(SHARED_ROUNDS):
                if await _backend_pid(other) == pid or await _backend_pid(conn) != pid:
                    raise SharedSession("a pooler in transaction mode shares this session")
        finally:
            other.terminate()
        return pid

    async def _probe(self, conn: Any) -> None:
        self._probe_arrived.clear()
        await conn.execute(f"NOTIFY {self._quoted_probe_channel}")
        try:
            await asyncio.wait_for(self._probe_arrived.wait(), PROBE_TIMEOUT_SECONDS)
            self.healthy = True
        except TimeoutError:
            self.healthy = False
            if self._server_pid != conn.get_server_pid():
                # Through a pooler, LISTEN has reached a session that others may use.
                await conn.execute("UNLISTEN *")
                raise SharedSession("notifications do not arrive through this pooler") from None

    def _on_notification(self, conn: Any, pid: int, channel: str, payload: str) -> None:
        if channel == self._probe_channel:
            # Sent by another session, it would not prove that LISTEN and NOTIFY share this one.
            if pid == self._server_pid:
                self._probe_arrived.set()
        else:
            self._call_subscribers(channel.removeprefix(f"{self._schema}:"), payload)

    def _call_subscribers(self, channel: str, payload: str) -> None:
        for callback in list(self._subscribers[channel]):
            try:
                callback(payload)
            except Exception:
                logger.exception("notification subscriber failed")


async def _connect(url: str) -> Any:
    # No statement cache: a pooler may run the next query in another session.
    return await asyncpg.connect(
        url,
        timeout=CONNECT_TIMEOUT_SECONDS,
        command_timeout=PROBE_TIMEOUT_SECONDS,
        statement_cache_size=0,
    )


async def _backend_pid(conn: Any) -> int:
    # asyncpg prepares the query, so it needs a transaction: a pooler keeps the session during one.
    async with conn.transaction():
        pid: int = await conn.fetchval("SELECT pg_backend_pid()")
    return pid
