"""A TCP proxy in front of PostgreSQL that knows where a statement ends, and can therefore cut the line in
the one place that matters: after the client has said "commit" and before it hears what came of it.

In PostgreSQL's protocol the statement is executed on Execute, and an implicit transaction commits on Sync.
Ways to cut, none of which the client can tell from another:

    unsent   nothing of the statement reached the server
    torn     it was executed, and the commit never arrived
    hasty    all of it was sent, and both lines were cut at once
    unheard  it was committed, and the answer was thrown away
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar
from uuid import UUID

from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

Cut: TypeAlias = Literal["unsent", "torn", "hasty", "unheard"]
CUTS: tuple[Cut, ...] = ("unsent", "torn", "hasty", "unheard")
_ENCRYPTION = {80877103, 80877104}  # SSLRequest, GSSENCRequest
_UUID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CALLED = re.compile(rb"\.(enqueue_jobs|claim_job_batch|complete_jobs)\(")


@dataclass
class Round:
    """What a client asks in one go, from Bind to Sync: which function of ours, about what."""

    backend: int
    called: str
    """`enqueue_jobs`, `claim_job_batch`, `complete_jobs`, or the empty string."""
    commits: bool
    """Whether its end makes it durable: it is no part of a longer transaction, or is its COMMIT."""
    parameters: list[bytes | None] = field(default_factory=list)

    def ids(self) -> list[UUID]:
        """The jobs that it is about, as far as it names them in its first parameter."""
        first = self.parameters[0] if self.parameters else None
        if first is None:
            return []
        if self.called == "enqueue_jobs" or first.startswith(b"{"):
            return [UUID(found.decode()) for found in _UUID.findall(first)]
        return _binary_uuids(first)

    def worker_id(self) -> str:
        """Who claims."""
        first = self.parameters[0] if self.parameters else None
        return (first or b"").decode()


class Scissors(Protocol):
    """Says what to cut, and looks what came of it."""

    def plan(self, this: Round) -> Cut | None:
        """Whether and how to cut a round that would commit. Called in the gate's event loop."""

    def before(self, this: Round) -> set[Any]:
        """What to remember of the database before the round is sent; in a thread."""

    def after(self, this: Round, cut: Cut, before: set[Any]) -> None:
        """Look at the database once the server has it all, before the client hears; in a thread."""


class Gate:
    """Listens on a TCP port of its own and forwards to a server's Unix socket."""

    def __init__(self, target: Path, scissors: Scissors | None = None) -> None:
        self._target = target
        self.scissors = scissors
        self._database = "howdah"
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gate", daemon=True)
        self._thread.start()
        self._listening: asyncio.Server = self._call(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.port: int = self._listening.sockets[0].getsockname()[1]

    @classmethod
    def before(cls, url: str, scissors: Scissors | None = None) -> Gate:
        """In front of the server that a URL with a Unix socket leads to."""
        known = conninfo_to_dict(url)
        gate = cls(Path(str(known["host"])) / f".s.PGSQL.{known.get('port', 5432)}", scissors)
        gate._database = str(known["dbname"])
        return gate

    def url(self, database: str | None = None, user: str = "howdah") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database or self._database}"

    def lead_to(self, target: Path) -> None:
        """Lead to another server from now on, and hang up on everybody who was with the last one."""
        self._target = target
        self.hang_up()

    def hang_up(self) -> int:
        """Cut every connection that there is; how many."""
        return self._call(self._hang_up())

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _hang_up(self) -> int:
        links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    async def _close(self) -> None:
        self._listening.close()
        await self._hang_up()
        mine = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not mine]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await asyncio.open_unix_connection(str(self._target))
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self, reader, writer, *server)
        self._links.add(link)
        try:
            await link.run()
        finally:
            link.cut()
            self._links.discard(link)


class _Link:
    """One client's connection."""

    def __init__(
        self,
        gate: Gate,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        self._gate = gate
        self._from_client, self._to_client = from_client, to_client
        self._from_server, self._to_server = from_server, to_server
        self._backend = 0
        self._prepared: dict[bytes, str] = {}
        self._round = self._new_round()
        self._in_transaction = False
        self._within: Round | None = None  # what a transaction has called so far
        self._cutting = False
        self._swallowing: asyncio.Event | None = None

    def cut(self) -> None:
        self._to_client.transport.abort()
        self._to_server.transport.abort()

    async def run(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._greet()
            both = [asyncio.ensure_future(each) for each in (self._upward(), self._downward())]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in both:
                    each.cancel()
                await asyncio.gather(*both, return_exceptions=True)

    async def _greet(self) -> None:
        """The first message has no type; requests for encryption are turned down."""
        while True:
            size = await self._from_client.readexactly(4)
            rest = await self._from_client.readexactly(struct.unpack("!i", size)[0] - 4)
            if struct.unpack("!i", rest[:4])[0] not in _ENCRYPTION:
                self._to_server.write(size + rest)
                return
            self._to_client.write(b"N")

    # ── from the client ───────────────────────────────────────────────────────────────────────────

    async def _upward(self) -> None:
        unsent = b""
        while True:
            kind, body, raw = await _message(self._from_client)
            self._note(kind, body)
            unsent += raw
            if kind in b"SQ":
                await self._finish(unsent)
                unsent = b""
            elif kind not in b"PBDE":  # a Flush, a password, data of a COPY
                self._to_server.write(unsent)
                await self._to_server.drain()
                unsent = b""

    def _new_round(self) -> Round:
        return Round(self._backend, "", commits=False)

    def _note(self, kind: bytes, body: bytes) -> None:
        """What this message adds to the round."""
        if kind == b"P":
            name, text = body.split(b"\0")[:2]
            self._prepared[name] = _meant(text)
        elif kind == b"B":
            name, self._round.parameters = _bound(body)
            self._round.called = self._prepared.get(name, "")
        elif kind == b"E":
            self._round.commits = True
        elif kind == b"Q":
            self._round.called = _meant(body)
            self._round.commits = True

    async def _finish(self, raw: bytes) -> None:
        """The client has said all of a round."""
        this, self._round = self._round, self._new_round()
        if this.called == "COMMIT":
            this = self._within or this
            this.commits = True
            self._within = None
        elif self._in_transaction:
            this.commits = False
            if this.called:
                self._within = this
        scissors = self._gate.scissors if this.commits and this.called else None
        cut = scissors.plan(this) if scissors else None
        if scissors is None or cut is None:
            self._to_server.write(raw)
            await self._to_server.drain()
            return
        before = await asyncio.to_thread(scissors.before, this)
        await self._send_and_cut(cut, raw)
        await asyncio.to_thread(scissors.after, this, cut, before)
        raise ConnectionResetError(cut)

    async def _send_and_cut(self, cut: Cut, raw: bytes) -> None:
        self._cutting = True
        if cut == "torn":
            raw = raw[:-1]  # Sync's last byte: the server has executed it all and waits for the end
        if cut == "unheard":
            self._swallowing = asyncio.Event()
        if cut != "unsent":
            self._to_server.write(raw)
            await self._to_server.drain()
        if self._swallowing is not None:
            await self._swallowing.wait()
        self._to_server.close()  # not abort: what was written is to arrive

    # ── from the server ───────────────────────────────────────────────────────────────────────────

    async def _downward(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._pass_on()
        if self._cutting:
            await asyncio.Event().wait()  # the client hears of it when we have looked

    async def _pass_on(self) -> None:
        while True:
            kind, body, raw = await _message(self._from_server)
            if kind == b"K":
                self._backend = struct.unpack("!i", body[:4])[0]
                self._round.backend = self._backend
            elif kind == b"Z":
                self._in_transaction = body != b"I"
            if not self._cutting:
                self._to_client.write(raw)
                await self._to_client.drain()
            elif kind == b"Z" and self._swallowing is not None:
                self._swallowing.set()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bytes]:
    head = await reader.readexactly(5)
    body = await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)
    return head[:1], body, head + body


def _meant(text: bytes) -> str:
    if text.strip(b" ;\0").upper() == b"COMMIT":
        return "COMMIT"
    called = _CALLED.search(text)
    return called[1].decode() if called else ""


def _bound(body: bytes) -> tuple[bytes, list[bytes | None]]:
    """The statement that a Bind names, and its parameters as they are on the wire."""
    _portal, name, rest = body.split(b"\0", 2)
    (formats,) = struct.unpack_from("!h", rest)
    at = 2 + 2 * formats
    (count,) = struct.unpack_from("!h", rest, at)
    at += 2
    parameters: list[bytes | None] = []
    for _ in range(count):
        (size,) = struct.unpack_from("!i", rest, at)
        at += 4
        parameters.append(None if size < 0 else rest[at : at + size])
        at += max(size, 0)
    return name, parameters


def _binary_uuids(array: bytes) -> list[UUID]:
    """The elements of a uuid[] of one dimension, none of them NULL."""
    (dimensions,) = struct.unpack_from("!i", array)
    if not dimensions:
        return []
    (count,) = struct.unpack_from("!i", array, 12)
    return [UUID(bytes=array[24 + 20 * n : 40 + 20 * n]) for n in range(count)]
