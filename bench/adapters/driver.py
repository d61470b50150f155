"""What the Python adapters share: the verbs, the pacing and the clocks. An adapter defines only how its peer enqueues
and works; the same code drives and times all of them.

Verbs of a request, one for each process:
    setup    create the schema in an empty database
    enqueue  `jobs` jobs, starting with number `first`, in one way: `bulk`, or single jobs from `callers` concurrent
             callers, each in the caller's `transaction` or not; returns the total time
    sample   single enqueues, one after the other with delays; returns the times of each
    stream   enqueue in bulk until stopped, at a `rate` or so that `backlog` jobs are pending
    work     run a worker until stopped; handlers mark the ledger
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

BATCH_JOBS = 1000  # per bulk enqueue
# Padding that PostgreSQL cannot compress.
PAD = base64.b64encode(random.Random(1).randbytes(6000)).decode()
STALL_NANOSECONDS = 40 * 10**9  # longer than the polling intervals of all peers


@dataclass(frozen=True)
class Call:
    """The arguments of a job: its number in the ledger, and padding."""

    number: int
    pad: str


class Peer:
    """The interface of an adapter. Adapters override what their peer supports."""

    batch: ClassVar[int] = BATCH_JOBS
    in_bulk: ClassVar[bool] = True

    def __init__(self, database: str, handler: str) -> None:
        self.database = database
        self.handler = handler

    async def setup(self) -> None:
        """Create the schema."""

    async def connect(self) -> None:
        """Open connections for enqueues."""

    async def close(self) -> None:
        """Close connections."""

    async def enqueue(self, call: Call) -> None:
        """Enqueue one job, durably when this returns."""
        raise NotImplementedError

    async def enqueue_many(self, calls: Sequence[Call]) -> None:
        """Enqueue many jobs in one call."""
        raise NotImplementedError

    async def enqueue_in_transaction(self, call: Call, before_commit: Callable[[], None]) -> None:
        """Enqueue one job in the caller's transaction; call `before_commit` just before COMMIT is sent."""
        raise NotImplementedError

    async def enqueue_from(self, callers: int, calls: Sequence[Call], in_transaction: bool) -> None:
        """Enqueue single jobs from independent concurrent callers."""
        remaining = iter(calls)

        async def caller() -> None:
            for call in remaining:
                if in_transaction:
                    await self.enqueue_in_transaction(call, lambda: None)
                else:
                    await self.enqueue(call)

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(caller())

    async def work(self, ledger: Ledger, control: Control) -> None:
        """Run a worker until `control.stopped` is set; call `control.ready()` when it is idle."""
        raise NotImplementedError


class Control:
    """The connection to the benchmark process that started this one."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go = asyncio.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def ready(self) -> None:
        send_event("ready")

    async def wait_for_go(self) -> None:
        await self._go.wait()

    async def wait_for_stop(self, worker: asyncio.Task[Any]) -> None:
        """Report that a worker is ready, and wait for `stop`. Raises if the worker fails."""
        self.ready()
        stopping = asyncio.create_task(self.stopped.wait())
        await asyncio.wait([worker, stopping], return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
            raise RuntimeError("the worker stopped without a request")

    def _listen(self) -> None:
        for line in sys.stdin:
            event = self._go if json.loads(line)["verb"] == "go" else self.stopped
            self._loop.call_soon_threadsafe(event.set)
        if not self.stopped.is_set():
            os._exit(1)  # the benchmark process is gone


_out = sys.stdout


def send_event(event: str, **facts: Any) -> None:
    """Send an event."""
    print(json.dumps({"event": event, **facts}), file=_out, flush=True)


def spin(seconds: float = 0.001) -> None:
    """Use so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def main(make: type[Peer]) -> None:
    """The main function of an adapter process."""
    global _out
    # Libraries may print; only events may go to the pipe.
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    with contextlib.suppress(ImportError):
        import uvloop  # type: ignore[import-not-found,unused-ignore]

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    os.environ["BENCH_LEDGER"] = request.get("ledger", "")
    asyncio.run(_serve(make(request["database"], request.get("handler", "async")), request))


async def _serve(peer: Peer, request: dict[str, Any]) -> None:
    control = Control()
    verbs: dict[str, Callable[[Peer, dict[str, Any], Control], Awaitable[dict[str, Any]]]]
    verbs = {"enqueue": _enqueue, "sample": _sample, "stream": _stream}
    match request["verb"]:
        case "setup":
            await peer.setup()
            send_event("done")
        case "work":
            await peer.work(Ledger(request["ledger"]), control)
            send_event("done")
        case verb:
            await peer.connect()
            measured = await verbs[verb](peer, request, control)
            await peer.close()
            send_event("done", **measured)


def _calls(request: dict[str, Any], first: int, jobs: int) -> list[Call]:
    pad = PAD[: max(0, request.get("payload", 100) - 24)]
    return [Call(number, pad) for number in range(first, first + jobs)]


async def _enqueue(peer: Peer, request: dict[str, Any], control: Control) -> dict[str, Any]:
    calls = _calls(request, request["first"], request["jobs"])
    control.ready()
    await control.wait_for_go()
    cpu, started = time.process_time(), time.monotonic_ns()
    if request["how"] == "bulk":
        for at in range(0, len(calls), peer.batch):
            await peer.enqueue_many(calls[at : at + peer.batch])
    else:
        in_transaction = request["how"] == "transaction"
        await peer.enqueue_from(request.get("callers", 1), calls, in_transaction)
    ended = time.monotonic_ns()
    return {"started": started, "ended": ended, "cpu": time.process_time() - cpu}


async def _sample(peer: Peer, request: dict[str, Any], control: Control) -> dict[str, Any]:
    calls = _calls(request, request["first"], request["jobs"])
    ledger = Ledger(request["ledger"])
    called: list[int] = []
    committed: list[int] = []
    control.ready()
    await control.wait_for_go()
    delay = request["pause"]
    for call in calls:
        # Random, so as not to be in phase with a peer's polling.
        await asyncio.sleep(random.uniform(0.5, 1.5) * delay)
        called.append(time.monotonic_ns())
        if request["how"] == "transaction":
            await peer.enqueue_in_transaction(call, lambda: committed.append(time.monotonic_ns()))
        else:
            await peer.enqueue(call)
        while not ledger.starts[call.number]:  # so that the worker is idle for the next sample
            if time.monotonic_ns() - called[-1] > STALL_NANOSECONDS:
                raise TimeoutError(f"job {call.number} was not started")
            await asyncio.sleep(0.001)
    return {"called": called, "committed": committed}


async def _stream(peer: Peer, request: dict[str, Any], control: Control) -> dict[str, Any]:
    """Bulk enqueues in small batches, paced by the clock or by the number of started handlers in the ledger."""
    first, limit, batch = request["first"], request["jobs"], request["batch"]
    rate, backlog = request.get("rate"), request.get("backlog", 0)
    ledger = Ledger(request["ledger"])
    already = ledger.executed
    control.ready()
    await control.wait_for_go()
    started = time.monotonic()
    sent = 0
    while not control.stopped.is_set() and sent < limit:
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
