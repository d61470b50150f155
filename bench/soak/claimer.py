"""Claims one job at a time from a bare queue and completes it, until SIGTERM. Writes a line per second: how many
claims found a job, and the mean and the 95th percentile of their time as the client measures it.

    python -m bench.soak.claimer --loops 4 --times FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from pathlib import Path
from typing import TextIO

from bench.results import percentile
from bench.soak.load import SINGLE
from howdah import AsyncJobQueue

POLL_SECONDS = 0.02


class Claimer:
    """Several loops on one queue."""

    def __init__(self) -> None:
        self._queue = AsyncJobQueue()
        self._times: list[float] = []
        self.stopping = asyncio.Event()

    async def run(self, loops: int, times: TextIO) -> None:
        """Claim until `stopping` is set."""
        running = [asyncio.create_task(self._claim()) for _ in range(loops)]
        while not self.stopping.is_set():
            await asyncio.sleep(1)
            self._write(times)
        await asyncio.gather(*running)
        await self._queue.close()

    def _write(self, file: TextIO) -> None:
        taken, self._times = self._times, []
        if taken:
            mean, p95 = sum(taken) / len(taken), percentile(taken, 0.95)
            line = {"t": time.monotonic(), "claims": len(taken), "mean": mean, "p95": p95}
            print(json.dumps(line), file=file, flush=True)

    async def _claim(self) -> None:
        while not self.stopping.is_set():
            began = time.perf_counter()
            job = await self._queue.claim_one(SINGLE)
            taken = (time.perf_counter() - began) * 1000
            if job is None:
                await asyncio.sleep(POLL_SECONDS)
                continue
            self._times.append(taken)
            await self._queue.complete(job)


async def claim(loops: int, times: TextIO) -> None:
    """Claim until SIGTERM."""
    claimer = Claimer()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, claimer.stopping.set)
    print("claimer started", flush=True)
    await claimer.run(loops, times)


def main() -> None:
    """Claim until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--times", type=Path, required=True)
    options = parser.parse_args()
    with open(options.times, "w") as file:
        asyncio.run(claim(options.loops, file))


if __name__ == "__main__":
    main()
