"""Errors of enqueues while the server's disk is full."""

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
    pytest.mark.skipif(
        bool(small_disk.unavailable_because()), reason=str(small_disk.unavailable_because())
    ),
]
MANY_JOBS = 200
ERROR = "no disk space left: could not (extend|write).*No space left.*Nothing was written"


def payload() -> dict[str, str]:
    return {"filler": os.urandom(30_000).hex()}  # incompressible


def enqueue_many_times(queue: JobQueue) -> None:
    """The first enqueues may fit into pages that the server has already allocated."""
    for _ in range(MANY_JOBS):
        queue.enqueue("store", payload())


async def aenqueue_many_times(queue: AsyncJobQueue) -> None:
    for _ in range(MANY_JOBS):
        await queue.enqueue("store", payload())


@pytest.fixture
def full_server() -> Iterator[tuple[EmbeddedServer, small_disk.SmallDisk]]:
    with (
        workspace("disk") as directory,
        small_disk.server_on_small_disk(directory, "data") as (server, disk),
    ):
        queue = JobQueue(server.url)
        queue.pending()
        queue.close()
        disk.fill()
        yield server, disk


def test_an_enqueue_on_a_full_disk_raises_database_full_and_works_when_there_is_space(
    full_server: tuple[EmbeddedServer, small_disk.SmallDisk],
) -> None:
    server, disk = full_server
    queue = JobQueue(server.url)
    try:
        with pytest.raises(DatabaseFull, match=ERROR) as error:
            enqueue_many_times(queue)
        with pytest.raises(DatabaseFull, match="howdah clear"):
            queue.enqueue_many([("store", payload()) for _ in range(MANY_JOBS)])
        assert is_transient(error.value)
        disk.free()
        handle = queue.enqueue("store", payload())
        assert queue.get(handle).status == "pending"
    finally:
        queue.close()


async def test_an_async_enqueue_on_a_full_disk_raises_database_full_and_works_when_there_is_space(
    full_server: tuple[EmbeddedServer, small_disk.SmallDisk],
) -> None:
    server, disk = full_server
    queue = AsyncJobQueue(server.url)
    try:
        with pytest.raises(DatabaseFull, match=ERROR):
            await aenqueue_many_times(queue)
        disk.free()
        handle = await queue.enqueue("store", payload())
        assert (await queue.get(handle)).status == "pending"
    finally:
        await queue.close()
