"""Worker processes for tests: started as a user would, watched through their logs, and never left behind.

Also the ledger that their jobs write, and waiting for what must happen."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

HERE = Path(__file__).parent
DEADLINE = 120.0


def until(condition: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    """The condition's value, once it is true."""
    give_up = time.monotonic() + deadline
    while not (value := condition()):
        assert time.monotonic() < give_up, f"not within {deadline:g} s: {what}"
        time.sleep(0.02)
    return value


class Child:
    """One worker process, or the supervisor of some."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def entries(self) -> list[dict[str, Any]]:
        """Its log, which must be JSON line by line. A last line that is not yet whole is left out."""
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def said(self, message: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries() if entry["message"] == message]

    def ready(self, count: int = 1) -> Child:
        """Once it says that its workers have started."""

        def is_ready() -> bool:
            assert self.process.poll() is None or len(self.said("worker started")) >= count, (
                self.log.read_text()
            )
            return len(self.said("worker started")) >= count

        until(is_ready, "the worker started")
        return self

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = DEADLINE) -> int:
        """Its exit code, which is negative for a signal."""
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
        """`howdah worker APP OPTIONS…`, with these variables in its environment."""
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
        entries = [json.loads(line) for line in self.ledger_file.read_text().splitlines()]
        return [entry for entry in entries if entry["kind"] in kinds]

    def counted(self, kind: str) -> Counter[str]:
        """How often the ledger has this for each job."""
        return Counter(entry["job"] for entry in self.ledger(kind))

    def close(self) -> None:
        """Kill what still runs, with the children of a supervisor."""
        for child in self._started:
            if child.process.poll() is None:
                for pid in [*offspring(child.pid), child.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                child.wait()


def offspring(pid: int) -> list[int]:
    """The living child processes of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def statuses(conn: psycopg.Connection[Any]) -> Counter[str]:
    """How many jobs there are of each status."""
    return Counter(dict(conn.execute("SELECT status, count(*) FROM howdah.jobs GROUP BY 1")))


def all_ended(conn: psycopg.Connection[Any]) -> bool:
    return conn.execute("SELECT count(*) FROM howdah.live_jobs").fetchone() == (0,)
