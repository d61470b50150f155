"""`howdah worker`: runs the tasks of an app until it receives a signal."""

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
from howdah.cli.supervisor import Supervisor, stop_with_supervisor
from howdah.errors import HowdahError
from howdah.worker import Worker
from howdah.worker.health import serve_health
from howdah.worker.runner import CONCURRENCY, GRACE

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

FORCED_EXIT_SECONDS = 8.0


@click.command("worker", short_help="Run the tasks of an app.")
@click.argument("app_name", metavar="MODULE:APP")
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=CONCURRENCY, show_default=True,
              help="How many jobs run at once in each process.")  # fmt: skip
@click.option(
    "--queues", help="Only these queues, separated by commas.  [default: those of the tasks]"
)
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True,
              help="How many worker processes to run.")  # fmt: skip
@click.option("--grace", type=click.FloatRange(0), default=GRACE, show_default=True,
              help="Seconds to wait for running jobs when stopping.")  # fmt: skip
@click.option(
    "--reload", is_flag=True, help="Restart when a .py file in or below this directory changes."
)
@click.option("--health-port", type=click.IntRange(0, 65535),
              help="Serve /live and /ready on this port; with --processes, also on those after it.")  # fmt: skip
@click.option(
    "--health-host", default="127.0.0.1", show_default=True, help="The address for --health-port."
)
@click.option(
    "--log-json", "--json", "log_json", is_flag=True, help="Log one JSON object per line."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
              show_default=True, help="The least severe level to log.")  # fmt: skip
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

    SIGTERM or Ctrl-C stops the worker gracefully: it claims no more jobs, releases those that have not
    started, and waits for running jobs. A second signal stops it at once.
    """
    color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    set_up_logging(log_level, as_json=log_json, color=color)
    supervised = stop_with_supervisor()
    names = _names(queues)
    if reload or processes > 1:
        if not reload:
            load_app(app_name)  # report a wrong name once, here, not from each restarted child
        common = ["worker", app_name, "--concurrency", str(concurrency), "--grace", str(grace)]
        common += ["--log-level", log_level]
        common += ["--queues", ",".join(names)] if names else []
        common += ["--log-json"] if log_json else []
        commands = [
            [*common, *_health_options(health_host, health_port, number)]
            for number in range(processes)
        ]
        raise SystemExit(Supervisor(commands, reload=reload, grace=grace).run())
    app = load_app(app_name)
    worker = Worker(app, queues=names, concurrency=concurrency, grace=grace)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_run(worker, health_host, health_port, supervised))


async def _run(worker: Worker, health_host: str, health_port: int | None, supervised: bool) -> None:
    _handle_signals(worker, supervised)
    status = 1
    try:
        async with contextlib.AsyncExitStack() as stack:
            if health_port is not None:
                await stack.enter_async_context(serve_health(worker, health_host, health_port))
            await worker.run()
        status = 0
    except HowdahError:
        raise
    except Exception:
        logger.critical("worker failed", exc_info=True)
        raise SystemExit(status) from None
    finally:
        if worker.abandoned:
            # Handlers that ignored the cancellation still run; their jobs were released.
            logger.warning("handlers did not stop", extra={"handlers": worker.abandoned})
            logging.shutdown()
            sys.stdout.flush()
            os._exit(status)


def _handle_signals(worker: Worker, supervised: bool) -> None:
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if supervised and number == signal.SIGTERM and seen:
            return  # sent by both the service manager and the supervisor: it counts once
        seen.append(number)
        if len(seen) > 1:
            # Exit even if something blocks the event loop.
            timer = threading.Timer(FORCED_EXIT_SECONDS, os._exit, (1,))
            timer.daemon = True
            timer.start()
        loop.call_soon_threadsafe(worker.stop)

    # Not `loop.add_signal_handler`: its handlers do not run while a task blocks the loop.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _names(queues: str | None) -> list[str] | None:
    if queues is None:
        return None
    names = [name.strip() for name in queues.split(",") if name.strip()]
    if not names:
        raise click.BadParameter("name at least one queue.", param_hint="--queues")
    return names


def _health_options(host: str, port: int | None, number: int) -> list[str]:
    if port is None:
        return []
    # Port 0 means any free port, for every child.
    return ["--health-host", host, "--health-port", str(port and port + number)]


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
