"""A TCP proxy in front of PostgreSQL, in its own thread. Subclasses decide what happens to the bytes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")
CALL_TIMEOUT_SECONDS = 30


class TcpProxy:
    """Listens on its own TCP port and forwards each connection to the Unix socket of a server."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._links: set[Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._listening = self._call(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port: int = self._listening.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """Abort every open connection; returns how many there were."""
        return self._call(self._cut())

    def close(self) -> None:
        """Abort every connection and stop the thread."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _link(self, *ends: Any) -> Link:
        """The link between a client and the server."""
        raise NotImplementedError

    def _call(self, work: Coroutine[None, None, T]) -> T:
        """Run a coroutine in the thread of the proxy."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_SECONDS)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await asyncio.open_unix_connection(str(self._target))
        except OSError:
            writer.transport.abort()
            return
        link = self._link(reader, writer, *server)
        self._links.add(link)
        try:
            await link.run()
        finally:
            link.cut()
            self._links.discard(link)

    async def _cut(self) -> int:
        links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    async def _close(self) -> None:
        self._listening.close()
        await self._cut()
        this = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not this]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class Link:
    """One connection of a client. Ends when either direction ends."""

    def __init__(
        self,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        self._from_client, self._to_client = from_client, to_client
        self._from_server, self._to_server = from_server, to_server

    def cut(self) -> None:
        """Abort both ends."""
        self._to_client.transport.abort()
        self._to_server.transport.abort()

    async def run(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._start()
            both = [asyncio.ensure_future(each) for each in (self._send(), self._receive())]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in both:
                    each.cancel()
                await asyncio.gather(*both, return_exceptions=True)

    async def _start(self) -> None:
        """Before the two directions run."""

    async def _send(self) -> None:
        """Forward from the client to the server."""
        raise NotImplementedError

    async def _receive(self) -> None:
        """Forward from the server to the client."""
        raise NotImplementedError


def server_socket(url: str) -> Path:
    """The Unix socket in a URL."""
    parts = conninfo_to_dict(url)
    return Path(str(parts["host"])) / f".s.PGSQL.{parts.get('port', 5432)}"
