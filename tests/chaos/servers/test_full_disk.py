"""What a caller is told when the server has no room left."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import small_disk
from embedded_servers import workspace

from howdah import AsyncJobQueue, DatabaseFull, JobQueue
from howdah.database.driver_errors import is_transient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from howdah.embedded import EmbeddedServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(small_disk.why_not()), reason=str(small_disk.why_not())),
]
MANY = 200
SOME = "no disk space left: could not (extend|write).*No space left.*Nothing was written"


def payload() -> dict[str, str]:
    return {"filler": os.urandom(30_000).hex()}  # nothing that could be compressed


def enqueue_on_and_on(queue: JobQueue) -> None:
    """There may be room in pages that the server has already."""
    for _ in range(MANY):
        queue.enqueue("store", payload())


async def aenqueue_on_and_on(queue: AsyncJobQueue) -> None:
    for _ in range(MANY):
        await queue.enqueue("store", payload())


@pytest.fixture
def full() -> Iterator[tuple[EmbeddedServer, small_disk.SmallDisk]]:
    with workspace("disk") as directory, small_disk.cramped(directory, "data") as (server, disk):
        queue = JobQueue(server.url)
        queue.pending()
        queue.close()
        disk.fill()
        yield server, disk


def test_an_enqueue_says_that_the_disk_is_full_and_works_when_there_is_room(
    full: tuple[EmbeddedServer, small_disk.SmallDisk],
) -> None:
    server, disk = full
    queue = JobQueue(server.url)
    try:
        with pytest.raises(DatabaseFull, match=SOME) as refused:
            enqueue_on_and_on(queue)
        with pytest.raises(DatabaseFull, match="howdah clear"):
            queue.enqueue_many([("store", payload()) for _ in range(MANY)])
        assert is_transient(refused.value)
        disk.free()
        handle = queue.enqueue("store", payload())
        assert queue.get(handle).status == "pending"
    finally:
        queue.close()


async def test_so_does_an_awaited_one(full: tuple[EmbeddedServer, small_disk.SmallDisk]) -> None:
    server, disk = full
    queue = AsyncJobQueue(server.url)
    try:
        with pytest.raises(DatabaseFull, match=SOME):
            await aenqueue_on_and_on(queue)
        disk.free()
        handle = await queue.enqueue("store", payload())
        assert (await queue.get(handle)).status == "pending"
    finally:
        await queue.close()
