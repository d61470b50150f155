"""A proxy in front of PostgreSQL that can cut a connection after a statement was sent and before its answer
arrives, or keep it open and silent: a black hole."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READY = re.compile(rb"Z\x00\x00\x00\x05[ITE]\Z")


class Proxy:
    """Listens on a TCP port and forwards to the server's Unix socket."""

    def __init__(self, server_socket: Path) -> None:
        self._server_socket = str(server_socket)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._marker: bytes | None = None
        self._executed = self._silently = False
        self._then: Callable[[], object] = bool
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._refuses = False
        self._refused_numbers: set[int] = set()
        self._cut_numbers: set[int] = set()
        self.accepted = 0
        self.cuts = 0
        self.refused = 0
        self._accepting = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._accepting.start()

    def url(self, database: str, user: str = "howdah") -> str:
        return f"postgresql://{user}@127.0.0.1:{self._listening.getsockname()[1]}/{database}"

    def cut(
        self,
        marker: bytes,
        *,
        executed: bool,
        then: Callable[[], object] = bool,
        silently: bool = False,
    ) -> None:
        """Cut the next connection that sends `marker`, after the statement was executed or before the server
        received it. `then` is called before the client can notice. With `silently`, the connection stays
        open and forwards nothing more."""
        with self._lock:
            self._marker, self._executed, self._then = marker, executed, then
            self._silently = silently

    def swallow(self) -> int:
        """Make all open connections silent. Returns how many."""
        with self._lock:
            links = [link for link in self._links if link.open and not link.lost]
        for link in links:
            link.lost = True
        return len(links)

    def refuse(self) -> None:
        """Close all connections, and refuse new ones."""
        self._refuses = True
        for each in list(self._open):
            self._close(each)

    def accept(self) -> None:
        """Accept connections again after `refuse`."""
        self._refuses = False

    def refuse_one(self, number: int, *, after_bytes: bool = False) -> None:
        """Close one of the next connections, counted from 1: at once, or when the client has sent something."""
        numbers = self._cut_numbers if after_bytes else self._refused_numbers
        numbers.add(self.accepted + number)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # if it is closed
            self._listening.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._accepting.join()
        self._listening.close()
        for each in list(self._open):
            self._close(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.accepted += 1
                if self.accepted in self._cut_numbers:
                    client.recv(65536)
                if self._refuses or self.accepted in self._refused_numbers | self._cut_numbers:
                    client.close()
                    self.refused += 1
                    continue
                server = socket.socket(socket.AF_UNIX)
                self._open |= {client, server}
                server.connect(self._server_socket)
                with self._lock:
                    self._links.append(_Link(self, client, server))

    def _take_cut(self, sent: bytes) -> tuple[bool, Callable[[], object], bool] | None:
        """(executed, then, silently) if the connection is to be cut now; only once."""
        with self._lock:
            if self._marker is None or self._marker not in sent:
                return None
            self._marker = None
            self.cuts += 1
            return self._executed, self._then, self._silently

    def _close(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
        self._open.discard(end)


class _Link:
    """One client's connection, with a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._cutting: Callable[[], object] | None = None
        self._silently = False
        self.lost = False
        self.open = True
        for direction in (self._to_server, self._to_client):
            threading.Thread(target=self._run, args=(direction,), daemon=True).start()

    def _run(self, direction: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            direction()
        self.open = False
        self._proxy._close(self._client)
        self._proxy._close(self._server)

    def _to_server(self) -> None:
        tail = b""
        while data := self._client.recv(65536):
            cut = self._proxy._take_cut(tail + data)
            if cut is not None:
                executed, then, self._silently = cut
                if executed:
                    self._cutting = then
                else:
                    then()
                    if not self._silently:
                        return
                    self.lost = True
            tail = data[-64:]
            if not self.lost:
                self._server.sendall(data)

    def _to_client(self) -> None:
        answer = b""
        while data := self._server.recv(65536):
            if self.lost:
                continue
            if self._cutting is None:
                self._client.sendall(data)
                continue
            answer = (answer + data)[-64:]
            if READY.search(answer):
                self._cutting()
                if not self._silently:
                    return
                self.lost = True
