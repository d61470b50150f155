"""A proxy in front of PostgreSQL that counts connections and round trips: messages after which the client has to
wait for the server."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROTOCOL_3 = 196608
WAITING = frozenset(b"QSH")  # Query, Sync and Flush


class CountingProxy:
    """Listens on a TCP port and forwards to the server's Unix socket."""

    def __init__(self, server_socket: Path) -> None:
        self._server_socket = str(server_socket)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.round_trips = 0
        self.connections = 0
        self._accepting = threading.Thread(target=self._accept, name="counting-proxy", daemon=True)
        self._accepting.start()

    def url(self, database: str, user: str = "howdah") -> str:
        return f"postgresql://{user}@127.0.0.1:{self._listening.getsockname()[1]}/{database}"

    def close(self) -> None:
        with contextlib.suppress(OSError):  # if it is closed
            self._listening.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._accepting.join()
        self._listening.close()
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.connections += 1
                server = socket.socket(socket.AF_UNIX)
                self._open += [client, server]
                server.connect(self._server_socket)
                for pump in (self._to_server, self._to_client):
                    threading.Thread(target=pump, args=(client, server), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        messages = Messages()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                waits = sum(kind in WAITING for kind in messages.feed(data))
                with self._lock:
                    self.round_trips += waits
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _to_client(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                client.sendall(data)
        # Also after an error: a server that ends with unread bytes resets the connection, and the client would wait.
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


class Messages:
    """Parses the types of the messages that a client sends."""

    def __init__(self) -> None:
        self._started = False
        self._rest = b""

    def feed(self, data: bytes) -> list[int]:
        data, found = self._rest + data, []
        while True:
            head = 1 if self._started else 0  # messages before the startup message have no type
            if len(data) < head + 4:
                break
            (length,) = struct.unpack_from("!i", data, head)
            if len(data) < head + length:
                break
            if self._started:
                found.append(data[0])
            else:
                self._started = struct.unpack_from("!i", data, 4)[0] == PROTOCOL_3
            data = data[head + length :]
        self._rest = data
        return found
