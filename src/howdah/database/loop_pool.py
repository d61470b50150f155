"""The asyncpg pool of one event loop, and the connections that `async_store.py` keeps outside of it (decision 0021)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import asyncpg

KEPT_CONNECTIONS = 2  # a worker has a claim and an acknowledgement in flight at once
KEPT_SECONDS = 300.0  # after this, a firewall or proxy may have dropped an idle connection


async def release(pool: asyncpg.Pool, conn: Any) -> None:
    """`pool.release`. asyncpg has released a connection that breaks at the same time, and refuses to do it twice."""
    with contextlib.suppress(asyncpg.InternalClientError):
        await pool.release(conn)


class LoopPool:
    """What a store has in one event loop."""

    def __init__(self) -> None:
        self.opening = asyncio.Lock()
        self.pool: asyncpg.Pool | None = None
        self.kept: list[tuple[float, Any]] = []
        self._acquiring = 0

    async def acquire(self, pool: asyncpg.Pool, timeout: float) -> Any:
        """A connection, if possible a kept one: a checkout takes longer than a short statement."""
        while self.kept:
            since, conn = self.kept.pop()
            if not conn.is_closed() and time.monotonic() - since < KEPT_SECONDS:
                return conn
            conn.terminate()
            await release(pool, conn)
        self._acquiring += 1
        try:
            return await pool.acquire(timeout=timeout)
        finally:
            self._acquiring -= 1

    async def release(self, pool: asyncpg.Pool, conn: Any, *, is_own: bool) -> None:
        """Keep a connection out of the pool if no caller waits for one and the pool is not being closed."""
        is_free = is_own and self.pool is pool and not self._acquiring
        if is_free and len(self.kept) < KEPT_CONNECTIONS:
            self.kept.append((time.monotonic(), conn))
        else:
            await release(pool, conn)

    async def release_kept(self, pool: asyncpg.Pool) -> None:
        """Release the kept connections to the pool."""
        while self.kept:
            await release(pool, self.kept.pop()[1])

    async def expire(self, pool: asyncpg.Pool) -> None:
        """Replace all connections: after one broke, each of the others would have to time out first."""
        await pool.expire_connections()
        for _, conn in self.kept:
            conn.terminate()
        await self.release_kept(pool)
