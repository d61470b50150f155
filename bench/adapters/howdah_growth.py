"""Howdah for the growth benchmarks: with many job types, or many workers in one process.

`handler` selects the variant: `async`, `types:200`, or `workers:10`. Settings are Howdah's defaults.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bench.adapters import driver
from bench.adapters.howdah import Howdah
from bench.adapters.howdah_tasks import no_op
from howdah.worker import Worker

if TYPE_CHECKING:
    from bench.adapters.driver import Control
    from bench.ledger import Ledger


class Growth(Howdah):
    """The same task under many types, or more workers."""

    async def work(self, ledger: Ledger, control: Control) -> None:
        kind, _, number = self.handler.partition(":")
        types = int(number) if kind == "types" else 0
        for n in range(types):
            self.app.task(name=f"type{n}" if types > 1 else "type")(no_op.function)
        workers = [Worker(self.app) for _ in range(int(number) if kind == "workers" else 1)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for worker in workers:
            await worker.ready.wait()
        control.ready()
        stopping = asyncio.create_task(control.stopped.wait())
        await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)


if __name__ == "__main__":
    driver.main(Growth)
