"""A connection to PostgreSQL that can be cut, slowed down, or turned into a black hole."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from psycopg.conninfo import conninfo_to_dict
from tcp_proxy import Link, TcpProxy, server_socket

CHUNK_BYTES = 65536


class FaultyProxy(TcpProxy):
    """Forwards everything until a fault is switched on."""

    def __init__(self, url: str) -> None:
        parts = conninfo_to_dict(url)
        self._user, self._database = parts["user"], parts["dbname"]
        self.delay = 0.0
        self._black_hole = False
        super().__init__(server_socket(url))

    @property
    def url(self) -> str:
        return f"postgresql://{self._user}@127.0.0.1:{self.port}/{self._database}"

    def slow_down(self, seconds: float) -> None:
        """Delay every message by so much, in each direction."""
        self.delay = seconds

    def black_hole(self, on: bool) -> None:
        """Drop everything without closing a connection. Connections that are open at that moment stay dead, even
        after the black hole is switched off."""

        async def switch() -> None:
            self._black_hole = on
            if on:
                for link in self._links:
                    link.dead = True

        self._call(switch())

    def _link(self, *ends: Any) -> FaultyLink:
        return FaultyLink(self, *ends, dead=self._black_hole)


class FaultyLink(Link):
    """One connection. A dead one drops everything."""

    def __init__(self, proxy: FaultyProxy, *ends: Any, dead: bool) -> None:
        super().__init__(*ends)
        self._proxy = proxy
        self.dead = dead

    async def _send(self) -> None:
        await self._forward(self._from_client, self._to_server)

    async def _receive(self) -> None:
        await self._forward(self._from_server, self._to_client)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self._proxy.delay:
                    await asyncio.sleep(self._proxy.delay)
                if not self.dead:
                    writer.write(data)
                    await writer.drain()
