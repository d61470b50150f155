"""Messages in parts: interrupted, interleaved and forgotten ones disturb no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from howdah.worker import process_messages
from howdah.worker.process_messages import PART_BYTES, Messages

if TYPE_CHECKING:
    import pytest

LONG = "x" * (3 * PART_BYTES)
OTHER = "y" * (3 * PART_BYTES)


def test_parts_of_two_messages_may_be_interleaved() -> None:
    sender, receiver = Messages(), Messages()
    parts = zip(sender.encode("event", LONG)[1], sender.encode("event", OTHER)[1], strict=True)
    received = [receiver.decode(each) for pair in parts for each in pair]
    assert [each for each in received if each] == [["event", LONG], ["event", OTHER]]


def test_the_rest_of_a_message_whose_first_parts_were_forgotten_is_ignored() -> None:
    sender, receiver = Messages(), Messages()
    first, *rest = sender.encode("event", LONG)[1]
    assert receiver.decode(first) is None
    receiver.forget_parts()
    assert [receiver.decode(each) for each in rest] == [None] * len(rest)
    (last,) = sender.encode("ended", 1)[1]
    assert receiver.decode(last) == ["ended", 1]


def test_parts_of_messages_with_one_number_from_two_processes_may_be_interleaved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that a handler has forked goes on with a copy of the numbers."""
    sender, forked, receiver = Messages(), Messages(), Messages()
    parts = sender.encode("event", LONG)[1]
    monkeypatch.setattr(process_messages.os, "getpid", lambda: 1)
    pairs = zip(parts, forked.encode("event", OTHER)[1], strict=True)
    received = [receiver.decode(each) for pair in pairs for each in pair]
    assert [each for each in received if each] == [["event", LONG], ["event", OTHER]]
