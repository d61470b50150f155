"""A producer of the soak: enqueues every kind of job at its rate until SIGTERM, and then writes what it did.

python -m bench.soak.producer --load mixed --rate 1150 --number 1 --counts FILE
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.soak import app as tasks
from bench.soak.load import LOADS, ORDERING_KEYS, SINGLE, scaled
from howdah.model import NewJob

TICK_SECONDS = 0.05
DELAY_SECONDS = 5.0
CANCELLED_DELAY_SECONDS = 3600.0
RESULT_TIMEOUT_SECONDS = 60.0


class Producer:
    """Enqueues at fixed rates; a tick that was late catches up."""

    def __init__(self, rates: dict[str, float], number: int) -> None:
        self._rates = rates
        self._numbers = itertools.count(number * 1_000_000_000)
        self._keys = itertools.count(number * 1_000_000_000)
        self._sent: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.stopping = asyncio.Event()
        self._waiting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Enqueue until `stopping` is set, then wait for the awaited results."""
        began = time.monotonic()
        while not self.stopping.is_set():
            elapsed = time.monotonic() - began
            due = {
                kind: int(rate * elapsed) - self._sent[kind] for kind, rate in self._rates.items()
            }
            self._sent.update(due)
            await asyncio.gather(
                *(self._enqueue(kind, count) for kind, count in due.items() if count)
            )
            left = elapsed + TICK_SECONDS - (time.monotonic() - began)
            await asyncio.sleep(max(0.0, left))
        await asyncio.gather(*self._waiting)

    async def _enqueue(self, kind: str, count: int) -> None:
        numbers = [next(self._numbers) for _ in range(count)]
        match kind:
            case "single":
                await tasks.app.aqueue.enqueue_many(
                    [NewJob(job_type=SINGLE, data={"number": n}) for n in numbers]
                )
            case "keyed":
                await asyncio.gather(*(self._enqueue_keyed() for _ in numbers))
            case "ordered":
                await asyncio.gather(*map(self._enqueue_ordered, numbers))
            case "delayed":
                await tasks.delayed.using(delay=DELAY_SECONDS).aenqueue_many(
                    [(n,) for n in numbers]
                )
            case "cancelled":
                await self._enqueue_cancelled(numbers)
            case "awaited":
                await asyncio.gather(*map(self._enqueue_awaited, numbers))
            case "no_op":
                # One call each, as a web application would.
                await asyncio.gather(*(tasks.no_op.aenqueue(n) for n in numbers))
            case _:
                await getattr(tasks, kind).aenqueue_many([(n,) for n in numbers])
        self.counts[kind] += count if kind != "keyed" else 0

    async def _enqueue_keyed(self) -> None:
        """Every second call repeats the key and the arguments of the one before."""
        first = next(self._keys) // 2
        handle = await tasks.keyed.using(idempotency_key=f"key-{first}").aenqueue(first)
        self.counts["keyed"] += handle.is_new
        self.counts["repeated"] += not handle.is_new

    async def _enqueue_ordered(self, number: int) -> None:
        await tasks.ordered.using(ordering_key=f"key-{number % ORDERING_KEYS}").aenqueue(number)

    async def _enqueue_cancelled(self, numbers: list[int]) -> None:
        later = tasks.cancelled.using(delay=CANCELLED_DELAY_SECONDS)
        handles = await later.aenqueue_many([(n,) for n in numbers])
        done: dict[Any, str] = await tasks.app.aqueue.cancel(handles)
        self.counts["cancels"] += len(done)

    async def _enqueue_awaited(self, number: int) -> None:
        handle = await tasks.awaited.aenqueue(number)

        async def wait() -> None:
            result = await handle.aresult(timeout=RESULT_TIMEOUT_SECONDS)
            self.counts["results" if result == number else "wrong results"] += 1

        waiting = asyncio.create_task(wait())
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)


async def produce(producer: Producer) -> None:
    """Run a producer until SIGTERM."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, producer.stopping.set)
    print("producer started", flush=True)
    try:
        await producer.run()
    finally:
        await tasks.app.aclose()


def main() -> None:
    """Enqueue until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", choices=LOADS, default="mixed")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--counts", type=Path, required=True)
    options = parser.parse_args()
    producer = Producer(scaled(LOADS[options.load], options.rate), options.number)
    asyncio.run(produce(producer))
    options.counts.write_text(json.dumps(producer.counts))


if __name__ == "__main__":
    main()
