"""Messages between a worker and a task process, over a pair of datagram sockets.

A datagram arrives whole or not at all, and no lock is needed to send one: a process that is killed while it sends
leaves nothing behind that others would wait for (decision 0011). A message that is too long for one datagram is sent
in parts. Each part names its process and its message, so that threads, and processes that a handler has forked, may
send at the same time, and a message that was interrupted disturbs no other."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from howdah.outcome import Cancelled, Completed, CompletedByHandler, Failed, Lost, Released

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.outcome import Outcome

PART_BYTES = 64 << 10
RECEIVED_BYTES = PART_BYTES + 64
BUFFER_BYTES = 1 << 20
# The process that sends, the number of its message, that of the part, and how many there are.
_HEADER = struct.Struct(">IIII")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

_OUTCOMES: dict[str, type[Outcome]] = {
    each.__name__: each
    for each in (Completed, Failed, Released, Cancelled, Lost, CompletedByHandler)
}


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The sockets of a worker and of a task process. They never wait in the worker, although the program may have
    called `socket.setdefaulttimeout`."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return ends


class Messages:
    """Encodes and decodes the messages of one end."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._parts: dict[tuple[int, int], list[bytes]] = {}

    def encode(self, *message: Any) -> tuple[int, list[bytes]]:
        """The number of a message, and its datagrams."""
        data = _encode(message)
        number = next(self._numbers) & 0xFFFFFFFF
        if len(data) <= PART_BYTES:
            return number, [_HEADER.pack(os.getpid(), number, 0, 1) + data]
        return number, list(_parts(number, data))

    def decode(self, datagram: bytes) -> Any:
        """The message that this datagram completes, or None. Parts of a message whose first ones were forgotten are
        ignored."""
        sender, number, place, count = _HEADER.unpack_from(datagram)
        part = datagram[_HEADER.size :]
        if count == 1:
            return _decode(part)
        if place == 0:
            self._parts[sender, number] = []
        parts = self._parts.get((sender, number))
        if parts is None or len(parts) != place:
            return None
        parts.append(part)
        if len(parts) < count:
            return None
        return _decode(b"".join(self._parts.pop((sender, number))))

    def forget_parts(self) -> None:
        """A run has ended: what was interrupted is not continued."""
        self._parts.clear()


def number_of(datagram: bytes) -> int:
    """The number of the message that this datagram belongs to."""
    number: int = _HEADER.unpack_from(datagram)[1]
    return number


def _parts(number: int, data: bytes) -> Iterator[bytes]:
    starts = range(0, len(data), PART_BYTES)
    for place, start in enumerate(starts):
        yield (
            _HEADER.pack(os.getpid(), number, place, len(starts)) + data[start : start + PART_BYTES]
        )


def outcome_values(outcome: Outcome) -> tuple[str, list[Any]]:
    """An outcome as plain values, without its exception."""
    match outcome:
        case Completed(result):
            return "Completed", [result]
        case Failed(error, traceback, retry_in):
            return "Failed", [error, traceback, retry_in]
        case Released(delay):
            return "Released", [delay]
        case Cancelled(reason):
            return "Cancelled", [reason]
        case _:
            return type(outcome).__name__, []


def make_outcome(name: str, values: list[Any]) -> Outcome:
    """The outcome of these plain values."""
    return _OUTCOMES[name](*values)
