"""A health endpoint. `/live` answers 200 while the event loop and the heartbeat's thread run, `/ready` while the
worker has started, has had a recent heartbeat, and is not stopping. Neither answers while a handler blocks the event
loop; `Worker.health`, called in another thread, then says that the worker is not ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

from howdah.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from howdah.worker.runner import Worker


@contextlib.asynccontextmanager
async def serve_health(worker: Worker, host: str, port: int) -> AsyncIterator[int]:
    """Serve inside the block; yields the port, which is chosen by the system if `port` is 0."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            async with asyncio.timeout(5):
                request = (await reader.readline()).decode("latin-1").split(" ")
                while (await reader.readline()).strip():
                    pass
                status, body = _response(worker, request[1] if len(request) > 1 else "")
                text = json.dumps(body) + "\n"
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode()
                )
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise InvalidOption(
            f"health cannot be served at {host}:{port}: {error.strerror or error}."
        ) from error
    async with server:
        yield server.sockets[0].getsockname()[1]


def _response(worker: Worker, path: str) -> tuple[str, dict[str, object]]:
    state = worker.health()
    match path.partition("?")[0]:
        case "/live":
            return ("200 OK" if state["live"] else "503 Service Unavailable"), state
        case "/ready" | "/":
            return ("200 OK" if state["ready"] else "503 Service Unavailable"), state
        case _:
            return "404 Not Found", {"error": "unknown path; try /live or /ready"}
