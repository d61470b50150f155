"""A process that does not close its queues ends in time, silently, with exit code 0.

A pool's threads do not run any more while the interpreter is finalized; see `_Pool` in `store.py`. On a
machine under load any process may take a second to end, so the time is compared with that of a process
that only imports Howdah, run just before."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

import howdah
import proxy

if TYPE_CHECKING:
    from howdah.embedded import EmbeddedServer


ATTEMPTS = 3
SCRIPTS = {
    "a sync queue": """
        from howdah import JobQueue
        queue = JobQueue()
        queue.enqueue("a")
    """,
    "an async queue": """
        import asyncio
        from howdah import AsyncJobQueue
        queue = AsyncJobQueue()
        asyncio.run(queue.enqueue("a"))
    """,
    "an app that waited for a result": """
        from howdah import App
        app = App()
        double = app.task(name="double")(lambda x: 2 * x)
        handle = double.enqueue(x=1)
        app.queue.complete(app.queue.claim("double"), [2])
        assert handle.result(timeout=60) == 2
    """,
    "daemon threads that enqueue": """
        import itertools, threading
        from howdah import JobQueue
        queue = JobQueue()
        began = threading.Semaphore(0)
        def enqueue():
            for n in itertools.count():
                queue.enqueue("a", n)
                began.release()
        for _ in range(4):
            threading.Thread(target=enqueue, daemon=True).start()
        for _ in range(20):
            began.acquire()
    """,
    "a daemon thread whose transaction is not answered": """
        import os, sys, threading, time
        from pathlib import Path
        from howdah import JobQueue
        from proxy import Proxy
        proxy = Proxy(Path(os.environ["SERVER_SOCKET"]))
        queue = JobQueue(proxy.url(os.environ["DATABASE"]))
        queue.pending()
        proxy.cut(b"COMMIT", executed=False, silently=True)
        jobs = [("a", n) for n in range(300)]
        threading.Thread(target=queue.enqueue_many, args=[jobs], daemon=True).start()
        while not proxy.cuts:
            time.sleep(0.001)
    """,
    "a forked child": """
        import os, sys, time, warnings
        from howdah import JobQueue
        warnings.simplefilter("ignore", DeprecationWarning)
        queue = JobQueue()
        queue.enqueue("a")
        if (child := os.fork()) != 0:
            assert os.waitpid(child, 0)[1] == 0
            queue.enqueue("a")
            os._exit(0)
        queue.enqueue("a")
    """,
    "an exit handler that was registered before the import": """
        import atexit
        atexit.register(lambda: queue.enqueue("a"))
        from howdah import JobQueue
        queue = JobQueue()
        queue.enqueue("a")
    """,
}


def seconds_to_end(script: str, environment: dict[str, str]) -> float:
    """Seconds from a script's last line to the end of its process."""
    code = textwrap.dedent(script) + "\nimport time\nprint(time.time(), flush=True)\n"
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    ended = time.time()
    assert (process.returncode, process.stderr) == (0, "")
    return ended - float(process.stdout)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_process_that_closes_nothing_ends_within_a_second(
    script: str, database: str, server: EmbeddedServer
) -> None:
    source = os.path.dirname(os.path.dirname(howdah.__file__))
    support = os.path.dirname(proxy.__file__)
    environment = os.environ | {
        "HOWDAH_DATABASE_URL": database,
        "PYTHONPATH": os.pathsep.join([source, support]),
        "SERVER_SOCKET": str(server.socket_directory / ".s.PGSQL.5432"),
        "DATABASE": database.partition("?")[0].rpartition("/")[2],
    }
    took = []
    for _ in range(ATTEMPTS):
        idle = seconds_to_end("import howdah", environment)
        took.append(seconds_to_end(script, environment) - idle)
        if took[-1] < 1:
            break
    assert min(took) < 1
