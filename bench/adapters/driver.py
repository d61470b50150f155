"""What the Python adapters share: the verbs, the pacing and the clocks. An adapter says only how its peer
enqueues and how it works; all are driven and timed by the same code.

Verbs of a request, one for each process:
    setup    make the schema in an empty database
    enqueue  `jobs` jobs, from number `first` on, in one way: `bulk`, or single ones from `callers` callers
             at once, each in a `transaction` of the caller's or not; told in seconds
    sample   single enqueues, one after the other with pauses; told as the times of each
    stream   enqueue in bulk until told to stop, at a `rate` or so that `backlog` jobs wait
    work     run a worker until told to stop; handlers mark the ledger
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

BATCH = 1000  # of a bulk enqueue
# Ballast, of a kind that PostgreSQL cannot compress.
PAD = base64.b64encode(random.Random(1).randbytes(6000)).decode()
STALLED = 40 * 10**9  # nanoseconds; longer than the polling intervals of all peers


@dataclass(frozen=True)
class Call:
    """The arguments of a job: its number in the ledger, and ballast."""

    number: int
    pad: str


class Peer:
    """A peer as the driver sees it. Adapters override what their peer can do."""

    batch: ClassVar[int] = BATCH
    in_bulk: ClassVar[bool] = True

    def __init__(self, database: str, handler: str) -> None:
        self.database = database
        self.handler = handler

    async def setup(self) -> None:
        """Make the schema."""

    async def connect(self) -> None:
        """Be ready to enqueue."""

    async def close(self) -> None:
        """Let go of connections."""

    async def enqueue(self, call: Call) -> None:
        """Enqueue one job, durably when this returns."""
        raise NotImplementedError

    async def enqueue_many(self, calls: Sequence[Call]) -> None:
        """Enqueue many jobs at once."""
        raise NotImplementedError

    async def enqueue_in_transaction(self, call: Call, before_commit: Callable[[], None]) -> None:
        """Enqueue one job in a transaction of the caller's; say so just before COMMIT is sent."""
        raise NotImplementedError

    async def enqueue_from(self, callers: int, calls: Sequence[Call], in_transaction: bool) -> None:
        """Enqueue single jobs from callers that do not know of each other."""
        waiting = iter(calls)

        async def caller() -> None:
            for call in waiting:
                if in_transaction:
                    await self.enqueue_in_transaction(call, lambda: None)
                else:
                    await self.enqueue(call)

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(caller())

    async def work(self, ledger: Ledger, life: Life) -> None:
        """Run a worker: `life.ready()` once it waits for jobs, until `life.stopped` is set."""
        raise NotImplementedError


class Life:
    """The talk with whoever started this process."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._went = asyncio.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def ready(self) -> None:
        tell("ready")

    async def until_go(self) -> None:
        await self._went.wait()

    async def lived_through(self, worker: asyncio.Task[Any]) -> None:
        """Say that a worker is ready, and wait until it is to stop. If it breaks, so does this."""
        self.ready()
        stopping = asyncio.create_task(self.stopped.wait())
        await asyncio.wait([worker, stopping], return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
            raise RuntimeError("the worker ended by itself")

    def _listen(self) -> None:
        for line in sys.stdin:
            event = self._went if json.loads(line)["verb"] == "go" else self.stopped
            self._loop.call_soon_threadsafe(event.set)
        if not self.stopped.is_set():
            os._exit(1)  # whoever started us is gone


_out = sys.stdout


def tell(event: str, **facts: Any) -> None:
    """Send an event."""
    print(json.dumps({"event": event, **facts}), file=_out, flush=True)


def spin(seconds: float = 0.001) -> None:
    """Use so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def main(make: type[Peer]) -> None:
    """The whole of an adapter's process."""
    global _out
    # Libraries may print; only events go to the pipe.
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    with contextlib.suppress(ImportError):
        import uvloop  # type: ignore[import-not-found,unused-ignore]

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    os.environ["BENCH_LEDGER"] = request.get("ledger", "")
    asyncio.run(_serve(make(request["database"], request.get("handler", "async")), request))


async def _serve(peer: Peer, request: dict[str, Any]) -> None:
    life = Life()
    verbs: dict[str, Callable[[Peer, dict[str, Any], Life], Awaitable[dict[str, Any]]]]
    verbs = {"enqueue": _enqueue, "sample": _sample, "stream": _stream}
    match request["verb"]:
        case "setup":
            await peer.setup()
            tell("done")
        case "work":
            await peer.work(Ledger(request["ledger"]), life)
            tell("done")
        case verb:
            await peer.connect()
            told = await verbs[verb](peer, request, life)
            await peer.close()
            tell("done", **told)


def _calls(request: dict[str, Any], first: int, jobs: int) -> list[Call]:
    pad = PAD[: max(0, request.get("payload", 100) - 24)]
    return [Call(number, pad) for number in range(first, first + jobs)]


async def _enqueue(peer: Peer, request: dict[str, Any], life: Life) -> dict[str, Any]:
    calls = _calls(request, request["first"], request["jobs"])
    life.ready()
    await life.until_go()
    cpu, started = time.process_time(), time.monotonic_ns()
    if request["how"] == "bulk":
        for at in range(0, len(calls), peer.batch):
            await peer.enqueue_many(calls[at : at + peer.batch])
    else:
        in_transaction = request["how"] == "transaction"
        await peer.enqueue_from(request.get("callers", 1), calls, in_transaction)
    ended = time.monotonic_ns()
    return {"started": started, "ended": ended, "cpu": time.process_time() - cpu}


async def _sample(peer: Peer, request: dict[str, Any], life: Life) -> dict[str, Any]:
    calls = _calls(request, request["first"], request["jobs"])
    ledger = Ledger(request["ledger"])
    called: list[int] = []
    committed: list[int] = []
    life.ready()
    await life.until_go()
    pause = request["pause"]
    for call in calls:
        # Not in step with anybody's polling.
        await asyncio.sleep(random.uniform(0.5, 1.5) * pause)
        called.append(time.monotonic_ns())
        if request["how"] == "transaction":
            await peer.enqueue_in_transaction(call, lambda: committed.append(time.monotonic_ns()))
        else:
            await peer.enqueue(call)
        while not ledger.starts[call.number]:  # the next one finds a worker that waits
            if time.monotonic_ns() - called[-1] > STALLED:
                raise TimeoutError(f"job {call.number} was not started")
            await asyncio.sleep(0.001)
    return {"called": called, "committed": committed}


async def _stream(peer: Peer, request: dict[str, Any], life: Life) -> dict[str, Any]:
    """Bulk enqueues in small batches, paced by the clock or by what the ledger says has run."""
    first, limit, batch = request["first"], request["jobs"], request["batch"]
    rate, backlog = request.get("rate"), request.get("backlog", 0)
    ledger = Ledger(request["ledger"])
    already = ledger.executed
    life.ready()
    await life.until_go()
    started = time.monotonic()
    sent = 0
    while not life.stopped.is_set() and sent < limit:
        if rate is not None:
            late = time.monotonic() - started - sent / rate
            if late < 0:
                await asyncio.sleep(-late)
        elif sent - (ledger.executed - already) >= backlog:
            await asyncio.sleep(0.001)
            continue
        now = min(batch, limit - sent)
        await peer.enqueue_many(_calls(request, first + sent, now))
        sent += now
    return {"sent": sent, "seconds": time.monotonic() - started}
