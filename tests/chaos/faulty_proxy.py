"""A line to PostgreSQL that can be cut, slowed down, or turned into a black hole."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    from collections.abc import Coroutine

CHUNK = 65536


class Wire:
    """Listens on a TCP port of its own and forwards to a server's Unix socket."""

    def __init__(self, url: str) -> None:
        parts = conninfo_to_dict(url)
        self._target = Path(str(parts["host"])) / f".s.PGSQL.{parts.get('port', 5432)}"
        self._account = f"{parts['user']}@127.0.0.1", str(parts["dbname"])
        self._links: set[_Link] = set()
        self._delay = 0.0
        self._hole = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire", daemon=True)
        self._thread.start()
        self._server = self._call(self._listen())

    @property
    def url(self) -> str:
        port = self._server.sockets[0].getsockname()[1]
        who, database = self._account
        return f"postgresql://{who}:{port}/{database}"

    def cut(self) -> int:
        """Hang up on everybody; how many there were."""

        async def hang_up() -> int:
            links = list(self._links)
            for link in links:
                link.hang_up()
            return len(links)

        return self._call(hang_up())

    def slow_down(self, seconds: float) -> None:
        """From now on everything takes so much longer, in each direction."""
        self._delay = seconds

    def black_hole(self, on: bool) -> None:
        """Swallow everything, and say nothing. What was open then never comes back to life."""

        async def switch() -> None:
            self._hole = on
            if on:
                for link in self._links:
                    link.lost = True

        self._call(switch())

    def close(self) -> None:
        """Close everything."""

        async def close() -> None:
            self._server.close()
            for link in list(self._links):
                link.hang_up()
            await asyncio.sleep(0)

        self._call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _call(self, work: Coroutine[None, None, object]) -> object:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self, reader, writer, lost=self._hole)
        self._links.add(link)
        try:
            await link.run(self._target)
        finally:
            self._links.discard(link)
            link.hang_up()


class _Link:
    """One client's connection."""

    def __init__(
        self,
        wire: Wire,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        lost: bool,
    ) -> None:
        self._wire, self._reader, self._writers = wire, reader, [writer]
        self.lost = lost

    async def run(self, target: Path) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(str(target))
            self._writers.append(writer)
            ways = [self._forward(self._reader, writer), self._forward(reader, self._writers[0])]
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if self._wire._delay:
                    await asyncio.sleep(self._wire._delay)
                if self.lost:
                    continue
                writer.write(data)
                await writer.drain()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
