"""Support for the tests of commands: a queue with jobs in every state, commands in this process, and
commands in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from click.testing import CliRunner, Result

from howdah import JobQueue
from howdah.cli import main

if TYPE_CHECKING:
    from uuid import UUID

EVIL = "evil\x1b[31m\nname\x07"
ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[()][A-Z0-9]|[=>])")
HOWDAH = [sys.executable, "-m", "howdah"]


def ids(text: str) -> list[str]:
    """Every complete id in a text."""
    return ID.findall(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """A database that tests only read, and its jobs, oldest first."""

    url: str
    completed: UUID
    failed: UUID
    cancelled: UUID
    running: UUID
    blocked: UUID
    pending: UUID
    scheduled: UUID
    evil: UUID
    misspelt: UUID


def fill(url: str) -> Shop:
    """Enqueue, run, fail and cancel jobs, so that there is one in every state."""
    queue = JobQueue(url, worker_id="worker-1", lease=86400)
    completed = queue.enqueue("resize", {"path": "a.png", "size": {"width": 400}}).id
    job = queue.claim_one()
    assert job is not None
    queue.progress(job, 40, "tiles")
    queue.event(job, "tile", {"n": 1})
    queue.complete(job, "a-400.png")
    failed = queue.enqueue(
        "charge", {"order": 7, "note": 'it\'s; "quoted" -- here'}, max_attempts=2
    ).id
    for attempt in (1, 2):
        job = queue.claim_one("charge")
        assert job is not None
        queue.fail(job, f"CardError: declined {attempt}\nsecond line")
    cancelled = queue.enqueue("resize", {"path": "b.png"}).id
    queue.cancel(cancelled)
    running = queue.enqueue("export", {"n": 3}, queue="mail", ordering_key="alice").id
    job = queue.claim_one(queues="mail")
    assert job is not None
    queue.progress(job, 60, "writing")
    blocked = queue.enqueue("export", queue="mail", ordering_key="alice").id
    pending = queue.enqueue("resize", {"path": "c.png"}, priority=150, request_id="request-9").id
    scheduled = queue.enqueue("resize", {"path": "d.png"}, delay=3600).id
    evil = queue.enqueue(EVIL, {"text": "\x1b]0;title\x07"}).id
    misspelt = queue.enqueue("exprot").id
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(
            "SELECT howdah.register_worker('worker-1', 'db.example.com', 42, '{default,mail}', "
            "'{resize,export,charge}', '{100}', '{\"concurrency\": 8, \"running\": 1}')"
        )
        conn.execute(
            "SELECT howdah.beat_worker('worker-1', NULL, "
            '\'[{"queue": "default", "job_type": "resize", "completed": 600,'
            ' "failed": 30, "retried": 0, "cancelled": 0, "wait_seconds": 63.0,'
            ' "run_seconds": 1260.0}]\')'
        )
    queue.close()
    return Shop(
        url=url, completed=completed, failed=failed, cancelled=cancelled, running=running,
        blocked=blocked, pending=pending, scheduled=scheduled, evil=evil, misspelt=misspelt,
    )  # fmt: skip


Run = Callable[..., Result]


def invoke(*arguments: object, **options: Any) -> Result:
    """Run a command in this process. It must not end with a traceback."""
    result = CliRunner().invoke(main, [str(each) for each in arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    return result


def objects(result: Result) -> list[dict[str, Any]]:
    """The JSON objects that a command printed."""
    return [json.loads(line) for line in result.stdout.splitlines()]


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, arguments: list[str], width: int, height: int, **variables: str) -> None:
        self.raw = ""
        self._file, inner = os.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        dropped = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}
        environment = {k: v for k, v in os.environ.items() if k not in dropped}
        environment |= {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | variables
        self.process = subprocess.Popen(
            [*HOWDAH, *arguments], stdin=inner, stdout=inner, stderr=inner, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(inner)

    @property
    def text(self) -> str:
        """The output without escape sequences."""
        return ESCAPES.sub("", self.raw).replace("\r\n", "\n").replace("\r", "\n")

    def read(self, until: str | None = None, *, times: int = 1, timeout: float = 120) -> str:
        """Read until a text has appeared `times` times, or to the end."""
        deadline = time.monotonic() + timeout
        while until is None or self.text.count(until) < times:
            ready, _, _ = select.select([self._file], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"nothing more within {timeout} s after: {self.raw[-2000:]}"
            try:
                chunk = os.read(self._file, 65536)
            except OSError:  # Linux raises an error at the end instead of returning nothing
                chunk = b""
            if not chunk:
                assert until is None, f"it ended without {until!r}: {self.raw[-2000:]}"
                break
            self.raw += chunk.decode(errors="replace")
        return self.text

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Read to the end. Returns the exit code."""
        self.read()
        return self.process.wait(120)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._file)
