"""`howdah worker`: runs the tasks of an app until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import click

from howdah.cli.load import load_app
from howdah.cli.logs import set_up_logging
from howdah.cli.supervisor import Supervisor
from howdah.worker import Worker
from howdah.worker.health import serve_health
from howdah.worker.runner import CONCURRENCY, GRACE

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


@click.command("worker")
@click.argument("app_name", metavar="MODULE:APP")
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=CONCURRENCY, show_default=True,
              help="How many jobs run at once in a process.")  # fmt: skip
@click.option(
    "--queues", help="Only these queues, separated by commas.  [default: those of the tasks]"
)
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True,
              help="How many worker processes to run.")  # fmt: skip
@click.option("--grace", type=click.FloatRange(0), default=GRACE, show_default=True,
              help="Seconds to wait for running jobs when stopping.")  # fmt: skip
@click.option(
    "--reload", is_flag=True, help="Start anew when a .py file below this directory changes."
)
@click.option("--health-port", type=click.IntRange(0, 65535),
              help="Serve /live and /ready on this port of the loopback address.")  # fmt: skip
@click.option(
    "--health-host", default="127.0.0.1", show_default=True, help="Where to serve health."
)
@click.option("--log-json", is_flag=True, help="Log one JSON object a line.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
              show_default=True, help="What to log.")  # fmt: skip
def worker_command(
    app_name: str,
    concurrency: int,
    queues: str | None,
    processes: int,
    grace: float,
    reload: bool,
    health_port: int | None,
    health_host: str,
    log_json: bool,
    log_level: str,
) -> None:
    """Run the tasks of an app, named as MODULE:APP.

    SIGTERM or Ctrl-C stops it gracefully: it claims no more, gives back what has not started, and waits
    for what runs. A second one stops it at once.
    """
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    set_up_logging(log_level, as_json=log_json, colour=colour)
    if reload or processes > 1:
        arguments = ["worker", app_name, "--concurrency", str(concurrency), "--grace", str(grace)]
        arguments += ["--log-level", log_level]
        arguments += ["--queues", queues] if queues else []
        arguments += ["--log-json"] if log_json else []
        if health_port is not None and processes == 1:
            arguments += ["--health-port", str(health_port), "--health-host", health_host]
        raise SystemExit(Supervisor(arguments, processes, reload=reload, grace=grace).run())
    app = load_app(app_name)
    names = [name.strip() for name in queues.split(",") if name.strip()] if queues else None

    async def live() -> None:
        worker = Worker(app, queues=names, concurrency=concurrency, grace=grace)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        async with contextlib.AsyncExitStack() as stack:
            if health_port is not None:
                await stack.enter_async_context(serve_health(worker, health_host, health_port))
            await worker.run()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(live())
    if any(thread.name == "howdah-task" and _is_busy(thread) for thread in threading.enumerate()):
        # A handler that does not listen still runs in a thread; its job was given back.
        logging.shutdown()
        os._exit(0)


def _is_busy(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name != "_serve"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
