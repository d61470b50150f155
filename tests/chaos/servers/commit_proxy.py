"""A TCP proxy that parses PostgreSQL's protocol and can cut a connection between a commit and its reply.

In PostgreSQL's protocol the server executes a statement on Execute and commits an implicit transaction on Sync. The
client cannot distinguish these cuts:

    unsent   nothing of the statement reached the server
    torn     the statement was executed, and the commit did not arrive
    hasty    everything was sent, and both connections were cut at once
    unheard  the transaction was committed, and the reply was dropped
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from uuid import UUID

from psycopg.conninfo import conninfo_to_dict
from tcp_proxy import Link, TcpProxy, server_socket

if TYPE_CHECKING:
    from pathlib import Path

Cut: TypeAlias = Literal["unsent", "torn", "hasty", "unheard"]
CUTS: tuple[Cut, ...] = ("unsent", "torn", "hasty", "unheard")
_ENCRYPTION = {80877103, 80877104}  # SSLRequest, GSSENCRequest
_UUID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# The functions of a worker do the same.
_CONTRACT = {b"claim_runs": b"claim_job_batch", b"complete_runs": b"complete_jobs"}
_CALLED = re.compile(rb"\.(enqueue_jobs|claim_job_batch|claim_runs|complete_jobs|complete_runs)\(")


@dataclass
class Round:
    """One request of a client, from Bind to Sync: the function that it calls, and the parameters."""

    backend: int
    called: str
    """`enqueue_jobs`, `claim_job_batch`, `complete_jobs`, or the empty string."""
    commits: bool
    """Whether its end commits: it is its own transaction, or the COMMIT of a longer one."""
    parameters: list[bytes | None] = field(default_factory=list)

    def ids(self) -> list[UUID]:
        """The job ids in its first parameter."""
        first = self.parameters[0] if self.parameters else None
        if first is None:
            return []
        if self.called == "enqueue_jobs" or first.startswith(b"{"):
            return [UUID(found.decode()) for found in _UUID.findall(first)]
        return _binary_uuids(first)

    def worker_id(self) -> str:
        """The worker that claims."""
        first = self.parameters[0] if self.parameters else None
        return (first or b"").decode()


class CutPolicy(Protocol):
    """Decides which rounds to cut, and checks what each cut did."""

    def plan(self, this: Round) -> Cut | None:
        """Whether and how to cut a round that would commit. Called in the event loop of the proxy."""

    def before(self, this: Round) -> set[Any]:
        """The state of the database before the round is sent. Called in a thread."""

    def after(self, this: Round, cut: Cut, before: set[Any]) -> None:
        """Check the database after the server received everything, before the client notices. Called in a thread."""


class CommitProxy(TcpProxy):
    """Forwards everything, except for the rounds that the policy cuts."""

    def __init__(self, target: Path, policy: CutPolicy | None = None) -> None:
        self.policy = policy
        self._database = "howdah"
        super().__init__(target)

    @classmethod
    def in_front_of(cls, url: str, policy: CutPolicy | None = None) -> CommitProxy:
        """A proxy for the server in a URL with a Unix socket."""
        proxy = cls(server_socket(url), policy)
        proxy._database = str(conninfo_to_dict(url)["dbname"])
        return proxy

    def url(self, database: str | None = None, user: str = "howdah") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database or self._database}"

    def redirect(self, target: Path) -> None:
        """Forward new connections to another server, and abort the open ones."""
        self._target = target
        self.cut()

    def _link(self, *ends: Any) -> CommitLink:
        return CommitLink(self, *ends)


class CommitLink(Link):
    """One connection of a client."""

    def __init__(self, proxy: CommitProxy, *ends: Any) -> None:
        super().__init__(*ends)
        self._proxy = proxy
        self._backend = 0
        self._prepared: dict[bytes, str] = {}
        self._round = self._new_round()
        self._in_transaction = False
        self._transaction_round: Round | None = None  # the last call in the open transaction
        self._cutting = False
        self._reply_dropped: asyncio.Event | None = None

    async def _start(self) -> None:
        """Forward the first message, which has no type. Requests for encryption are refused."""
        while True:
            size = await self._from_client.readexactly(4)
            rest = await self._from_client.readexactly(struct.unpack("!i", size)[0] - 4)
            if struct.unpack("!i", rest[:4])[0] not in _ENCRYPTION:
                self._to_server.write(size + rest)
                return
            self._to_client.write(b"N")

    # ── from the client ───────────────────────────────────────────────────────────────────────────

    async def _send(self) -> None:
        unsent = b""
        while True:
            kind, body, raw = await _message(self._from_client)
            self._add_to_round(kind, body)
            unsent += raw
            if kind in b"SQ":
                await self._finish_round(unsent)
                unsent = b""
            elif kind not in b"PBDE":  # a Flush, a password, data of a COPY
                self._to_server.write(unsent)
                await self._to_server.drain()
                unsent = b""

    def _new_round(self) -> Round:
        return Round(self._backend, "", commits=False)

    def _add_to_round(self, kind: bytes, body: bytes) -> None:
        if kind == b"P":
            name, text = body.split(b"\0")[:2]
            self._prepared[name] = _called(text)
        elif kind == b"B":
            name, self._round.parameters = _parse_bind(body)
            self._round.called = self._prepared.get(name, "")
        elif kind == b"E":
            self._round.commits = True
        elif kind == b"Q":
            self._round.called = _called(body)
            self._round.commits = True

    async def _finish_round(self, raw: bytes) -> None:
        """Forward or cut a complete round."""
        this, self._round = self._round, self._new_round()
        if this.called == "COMMIT":
            this = self._transaction_round or this
            this.commits = True
            self._transaction_round = None
        elif self._in_transaction:
            this.commits = False
            if this.called:
                self._transaction_round = this
        policy = self._proxy.policy if this.commits and this.called else None
        cut = policy.plan(this) if policy else None
        if policy is None or cut is None:
            self._to_server.write(raw)
            await self._to_server.drain()
            return
        before = await asyncio.to_thread(policy.before, this)
        await self._send_and_cut(cut, raw)
        await asyncio.to_thread(policy.after, this, cut, before)
        raise ConnectionResetError(cut)

    async def _send_and_cut(self, cut: Cut, raw: bytes) -> None:
        self._cutting = True
        if cut == "torn":
            raw = raw[
                :-1
            ]  # without the last byte of Sync: the server has executed everything and waits for it
        if cut == "unheard":
            self._reply_dropped = asyncio.Event()
        if cut != "unsent":
            self._to_server.write(raw)
            await self._to_server.drain()
        if self._reply_dropped is not None:
            await self._reply_dropped.wait()
        self._to_server.close()  # not abort: what was written must arrive

    # ── from the server ───────────────────────────────────────────────────────────────────────────

    async def _receive(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._forward_replies()
        if self._cutting:
            await asyncio.Event().wait()  # the client is cut only after `CutPolicy.after`

    async def _forward_replies(self) -> None:
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
            elif kind == b"Z" and self._reply_dropped is not None:
                self._reply_dropped.set()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bytes]:
    head = await reader.readexactly(5)
    body = await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)
    return head[:1], body, head + body


def _called(text: bytes) -> str:
    if text.strip(b" ;\0").upper() == b"COMMIT":
        return "COMMIT"
    found = _CALLED.search(text)
    return _CONTRACT.get(found[1], found[1]).decode() if found else ""


def _parse_bind(body: bytes) -> tuple[bytes, list[bytes | None]]:
    """The statement that a Bind names, and its parameters in wire format."""
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
    """The elements of a one-dimensional uuid[] without NULLs."""
    (dimensions,) = struct.unpack_from("!i", array)
    if not dimensions:
        return []
    (count,) = struct.unpack_from("!i", array, 12)
    return [UUID(bytes=array[24 + 20 * n : 40 + 20 * n]) for n in range(count)]
