"""Worker processes for tests: started by the command line, observed through their logs, and killed after the test.

Also the ledger that their jobs write."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import DEADLINE_SECONDS, until

if TYPE_CHECKING:
    import psycopg

HERE = Path(__file__).parent


class Child:
    """One worker process, or a supervisor of worker processes."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def entries(self) -> list[dict[str, Any]]:
        """Its log; every line must be JSON. An incomplete last line is left out."""
        return _entries(self.log)

    def logged(self, message: str) -> list[dict[str, Any]]:
        """The log entries with this message."""
        return [entry for entry in self.entries() if entry["message"] == message]

    said = logged  # the name in tests of other packages

    def ready(self, count: int = 1) -> Child:
        """Wait until `count` workers have logged that they started."""

        def is_ready() -> bool:
            started = len(self.logged("worker started")) >= count
            assert started or self.process.poll() is None, self.log.read_text()
            return started

        until(is_ready, "the worker started")
        return self

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = DEADLINE_SECONDS) -> int:
        """Its exit code, which is negative if a signal killed it."""
        return self.process.wait(timeout)


class Children:
    """Starts worker processes on one database, with one ledger."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        self.database = database
        self.ledger_file = directory / "ledger"
        self._started: list[Child] = []

    def environment(self, **more: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HOWDAH_")}
        return inherited | {
            "HOWDAH_DATABASE_URL": self.database,
            "FAULT_APP_LEDGER": str(self.ledger_file),
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }

    def start(
        self,
        *options: str,
        app: str = "fault_app:app",
        log_json: bool = True,
        cwd: Path = HERE,
        **environment: str,
    ) -> Child:
        """Run `howdah worker APP OPTIONS…` with these environment variables."""
        log = self.directory / f"log-{len(self._started)}"
        command = [sys.executable, "-m", "howdah", "worker", app, *options]
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*command, "--log-json"] if log_json else command,
                cwd=cwd,
                env=self.environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        child = Child(process, log)
        self._started.append(child)
        return child

    def ledger(self, *kinds: str) -> list[dict[str, Any]]:
        """The ledger's lines of these kinds, oldest first."""
        if not self.ledger_file.exists():
            return []
        return [entry for entry in _entries(self.ledger_file) if entry["kind"] in kinds]

    def counted(self, kind: str) -> Counter[str]:
        """The number of ledger lines of this kind for each job."""
        return Counter(entry["job"] for entry in self.ledger(kind))

    def close(self) -> None:
        """Kill the processes that still run, and the children of a supervisor."""
        for child in self._started:
            if child.process.poll() is None:
                for pid in [*offspring(child.pid), child.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                child.wait()


def offspring(pid: int) -> list[int]:
    """The running child processes of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def statuses(conn: psycopg.Connection[Any]) -> Counter[str]:
    """The number of jobs with each status."""
    return Counter(dict(conn.execute("SELECT status, count(*) FROM howdah.jobs GROUP BY 1")))


def all_ended(conn: psycopg.Connection[Any]) -> bool:
    """Whether every job is completed, failed or cancelled."""
    return conn.execute("SELECT count(*) FROM howdah.live_jobs").fetchone() == (0,)


def _entries(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a file. The last one may be incomplete: a process is writing it."""
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
