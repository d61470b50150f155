"""`howdah worker`: runs the tasks of an app until it receives a signal."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import click

from howdah.cli.load import load_app
from howdah.cli.supervisor import Supervisor, stop_signals, stop_with_supervisor
from howdah.encoding.safe_logger import get_logger
from howdah.errors import HowdahError
from howdah.execution import forks
from howdah.worker import Worker, garbage_collector
from howdah.worker.event_loop import run_to_end
from howdah.worker.executor_slots import SlotTask
from howdah.worker.health import serve_health
from howdah.worker.logs import set_up_logging
from howdah.worker.runner import CONCURRENCY, GRACE

if TYPE_CHECKING:
    from collections.abc import Callable

    from howdah.execution.run import Run

logger = get_logger(__name__)

SIGNAL_CHECK_SECONDS = 1.0
FORCED_EXIT_SECONDS = 8.0
# After the grace period: a worker whose event loop runs has stopped its jobs by then.
BLOCKED_EXIT_SECONDS = 15.0
BLOCKED_SECONDS = 5.0  # an event loop that does not answer for so long is blocked
LOGGED_JOBS = 20
EXIT_SECONDS = 3.0  # from the end of the worker to the end of its process


@click.command("worker", short_help="Run the tasks of an app.")
@click.argument("app_name", metavar="MODULE:APP")
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=CONCURRENCY, show_default=True,
              help="How many async tasks, and how many tasks in threads, run at once in each process.")  # fmt: skip
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
@click.option("--gc", "collector", type=click.Choice(["tuned", "default"]), default="tuned", show_default=True,
              help="How often Python searches for cyclic garbage: rarely, or as by default.")  # fmt: skip
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
    collector: str,
) -> None:
    """Run the tasks of an app, named as MODULE:APP.

    SIGTERM, SIGHUP or Ctrl-C stops the worker gracefully: it claims no more jobs, releases those that have not
    started, and waits for running jobs. A second signal stops it at once. If a handler blocks the event loop, the
    process ends 15 s after the grace period.
    """
    color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    set_up = functools.partial(set_up_logging, log_level, as_json=log_json, color=color)
    set_up()
    supervised = stop_with_supervisor()
    names = _names(queues)
    if reload or processes > 1:
        if not reload:
            load_app(app_name)  # report a wrong name once, here, not from each restarted child
        common = ["worker", app_name, "--concurrency", str(concurrency), "--grace", str(grace)]
        common += ["--log-level", log_level, "--gc", collector]
        common += ["--queues", ",".join(names)] if names else []
        common += ["--log-json"] if log_json else []
        commands = [
            [*common, *_health_options(health_host, health_port, number)]
            for number in range(processes)
        ]
        raise SystemExit(Supervisor(commands, reload=reload, grace=grace).run())
    app = load_app(app_name)
    if collector == "tuned":
        garbage_collector.tune()
    worker = Worker(app, queues=names, concurrency=concurrency, grace=grace)
    worker.set_up_process = set_up
    worker.lifespans.on_stuck = functools.partial(_exit_now, 1)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            run_to_end(runner.get_loop(), _run(worker, health_host, health_port, supervised))
            _exit_soon(0)
    except BaseException:
        _exit_soon(1)
        raise


async def _run(worker: Worker, health_host: str, health_port: int | None, supervised: bool) -> None:
    _handle_signals(worker, supervised)
    status = 1
    try:
        async with contextlib.AsyncExitStack() as stack:
            if health_port is not None:
                await stack.enter_async_context(serve_health(worker, health_host, health_port))
            await worker.run()
        if worker.lifespans.late:
            raise click.exceptions.Exit(status)
        status = 0
    except (HowdahError, click.exceptions.Exit):
        raise
    except Exception:
        logger.critical("worker failed", exc_info=True)
        # Not SystemExit: in a task it would stop the event loop.
        raise click.exceptions.Exit(status) from None
    finally:
        if worker.abandoned:
            # Handlers that ignored the cancellation still run; their jobs were released.
            logger.warning("handlers did not stop", extra={"handlers": worker.abandoned})
            _exit_now(status)


def _exit_now(status: int) -> None:
    """End this process without waiting for its threads, although a log handler or a closed stream may raise."""
    try:
        logging.shutdown()
        sys.stdout.flush()
    finally:
        os._exit(status)


def _exit_soon(status: int) -> None:
    """End this process after `EXIT_SECONDS`, even if something that handlers have left behind does not end: a
    thread, such as one of the event loop's default executor, a child process or an `atexit` function."""

    def leave() -> None:
        logger.warning("threads or processes of handlers did not stop")
        _exit_now(status)

    timer = threading.Timer(EXIT_SECONDS, leave)
    timer.daemon = True
    timer.start()


def _handle_signals(worker: Worker, supervised: bool) -> None:
    loop = asyncio.get_running_loop()
    seen: list[int] = []
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    # Started now: a signal handler that starts a thread may have interrupted the start of another, and wait for it.
    threading.Thread(
        target=_end_if_blocked, args=(worker, loop, signals), name="howdah-signals", daemon=True
    ).start()

    def on_signal(number: int, frame: object) -> None:
        if supervised and number in (signal.SIGTERM, signal.SIGHUP) and seen:
            return  # sent by both the service manager and the supervisor: it counts once
        seen.append(number)
        signals.put(number)
        loop.call_soon_threadsafe(worker.stop)

    numbers = stop_signals()

    def install() -> None:
        # Not `loop.add_signal_handler`: its handlers do not run while a task blocks the loop.
        for number in numbers:
            forks.handle_signal(number, on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        # A task in this thread may have replaced or blocked them. Then no signal could stop this worker.
        loop.call_later(SIGNAL_CHECK_SECONDS, install)

    install()


def _end_if_blocked(
    worker: Worker, loop: asyncio.AbstractEventLoop, signals: queue.SimpleQueue[int]
) -> None:
    """In its own thread: end this process although a handler blocks the event loop, some time after the grace period
    or soon after the second signal. The leases of its jobs then expire, and other workers run them."""
    signals.get()
    seconds = worker.grace + BLOCKED_EXIT_SECONDS - BLOCKED_SECONDS
    is_answered = True
    while True:
        try:
            number = signals.get(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))
        except queue.Empty:
            # Without a running job, it is the teardown of a lifespan that takes long.
            if not is_answered and (running := worker._running_jobs()):
                _end_blocked(loop, running)
            is_answered, seconds = False, BLOCKED_SECONDS
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(signals.put, 0)
            continue
        if number:
            break
        is_answered = True
    time.sleep(FORCED_EXIT_SECONDS)
    os._exit(1)


def _end_blocked(loop: asyncio.AbstractEventLoop, running: list[Run]) -> None:
    # The blocked thread may hold the lock of a log handler.
    timer = threading.Timer(EXIT_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()
    task = asyncio.current_task(loop)
    blocking = task.run if isinstance(task, SlotTask) else None  # None: a task of a handler's own
    logger.critical(
        "a handler blocks the event loop; ending the worker without its jobs",
        extra={
            "job_id": None if blocking is None else str(blocking.id),
            "job_type": None if blocking is None else blocking.job.job_type,
            "running": [f"{run.job.job_type} {run.id}" for run in running[:LOGGED_JOBS]],
            "count": len(running),
        },
    )
    logging.shutdown()
    os._exit(1)


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
