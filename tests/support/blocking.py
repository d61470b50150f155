"""An AsyncJobQueue with the methods of JobQueue, so that one test covers both queues."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

from howdah import AsyncJobQueue


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="blocking-queues", daemon=True).start()
    return loop


class BlockingAsyncJobQueue:
    """Runs each method of an AsyncJobQueue on an event loop in another thread, and waits for its result."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._queue = AsyncJobQueue(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._queue, name)

        def call(*arguments: Any, **options: Any) -> Any:
            # The coroutine runs in a copy of the caller's context.
            return asyncio.run_coroutine_threadsafe(method(*arguments, **options), _loop()).result()

        return call
