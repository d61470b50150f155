"""Runs blocking calls in separate threads. Handlers may fill the event loop's default executor, so nothing of Howdah
runs there (decision 0027)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread` without the default executor: in a new daemon thread."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if answer.done():
            return  # the caller was cancelled
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def work() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = function(*args, **kwargs)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(deliver, value, failure)

    try:
        threading.Thread(target=work, name="howdah-call", daemon=True).start()
    except RuntimeError:  # handlers have started as many threads as the system allows
        return function(*args, **kwargs)
    return await answer


@contextlib.contextmanager
def own_name_resolution() -> Iterator[None]:
    """Resolve host names in own threads while the block runs: asyncio's event loop does it in its default
    executor, uvloop in threads of libuv. So a connection opens even if handlers fill the default executor."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, asyncio.BaseEventLoop) or "getaddrinfo" in vars(loop):
        yield
        return

    async def getaddrinfo(host: Any, port: Any, **options: Any) -> Any:
        return await run_in_own_thread(partial(socket.getaddrinfo, host, port, **options))

    loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign]
    try:
        yield
    finally:
        del loop.getaddrinfo
